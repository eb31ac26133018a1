"""Tracing of mods: captures, refusals, and reuse of translations."""

from __future__ import annotations

import functools
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tritoncp
from tests.mods.harness import N, eager_mask, eager_score, run_mask, run_score
from tritoncp.mods import Mod, Untranslatable, mask_mod, score_mod
from tritoncp.mods.translate.trace import trace_mod

IDS = torch.arange(60).view(2, 30) // 4
BIAS = torch.randn(64)


def window(width: int) -> Callable[..., Any]:
    return lambda b, h, q, k: q - k <= width


def capped(scale: float, cap: float) -> Callable[..., Any]:
    return lambda s, b, h, q, k: torch.tanh(s * scale / cap) * cap


# -- numbers ---------------------------------------------------------------------------------------------


def test_captured_numbers_are_arguments() -> None:
    one, two = mask_mod(window(3)), mask_mod(window(5))
    assert one.fn is two.fn
    assert one.digest == two.digest
    assert (one.numbers, two.numbers) == ((3,), (5,))
    assert not torch.equal(run_mask(one), run_mask(two))
    assert torch.equal(run_mask(two), eager_mask(window(5)))


def test_the_number_one_is_handled_like_other_numbers() -> None:
    """The value 1 of an argument, which Triton makes a constant, gives the same result."""
    for width in (1, 0, -1, 16, 2**40):
        assert torch.equal(run_mask(mask_mod(window(width))), eager_mask(window(width)))


def test_captured_floats_are_arguments_of_float32_scores() -> None:
    one, two = score_mod(capped(0.5, 20.0)), score_mod(capped(0.25, 30.0))
    assert one.fn is two.fn
    assert two.numbers == (0.25, 30.0)
    scores = torch.randn(N, N) * 30
    torch.testing.assert_close(run_score(two, scores), torch.tanh(scores * 0.25 / 30) * 30)
    assert score_mod(capped(0.5, 20.0), torch.float64).numbers == ()


def test_numbers_that_decide_branches_stay_constants() -> None:
    def make(n: int) -> Callable[..., Any]:
        def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
            out = q >= k
            for i in range(n):
                out = out | (k == i)
            return out if n > 2 else out & (q < 9 + n * 2)

        return mod

    for n in (0, 1, 2, 3, 4):
        assert torch.equal(run_mask(mask_mod(make(n))), eager_mask(make(n)))


def test_numbers_in_defaults_partials_and_nested_functions() -> None:
    seven = window(7)

    def outer(b: Any, h: Any, q: Any, k: Any, *, width: int = 3, inner: Any = seven) -> Any:
        return (q - k <= width) | inner(b, h, q, k) & (q > 10)

    mod = mask_mod(functools.partial(outer, width=5))
    assert mod.numbers == (5, 7)
    assert torch.equal(run_mask(mod), eager_mask(functools.partial(outer, width=5)))


def shifted(n: int) -> Callable[..., Any]:
    return lambda s, b, h, q, k: s + BIAS[q - k + n] * (k >= 0)


def clamped(n: int) -> Callable[..., Any]:
    return lambda s, b, h, q, k: s + BIAS[(q - k).clamp(-n, n) + n]


