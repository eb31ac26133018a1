"""Tests with NaN and scores of any size, on both engines: lse agrees with out, and gradients are bounded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import tritoncp
from tritoncp.reference.dense import Dense, dense_attention

S, D = 48, 8  # a scale that is no power of two, so that log2 units round
AUX = AuxRequest(lse=True, max_scores=True)
SCHEDULES = ("one device", "allgather", "ring", "fetch", "ulysses")


pytestmark = pytest.mark.usefixtures("engine")


def mask() -> tritoncp.Mask:
    """Make a causal mask whose last block of queries sees no key."""
    return tritoncp.create_block_mask(lambda b, h, q, kv: (q >= kv) & (q < 32), 1, 1, S, S, BLOCK_SIZE=16)


def tensors(size: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Make q, k, v whose scores have magnitude ``size``."""
    q, k, v = (torch.randn(1, 2, S, D) for _ in range(3))
    return [x.to(dtype).requires_grad_() for x in (q * math.sqrt(size), k * math.sqrt(size), v)]


def dense(*qkv: Tensor) -> Dense:
    at = torch.arange(S)
    visible = (at[:, None] >= at) & (at[:, None] < 32)
    return dense_attention(*(x.double() for x in qkv), visible)


def answers(qkv: list[Tensor], schedule: str, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    if schedule == "one device":
        out, aux = tritoncp.flex_attention(*qkv, mask(), return_aux=AUX, kernel_options=options)
        return out, aux.lse, aux.max_scores
    world = tritoncp.simulate(3)
    plan = world.make_plan(mask(), schedule=schedule)
    shards = (world.shard(x, plan, dim=2) for x in qkv)
    outs, aux = world.flex_attention(*shards, plan, return_aux=AUX, kernel_options=options)
    out, lse, top = (world.unshard(x, plan, dim=2) for x in (outs, aux.lse, aux.max_scores))
    return out, lse, top


PLACES = [
    pytest.param(engine, where, marks=[pytest.mark.long] * (engine == "kernels" and where != "q and k"))
    for engine in ("cpu", "kernels")
    for where in ("q", "k", "q and k")
]


@pytest.mark.parametrize(("engine", "where"), PLACES, indirect=["engine"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_nan_is_in_every_answer_that_saw_it(schedule: str, where: str, engine: str) -> None:
    q, k, v = tensors()
    with torch.no_grad():
        if "q" in where:
            q[0, 0, 20] = math.nan
        if "k" in where:
            k[0, 1, 25] = math.nan
    got, want = answers([q, k, v], schedule), dense(q, k, v)
    for name, a, b in zip(("out", "lse", "max_scores"), got, want, strict=True):
        assert bool(b.isnan().any()) and torch.equal(a.isnan(), b.isnan()), name
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert bool((got[1][:, :, 32:] == -math.inf).all())  # saw nothing, and says so


def test_an_infinite_score_is_a_nan_in_out_and_lse_of_its_row() -> None:
    q, k, v = tensors()
    with torch.no_grad():
        k[0, 1, 5, 3] = math.inf
    out, lse, top = answers([q, k, v], "one device")
    infinite = torch.zeros(lse.shape, dtype=torch.bool)
    infinite[0, 1, 5:32] = q[0, 1, 5:32, 3] > 0
    seen = infinite | (top == -math.inf)
    assert infinite.any() and torch.equal(top == math.inf, infinite)
    assert torch.equal(lse.isnan(), infinite) and torch.equal(out.isnan().all(-1), infinite)
    assert bool(lse[~seen].isfinite().all())


def test_programs_that_share_keys_hand_a_nan_on() -> None:
    q, k, v = tensors()
    with torch.no_grad():
        k[0, 1, 5] = math.nan
    got = answers([q, k, v], "one device", SPLIT_KV=2, BLOCK_M=16, BLOCK_N=16)
    for a, b in zip(got, dense(q, k, v), strict=True):
        assert torch.equal(a.isnan(), b.isnan())


def test_gradients_of_rows_with_a_nan_are_nan() -> None:
    """They are NaN although the gradient of out is finite."""
    q, k, v = tensors()
    with torch.no_grad():
        q[0, 0, 20] = math.nan
    dq, dk, dv = torch.autograd.grad(answers([q, k, v], "one device")[0].sum(), (q, k, v))
    assert bool(dq[0, 0, 20].isnan().all()) and not bool(dq[0, 0, :20].isnan().any())
    for grad in (dk, dv):
        assert bool(grad[0, 0, :16].isnan().all()) and not bool(grad[0, 1].isnan().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e8, 1e12])
@pytest.mark.bar(5)
def test_no_probability_exceeds_one_however_large_scores_are(size: float, dtype: torch.dtype) -> None:
    """The forward pass is exact; for scores beyond the fractional digits of float32, gradients are bounded by
    those of probabilities that are all one."""
    qkv = tensors(size, dtype)
    got, want = answers(qkv, "one device"), dense(*qkv)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(got[0].double(), want[0], **near)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=0)
    dout = torch.randn_like(got[0])
    dq, dk, dv = torch.autograd.grad(got[0], qkv, dout)
    assert all(bool(x.isfinite().all()) for x in (dq, dk, dv))
    most = dout.abs().double()[:, :, :32].flip(2).cumsum(2).flip(2)  # of all queries that see a key
    assert bool((dv.double().abs()[:, :, :32] <= most * 1.01 + 1e-6).all())
