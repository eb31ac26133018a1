"""CPU time of Python in a call: plan cached, kernels compiled for an absent GPU and never launched.

`python -m tests.kernels.support.overhead [--profile]` prints microseconds of CPU time a call, and their ratio
to torch's compiled flex_attention, on tensors so small that computing takes next to nothing; both are timed
in turns, since the speed of a shared machine varies from minute to minute.  For one rank of several it also
prints the time without messages (which otherwise are sent to no process).  The time of the GPU's driver is
not included.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver

import tritoncp
from tritoncp.analysis.cross_compile import DriverStub, target_of
from tritoncp.distributed import collectives, groups
from tritoncp.kernels import engine
from tritoncp.ops import engine_factory

ARCH = "sm_90"


def pretend() -> None:
    """Let CPU tensors run kernels compiled for ARCH and never launched."""
    driver.set_active(DriverStub(target_of(ARCH)))
    engine_factory.uses_triton = lambda device: True
    engine.architecture = lambda device: ARCH
    CompiledKernel.run = property(lambda self: lambda *args: None)
    CompiledKernel.launch_metadata = lambda *args: None
    CompiledKernel._init_handles = lambda self: None
    CompiledKernel.function = None
    CompiledKernel.packed_metadata = None


Call = Callable[[], Any]


def microseconds(call: Call, repeats: int = 50) -> float:
    """Measure the CPU time of a call in microseconds."""
    start = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - start) / repeats * 1e6


def figures(call: Call, beside: Call, rounds: int = 60) -> dict[str, float]:
    """The smallest time of several rounds, and the median ratio to the time of ``beside``."""
    pairs = [(microseconds(call), microseconds(beside)) for _ in range(rounds)][rounds // 10 :]
    ratio = statistics.median(own / other for own, other in pairs)
    return {"us": round(min(own for own, _ in pairs), 1), "of torch's": round(ratio, 2)}


def unsent(request: Any, group: Any) -> collectives.Ticket:
    """Replace :func:`tritoncp.distributed.collectives._start`: allocate the result, send nothing."""
    world = group.size()
    match request:
        case collectives.AllGather(x):
            return collectives.Ticket(x.new_empty(x.shape[0] * world, *x.shape[1:]))
        case collectives.ReduceScatter(x):
            return collectives.Ticket(x.new_empty(x.shape[0] // world, *x.shape[1:]))
        case collectives.AllToAll(x, _, recvs):
            return collectives.Ticket(x.new_empty(sum(recvs), *x.shape[1:]))
    return collectives.Ticket([x for _, x in request.recvs])


def without_collectives(call: Call, beside: Call) -> dict[str, float]:
    """Measure a call that sends no message."""
    start, collectives._start = collectives._start, unsent
    try:
        return figures(call, beside)
    finally:
        collectives._start = start


def of_torch() -> dict[str, Call]:
    """Time torch's own attention, compiled for the CPU: guards and wrapper are the same as for a GPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    q, k, v = (torch.randn(1, heads, 16, 16) for heads in (2, 1, 1))
    ids = torch.arange(16) // 5

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (ids[i] == ids[j])

    masks = [create_block_mask(mod, None, None, 16, 16, "cpu", 16) for mod in (causal, documents)]
    names = "torch's compiled flex, causal", "torch's compiled flex, documents"
    return {
        name: lambda mask=mask: compiled(q, k, v, block_mask=mask, enable_gqa=True)
        for name, mask in zip(names, masks, strict=True)
    }


def of_a_rank(schedule: str, ranks: int = 4) -> tuple[Call, Call]:
    """Measure forward, and both passes, of the first of several ranks, whose messages are not sent."""
    group = dist.group.WORLD
    mask = tritoncp.create_block_mask(tritoncp.causal(), None, None, 128, 128, BLOCK_SIZE=16)
    plan = tritoncp.make_plan(mask, world_size=ranks, rank=0, schedule=schedule)
    tritoncp.positions(plan)  # the shards below are in its order
    shard = [torch.randn(1, heads, plan.s_local, 16, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    leaves = [x.clone().requires_grad_() for x in shard]

    def both() -> Any:
        out = tritoncp.flex_attention(*leaves, plan, enable_gqa=True, mesh=group)
        return torch.autograd.grad(out, leaves, out)

    return lambda: tritoncp.flex_attention(*shard, plan, enable_gqa=True, mesh=group), both


def calls() -> dict[str, Call]:
    q = torch.randn(1, 2, 128, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 1, 128, 64, dtype=torch.bfloat16) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = tritoncp.create_block_mask(tritoncp.causal(), None, None, 128, 128)
    documents = tritoncp.and_masks(tritoncp.causal(), tritoncp.document(lengths=[50, 40, 38]))
    table = tritoncp.create_block_mask(documents, None, None, 128, 128)

    def alibi(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - 0.1 * (i - j)

    slopes = torch.tensor([0.1, 0.2])

    def captured(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - slopes[h] * (i - j)

    def both(block_mask: Any) -> Any:
        out = tritoncp.flex_attention(*leaves, block_mask, enable_gqa=True)
        return torch.autograd.grad(out, leaves, out)

    return {
        "forward, causal": lambda: tritoncp.flex_attention(q, k, v, mask, enable_gqa=True),
        "forward, documents": lambda: tritoncp.flex_attention(q, k, v, table, enable_gqa=True),
        "forward, score_mod": lambda: tritoncp.flex_attention(q, k, v, alibi, mask, enable_gqa=True),
        "forward, captured": lambda: tritoncp.flex_attention(q, k, v, captured, mask, enable_gqa=True),
        "forward and backward, causal": lambda: both(mask),
    }


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("unset TRITON_INTERPRET: interpreted kernels would be measured, not what launches them")
    torch.set_num_threads(1)  # CPU time is that of all threads
    beside = of_torch()
    torchs = next(iter(beside.values()))
    for name, call in beside.items():
        say(name, call, figures(call, torchs))
    pretend()
    for name, call in calls().items():
        say(name, call, figures(call, torchs))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    groups.timeout = lambda group: timedelta(minutes=1)
    for schedule in ("allgather", "fetch", "ring", "ulysses"):
        for way, call in zip(("forward", "forward and backward"), of_a_rank(schedule), strict=True):
            timings = figures(call, torchs) | {"without collectives": without_collectives(call, torchs)}
            say(f"{schedule}, a rank of 4, {way}", call, timings)
    dist.destroy_process_group()


def say(name: str, call: Call, timings: dict[str, Any]) -> None:
    print(json.dumps({"call": name} | timings), flush=True)
    if "--profile" in sys.argv:
        with cProfile.Profile() as profile:
            for _ in range(300):
                call()
        pstats.Stats(profile).sort_stats("tottime").print_stats(32)


if __name__ == "__main__":
    main()
