"""Tests of calls on the CPU engine: bands of slots, masks that differ between heads, views as results."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tritoncp
from tests.cases import Case, check
from tritoncp import full_mask
from tritoncp.cpu.engine import CpuEngine
from tritoncp.planning.step_tables import ForwardStep
from tritoncp.reference.dense import dense_attention

pytestmark = pytest.mark.usefixtures("cpu_engine")
F64 = torch.float64


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(4)
    return [torch.randn(shape, generator=g, dtype=F64).requires_grad_() for shape in shapes]


def agree(out: Tensor, want: Tensor, leaves: list[Tensor]) -> None:
    """Compare results and the gradients of their sum of squares."""
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (out, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.sample(3)
@pytest.mark.parametrize("distance", [7, 40, 300])
@pytest.mark.parametrize("block", [16, 24, 128])
def test_bands_of_a_window_are_the_window(block: int, distance: int) -> None:
    check(Case(("window", distance + 1), batch=2, group=2, length=400, kv_length=400, block=block))


def test_intervals_of_a_mask_mod_do_not_apply_to_full_blocks() -> None:
    """Intervals apply to masked blocks: keys 0 to 3 are a full block, and 4 to 6 are in a masked one."""
    check(Case(("pieces", 6), length=8, kv_length=46, block=4))


@pytest.mark.parametrize("form", ["a capture", "the score", "a constant"])
def test_a_score_mod_may_return_its_argument(form: str) -> None:
    """The result shares memory with others, or is one number for many pairs; captures keep their values."""
    q, k, v, table = leaves = tensors((1, 2, 90, 4), (1, 2, 90, 4), (1, 2, 90, 4), (2,))
    before = table.detach().clone()

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return {"a capture": table[h], "the score": s, "a constant": torch.zeros_like(s)}[form]

    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, 90, 90, BLOCK_SIZE=16)
    visible = torch.ones(90, 90, dtype=torch.bool).tril().expand(1, 2, -1, -1)
    wanted = leaves if form == "a capture" else leaves[:3]
    out = tritoncp.flex_attention(q, k, v, score, mask)
    want = dense_attention(q, k, v, visible, score).out
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(x.square().sum(), wanted, materialize_grads=True) for x in (out, want)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-11)
    assert torch.equal(table, before)


def test_a_score_mod_is_not_called_for_a_head_that_sees_no_pair_of_a_tile() -> None:
    """One block list serves all heads, and the mask_mod hides all of a listed block from some."""
    q, k, v, table = leaves = tensors((1, 3, 40, 4), (1, 3, 40, 4), (1, 3, 40, 4), (3, 40))

    def shown(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & ((h == 0) | (kv < 5 * h))

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.tanh(s) + table[h, torch.where(shown(b, h, q, kv), kv, 1 << 40)]

    def listed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:  # every block is masked
        return shown(b, h, q, kv) & ((h > 0) | ((q + kv) % 7 > 0))

    mask = tritoncp.create_block_mask(listed, 1, 1, 40, 40, BLOCK_SIZE=8)
    at = [torch.arange(n) for n in (1, 3, 40, 40)]
    visible = listed(*torch.meshgrid(*at, indexing="ij"))
    agree(tritoncp.flex_attention(q, k, v, score, mask), dense_attention(q, k, v, visible, score).out, leaves)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_value_that_is_not_finite_stays_in_rows_whose_blocks_list_it(value: float) -> None:
    q, k, v = (x.detach() for x in tensors((1, 2, 512, 4), (1, 2, 512, 4), (1, 2, 512, 4)))
    v[:, :, 100] = value
    mask = tritoncp.create_block_mask(tritoncp.sliding_window(63), 1, 1, 512, 512, BLOCK_SIZE=64)
    out = tritoncp.flex_attention(q, k, v, mask)
    assert bool(out[:, :, 192:].isfinite().all()) and not bool(out[:, :, 100:164].isfinite().any())


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("stored", [False, True])
def test_a_state_changes_only_where_the_step_stores_it(stored: bool, dtype: torch.dtype) -> None:
    """A step that continues a state works in its memory only if it leaves the next state there."""
    q, k, v = (x.detach().to(dtype) for x in tensors((1, 2, 96, 8), (1, 2, 80, 8), (1, 2, 80, 8)))
    tables = tritoncp.make_plan(full_mask(96, 80, block=16)).tables("cpu", 1, 2)
    engine, g = CpuEngine(0.3), torch.Generator().manual_seed(9)
    acc = torch.randn(1, 2, 96, 8, generator=g, dtype=dtype)
    m, l = torch.randn(1, 2, 96, generator=g, dtype=dtype), torch.ones(1, 2, 96, dtype=dtype)
    m[:, :, 7], l[:, :, 7], acc[:, :, 7] = -math.inf, 0, 0
    state, before = (acc, m, l), [x.clone() for x in (acc, m, l)]
    out, lse = torch.full_like(q, math.nan), torch.full_like(m, math.nan)
    engine.forward(ForwardStep(q, k, v, tables, out, lse, None, state, True, stored))()
    results = dense_attention(q, k, v, torch.ones(1, 2, 96, 80, dtype=torch.bool), scale=0.3)
    weights = torch.softmax(torch.stack([before[1] * math.log(2), results.lse]), 0)[..., None]
    want = weights[0] * before[0] + weights[1] * results.out
    torch.testing.assert_close(acc / l[..., None] if stored else out, want, rtol=0, atol=1e-5)
    if not stored:
        for x, y in zip(state, before, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_scores_of_minus_infinity_are_keys_that_nobody_sees() -> None:
    """This holds also if no mask hides pairs: torch's kernel has lse 0 for such rows."""
    q, k, v = (x.detach() for x in tensors((1, 2, 40, 4), (1, 2, 30, 4), (1, 2, 30, 4)))
    q[:, :, 5], k = -math.inf, k.abs()
    out, lse = tritoncp.flex_attention(q, k, v, return_lse=True)
    want = dense_attention(q, k, v, torch.ones(1, 2, 40, 30, dtype=torch.bool))
    torch.testing.assert_close((out, lse), (want.out, want.lse), rtol=0, atol=1e-12)
    assert bool((lse[:, :, 5] == -math.inf).all())


