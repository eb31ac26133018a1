"""NCCL, and messages beside a kernel that fills the GPU: a copy of few blocks, on streams of two
priorities."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import tritoncp
from tests.device import TOKENS
from tests.kernels.support.harness import MASKS, cotangents, qkv, run, same

S = 16384
LAUNCHES = 4  # blocks of the copy: each waits for a free multiprocessor
ROUNDS = 5


class Times(NamedTuple):
    """Milliseconds from the start of an attention kernel to its end, and to the end of a copy that was queued
    after it on another stream."""

    attention: float
    copy: float


def strided_copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy by multiprocessors instead of the copy engine, in a few launches of few blocks."""
    for rows, into in zip(source.mT.chunk(LAUNCHES), target.chunk(LAUNCHES), strict=True):
        into.copy_(rows)


def measure(priority: int) -> Times:
    """Time attention on the current stream and a copy, queued after it, on a stream of this priority."""
    q, k, v = torch.randn(3, 1, 32, S, 128, dtype=torch.bfloat16)
    source, target = torch.randn(512, 512), torch.empty(512, 512)
    tritoncp.flex_attention(q, k, v)  # compiles the kernel
    strided_copy(source, target)
    side = torch.cuda.Stream(priority=priority)
    begin, end, copied = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    begin.record()
    tritoncp.flex_attention(q, k, v)
    end.record()
    with torch.cuda.stream(side):
        side.wait_event(begin)
        strided_copy(source, target)
        copied.record()
    torch.cuda.synchronize()
    assert torch.equal(target, source.mT)
    return Times(begin.elapsed_time(end), begin.elapsed_time(copied))


def test_a_high_priority_copy_ends_before_the_attention_kernel() -> None:
    """An assumption of docs/decisions/0001: without it no schedule overlaps its messages."""
    low, high = torch.cuda.Stream.priority_range()
    normal = [measure(low) for _ in range(ROUNDS)]
    urgent = [measure(high) for _ in range(ROUNDS)]
    print(f"\npriority {low}: {normal}\npriority {high}: {urgent}")
    shares = sorted(times.copy / times.attention for times in urgent)
    assert shares[ROUNDS // 2] < 0.9, f"the copy waits for the kernel: {urgent}"


@pytest.fixture
def group_of_one() -> Iterator[dist.ProcessGroup]:
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_process_group_of_one_is_one_device(group_of_one: dist.ProcessGroup) -> None:
    x, whole = qkv(TOKENS, heads=2, dim=64, dtype=torch.bfloat16), MASKS["causal"](TOKENS, 128)
    start = cotangents(x)
    alone, plan = run(x, whole, start=start), tritoncp.make_plan(whole, group_of_one)
    for mask in (whole, plan):
        got = run(x, mask, start=start, mesh=group_of_one)
        same((*got[:3], *got.grads), (*alone[:3], *alone.grads))
    q = tritoncp.shard(x.q, plan, dim=2)
    assert torch.equal(tritoncp.unshard(q, plan, group_of_one, dim=2), x.q) and q.shape[2] == TOKENS


if torch.cuda.device_count() > 1:

    def test_one_rank_per_gpu_agrees_with_one_device() -> None:
        """Every schedule, on NCCL, with the companion communicator."""
        ranks = f"--nproc-per-node={min(torch.cuda.device_count(), 8)}"
        launch = ["-m", "torch.distributed.run", "--standalone", ranks]
        command = [sys.executable, *launch, "-m", "tritoncp", "check"]
        result = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stdout + result.stderr
