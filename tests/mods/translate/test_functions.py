"""Functions of scores in both engines against float64 dense attention; their accuracy and special values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import tritoncp
from tests.command_process import run_code
from tests.draws import few
from tests.mods.harness import FORMULAS, N, eager_mask, read_formulas, run_mask, run_score
from tritoncp.mods import mask_mod, score_mod
from tritoncp.reference.dense import dense_attention

F = torch.nn.functional
Function = Callable[[Tensor], Tensor]

FUNCTIONS: dict[str, tuple[Function, float, float]] = {
    name: (eval(f"lambda s: {formula}", globals()), low, high)
    for name, (formula, low, high) in FORMULAS["of scores"].items()
}


def check_attention(
    score: Callable[..., Any], captures: tuple[Tensor, ...] = (), tolerance: float = 1e-9, length: int = 12
) -> None:
    """Compare out and gradients of a float64 call with dense attention."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(1, 2, length, 16, dtype=torch.float64, generator=g).requires_grad_() for _ in "qkv"
    )
    upstream = torch.randn(q.shape, dtype=torch.float64, generator=g)
    leaves = [q, k, v, *(c for c in captures if c.requires_grad)]
    results = []
    for run in (
        lambda: tritoncp.flex_attention(q, k, v, score_mod=score),
        lambda: dense_attention(q, k, v, None, score).out,
    ):
        out = run()
        results.append([out, *torch.autograd.grad(out, leaves, upstream, materialize_grads=True)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# A few in one score_mod: most of the time goes to kernels, which are interpreted.
GROUPS = [list(FUNCTIONS)[i : i + 3] for i in range(0, len(FUNCTIONS), 3)]


def sum_of(names: list[str]) -> Callable[..., Any]:
    """Return a score_mod of several functions."""

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        terms = [(weight, *FUNCTIONS[name]) for weight, name in enumerate(names, start=1)]
        unit = torch.sigmoid(s)
        return sum(weight * fn(low + (high - low) * unit) for weight, fn, low, high in terms)

    return score


@pytest.mark.sample(3)
@pytest.mark.parametrize("names", GROUPS, ids="; ".join)
def test_functions_of_scores_equal_dense_attention(names: list[str], engine: str) -> None:
    tolerance = 1e-7 if "hardsigmoid" in names else 1e-9  # torch multiplies by 1 / 6 as rounded to float32
    check_attention(sum_of(names), tolerance=tolerance)


@pytest.mark.long  # tests/test_plain.py draws tests of this room in make test
@pytest.mark.interpreted
def test_functions_of_libdevice_in_a_process_without_settings_of_tests() -> None:
    """Kernels run in Triton's unmodified interpreter, and each function is called."""
    run_code(
        """
from tests.mods.translate.test_functions import FUNCTIONS, check_attention, sum_of
from tritoncp.mods.translate.interpreted_libdevice import libdevice

unused = set(vars(libdevice))
for name, function in vars(libdevice).items():
    setattr(libdevice, name, lambda *x, name=name, f=function: (unused.discard(name), f(*x))[1])
for i in range(0, len(FUNCTIONS), 12):
    check_attention(sum_of(list(FUNCTIONS)[i : i + 12]), length=4, tolerance=1e-7)
assert not unused, unused
""",
        TRITON_INTERPRET="1",
    )


def spread(low: float, high: float) -> Tensor:
    """Numbers of both signs from 10^low to 10^high."""
    size = 10.0 ** torch.linspace(low, high, N * N - 1, dtype=torch.float64)
    return torch.cat([size * (1 - 2 * (torch.arange(N * N - 1) % 2)), torch.zeros(1)])[:, None].view(N, N)


def test_tanh_of_float32_is_exact_to_three_units_in_the_last_place() -> None:
    x = spread(-12, 3).float()
    out = run_score(score_mod(lambda s, b, h, q, k: torch.tanh(s)), x).double()
    exact, tiny = torch.tanh(x.double()), torch.finfo(torch.float32).tiny
    normal = exact.abs() >= tiny
    assert ((out - exact) / exact).abs()[normal].max() <= 3 * torch.finfo(torch.float32).eps
    assert (out[~normal].abs() <= tiny).all()


UNARY = ["sigmoid", "nan_to_num", "signbit", "sgn", "logit"]
BINARY = ["fmax", "fmin"]
SPECIAL = [math.nan, *(sign * x for x in (0.0, 1.0, 2.0, 0.5, math.inf, 1e30, 1e-30) for sign in (1, -1))]


def same(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are close, with equal signs of zeros."""
    close = torch.isclose(actual, expected, rtol=2e-5, atol=1e-37, equal_nan=True)
    return bool((close & ((expected != 0) | (actual.signbit() == expected.signbit()))).all())


def values_of(fn: Callable[..., Tensor], pairs: list[tuple[float, float]], dtype: torch.dtype) -> Tensor:
    """Compute fn(a, b) for up to N * N pairs inside a kernel."""
    padded = torch.tensor(pairs + [(1.0, 1.0)] * (N * N - len(pairs)), dtype=dtype)
    first, second = padded.T.contiguous()
    mod = score_mod(lambda s, b, h, q, k: fn(s, second[q * N + k]).to(dtype), dtype)
    return run_score(mod, first.view(N, N)).flatten()[: len(pairs)]


@pytest.mark.sample(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", UNARY + BINARY)
def test_special_values(name: str, dtype: torch.dtype) -> None:
    fn, others = getattr(torch, name), SPECIAL if name in BINARY else [0.0]
    pairs = [(a, b) for a in SPECIAL for b in others]
    call = fn if name in BINARY else lambda a, b: fn(a)
    expected, actual = call(*torch.tensor(pairs, dtype=dtype).T), values_of(call, pairs, dtype)
    assert same(actual, expected.to(dtype)), [*zip(pairs, actual.tolist(), expected.tolist())]


@few()
@hypothesis.given(
    st.lists(st.floats(width=32), min_size=1, max_size=12),
    st.sampled_from([n for n in UNARY + BINARY if n != "nan_to_num"]),
)
def test_any_float(numbers: list[float], name: str) -> None:
    """The value of any float, also subnormal, is torch's value in float64."""
    fn = getattr(torch, name)
    pairs = [(a, b) for a in numbers for b in numbers]
    columns = torch.tensor(pairs, dtype=torch.float32).double().T
    expected = (fn(*columns) if name in BINARY else fn(columns[0])).float()
    actual = values_of(fn if name in BINARY else lambda a, b: fn(a), pairs, torch.float32)
    assert torch.allclose(actual, expected, rtol=2e-5, atol=2e-5, equal_nan=True)


MASKS = read_formulas("functions", "b, h, q, k", globals())
POINTS = torch.randn(N, 3, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("name", MASKS)
def test_masks_take_the_same_functions(name: str) -> None:
    fn = MASKS[name]
    assert torch.equal(run_mask(mask_mod(fn)), eager_mask(fn))


def test_mods_of_one_source_keep_their_torch_forms(engine: str) -> None:
    """In kernels the mods differ only in a captured size; in torch the added zeros have that size."""
    x = torch.randn(1, 2, 12, 16, dtype=torch.float64)
    mods = [
        score_mod(lambda s, b, h, q, k, t=t: s + (t + torch.zeros(len(t)))[h], torch.float64)
        for t in (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0]))
    ]
    assert mods[0].source == mods[1].source
    for mod in mods:
        out = tritoncp.flex_attention(x, x, x, score_mod=mod)
        expected = dense_attention(x, x, x, scale=0.25).out  # a constant of a row changes nothing
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_a_mask_of_several_results_is_translated() -> None:
    bounds = torch.tensor([[0, 3], [1, 4]])

    def between(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        low, high = bounds[q % 2].unbind(-1)
        return (low <= kv) & (kv < high)

    assert "between" in mask_mod(between).source
