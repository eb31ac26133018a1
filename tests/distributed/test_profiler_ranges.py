"""Tests of the ranges of steps and messages in a profiler's trace: names, number, order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import tritoncp
from tests.multiprocess import ranks
from tritoncp.distributed import profiler_ranges

pytestmark = pytest.mark.usefixtures("cpu_engine", "in_pieces")
N, WORLD = 128, 4
# Ranges of a rank of four, under the name of the schedule, where every rank reads of every rank.
RING = [
    *(f"step {turn}" for turn in range(WORLD)),
    "backward step 0 delta",
    *(f"backward step {turn} {part}" for turn in range(WORLD) for part in ("dq", "dkdv")),
]
FETCH = [
    *("step 0", "step 1", "backward step 0 delta", "backward step 0 dq", "backward step 0 dkdv"),
    *("backward step 1 dkdv", "backward step 1 dq"),  # gradients of keys return while dq is computed
]
LOCAL = ["step 0", "backward step 0 delta", "backward step 0 dq", "backward step 0 dkdv"]
STEPS = {
    "ring": RING,
    "fetch": FETCH,
    "allgather": [  # the two head groups of two KV heads
        *("step 0", "step 1", "backward step 0 delta"),
        *("backward step 0 dq", "backward step 0 dkdv", "backward step 1 dq", "backward step 1 dkdv"),
    ],
    "ulysses": LOCAL,
}


def ranges(call: Callable[[], Any]) -> list[str]:
    """List the ranges of a call in the order of their starts, without ops as `tritoncp::forward`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    names = [event.name() for event in events if event.name().startswith("tritoncp::")]
    return [name.removeprefix("tritoncp::") for name in names if "/" in name]


def layer(
    world: Any, schedule: str, heads: int = 4, kv_heads: int = 2, mask: Any = None
) -> Callable[[], None]:
    """Return a function that runs a layer, forward and backward, of full attention or a mask."""
    mask = mask or tritoncp.full_mask(N, N, block=32)
    plan = world.make_plan(mask, balancer="contiguous", schedule=schedule)
    q, k = (torch.randn(1, h, N, 16, requires_grad=True) for h in (heads, kv_heads))
    shards = [world.shard(x, plan, dim=2) for x in (q, k, k)]

    def run() -> None:
        outs = world.flex_attention(*shards, plan, enable_gqa=True)
        sum(out.sum() for out in outs).backward()

    return run


@pytest.mark.long
@pytest.mark.parametrize("schedule", STEPS)
def test_steps_of_simulated_ranks(schedule):
    names = ranges(layer(tritoncp.simulate(WORLD), schedule))
    steps = [f"{schedule}/{step}" for step in STEPS[schedule]]
    assert sorted(names) == sorted(WORLD * steps)
    assert list(dict.fromkeys(names)) == list(dict.fromkeys(steps)), "in this order"


def test_a_single_rank_has_one_step():
    assert ranges(layer(tritoncp.simulate(1), "ring")) == [f"local/{step}" for step in LOCAL]


def test_a_rank_that_fetches_no_keys_has_one_step():
    mask = tritoncp.create_block_mask(tritoncp.causal(), None, None, N, N, BLOCK_SIZE=32)
    names = ranges(layer(tritoncp.simulate(2), "fetch", mask=mask))
    assert sorted(names) == sorted(f"fetch/{step}" for step in LOCAL + FETCH)


@pytest.mark.long
def test_messages_of_real_ranks_are_ranges_too():
    """The wait of two ranks for a message comes where the result is needed."""

    def rank(group):
        schedules = {}
        for schedule in ("ring", "fetch", "allgather", "ulysses"):
            mask = tritoncp.full_mask(N, N, block=32)
            plan = tritoncp.make_plan(mask, group, balancer="contiguous", schedule=schedule)
            x = tritoncp.shard(torch.randn(1, 2, N, 16), plan, dim=2).requires_grad_()

            def run(plan=plan, x=x):
                tritoncp.flex_attention(x, x, x, None, plan, mesh=group).sum().backward()

            schedules[schedule] = ranges(run)
        return schedules

    for names_by_schedule in ranks.run(2, rank):
        for schedule, names in names_by_schedule.items():
            assert {name.split("/")[0] for name in names} == {schedule}
            computed = [name for name in names if "start" not in name and "wait" not in name]
            assert list(dict.fromkeys(name.split("step")[0] for name in computed)) == [
                f"{schedule}/",
                f"{schedule}/backward ",
            ]
        ring = names_by_schedule["ring"]
        forward = ["start AllToAll", "step 0", "wait AllToAll", "start AllToAll", "step 1", "wait AllToAll"]
        assert ring[: len(forward)] == [f"ring/{name}" for name in forward]
        assert ring[-1] == "ring/backward wait AllToAll"
        assert names_by_schedule["fetch"][:4] == [
            f"fetch/{name}" for name in ("start AllToAll", "step 0", "wait AllToAll", "step 1")
        ]
        heads = ["start AllGather", "wait AllGather", "start AllGather", "{}", "wait AllGather", "{}"]
        gathers = "allgather/" + " allgather/".join(heads)  # next heads in flight meanwhile
        text = " ".join(names_by_schedule["allgather"])
        assert text.startswith(gathers.format("step 0", "step 1"))
        assert text.endswith(" allgather/backward wait ReduceScatter" * 2)  # in flight until the end
        assert text.count("allgather/backward start ReduceScatter") == 2
        assert "ulysses/start AllToAll" in names_by_schedule["ulysses"]


def test_no_range_is_made_without_a_profiler(monkeypatch):
    def fail(*_: object) -> AbstractContextManager[None]:
        raise AssertionError("a range without a profiler")

    monkeypatch.setattr(torch.profiler, "record_function", fail)
    layer(tritoncp.simulate(2), "ring")()
    with pytest.raises(AssertionError, match="a range without a profiler"):
        ranges(layer(tritoncp.simulate(2), "ring"))
    plan = tritoncp.make_plan(tritoncp.full_mask(N, N))
    assert profiler_ranges.step_range(plan, 1) is profiler_ranges.step_range(plan, 2)
