"""Context parallelism on one GPU: simulated worlds, and a process group of one."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import AuxRequest

import tritoncp
from tests.gpu.support import (
    BF16,
    FP32,
    MASKS,
    ON_GPU,
    QKV,
    SCORES,
    N,
    Results,
    Score,
    check,
    leaves,
    qkv,
    run,
    same,
)


def simulated(x: QKV, plan: tritoncp.Plan, score: Score = SCORES["none"], captured=()) -> Results:
    """Return the global results of a simulated world, with gradients through its shards."""
    world = tritoncp.simulate(plan.world_size)
    own, caught = leaves(x, captured, None)
    shards = [world.shard(t, plan, dim=2, side=side) for t, side in zip(own, ("q", "kv", "kv"))]
    outs, aux = world.flex_attention(
        *shards, score.of and score.of(*caught), plan, enable_gqa=True,
        return_aux=AuxRequest(lse=True, max_scores=True),
    )  # fmt: skip
    out, lse, top = (world.unshard(t, plan, dim=2) for t in (outs, aux.lse, aux.max_scores))
    grads = torch.autograd.grad([out, lse], [*own, *caught], [x.dout, x.dlse])
    return Results(out.detach(), lse.detach(), top, *grads[:3], tuple(grads[3:]))


@pytest.mark.parametrize(
    ("world", "mask", "balancer"),
    [(2, "causal", "ptrr"), (3, "documents", "ptrr"), (8, "window", "contiguous"),
     (4, "dilated", "head_tail"), (4, "full", None), (2, "empty rows", "ptrr")],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_any_world_is_the_oracle(world, mask, balancer, dtype):
    whole = MASKS[mask]()
    x = qkv(heads=4, kv_heads=2, dtype=dtype)
    check(x, whole, got=simulated(x, tritoncp.make_plan(whole, world_size=world, rank=0, balancer=balancer)))


@pytest.mark.parametrize("schedule", ["allgather", "fetch", "ring", "ulysses", "ulysses+ring"])
def test_any_schedule_is_the_oracle(schedule):
    """Four ranks, two heads of keys: ulysses shares each of them among two ranks."""
    whole, x = MASKS["documents"](), qkv(batch=2, heads=4, kv_heads=2)
    plan = tritoncp.make_plan(whole, world_size=4, rank=0, schedule=schedule)
    check(x, whole, got=simulated(x, plan))


def test_scores_see_global_positions_and_what_they_capture_gets_gradients():
    whole, score = MASKS["causal"](), SCORES["relative"]
    x, captured = qkv(heads=4, kv_heads=2), score.captured(4)
    plan = tritoncp.make_plan(whole, world_size=4, rank=0)
    check(x, whole, score, captured, got=simulated(x, plan, score, captured))


@contextlib.contextmanager
def group_of_one() -> Iterator[dist.ProcessGroup]:
    device = torch.device("cuda", torch.cuda.current_device()) if ON_GPU else None
    dist.init_process_group(
        "nccl" if ON_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1, device_id=device
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_a_process_group_of_one_is_one_device():
    whole = MASKS["causal"]()
    x = qkv()
    alone = run(x, whole)
    with group_of_one() as group:
        same(run(x, whole, mesh=group), alone)
        plan = tritoncp.make_plan(whole, group)
        same(run(x, plan, mesh=group), alone)
        q = tritoncp.shard(x.q, plan, dim=2)
        assert torch.equal(tritoncp.unshard(q, plan, group, dim=2), x.q) and q.shape[2] == N
