"""Collectives: process groups and the simulated world give the same results."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.multiprocess.ranks import run as on_ranks
from tritoncp.distributed import collectives, groups
from tritoncp.distributed.collectives import AllGather, AllToAll, ReduceScatter, SendRecv, Wait, lockstep

Program = list[
    tuple[str, int, int]
]  # (collective, rows a rank gives or gets, how many waits later it is read)


def contribution(step: int, rank: int, rows: int) -> Tensor:
    """Whole numbers, so that sums are exact in any order."""
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-9, 10, (rows, 2), generator=g).double()


def rank_of(program: Program, rank: int, world_size: int) -> collectives.Schedule[list[Tensor]]:
    """A schedule that starts each collective in order and waits for some of them late."""
    flying, results = [], []
    for step, (kind, rows, late) in enumerate(program):
        given_rows = rows if kind == "gather" else rows * world_size
        x = contribution(step, rank, given_rows)
        ticket = yield AllGather(x) if kind == "gather" else ReduceScatter(x)
        flying.append((step, ticket))
        while len(flying) > late:
            step, ticket = flying.pop(0)
            results.append((step, (yield Wait(ticket)).clone()))
    while flying:
        step, ticket = flying.pop()
        results.append((step, (yield Wait(ticket)).clone()))
    return [result for _, result in sorted(results, key=lambda pair: pair[0])]


def expected(program: Program, rank: int, world_size: int) -> list[Tensor]:
    results = []
    for step, (kind, rows, _) in enumerate(program):
        if kind == "gather":
            results.append(torch.cat([contribution(step, r, rows) for r in range(world_size)]))
        else:
            total = sum(contribution(step, r, rows * world_size) for r in range(world_size))
            results.append(total[rank * rows : (rank + 1) * rows])
    return results


PROGRAM = [("gather", 2, 0), ("reduce", 3, 2), ("gather", 1, 2), ("gather", 4, 1), ("reduce", 1, 0)]
programs = st.lists(st.tuples(st.sampled_from(["gather", "reduce"]), st.integers(0, 3), st.integers(0, 3)))


@given(programs, st.integers(1, 4))
def test_lockstep_gathers_and_sums(program: Program, world_size: int) -> None:
    results_by_rank = lockstep([rank_of(program, rank, world_size) for rank in range(world_size)])
    for rank, results in enumerate(results_by_rank):
        want = expected(program, rank, world_size)
        assert len(results) == len(want)
        assert all(torch.equal(a, b) for a, b in zip(results, want))


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
        inner = groups.group_of(mesh["cp"])
        parts = [collectives.exchange_bytes(bytes([255 - rank] * 21), length, group) for length in (19, 24)]
        return results, collectives.exchange([rank, 10 * rank], group), parts, inner.size()

    answers = on_ranks(3, work)
    want = lockstep([rank_of(PROGRAM, rank, 3) for rank in range(3)])
    for (results, numbers, parts, size), expected in zip(answers, want):
        assert all(torch.equal(a, b) for a, b in zip(results, expected))
        assert numbers == [[0, 0], [1, 10], [2, 20]]
        whole = [bytes([255 - rank] * 21 + [0] * 3) for rank in range(3)]  # longer content is cut
        assert parts == [[content[:19] for content in whole], whole]
        assert size == 3


def test_the_only_rank_of_a_dry_run_gets_its_own_numbers_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "is_dry_run", lambda group: True)
    assert collectives.exchange([4, 2], SimpleNamespace(size=lambda: 3)) == [[4, 2]] * 3


def asks(*what: Any) -> Callable[[], collectives.Schedule[None]]:
    def schedule() -> collectives.Schedule[None]:
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
    r"rank 1's SendRecv receives a tensor \[2\] with strides \[2\]": (
        asks(SendRecv([(1, torch.zeros(2))], [])),
        asks(SendRecv([], [(0, EVERY_OTHER)])),
    ),
    "AllToAlls differ: float32, float64": (
        asks(AllToAll(ONE, [1, 1], [1, 1])),
        asks(AllToAll(ONE.double(), [1, 1], [1, 1])),
    ),
    "split_with_sizes": (asks(AllToAll(ONE, [1, 2], [1, 2])),) * 2,
    r"rank 1 sends torch.float32 \[2, 1\], and rank 0 has room for torch.float32 \[4, 1\]": (
        asks(SendRecv([(1, ONE)], [(1, TWO.clone())])),
        asks(SendRecv([(0, ONE)], [(0, ONE.clone())])),
    ),
    r"rank 1 sends torch.float32 \[4, 1\], and rank 0 has room for torch.float32 \[2, 1\]": (
        asks(SendRecv([], [(1, ONE.clone())])),
        asks(SendRecv([(0, TWO)], [])),
    ),
}


@pytest.mark.parametrize("message", DIFFERENT)
@pytest.mark.bar(19)
def test_ranks_that_ask_for_different_things_are_told(message: str) -> None:
    """Mismatched requests, which over a network hang or return garbage, raise an error."""
    with pytest.raises(RuntimeError, match=message):
        lockstep([schedule() for schedule in DIFFERENT[message]])


def test_an_error_of_one_rank_comes_out() -> None:
    def failing() -> collectives.Schedule[None]:
        yield AllGather(ONE)
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        lockstep([asks(AllGather(ONE), AllGather(ONE))(), failing()])


def test_an_error_names_a_request_with_its_peers() -> None:
    group: Any = SimpleNamespace(size=lambda: 3, rank=lambda: 1)
    x = torch.zeros(3)
    for request, peers in (
        (AllGather(x), "AllGather with ranks [0, 2]"),
        (SendRecv([(2, x)], [(0, x)]), "SendRecv to ranks [2] and from ranks [0]"),
        (AllToAll(x, [1, 0, 2], [0, 0, 3]), "AllToAll to ranks [0, 2] and from ranks [2]"),
    ):
        assert collectives._describe(request, group, 4) == f"turn 4 of a layer's schedule, {peers}"