def divided(n: int) -> Callable[..., Any]:
    return lambda s, b, h, q, k: s + BIAS[(q - k).abs() // n]


def kept(n: int, m: int) -> Callable[..., Any]:
    return lambda s, b, h, q, k: torch.where((q - k > n) & (k >= 0), s * m, s + 1)


def extended(n: int) -> Callable[..., Any]:
    table = torch.arange(2.0 * N + n)
    return lambda s, b, h, q, k: s + table[q - k + table.shape[0] - N]


@pytest.mark.parametrize("make", [shifted, clamped, divided, extended])
def test_offsets_are_constants_until_they_change(make: Callable[..., Any]) -> None:
    """The first value has a source of its own, all others share one. Ranks compare the same form, whatever
    they have seen before."""
    scores = torch.randn(N, N)
    mods = [score_mod(make(n)) for n in (5, 7, 1, 5, 12)]
    for n, mod in zip((5, 7, 1, 5, 12), mods):
        assert bool(mod.numbers) == (n != 5)
        torch.testing.assert_close(run_score(mod, scores), eager_score(make(n), scores))
    assert len({mod.form for mod in mods}) == 1 and mods[0].digest == mods[3].digest
    assert {mod.digest for mod in (mods[1], mods[2], mods[4])} == {mods[0].form}


def test_offsets_take_no_further_call_of_a_mod() -> None:
    def count(make_index: Callable[[Any], Any]) -> int:
        calls = []

        def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            calls.append(None)
            return s + BIAS[make_index(q - k)]

        score_mod(score)
        return len(calls)

    far = 11
    assert count(lambda distance: distance + far) == count(lambda distance: distance) > 0


def test_offsets_as_constants_bound_an_index() -> None:
    """An index that is known not to be negative needs no case for those that count from the end."""
    far = 9
    assert "wrap" not in score_mod(lambda s, b, h, q, k: s + BIAS[(q - k).clamp(-far, far) + far]).source


def test_numbers_in_the_source_are_told_from_captured_numbers() -> None:
    """Also where they are equal, and where derivatives add numbers."""
    mods = {pair: score_mod(kept(*pair)) for pair in [(3, 5), (0, 0), (1, 1), (0, 1), (16, 1)]}
    scores = torch.randn(N, N)
    for pair, mod in mods.items():
        assert mod.numbers == pair and mod.digest == mods[3, 5].digest
        torch.testing.assert_close(run_score(mod, scores), eager_score(kept(*pair), scores))


def test_sources_serve_learned_tensors_of_other_sizes() -> None:
    """Also the source of the gradient."""

    def doubled(table: Tensor) -> Callable[..., Any]:
        return lambda s, b, h, q, k: s + table[h, q - k] * 2

    mods = [score_mod(doubled(torch.zeros(3, size, requires_grad=True))) for size in (1, 16, 33)]
    assert len({mod.digest for mod in mods}) == 1


def test_bools_are_constants() -> None:
    def make(flip: bool) -> Callable[..., Any]:
        return lambda b, h, q, k: (q >= k) ^ flip

    assert mask_mod(make(True)).fn is not mask_mod(make(False)).fn
    assert mask_mod(make(True)).numbers == ()


# -- edits of captures -----------------------------------------------------------------------------------


def test_an_unchanged_closure_is_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []
    monkeypatch.setattr(
        "tritoncp.mods.translate.trace.trace_mod", lambda *a: traces.append(a) or trace_mod(*a)
    )

    def make(ids: torch.Tensor) -> Callable[..., Any]:
        return lambda b, h, q, k: ids[b, q] == ids[b, k]

    first = mask_mod(make(IDS))
    other = mask_mod(make(IDS + 1))
    assert len(traces) == 1
    assert other.fn is first.fn
    assert other.tensors[0] is not first.tensors[0]
    longer = mask_mod(make(torch.zeros(2, 99, dtype=torch.int64)))
    assert len(traces) == 2  # a new shape might change the graph
    assert longer.fn is first.fn


def test_tensors_made_inside_are_made_once() -> None:
    fn = lambda b, h, q, k: torch.tensor([3, 1, 2])[q % 3] > k  # noqa: E731
    first, second = mask_mod(fn), mask_mod(fn)
    assert first.tensors[0] is second.tensors[0]
    assert torch.equal(run_mask(second), eager_mask(fn))


def test_the_same_tensor_twice_is_one_capture() -> None:
    alias = IDS
    mod = mask_mod(lambda b, h, q, k: (IDS[b, q] == alias[b, k]) & (IDS[0, 0] == 0))
    assert len(mod.tensors) == 1
    assert mod.tensors[0] is IDS


def test_translations_keep_no_tensor_alive() -> None:
    def translate() -> weakref.ref[torch.Tensor]:
        ids = torch.zeros(2, 30, dtype=torch.int64)
        assert mask_mod(lambda b, h, q, k: ids[b, q] == ids[b, k]).tensors[0] is ids
        return weakref.ref(ids)

    alive = translate()
    gc.collect()
    assert alive() is None


def test_the_graph_is_the_function() -> None:
    mod = score_mod(capped(0.5, 20.0))
    score, *indices = torch.tensor(3.0), *(torch.tensor(i) for i in (0, 1, 2, 3))
    assert mod.graph is not None
    assert mod.graph(score, *indices, *mod.tensors, *mod.numbers) == capped(0.5, 20.0)(score, *indices)


# -- refusals --------------------------------------------------------------------------------------------


def branch(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k if h > 1 else k >= q


def data_dependent_index(b: Any, h: Any, q: Any, k: Any) -> Any:
    return IDS[0, q:][0] > k


@pytest.mark.parametrize(("fn", "operation"), [(branch, "bool"), (data_dependent_index, "item")])
def test_a_refusal_names_the_operation_and_its_line(fn: Callable[..., Any], operation: str) -> None:
    """tests/call/mistakes.toml has other operations."""
    with pytest.raises(Untranslatable, match=operation) as caught:
        mask_mod(fn)
    line = re.search(rf"{re.escape(__file__)}:(\d+)", str(caught.value))
    assert line and int(line[1]) >= fn.__code__.co_firstlineno, str(caught.value)


def write_at(tensor: torch.Tensor, place: Any, value: Any) -> None:
    tensor[place] = value


WRITES: dict[str, Callable[..., Any]] = {  # to a captured tensor [4]
    "an element": lambda t, h, x: write_at(t, h, 1.0),
    "a constant element": lambda t, h, x: write_at(t, 0, x.detach()),
    "a slice": lambda t, h, x: write_at(t, slice(h, None), 1.0),
    "where": lambda t, h, x: write_at(t, h > 2, 1.0),
    "a view": lambda t, h, x: t.view(2, 2)[:1].mul_(2),
    "add_": lambda t, h, x: t.add_(1),
    "data": lambda t, h, x: t.data.fill_(2),
    "copy_": lambda t, h, x: t.copy_(x.detach()),
    "index_put_": lambda t, h, x: t.index_put_((h,), x),
    "scatter_add_": lambda t, h, x: t.scatter_add_(0, h.view(1), x.view(1)),
    "out": lambda t, h, x: torch.add(t, 1, out=t),
    "in place by name": lambda t, h, x: torch.relu_(t),
    "inplace=True": lambda t, h, x: torch.nn.functional.relu(t, inplace=True),
    "several": lambda t, h, x: torch._foreach_add_([t, t], 1),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("name", WRITES)
def test_a_mod_that_writes_to_a_capture_is_refused_before_it_writes(name: str, learned: bool) -> None:
    """This holds also for a function whose state is compared by recordings, which run it on the tensor."""
    t = torch.arange(4.0).requires_grad_(learned)
    before, write = t.detach().clone(), WRITES[name]

    class Config:
        factor = 2.0

    config = Config()
    edits = [
        (score_mod, lambda s, b, h, q, k: (write(t, h, s), s)[1]),
        (score_mod, lambda s, b, h, q, k: (write(t, h, s), s * config.factor)[1]),
        (mask_mod, lambda b, h, q, k: (write(t, h, q.float()), q >= k)[1]),
    ]
    for translate, edit in edits:
        with pytest.raises(Untranslatable, match="must not write to what it captures") as caught:
            translate(edit)
        assert __file__ in str(caught.value)
        assert torch.equal(t.detach(), before)


class Random(torch.autograd.Function):
    """A function with a derivative that no kernel computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.rand_like(grad)


@pytest.mark.parametrize("through_a_call", [False, True])
def test_a_refusal_in_the_backward_pass_names_a_line_of_the_user(through_a_call: bool) -> None:
    """It names the line of a backward method, or of the operation that has the derivative, in any form of
    call."""
    weight = torch.ones(8, requires_grad=True)
    x = torch.ones(1, 1, 8, 16)

    def translate(fn: Any) -> str:
        with pytest.raises(Untranslatable) as caught:
            tritoncp.flex_attention(x, x, x, fn) if through_a_call else score_mod(fn)
        return str(caught.value)

    def smooth(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        bias = weight[q] * 2
        bias = torch.lgamma(bias)
        return score + bias

    line = smooth.__code__.co_firstlineno + 2
    assert f"digamma.default at {__file__}:{line} cannot be translated" in translate(smooth)
    line = Random.backward.__code__.co_firstlineno + 2
    said = translate(lambda score, b, h, q, kv: score + Random.apply(weight[q]))
    assert f"rand_like.default at {__file__}:{line} cannot be translated" in said


def test_an_error_of_the_users_code_is_raised_unchanged() -> None:
    def broken(b: Any, h: Any, q: Any, k: Any) -> Any:
        raise LookupError("no such table")

    with pytest.raises(LookupError, match="no such table"):
        mask_mod(broken)


@pytest.mark.bar(24)
def test_hostile_names_reach_no_source() -> None:
    fn = lambda b, h, q, k: q >= k  # noqa: E731
    fn.__qualname__ = 'x"""\nimport os; os._exit(3)\n"""'
    mod = mask_mod(fn)
    assert "import os" not in mod.source
    assert torch.equal(run_mask(mod), eager_mask(fn))


# -- hand-written ----------------------------------------------------------------------------------------


@triton.jit
def near(b, h, q_idx, kv_idx, caps):
    return q_idx - kv_idx <= caps[0]


@triton.jit
def scaled(score, b, h, q_idx, kv_idx, caps):
    return score * tl.cast(caps[1], tl.float32)


@triton.jit
def scaled_grad(dscore, score, b, h, q_idx, kv_idx, keep, caps, dcaps):
    return dscore * tl.cast(caps[1], tl.float32)


def test_hand_written_mods() -> None:
    mod = Mod.from_triton(near, captures=(5,))
    assert torch.equal(run_mask(mod), eager_mask(window(5)))
    assert mask_mod(mod) is mod
    assert not mod.is_score
    assert Mod.from_triton(near, captures=(6,)).digest == mod.digest

    leaf = torch.ones(3, requires_grad=True)
    mod = Mod.from_triton(scaled, scaled_grad, captures=(leaf, 2.5), back=scaled_grad)
    assert (mod.wants, mod.is_score) == ((0,), True)
    assert run_score(mod, torch.ones(N, N)).unique().tolist() == [2.5]
    assert Mod.from_triton(scaled, captures=(leaf, 2.5)).wants == ()
    assert score_mod(scaled).grad is None


def test_tracing_adds_no_entry_to_torchs_cache_of_fake_results() -> None:
    """That cache is unbounded: an entry for each value of a captured number would leak in a training loop."""
    entries = len(FakeTensorMode.cache)
    for slope in (0.25, 0.5, 0.75):
        score_mod(lambda score, b, h, q, kv, slope=slope: score - slope * (q - kv))
    assert len(FakeTensorMode.cache) == entries
