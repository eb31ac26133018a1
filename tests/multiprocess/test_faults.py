"""Ranks that die, stop, raise or make another call: the other ranks end in time, with an error that names it.

Three gloo ranks, of which rank 1 fails just before a stage that all of them make together, or in it, as in
the table of docs/troubleshooting.md.
"""

from __future__ import annotations

import os
import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tritoncp
from tests.distributed.test_failures import run_out_of_memory
from tests.multiprocess.ranks import attempt, outcomes, run

S, TIMEOUT = 24, 3.0  # rows, and seconds of the group
PAGE = Path(__file__).parents[2] / "docs/troubleshooting.md"

pytestmark = pytest.mark.usefixtures("cpu_engine")


def mask_of(window: int = 9) -> tritoncp.Mask:
    return tritoncp.create_block_mask(tritoncp.sliding_window(window), 1, 1, S, S, BLOCK_SIZE=4)


def attend(plan: tritoncp.Plan, group: Any) -> Tensor:
    x = torch.ones(1, 3, plan.s_local, 8, requires_grad=True)
    return tritoncp.flex_attention(x, x, x, plan, group)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ArithmeticError("of rank 1 alone")


def stay_away() -> None:
    signal.pause()


# -- the table of docs/troubleshooting.md --------------------------------------------------------------------


def read_table() -> dict[str, list[str]]:
    """Read the rows of the page: by fault, the errors of rank 1 and of the other ranks, and their seconds."""
    table = PAGE.read_text().split("| fault of rank 1 |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]
    return {fault: rest for fault, *rest in rows}


def row_pattern(cell: str) -> str:
    return ".*".join(re.escape(part) for part in cell.strip("`").split("…"))


def lead(group: Any, fault: str) -> None:
    """Run a forward and backward pass whose second call has a fault on rank 1."""
    is_bad = group.rank() == 1 or fault.startswith("all ranks")
    if fault.startswith("`make_plan`"):
        tritoncp.make_plan(mask_of(), group, schedule="no" if is_bad else "ring")
    plan = tritoncp.make_plan(mask_of(), group, schedule="ring")
    out, x = attend(plan, group), torch.ones(1, 3, plan.s_local, 8)
    if fault.startswith("Ctrl-C"):
        if is_bad:
            run_out_of_memory("dq", 1, KeyboardInterrupt)({})
        out.sum().backward()
    if is_bad and fault == "another call than that of the others":
        tritoncp.make_plan(mask_of(11), group)
    elif is_bad and fault.startswith("no memory"):
        run_out_of_memory("forward", 1)({})
    elif is_bad and fault in PLACES:
        PLACES[fault]()
    elif is_bad and not fault.startswith("a score_mod"):
        x = x[:, :, 1:]
    tritoncp.flex_attention(
        x, x, x, raising if is_bad and fault.startswith("a score_mod") else None, plan, mesh=group
    )


def raising(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    raise ArithmeticError("of a score_mod")


PLACES = {
    "it is killed": die,
    "an exception outside of these calls ends it": fail,
    "it is stopped": stop,
    "it calls nothing": stay_away,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "fault",
    # A rank that stands still is for the others as one that calls nothing.
    [pytest.param(one, marks=[pytest.mark.long] * (one == "it is stopped")) for one in read_table()],
)
@pytest.mark.bar(20)
def test_each_fault_of_the_table_ends_as_the_table_says(fault: str) -> None:
    own, others, after = read_table()[fault]
    seconds = sum(
        TIMEOUT if part == "timeout" else float(part) for part in after.removesuffix(" s").split(" + ")
    )
    timeout = TIMEOUT if "timeout" in after else 60
    ends = outcomes(3, lambda group: lead(group, fault), timeout, seconds + 40, 1)
    for rank, end in enumerate(ends):
        if rank != 1 or own != "–":
            assert re.match(row_pattern(own if rank == 1 else others), end.said, re.DOTALL), end
            assert end.seconds <= seconds + 30, end  # a busy machine may stop a process for as long


def calls_with(mesh: Any) -> list[str]:
    """The errors of every public call with a mesh."""
    x, mask = torch.ones(1, 2, S // 2, 8), mask_of()
    plan = tritoncp.make_plan(mask, world_size=2, rank=0)
    return [
        attempt(lambda: tritoncp.make_plan(mask, mesh)),
        attempt(lambda: tritoncp.flex_attention(x, x, x, mask, mesh)),
        attempt(lambda: tritoncp.flex_attention(x, x, x, plan, mesh=mesh)),
        attempt(lambda: tritoncp.shard(torch.ones(S), mask, mesh, dim=0)),
        attempt(lambda: tritoncp.unshard(torch.ones(S // 2), plan, mesh, dim=0)),
    ]


@pytest.mark.bar(21)
def test_a_destroyed_group_and_one_of_other_ranks_are_refused_before_anything_is_sent() -> None:
    def work(group: Any) -> tuple[list[str], list[str], list[str], str]:
        first = dist.new_group([0])
        alone = dist.DeviceMesh("cpu", [0])
        late = dist.new_group(timeout=timedelta(seconds=5))
        plan = tritoncp.make_plan(mask_of(), late)
        x = torch.ones(1, 2, plan.s_local, 8, requires_grad=True)
        out = tritoncp.flex_attention(x, x, x, plan, late)
        over_late = dist.DeviceMesh.from_group(late, "cpu")
        dist.destroy_process_group(late)
        late_calls = calls_with(late) + calls_with(over_late)
        return late_calls, calls_with(first), calls_with(alone), attempt(lambda: out.sum().backward())

    for rank, (destroyed, other, mesh, backward) in enumerate(run(2, work)):
        for said in (*destroyed, backward):
            assert re.match("ValueError: the process group .* was destroyed", said), said
        for said in (*other, *mesh) if rank else ():
            assert re.match("ValueError: this process is not a member of", said), said