@pytest.mark.parametrize("mask", [None, tritoncp.causal()], ids=["full", "causal"])
def test_products_may_be_too_large_for_the_dtype_before_they_are_scaled(mask: Any) -> None:
    q, k, v = (x.detach() for x in tensors((1, 2, 40, 4), (1, 2, 40, 4), (1, 2, 40, 4)))
    blocks = None if mask is None else tritoncp.create_block_mask(mask, 1, 1, 40, 40, BLOCK_SIZE=8)
    out = tritoncp.flex_attention(q * 1e155, k * 1e155, v, None, blocks, scale=1e-307)
    want = tritoncp.flex_attention(q, k, v, None, blocks, scale=1e3)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-9)


def squares() -> tuple[Any, Tensor]:
    """Return a mask of full blocks of 32 rows, like a chessboard, and its visible pairs: [1, 1, 256, 256]."""
    mask = tritoncp.create_block_mask(
        lambda b, h, q, kv: (q // 32 + kv // 32) % 2 == 0, 1, 1, 256, 256, BLOCK_SIZE=32
    )
    at = torch.arange(256) // 32
    return mask, ((at[:, None] + at) % 2 == 0)[None, None]


@pytest.mark.parametrize("large", [0, 2, 6])
def test_a_large_value_with_a_tiny_weight_counts(large: int) -> None:
    """Key block ``large`` has values of 1e25, and weights of 1e-25 in rows that see it."""
    mask, visible = squares()
    q, k, v = torch.ones(1, 1, 256, 1), torch.zeros(1, 1, 256, 1), torch.ones(1, 1, 256, 1)
    k[:, :, 32 * large : 32 * large + 32] = -25 * math.log(10)
    v[:, :, 32 * large : 32 * large + 32] = 1e25
    out = tritoncp.flex_attention(q, k, v, None, mask, scale=1.0)
    want = dense_attention(q.double(), k.double(), v.double(), visible, scale=1.0).out
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=0)


def test_an_infinite_value_is_infinite_in_all_rows_that_see_it() -> None:
    mask, visible = squares()
    q, k, v = (x.detach() for x in tensors((1, 1, 256, 4), (1, 1, 256, 4), (1, 1, 256, 4)))
    v[:, :, 70, 0] = math.inf
    out = tritoncp.flex_attention(q, k, v, None, mask)
    torch.testing.assert_close(out[..., 0] == math.inf, visible[..., 70])
    assert not bool(out.isnan().any())


def test_keys_in_any_order_of_steps_have_the_same_sum() -> None:
    """The max scores of steps differ by 15 to 90, rising, falling and mixed, so that sums are rescaled."""
    q, k, v = (x.detach().float() for x in tensors((1, 1, 64, 8), (1, 1, 96, 8), (1, 1, 96, 8)))
    sizes = torch.tensor([0.0, 30, 60, 90, 45, 15]).repeat_interleave(16)
    tables, engine = tritoncp.make_plan(full_mask(64, 16, block=16)).tables("cpu", 1, 1), CpuEngine(1.0)
    q[..., 0], k[..., 0] = 1, sizes
    for order in ([0, 1, 2, 3, 4, 5], [3, 2, 4, 1, 5, 0], [5, 3, 0, 2, 1, 4]):
        acc, m, l = torch.empty(1, 1, 64, 8), torch.empty(1, 1, 64), torch.empty(1, 1, 64)
        out, lse = torch.empty(1, 1, 64, 8), torch.empty(1, 1, 64)
        for step, piece in enumerate(order):
            keys, values = (x[:, :, 16 * piece : 16 * piece + 16] for x in (k, v))
            state = acc, m, l
            engine.forward(ForwardStep(q, keys, values, tables, out, lse, None, state, step > 0, step < 5))()
        want = dense_attention(*(x.double() for x in (q, k, v)), torch.ones(1, 1, 64, 96).bool(), scale=1.0)
        torch.testing.assert_close(out.double(), want.out, rtol=0, atol=2e-5)
        torch.testing.assert_close(lse.double(), want.lse, rtol=1e-6, atol=0)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


@pytest.mark.filterwarnings("ignore:.*is run again at every call")
def test_gradients_of_a_score_mod_stop_where_it_stops_them() -> None:
    q, k, v = (torch.randn(1, 1, 8, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def gated(score: Tensor, *_: Any) -> Tensor:
        with torch.no_grad():
            gate = torch.tanh(score)
        return score * gate

    def rounded(score: Tensor, *_: Any) -> Tensor:
        return _Rounded.apply(score)

    slope = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    for score_mod in (gated, rounded):
        out = tritoncp.flex_attention(q, k, v, score_mod)
        want = score_mod(q @ k.mT / 2).softmax(-1) @ v
        grads, wants = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, want))
        for got, expected in zip(grads, wants, strict=True):
            torch.testing.assert_close(got, expected)
    out = tritoncp.flex_attention(q, k, v, lambda score, *_: rounded(score) * slope)
    with pytest.raises(NotImplementedError, match=r"_Rounded, an autograd.Function.*detach"):
        out.sum().backward()
