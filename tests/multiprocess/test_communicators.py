"""The data communicator of a group: it carries all tensors in one order, on a high-priority NCCL stream."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tritoncp
from tests.cases import Answers, Case, agree, expected
from tests.multiprocess.case_on_ranks import on_rank
from tests.multiprocess.ranks import run
from tritoncp.distributed import collectives, failures, groups

pytestmark = pytest.mark.usefixtures("cpu_engine", "in_pieces")
CUDA = torch.device("cuda", 0)
CASE = Case(("window", 12), balancer="ptrr", heads=4, block=4)  # some ranks are idle in some turns of a ring
SCHEDULES = {"allgather": 3, "ring": 3, "fetch": 3, "ulysses": 3, "ulysses+ring": 4}


def spied(monkeypatch: pytest.MonkeyPatch, channel: Any) -> list[str]:
    """Record the kinds of messages in the order of their start; fail on any but on ``channel``."""
    kinds: list[str] = []

    def spy(owner: Any, name: str) -> None:
        start = getattr(owner, name)

        def started(*args: Any, **options: Any) -> Any:
            assert options["group"] is channel, f"{name} on {options['group']}"
            kinds.append(name)
            return start(*args, **options)

        monkeypatch.setattr(owner, name, started)

    spy(collectives, "_all_gather")
    spy(collectives, "_reduce_scatter")
    spy(dist, "all_to_all_single")
    return kinds


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_tensors_travel_on_one_communicator(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It carries forward, backward and unshard, with and without a companion."""

    def work(group: Any) -> tuple[list[str], Answers]:
        companion = dist.new_group()
        monkeypatch.setattr(groups, "data_communicator", lambda of, device: companion)
        kinds = spied(monkeypatch, companion)
        return kinds, on_rank(group, case, mesh_of)

    def mesh_of(group: Any) -> Any:
        two = schedule == "ulysses+ring"
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses")) if two else group

    case = replace(CASE, schedule=schedule, world=SCHEDULES[schedule])
    want = expected(case)
    for kinds, results in run(case.world, work):
        assert kinds, "the spies see something"
        agree(case, results, want)


def pretend_nccl(high_priority: bool) -> list[dict[str, Any]]:
    """Pretend, in the process of a rank, that NCCL carries the CUDA tensors of groups; new communicators use
    gloo. Returns a list of events: the arguments of new communicators, collectives ("connected": group)."""
    patch, torchs, events = pytest.MonkeyPatch(), dist.distributed_c10d, []  # nothing runs after the test
    make, zeros = torchs._new_process_group_helper, torch.zeros

    def options(is_high_priority_stream: bool) -> SimpleNamespace:
        return SimpleNamespace(is_high_priority_stream=is_high_priority_stream)

    def helper(size: int, rank: int, ranks: list[int], backend: str, store: Any, name: str,
               options: Any = None, *args: Any, **rest: Any) -> Any:  # fmt: skip
        bound = dist.group.WORLD.bound_device_id
        events.append({"backend": str(backend), "ranks": ranks, "options": options, "bound": bound})
        return make(size, rank, ranks, dist.Backend("gloo"), store, name, None, *args, **rest)

    patch.setattr(torchs, "_new_process_group_helper", helper)
    patch.setattr(torchs, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    patch.setattr(groups, "_nccl_of", lambda group: SimpleNamespace(options=options(high_priority)))
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch, "zeros", lambda *shape, **rest: zeros(*shape, **{**rest, "device": None}))
    patch.setattr(dist, "all_reduce", lambda x, group: events.append({"connected": group}))
    return events


def test_nccl_gets_a_companion_with_a_high_priority_stream() -> None:
    """It is made and connected once, with the group's first plan, by the group's ranks only."""

    def work(group: Any) -> None:
        pair = dist.new_group([0, 2])
        if group.rank() == 1:
            return
        events = pretend_nccl(high_priority=False)
        group.bound_device_id = CUDA
        for schedule in ("ring", "fetch", "allgather"):
            tritoncp.make_plan(CASE.block_mask(), pair, schedule=schedule)
        assert group.bound_device_id == CUDA
        creation, connected = events
        assert creation["backend"] == "nccl" and creation["ranks"] == [0, 2] and creation["bound"] is None
        assert creation["options"].is_high_priority_stream
        channel = groups.data_communicator(pair, CUDA)
        assert connected == {"connected": channel} and channel is not pair
        assert dist.get_process_group_ranks(channel) == [0, 2]
        assert creation["options"]._timeout == failures.timeout(pair)
        assert groups.data_communicator(pair, torch.device("cpu")) is pair

    run(3, work)


@pytest.mark.parametrize("way", ["options", "environment"])
def test_a_group_with_a_high_priority_stream_carries_its_tensors(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is also connected with the first plan."""
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", str(int(way == "environment")))

    def work(group: Any) -> None:
        events = pretend_nccl(high_priority=way == "options")
        for _ in range(2):
            tritoncp.make_plan(CASE.block_mask(), group, schedule="ring")
        assert events == [{"connected": group}]
        assert groups.data_communicator(group, CUDA) is group

    run(2, work)


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", ["undefined", "cpu:gloo,cuda:nccl"])
def test_a_group_for_both_devices_connects_nccl_for_tensors_on_gpus_alone(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that share a GPU, or use none, send CPU tensors; NCCL would refuse to connect them."""

    def work(group: Any) -> None:
        events = pretend_nccl(high_priority=True)
        monkeypatch.setattr(dist, "get_backend", lambda group=None: backend)
        monkeypatch.setattr(failures, "timeout", lambda group: timedelta(minutes=1))
        plan = tritoncp.make_plan(CASE.block_mask(), group, schedule="ring")
        x = torch.ones(1, 4, plan.s_local, 8, requires_grad=True)
        tritoncp.flex_attention(x, x, x, plan, group).sum().backward()
        assert not events
        groups.connect_data(group, CUDA)  # like a call with tensors on that device
        assert events == [{"connected": group}]

    run(2, work)


def test_other_backends_and_single_ranks_need_no_companion() -> None:
    def work(group: Any) -> None:
        of_cpu = dist.new_group(backend="cpu:gloo")
        assert all(groups.data_communicator(one, CUDA) is one for one in (group, of_cpu))
        alone = [dist.new_group([rank]) for rank in range(2)][group.rank()]
        events = pretend_nccl(high_priority=False)
        tritoncp.make_plan(CASE.block_mask(), alone)
        assert groups.data_communicator(alone, CUDA) is alone and not events

    run(2, work)
