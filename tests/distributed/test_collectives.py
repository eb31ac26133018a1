"""Collectives: process groups and the simulated world give the same results."""

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.multiprocess.ranks import run as on_ranks
from tritoncp.distributed import collectives, groups
from tritoncp.distributed.collectives import AllGather, AllToAll, ReduceScatter, Ticket, lockstep

KINDS = ("gather", "reduce", "place", "exchange")
Program = list[tuple[str, int, int]]  # (kind, rows a rank gives or gets, how many waits later it is read)


def contribution(step: int, rank: int, rows: int) -> Tensor:
    """Whole numbers, so that sums are exact in any order."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(-9, 10, (rows, 2), generator=g).double()


def message(step: int, source: int, target: int) -> Tensor:
    """Rows from one rank to another, none for a third of the pairs."""
    return contribution(step, 10 + 10 * source + target, (source + target + step) % 3)


def request_of(step: int, kind: str, rows: int, rank: int, world_size: int) -> collectives.Collective:
    if kind == "gather":
        return AllGather(contribution(step, rank, rows))
    if kind == "reduce":
        return ReduceScatter(contribution(step, rank, rows * world_size))
    everyone = range(world_size)
    sends, recvs = ([message(step, *pair) for pair in pairs] for pairs in (
        [(rank, peer) for peer in everyone], [(peer, rank) for peer in everyone]
    ))  # fmt: skip
    counts = [list(map(len, part)) for part in (sends, recvs)]
    place = torch.full((sum(counts[1]), 2), torch.nan).double() if kind == "place" else None
    return AllToAll(torch.cat(sends), *counts, place)


def rank_of(program: Program, rank: int, world_size: int) -> collectives.Requests[list[Tensor]]:
    """A schedule that starts each collective in order and waits for some of them late."""
    flying, results = [], []

    def land(at: int) -> collectives.Requests[None]:
        step, ticket = flying.pop(at)
        place = getattr(ticket.source, "target", None)
        result = yield ticket
        assert place is None or result is place
        assert ticket.result is ticket.source is ticket.work is None  # a ticket that is kept keeps no buffer
        results.append((step, result))

    for step, (kind, rows, late) in enumerate(program):
        ticket = yield request_of(step, kind, rows, rank, world_size)
        flying.append((step, ticket))
        while len(flying) > late:
            yield from land(0)
    while flying:
        yield from land(-1)
    return [result for _, result in sorted(results, key=lambda pair: pair[0])]


def expected(program: Program, rank: int, world_size: int) -> list[Tensor]:
    results = []
    for step, (kind, rows, _) in enumerate(program):
        if kind == "gather":
            results.append(torch.cat([contribution(step, r, rows) for r in range(world_size)]))
        elif kind == "reduce":
            total = sum(contribution(step, r, rows * world_size) for r in range(world_size))
            results.append(total[rank * rows : (rank + 1) * rows])
        else:
            results.append(torch.cat([message(step, r, rank) for r in range(world_size)]))
    return results


PROGRAM = [("gather", 2, 0), ("reduce", 3, 2), ("place", 0, 1), ("gather", 1, 2), ("exchange", 0, 2)]
PROGRAM += [("place", 0, 0), ("gather", 4, 1), ("place", 0, 1), ("exchange", 0, 1), ("reduce", 1, 0)]
programs = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.integers(0, 3)))


@given(programs, st.integers(1, 4))
def test_lockstep_gathers_and_sums(program: Program, world_size: int) -> None:
    results_by_rank = lockstep([rank_of(program, rank, world_size) for rank in range(world_size)])
    for rank, results in enumerate(results_by_rank):
        want = expected(program, rank, world_size)
        assert len(results) == len(want)
        assert all(torch.equal(a, b) for a, b in zip(results, want))


@given(programs, st.integers(1, 4))
def test_without_messages_a_rank_receives_tensors_of_the_same_forms(
    program: Program, world_size: int
) -> None:
    for rank in range(world_size):
        results = collectives.run_dry(rank_of(program, rank, world_size), world_size)
        want = expected(program, rank, world_size)
        assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in want]


def test_a_process_group_answers_as_lockstep_does() -> None:
    def work(group) -> Any:
        rank, world_size = group.rank(), group.size()
        results = collectives.run(rank_of(PROGRAM, rank, world_size), group)
        mesh = torch.distributed.device_mesh.init_device_mesh(
            "cpu", (1, 1, world_size), mesh_dim_names=("dp", "tp", "cp")
        )
        with pytest.raises(ValueError, match=r"3 dimensions \('dp', 'tp', 'cp'\).*mesh\['cp'\]"):
            groups.group_of(mesh)
        nameless = torch.distributed.device_mesh.init_device_mesh("cpu", (1, world_size))
        with pytest.raises(ValueError, match=r"two dimensions without names.*mesh_dim_names="):
            groups.group_of(nameless)
        assert groups.group_of(mesh["tp", "cp"]).size() == world_size
        assert (groups.degree_of(mesh["tp", "cp"]), groups.degree_of(mesh["cp"])) == (world_size, 0)
        assert groups.group_of(group) is group
        assert groups.group_by_name(group.group_name) is group
        with pytest.raises(ValueError, match="'none' was destroyed, or never made in this process"):
            groups.group_by_name("none")
        inner = groups.group_of(mesh["cp"])
        content = bytes([255 - rank] * (21 - 7 * rank))
        parts = [collectives.exchange_bytes(content, length, group) for length in (17, 24)]
        return results, collectives.exchange([rank, 10 * rank], group), parts, inner.size()

    answers = on_ranks(3, work)
    want = lockstep([rank_of(PROGRAM, rank, 3) for rank in range(3)])
    for (results, numbers, parts, size), expected in zip(answers, want):
        assert all(torch.equal(a, b) for a, b in zip(results, expected))
        assert numbers == [[0, 0], [1, 10], [2, 20]]
        whole = [bytes([255 - rank] * (21 - 7 * rank)).ljust(24, b"\0") for rank in range(3)]
        assert parts == [[content[:17] for content in whole], whole]
        assert size == 3


def test_a_sent_tensor_is_freed_by_the_wait_for_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group: ...

    work = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(collectives, "_start", lambda request, group: Ticket(request.x + 1, work, request))

    def schedule() -> collectives.Requests[Any]:
        ticket = yield AllGather(torch.zeros(1))
        sent = weakref.ref(ticket.source.x)
        result = yield ticket
        return sent(), result.tolist()

    assert collectives.run(schedule(), Group()) == (None, [1])


def test_the_only_rank_of_a_dry_run_gets_its_numbers_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "is_dry_run", lambda group: True)
    assert collectives.exchange([4, 2], SimpleNamespace(size=lambda: 3)) == [[4, 2]] * 3


def asks(*what: Any) -> Callable[[], collectives.Requests[None]]:
    def schedule() -> collectives.Requests[None]:
        for i in range(len(what)):  # `yield from what` would send the answers to the tuple
            yield what[i]

    return schedule


ONE, TWO = torch.zeros(2, 1), torch.zeros(4, 1)
SQUARE, EVERY_OTHER = torch.zeros(2, 2), torch.zeros(4)[::2]
DIFFERENT = {
    "AllGather, ReduceScatter": (asks(AllGather(TWO)), asks(ReduceScatter(TWO))),
    "AllGather, end": (asks(AllGather(ONE)), asks()),
    r"float32 \[2, 1\], float32 \[4, 1\]": (asks(AllGather(ONE)), asks(AllGather(TWO))),
    r"float32 \[2, 1\], float64 \[2, 1\]": (asks(AllGather(ONE)), asks(AllGather(ONE.double()))),
    "2 rows does not divide by 3 ranks": (asks(ReduceScatter(ONE)),) * 3,
    r"rank 1's AllGather sends a tensor \[2, 2\] with strides \[1, 2\].*contiguous": (
        asks(AllGather(SQUARE)),
        asks(AllGather(SQUARE.T)),
    ),
    r"rank 1's AllToAll receives a tensor \[2\] with strides \[2\]": (
        asks(AllToAll(torch.zeros(2), [0, 2], [0, 0])),
        asks(AllToAll(torch.zeros(0), [0, 0], [2, 0], EVERY_OTHER)),
    ),
    "AllToAlls differ: float32, float64": (
        asks(AllToAll(ONE, [1, 1], [1, 1])),
        asks(AllToAll(ONE.double(), [1, 1], [1, 1])),
    ),
    "split_with_sizes": (asks(AllToAll(ONE, [1, 2], [1, 2])),) * 2,
    r"\[0, 2\] rows were sent to rank 0, which receives \[0, 4\]": (
        asks(AllToAll(ONE, [0, 2], [0, 4], TWO.clone())),
        asks(AllToAll(ONE, [2, 0], [2, 0], ONE.clone())),
    ),
    r"\[2, 0\] rows were sent to rank 0, which receives \[0, 0\]": (
        asks(AllToAll(ONE, [2, 0], [0, 0])),
        asks(AllToAll(ONE, [0, 2], [0, 2])),
    ),
}


@pytest.mark.parametrize("message", DIFFERENT)
@pytest.mark.bar(19)
def test_ranks_with_different_requests_raise(message: str) -> None:
    """Mismatched requests, which over a network hang or return garbage, raise an error."""
    with pytest.raises(RuntimeError, match=message):
        lockstep([schedule() for schedule in DIFFERENT[message]])


def test_an_error_of_one_rank_is_raised() -> None:
    def failing() -> collectives.Requests[None]:
        yield AllGather(ONE)
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        lockstep([asks(AllGather(ONE), AllGather(ONE))(), failing()])


def test_an_error_names_a_request_with_its_peers() -> None:
    group: Any = SimpleNamespace(size=lambda: 3, rank=lambda: 1)
    x = torch.zeros(3)
    for request, peers in (
        (AllGather(x), "AllGather with ranks [0, 2]"),
        (AllToAll(x, [1, 0, 2], [0, 0, 3]), "AllToAll to ranks [0, 2] and from ranks [2]"),
    ):
        assert collectives._describe(request, group, 4) == f"turn 4 of a layer's schedule, {peers}"


def test_collectives_of_a_gpu_start_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each starts asynchronously, on the communicator for data, with the tensors of the request: here named
    by their rows."""
    started: list[tuple[Any, ...]] = []

    def start(name: str) -> Callable[..., str]:
        def call(*args: Any, **options: Any) -> str:
            args = tree_map(lambda x: len(x) if isinstance(x, Tensor) else x, args)
            started.append((name, *args, *options.values()))
            return name

        return call

    monkeypatch.setattr(groups, "data_communicator", lambda group, device: f"for {device}")
    for name in ("_all_gather", "_reduce_scatter"):
        monkeypatch.setattr(collectives, name, start(name))
    monkeypatch.setattr(torch.distributed, "all_to_all_single", start("all_to_all_single"))
    group: Any = SimpleNamespace(size=lambda: 3, rank=lambda: 1)
    x, y = torch.empty(6, 2, device="meta"), torch.empty(4, 2, device="meta")
    to_next = AllToAll(x, (0, 0, 6), (4, 0, 0), y)
    for request, expected in (
        (AllGather(x), ("_all_gather", 18, 6, "for meta", True)),
        (ReduceScatter(x), ("_reduce_scatter", 2, 6, "for meta", True)),
        (
            AllToAll(x, (1, 2, 3), (4, 0, 1)),
            ("all_to_all_single", 5, 6, [4, 0, 1], [1, 2, 3], "for meta", True),
        ),
        (to_next, ("all_to_all_single", 4, 6, [4, 0, 0], [0, 0, 6], "for meta", True)),
    ):
        ticket = collectives._start(request, group)
        assert started.pop() == expected
        assert ticket.source is request and ticket.work and not ticket.on_host
    assert collectives._start(to_next, group).result is y
