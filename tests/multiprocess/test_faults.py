"""Ranks that die, stop, raise or make another call: the other ranks end in time, with an error that names it.

Three gloo ranks, of which rank 1 fails just before a stage that all of them make together.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tritoncp
from tests.multiprocess.ranks import outcomes, run
from tritoncp.ops import engine_factory

S, TIMEOUT, MORE = 24, 3.0, 5.0  # seconds of the group, and how many more a rank may take to end


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_factory, "uses_triton", lambda device: False)


def mask_of(window: int = 9) -> tritoncp.Mask:
    return tritoncp.create_block_mask(tritoncp.sliding_window(window), 1, 1, S, S, BLOCK_SIZE=4)


def attend(plan: tritoncp.Plan, group: Any) -> Tensor:
    x = torch.ones(1, 3, plan.s_local, 8, requires_grad=True)
    return tritoncp.flex_attention(x, x, x, plan, group)


def stop(group: Any, call: Any, other: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die(group: Any, call: Any, other: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(group: Any, call: Any, other: Any) -> None:
    raise ArithmeticError("of rank 1 alone")


def stay_away(group: Any, call: Any, other: Any) -> None:
    signal.pause()


def do_something_else(group: Any, call: Any, other: Any) -> None:
    other()
    signal.pause()


FAULTS = {
    "SIGSTOP": stop,
    "SIGKILL": die,
    "exception": fail,
    "missing rank": stay_away,
    "other order": do_something_else,
}
WORK = {  # earlier stages, the stage, and the errors of the survivors
    "first plan": r"rank (0|2) of 3 was at make_plan, and rank 1 did not come",
    "later plan": r"rank (0|2) of 3 was at make_plan, and rank 1 did not come",
    "first forward": r"rank (0|2) of 3 was at flex_attention of query \[1, 3, 8, 8\].* rank 1 did not come",
    "later forward": r"rank (0|2) of 3: \w+ (with|to) ranks \[.*1.*turn \d+ of this layer's schedule",
    "backward": r"rank (0|2) of 3: \w+ (with|to) ranks \[.*1.*turn \d+ of this layer's schedule",
}
DIFFERENT = r"Disagreement: the ranks differ in (call|mask).*rank 1"  # where the other call is compared too


def stage(group: Any, what: str, fault: Any) -> None:
    """Run the earlier stages on all ranks; then the fault on rank 1 and this stage on the other ranks."""
    plan, out = None, None
    if what != "first plan":
        plan = tritoncp.make_plan(mask_of(), group, schedule="allgather")
    if what in ("later forward", "backward"):
        out = attend(plan, group)
    calls = {"plan": lambda: tritoncp.make_plan(mask_of(10), group), "forward": lambda: attend(plan, group)}
    call = calls.get(what.split()[-1]) or (lambda: out.sum().backward())
    other = calls["forward"] if what == "later plan" else lambda: tritoncp.make_plan(mask_of(11), group)
    if group.rank() == 1:
        fault(group, call, other)
    call()


def check(what: str, name: str) -> None:
    ends = outcomes(3, lambda group: stage(group, what, FAULTS[name]), TIMEOUT, TIMEOUT + MORE + 10, 1)
    assert ends[1].status == {"SIGKILL": -9, "exception": 1}.get(name, ends[1].status)
    for end in (ends[0], ends[2]):
        assert end.status == 1 and end.seconds <= TIMEOUT + MORE, end
        compared = name == "other order" and what in ("first plan", "later plan", "first forward")
        said = DIFFERENT if compared else f"PeerLost: {WORK[what]}"
        assert re.search(said, end.said, re.DOTALL), end.said


TABLE = list(itertools.product(WORK, FAULTS))
SAMPLE = [
    ("first plan", "SIGSTOP"),
    ("later plan", "SIGKILL"),
    ("first forward", "exception"),
    ("later forward", "SIGSTOP"),
    ("backward", "missing rank"),
    ("first forward", "other order"),
]


@pytest.mark.parametrize(("what", "name"), SAMPLE)
def test_a_fault_of_one_rank_ends_the_others_in_time(what: str, name: str) -> None:
    check(what, name)


@pytest.mark.long
@pytest.mark.parametrize(("what", "name"), [row for row in TABLE if row not in SAMPLE])
def test_the_rest_of_the_table_of_faults(what: str, name: str) -> None:
    check(what, name)


def raised(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def calls_with(mesh: Any) -> list[str]:
    """The errors of every public call with a mesh."""
    x, mask = torch.ones(1, 2, S // 2, 8), mask_of()
    plan = tritoncp.make_plan(mask, world_size=2, rank=0)
    return [
        raised(lambda: tritoncp.make_plan(mask, mesh)),
        raised(lambda: tritoncp.flex_attention(x, x, x, mask, mesh)),
        raised(lambda: tritoncp.flex_attention(x, x, x, plan, mesh=mesh)),
        raised(lambda: tritoncp.shard(torch.ones(S), mask, mesh, dim=0)),
        raised(lambda: tritoncp.unshard(torch.ones(S // 2), plan, mesh, dim=0)),
    ]


def test_a_destroyed_group_and_one_of_other_ranks_are_refused_before_anything_is_sent() -> None:
    def work(group: Any) -> tuple[list[str], list[str], list[str], str]:
        first = dist.new_group([0])
        alone = dist.DeviceMesh("cpu", [0])
        late = dist.new_group(timeout=timedelta(seconds=5))
        plan = tritoncp.make_plan(mask_of(), late)
        x = torch.ones(1, 2, plan.s_local, 8, requires_grad=True)
        out = tritoncp.flex_attention(x, x, x, plan, late)
        dist.destroy_process_group(late)
        return calls_with(late), calls_with(first), calls_with(alone), raised(lambda: out.sum().backward())

    for rank, (destroyed, other, mesh, backward) in enumerate(run(2, work)):
        for said in (*destroyed, backward):
            assert re.match("ValueError: the process group .* was destroyed", said), said
        for said in (*other, *mesh) if rank else ():
            assert re.match("ValueError: this process is not a member of", said), said
