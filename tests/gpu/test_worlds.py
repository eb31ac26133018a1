"""A process group of one rank on one GPU; tests/gpu/test_cases.py has simulated worlds."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

import tritoncp
from tests.gpu.support import (
    MASKS,
    ON_GPU,
    N,
    qkv,
    run,
    same,
)


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
