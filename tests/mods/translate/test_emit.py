"""Results of translated mods against torch's eager vmap: masks exactly, scores to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import and_masks, or_masks

from tests.mods.harness import N, eager_mask, eager_score, read_formulas, run_mask, run_score
from tritoncp.mods import mask_mod, score_mod

G = torch.Generator().manual_seed(1)
TABLE = torch.randn(4, 30, generator=G)
IDS = torch.randint(0, 3, (2, 100), generator=G)
INTS = torch.randint(-9, 9, (100,), generator=G, dtype=torch.int32)
BYTES = torch.randint(0, 255, (100,), generator=G, dtype=torch.uint8)
FLAGS = torch.rand(2, 100, generator=G) > 0.5
POWERS = torch.tensor([0.25, -2.0, 0.5, 1.0]).repeat(8).bfloat16()  # products with indices are exact
HALF = torch.randn(100, generator=G).bfloat16()
WIDE = torch.randn(100, generator=G, dtype=torch.float64)
SLOPES = torch.tensor([0.5, 0.25, -0.125, 2.0])

MASKS = read_formulas("masks", "b, h, q, k", globals()) | {
    "and_masks": and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: IDS[b, q] == IDS[b, k]),
    "or_masks": or_masks(lambda b, h, q, k: q >= k + 3, lambda b, h, q, k: k < 4),
}
PLACES = [(1, 2, 3, 0), (0, 1, 0, 7)]


@pytest.mark.sample(14)
@pytest.mark.parametrize("name", MASKS)
def test_masks_equal_eager_masks(name: str) -> None:
    fn = MASKS[name]
    for place in PLACES:
        expected = eager_mask(lambda *a: torch.as_tensor(fn(*a)), *place).bool()
        assert torch.equal(run_mask(mask_mod(fn), *place), expected), mask_mod(fn).source


SCORES = read_formulas("scores", "s, b, h, q, k", globals())


@pytest.mark.sample(9)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_scores_equal_eager_scores(name: str, dtype: torch.dtype) -> None:
    fn = SCORES[name]
    scores = torch.randn(N, N, dtype=dtype) * 3
    mod = score_mod(fn, dtype)
    expected = eager_score(lambda *a: torch.as_tensor(fn(*a)), scores.clone(), 1, 2, 3, 0).to(dtype)
    rounding = 1e-12 if dtype is torch.float64 and not mod.tensors else 4e-6
    out = run_score(mod, scores, 1, 2, 3, 0)
    torch.testing.assert_close(out, expected.expand(N, N), rtol=rounding, atol=rounding)


def test_a_factor_of_all_scores_takes_the_scale() -> None:
    folded = {name for name, fn in SCORES.items() if "scale" in score_mod(fn).fn.arg_names}
    assert folded == {"softcap", "exponents of heads", "literals", "edit in place", "another dtype"}


def test_an_argument_at_its_default_needs_no_rule() -> None:
    """tests/call/mistakes.toml has the refusal of decimals=1."""
    mod = score_mod(lambda s, b, h, q, k: torch.round(s, decimals=0))
    assert run_score(mod, torch.full((N, N), 1.7))[0, 0] == 2


def test_captures_may_have_any_strides() -> None:
    base = torch.randn(30, 8)
    for view in (base.T[::2], base[::3, 1:5].T, base[:, :1].expand(30, 4).T):
        out = run_score(score_mod(lambda s, b, h, q, k, t=view: s + t[h, q % 9]), torch.zeros(N, N), 0, 3)
        assert torch.equal(out, view[3][torch.arange(N) % 9][:, None].expand(N, N))


def test_a_zero_dimensional_capture_is_read_at_every_call() -> None:
    scale = torch.tensor(2.0)
    mod = score_mod(lambda s, b, h, q, k: s * scale)
    assert run_score(mod, torch.ones(N, N)).unique().tolist() == [2.0]
    scale.fill_(3.0)
    assert run_score(mod, torch.ones(N, N)).unique().tolist() == [3.0]


def test_division_by_zero_does_not_trap() -> None:
    def value(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q // k + q % k + torch.fmod(-q, k) + torch.div(-q, k, rounding_mode="trunc")

    out = run_mask(mask_mod(lambda b, h, q, k: (value(q, k) > 3) & (k > 0)))
    i, j = torch.arange(N)[:, None], torch.arange(1, N)[None]
    assert torch.equal(out[:, 1:], value(i, j) > 3)
    assert not out[:, 0].any()


def test_indices_near_the_top_of_32_bits() -> None:
    top = 2**30 - N
    fn = lambda b, h, q, k: ((q + k) // 2 >= k) & (q + 1 > 0) & (k - q < 5) & (q * k > 0)  # noqa: E731
    assert torch.equal(run_mask(mask_mod(fn), 0, 0, top, top), eager_mask(fn, 0, 0, top, top))


# -- random expressions ----------------------------------------------------------------------------------

_LEAVES = st.sampled_from(["q", "k", "h", "IDS[b, q]", "INTS[k]", "INTS[q - k]", "b", "7", "-3", "BYTES[q]"])

_SYMBOLS = st.sampled_from(["+", "-", "*", "&", "|", "^"])
_CHOICE = "torch.where(q >= k, torch.as_tensor({}), torch.as_tensor({}))"


def _combine(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.tuples(children, children)
    return st.one_of(
        st.builds(lambda ab, op: f"({ab[0]} {op} {ab[1]})", pairs, _SYMBOLS),
        st.builds(lambda a, n, op: f"({a} {op} {n})", children, st.sampled_from([-5, -1, 2, 3, 2**33]),
                  st.sampled_from(["//", "%"])),
        st.builds(lambda a, n, call: call.format(f"{a} + 0 * q", n), children, st.sampled_from([-5, 2, 3]),
                  st.sampled_from(["torch.fmod({}, {})", "torch.div({}, {}, rounding_mode='trunc')"])),
        st.builds(lambda a: f"abs({a})", children),
        st.builds(lambda a: f"(-({a}))", children),
        st.builds(lambda ab: _CHOICE.format(*ab), pairs),
        st.builds(lambda a, n: f"(({a}) << {n})", children, st.integers(0, 40)),
    )  # fmt: skip


@hypothesis.given(
    st.recursive(_LEAVES, _combine, max_leaves=8), st.sampled_from(["<", "<=", "==", "!=", ">"])
)
def test_random_integer_expressions(expression: str, comparison: str) -> None:
    scope = {"torch": torch, "IDS": IDS.int() - 1, "INTS": INTS.long(), "BYTES": BYTES.long()}
    fn = eval(f"lambda b, h, q, k: torch.as_tensor({expression} + 0 * q) {comparison} k", scope)
    try:
        expected = eager_mask(fn, 1, 2, 3, 5)
    except (OverflowError, RuntimeError):  # of torch itself: a Python number too large for int64
        return
    out = run_mask(mask_mod(fn), 1, 2, 3, 5)
    assert torch.equal(out, expected), mask_mod(fn).source


LOADS: dict[str, tuple[int, Callable[..., Any]]] = {
    "captures nothing": (0, lambda s, b, h, q, k: s - (q - k).abs()),
    "by head": (0, lambda s, b, h, q, k: s - SLOPES[h] * (q - k)),
    "by head of batch row": (0, lambda s, b, h, q, k: s * (TABLE * 2)[h][b + 1]),
    "by row": (1, lambda s, b, h, q, k: s + HALF[q]),
    "by row and by key, apart": (1, lambda s, b, h, q, k: s + HALF[q] * HALF[k]),
    "by distance": (2, lambda s, b, h, q, k: s + TABLE[h, (q - k) % 30]),
    "by a value loaded by row": (1, lambda s, b, h, q, k: s + SLOPES[IDS[b, q]]),
    "loaded by row, not used": (0, lambda s, b, h, q, k: (HALF[q], s - 1)[1]),
}


@pytest.mark.parametrize("name", LOADS)
def test_loads_counts_the_axes_that_loads_vary_with(name: str) -> None:
    """Tiles are smaller if each score loads another value."""
    sides, fn = LOADS[name]
    assert score_mod(fn).loads == sides
