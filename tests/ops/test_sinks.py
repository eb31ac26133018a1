"""Tests of sinks: a sink equals an extra key with the logit as score and value zero, visible to all
queries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tritoncp
from tests.zoo import HEADS, MASKS, Answer, S, agree, differentiate, tensors
from tritoncp import simulate
from tritoncp.distributed.schedules import SCHEDULES
from tritoncp.masks import Mask
from tritoncp.ops import engine_factory
from tritoncp.reference.dense import dense_attention

CLOSE = {"atol": 1e-8, "rtol": 1e-8, "grad_atol": 1e-8}


def one_more_key(qkv: list[Tensor], mask: Mask, sinks: Tensor) -> Answer:
    q, k, v = qkv
    more = [torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[3])], 2) for x in (k, v)]
    visible = torch.cat([mask.to_dense(1, q.shape[1]), torch.ones(1, q.shape[1], S, 1, dtype=torch.bool)], 3)
    score = lambda s, b, h, q_idx, kv: torch.where(kv == S, sinks[h], s)  # noqa: E731
    result = dense_attention(q, *more, visible, score)
    return differentiate(result.out, result.lse, qkv, [sinks])


def with_sinks(qkv: list[Tensor], mask: Mask, sinks: Tensor, world_size: int, schedule: str) -> Answer:
    world = simulate(world_size)
    plan = world.make_plan(mask, schedule=schedule)
    q, k, v = (world.shard(x, plan, dim=2, side=side) for x, side in zip(qkv, ("q", "kv", "kv")))
    outs, lses = world.flex_attention(q, k, v, plan, enable_gqa=True, return_lse=True, sinks=sinks)
    return differentiate(*(world.unshard(x, plan, dim=2) for x in (outs, lses)), qkv, [sinks])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("mask", ["document", "random", "empty rows"])
def test_sinks_are_one_more_key(
    mask: str, world_size: int, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_factory, "uses_triton", lambda device: False)
    qkv = tensors(HEADS["GQA"], torch.float64)
    whole, sinks = MASKS[mask](8), torch.randn(8, dtype=torch.float64, requires_grad=True)
    agree(with_sinks(qkv, whole, sinks, world_size, schedule), one_more_key(qkv, whole, sinks), **CLOSE)


@pytest.mark.usefixtures("cpu_engine")
def test_one_device_and_compiled_are_the_same() -> None:
    q, k, v = tensors(HEADS["MHA"], torch.float32)
    mask, sinks = MASKS["causal"](2), torch.randn(2, requires_grad=True)

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return tritoncp.flex_attention(q, k, v, mask, sinks=sinks)

    want = call(q, k, v, sinks)
    assert not torch.allclose(want, tritoncp.flex_attention(q, k, v, mask))
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, sinks)
    torch.testing.assert_close(got, want)
    for own, right in zip(
        torch.autograd.grad(got.square().sum(), [q, k, v, sinks]),
        torch.autograd.grad(want.square().sum(), [q, k, v, sinks]),
    ):
        torch.testing.assert_close(own, right)


def test_a_sink_that_is_minus_infinity_takes_nothing() -> None:
    q, k, v = tensors(HEADS["MHA"], torch.float32)
    mask = MASKS["empty rows"](2)
    out, lse = tritoncp.flex_attention(q, k, v, mask, return_lse=True, sinks=torch.full((2,), -torch.inf))
    want, want_lse = tritoncp.flex_attention(q, k, v, mask, return_lse=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize("sinks", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64)])
def test_sinks_of_another_shape_or_kind_are_refused(sinks: Tensor) -> None:
    q, k, v = tensors(HEADS["MHA"], torch.float32)
    with pytest.raises(ValueError, match=r"one floating point logit for each of the query's 2 heads"):
        tritoncp.flex_attention(q, k, v, None, sinks=sinks)
