"""The data communicator of a group: it carries all tensors in one order, on a high-priority NCCL stream."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tritoncp
from tests.cases import Answers, Case, agree, expected
from tests.multiprocess.case_on_ranks import on_rank
from tests.multiprocess.ranks import run
from tritoncp.distributed import collectives, failures, groups

pytestmark = pytest.mark.usefixtures("cpu_engine")
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


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_tensors_travel_on_one_communicator(schedule: str) -> None:
    """With and without a companion: forward, backward and unshard."""

    def work(group: Any) -> tuple[list[str], Answers]:
        with pytest.MonkeyPatch.context() as monkeypatch:
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


class StandIn:
    """A stand-in for torch's ProcessGroupNCCL: its options."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream


def pretend_nccl(monkeypatch: pytest.MonkeyPatch, high_priority: bool) -> list[dict[str, Any]]:
    """Pretend that NCCL carries the CUDA tensors of groups; new communicators use gloo. Returns a list of
    events: the arguments of new communicators, and collectives ("connected": group)."""
    torchs: Any = dist.distributed_c10d
    make, events = torchs._new_process_group_helper, []
    backend = SimpleNamespace(options=StandIn.Options(high_priority))

    def helper(size: int, rank: int, ranks: list[int], backend: str, store: Any, name: str,
               options: Any = None, *args: Any, **rest: Any) -> Any:  # fmt: skip
        events.append(
            {
                "backend": str(backend),
                "ranks": ranks,
                "options": options,
                "bound": dist.group.WORLD.bound_device_id,
            }
        )
        return make(size, rank, ranks, dist.Backend("gloo"), store, name, None, *args, **rest)

    def all_reduce(x: Tensor, group: Any) -> None:
        events.append({"connected": group})

    monkeypatch.setattr(torchs, "_new_process_group_helper", helper)
    monkeypatch.setattr(torchs, "ProcessGroupNCCL", StandIn, raising=False)
    monkeypatch.setattr(groups, "_nccl_of", lambda group: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, **rest: zeros(*shape, **{**rest, "device": None}))
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return events


def test_nccl_gets_a_companion_with_a_high_priority_stream() -> None:
    """Made and connected with the group's first plan, of the group's ranks alone, once."""

    def work(group: Any) -> None:
        pair = dist.new_group([0, 2])
        if group.rank() == 1:
            return
        with pytest.MonkeyPatch.context() as monkeypatch:
            events = pretend_nccl(monkeypatch, high_priority=False)
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
            group.bound_device_id = None

    run(3, work)


@pytest.mark.parametrize("way", ["options", "environment"])
def test_a_group_with_a_high_priority_stream_carries_its_tensors(way: str) -> None:
    """It is also connected with the first plan."""

    def work(group: Any) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            events = pretend_nccl(monkeypatch, high_priority=way == "options")
            if way == "environment":
                monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "1")
            for _ in range(2):
                tritoncp.make_plan(CASE.block_mask(), group, schedule="ring")
            assert events == [{"connected": group}]
            assert groups.data_communicator(group, CUDA) is group

    run(2, work)


@pytest.mark.parametrize("backend", ["undefined", "cpu:gloo,cuda:nccl"])
def test_a_group_for_both_devices_connects_nccl_for_tensors_on_gpus_alone(backend: str) -> None:
    """Ranks that share a GPU, or use none, send CPU tensors; NCCL would refuse to connect them."""

    def work(group: Any) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            events = pretend_nccl(monkeypatch, high_priority=True)
            monkeypatch.setattr(dist, "get_backend", lambda group=None: backend)
            monkeypatch.setattr(failures, "timeout", lambda group: timedelta(minutes=1))
            plan = tritoncp.make_plan(CASE.block_mask(), group, schedule="ring")
            x = torch.ones(1, 4, plan.s_local, 8, requires_grad=True)
            tritoncp.flex_attention(x, x, x, plan, group).sum().backward()
            assert not events
            groups.connect_data(group, CUDA)  # as a call with tensors there does
            assert events == [{"connected": group}]

    run(2, work)


def test_other_backends_and_single_ranks_need_no_companion() -> None:
    def work(group: Any) -> None:
        assert groups.data_communicator(group, CUDA) is group
        with pytest.MonkeyPatch.context() as monkeypatch:
            alone = [dist.new_group([rank]) for rank in range(2)][group.rank()]
            events = pretend_nccl(monkeypatch, high_priority=False)
            tritoncp.make_plan(CASE.block_mask(), alone)
            assert groups.data_communicator(alone, CUDA) is alone and not events

    run(2, work)
