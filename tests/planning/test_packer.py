"""Tests of the packer: micro-batches hold each sequence once, fit their ranks, and have even work."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tritoncp
from tritoncp import Mask, pack_batches, pack_stream
from tritoncp.planning import packer
from tritoncp.planning.packer import MicroBatch

BLOCK = 4


@st.composite
def problems(draw: Callable) -> tuple[list[int], int, dict[str, Any]]:
    """Draw lengths, tokens of a rank, and the numbers of ranks and replicas; every length fits."""
    ranks, tokens = draw(st.integers(1, 4)), draw(st.integers(BLOCK, 30))
    room = ranks * (tokens // BLOCK * BLOCK)
    lengths = draw(
        st.lists(st.integers(1, room) | st.integers(1, 9).map(lambda n: min(n, room)), max_size=20)
    )
    shape = {"ranks": ranks, "data_parallel": draw(st.integers(1, 3)), "BLOCK_SIZE": BLOCK}
    return lengths, tokens, shape


WINDOWS = st.none() | st.tuples(st.integers(-1, 12), st.integers(-1, 3))
COSTS = st.sampled_from([0, 3, 2.5])


def mask_of(lengths: list[int], window: tuple[int, int] | None) -> Mask:
    """Make the mask of documents in a row."""
    mod = tritoncp.causal() & tritoncp.document(lengths=lengths)
    if window is not None:
        mod = mod & tritoncp.sliding_window(window[0], -1)
    return tritoncp.create_block_mask(mod, 1, 1, sum(lengths), sum(lengths), BLOCK_SIZE=BLOCK)


def works(batches: list[MicroBatch], cost: float = 0) -> list[float]:
    return [batch.pairs + cost * batch.tokens for batch in batches]


@given(problems(), WINDOWS, COSTS)
def test_each_sequence_is_in_one_micro_batch_whose_pairs_its_mask_shows(problem, window, cost) -> None:
    lengths, tokens, shape = problem
    batches = pack_batches(lengths, tokens, **shape, window=window, token_cost=cost)
    assert sorted(i for batch in batches for i in batch.sequences) == list(range(len(lengths)))
    steps, replicas = len(batches) // shape["data_parallel"], range(shape["data_parallel"])
    assert [batch[:2] for batch in batches] == list(itertools.product(range(steps), replicas))
    firsts = [
        min(i for batch in step for i in batch.sequences)
        for _, step in itertools.groupby(batches, lambda x: x.step)
    ]
    assert firsts == sorted(firsts)
    for batch in batches:
        inside = [lengths[i] for i in batch.sequences]
        assert batch.sequences == sorted(batch.sequences) and batch.tokens == sum(inside)
        assert batch.pairs == (int(mask_of(inside, window).to_dense().sum()) if inside else 0)


@given(problems(), st.sampled_from([*tritoncp.balancers]))
def test_no_rank_holds_more_than_its_tokens(problem, balancer: str) -> None:
    lengths, tokens, shape = problem
    for batch in pack_batches(lengths, tokens, **shape):
        if batch.sequences:
            mask = mask_of([lengths[i] for i in batch.sequences], None)
            plan = tritoncp.make_plan(mask, world_size=shape["ranks"], balancer=balancer)
            assert plan.s_local <= tokens


@st.composite
def forests(draw: Callable) -> tuple[list[int], list[int]]:
    """Draw segments in depth-first order: parents and lengths."""
    parents: list[int] = []
    path: list[int] = []
    for i in range(draw(st.integers(1, 12))):
        depth = draw(st.integers(0, len(path)))
        parents.append(path[depth - 1] if depth else -1)
        path = [*path[:depth], i]
    return parents, draw(st.lists(st.integers(0, 5), min_size=len(parents), max_size=len(parents)))


@given(forests(), WINDOWS)
def test_a_tree_stays_whole_and_has_the_pairs_of_its_mask(forest, window) -> None:
    parents, lengths = forest
    batches = pack_batches(
        lengths, 60, ranks=1, data_parallel=2, window=window, tree=parents, BLOCK_SIZE=BLOCK
    )
    assert sorted(i for batch in batches for i in batch.sequences) == list(range(len(lengths)))
    for batch in batches:
        place = {segment: at for at, segment in enumerate(batch.sequences)}
        inside = [place[parents[i]] if parents[i] >= 0 else -1 for i in batch.sequences]  # KeyError: cut
        sizes = [lengths[i] for i in batch.sequences]
        pairs = 0
        if sum(sizes):
            mod = tritoncp.tree(inside, sizes, window=window or (-1, -1))
            pairs = int(tritoncp.create_block_mask(mod, 1, 1, sum(sizes), sum(sizes)).to_dense().sum())
        assert (batch.tokens, batch.pairs) == (sum(sizes), pairs)


def least_of_largest(works: list[int], count: int) -> int:
    """Return the min over all assignments of the max work of a micro-batch."""
    loads = {(0,) * count}
    for work in works:
        loads = {
            tuple(sorted((*load[:i], load[i] + work, *load[i + 1 :]))) for load in loads for i in range(count)
        }
    return min(max(load) for load in loads)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 3))
def test_one_step_without_a_limit_has_at_most_four_thirds_of_the_best_work(lengths, replicas: int) -> None:
    """The bound of Graham (1969) for longest processing time first."""
    batches = pack_batches(lengths, 4096, ranks=1, data_parallel=replicas)
    best = least_of_largest([n * (n + 1) // 2 for n in lengths], replicas)
    assert 3 * replicas * max(works(batches)) <= (4 * replicas - 1) * best


@given(problems(), COSTS)
def test_a_replica_waits_for_no_sequence_that_it_has_room_for(problem, cost) -> None:
    """Within a step, a micro-batch without its shortest sequence has at most the work of a micro-batch with
    room for it."""
    lengths, tokens, shape = problem
    batches = pack_batches(lengths, tokens, **shape, token_cost=cost)
    room = shape["ranks"] * (tokens // BLOCK * BLOCK)
    for batch in batches if len(batches) == shape["data_parallel"] else ():
        last = min((lengths[i] for i in batch.sequences), default=0)
        before = batch.pairs + cost * batch.tokens - last * (last + 1) / 2 - cost * last
        roomy = [other for other in batches if other.tokens + last <= room]
        assert all(before <= work for work in works(roomy, cost))


@given(problems(), COSTS, st.randoms())
def test_the_result_depends_on_numbers_alone(problem, cost, random) -> None:
    lengths, tokens, shape = problem
    batches = pack_batches(lengths, tokens, **shape, token_cost=cost)
    for same in (tuple(lengths), torch.tensor(lengths, dtype=torch.int32)):
        if lengths:
            assert pack_batches(same, tokens, **shape, token_cost=cost) == batches
    shuffled = random.sample(lengths, len(lengths))
    again = pack_batches(shuffled, tokens, **shape, token_cost=cost)
    rows, rows_again = (
        Counter(tuple(sorted(x[i] for i in batch.sequences)) for batch in result)
        for x, result in ((lengths, batches), (shuffled, again))
    )
    assert rows == rows_again


@given(problems())
def test_micro_batches_are_at_most_twice_what_the_tokens_need(problem) -> None:
    lengths, tokens, shape = problem
    batches, replicas = pack_batches(lengths, tokens, **shape), shape["data_parallel"]
    room = shape["ranks"] * (tokens // BLOCK * BLOCK)
    most = -(-2 * sum(lengths) // room)
    assert len(batches) <= replicas * (-(-most // replicas) + 1)
    assert bool(batches) == bool(lengths)


class CountedHeaps:
    """The functions of heapq, which count their calls."""

    def __init__(self) -> None:
        self.count = 0

    def __getattr__(self, name: str) -> Callable:
        function = getattr(heapq, name)

        def counted(*arguments: Any) -> Any:
            self.count += 1
            return function(*arguments)

        return counted


def count_heap_operations(lengths: list[int], tokens: int, shape: dict[str, Any]) -> tuple[int, int]:
    """Return the operations on heaps of a call, and the micro-batches that it returns."""
    with mock.patch.object(packer, "heapq", CountedHeaps()) as heaps:
        batches = pack_batches(lengths, tokens, **shape)
    return heaps.count, len(batches)


LONG_THIRDS = [100 + i % 30 for i in range(600)]  # two fit, although the sum allows more


@given(problems())
@example((LONG_THIRDS, 256, {"ranks": 1, "data_parallel": 2, "BLOCK_SIZE": BLOCK}))
@example((LONG_THIRDS, 150, {"ranks": 2, "data_parallel": 3, "BLOCK_SIZE": BLOCK}))
@settings(max_examples=200)
def test_operations_grow_with_the_number_of_sequences(problem) -> None:
    """A round places each sequence by one operation, and moves a micro-batch to wait and back by four; there
    are few rounds."""
    lengths, tokens, shape = problem
    operations, batches = count_heap_operations(lengths, tokens, shape)
    assert operations <= 4 * (5 * len(lengths) + batches)


@pytest.mark.long
def test_a_hundred_thousand_sequences_take_two_rounds() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (6000 * torch.randn(100_000, generator=generator).mul(0.9).exp()).long().clamp(64, 1 << 17)
    shape = {"ranks": 16, "data_parallel": 4}
    operations, _ = count_heap_operations(lengths.tolist(), 8192, shape)
    assert operations <= 2 * 2 * len(lengths)
    batches = pack_batches(lengths, 8192, **shape)
    steps = [max(works(batches[at : at + 4])) for at in range(0, len(batches), 4)]
    assert 4 * sum(steps) <= 1.002 * sum(works(batches))
    assert len(batches) * 16 * 8192 <= 1.005 * int(lengths.sum())
    totals = Counter[int]()
    for batch in batches:
        totals[batch.replica] += batch.pairs
    assert 4 * max(totals.values()) <= 1.001 * sum(totals.values())


# -- streams --------------------------------------------------------------------------------------------


class CountedStream(Iterator[int]):
    """An iterator that counts the tokens and the sequences that were read."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.read = lengths, 0

    def __next__(self) -> int:
        if self.read == len(self.lengths):
            raise StopIteration
        self.read += 1
        return self.lengths[self.read - 1]


@given(problems(), st.integers(1, 4), COSTS)
def test_a_stream_is_packed_a_few_steps_at_a_time(problem, look_ahead: int, cost) -> None:
    lengths, tokens, shape = problem
    stream, room = CountedStream(lengths), shape["ranks"] * (tokens // BLOCK * BLOCK)
    done, steps = 0, []  # done: sequences of earlier groups of steps
    packed = pack_stream(stream, tokens, **shape, look_ahead=look_ahead, token_cost=cost)
    for step in packed:
        steps.append(step)
        held = lengths[done : stream.read]
        assert sum(held[:-1]) <= look_ahead * shape["data_parallel"] * room
        group = sorted(
            i
            for step in steps[-((len(steps) - 1) % look_ahead + 1) :]
            for batch in step
            for i in batch.sequences
        )
        if len(steps) % look_ahead == 0:
            assert group == list(range(done, done + len(group)))
            done += len(group)
    batches = [batch for step in steps for batch in step]
    assert [batch[:2] for batch in batches] == list(
        itertools.product(range(len(steps)), range(shape["data_parallel"]))
    )
    assert sorted(i for batch in batches for i in batch.sequences) == list(range(len(lengths)))
    for batch in batches:
        inside = [lengths[i] for i in batch.sequences]
        assert batch.tokens == sum(inside) <= room
        assert batch.pairs == sum(n * (n + 1) // 2 for n in inside)


def test_a_stream_without_an_end_is_read_as_far_as_it_is_used() -> None:
    steps = pack_stream(itertools.cycle([300, 100, 200]), 256, ranks=2, data_parallel=2, look_ahead=3)
    first = list(itertools.islice(steps, 20))
    assert [step[0].step for step in first] == list(range(20))
    again = pack_stream(itertools.cycle([300, 100, 200]), 256, ranks=2, data_parallel=2, look_ahead=3)
    assert list(itertools.islice(again, 5, 20)) == first[5:]


# -- errors ---------------------------------------------------------------------------------------------

ERRORS = [
    ({"lengths": [5, 2000]}, ValueError, "sequence 1 has 2000 tokens, and a micro-batch up to 1024"),
    ({"lengths": [5, -1]}, ValueError, r"lengths\[1\] is -1; 0 to"),
    ({"lengths": [5.5]}, ValueError, r"lengths must be integers \[n\], got torch.float32 \[1\]"),
    ({"lengths": [[1, 2]]}, ValueError, r"lengths must be integers \[n\], got torch.int64 \[1, 2\]"),
    ({"lengths": "text"}, TypeError, "lengths is the str 'text'; a list or tensor"),
    ({"tokens_per_rank": 100}, ValueError, "tokens_per_rank=100 is less than a block of 128 tokens"),
    ({"tokens_per_rank": 0}, ValueError, "tokens_per_rank=0: pass at least 1"),
    ({"ranks": 0}, ValueError, "ranks=0: pass at least 1"),
    ({"ranks": 1.5}, TypeError, "ranks=1.5; an int is needed"),
    ({"data_parallel": 0}, ValueError, "data_parallel=0: pass at least 1"),
    ({"BLOCK_SIZE": 0}, ValueError, "BLOCK_SIZE=0: pass at least 1"),
    ({"window": 4}, ValueError, "window=4; pass"),
    ({"token_cost": -1}, ValueError, "token_cost=-1: pass a number of pairs"),
    ({"token_cost": "6h"}, ValueError, "token_cost='6h': pass a number of pairs"),
    ({"tree": [-1]}, ValueError, r"tree must be integers \[2\], the parent of each entry of lengths, got"),
    ({"tree": [0, -1]}, ValueError, r"segments are on no path from a root"),
    ({"tree": [-1, 0], "lengths": [1000, 30]}, ValueError, "the tree of segment 0 has 1030 tokens"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), ERRORS, ids=lambda x: str(x)[:40])
def test_wrong_arguments_raise_with_the_remedy(wrong: dict, error: type[Exception], message: str) -> None:
    arguments = {"lengths": [5, 20], "tokens_per_rank": 512, "ranks": 2} | wrong
    with pytest.raises(error, match=message):
        pack_batches(**arguments)


def test_wrong_arguments_of_a_stream_raise_at_once_and_wrong_lengths_when_they_are_read() -> None:
    with pytest.raises(ValueError, match="look_ahead=0: pass at least 1"):
        pack_stream([1], 128, ranks=1, look_ahead=0)
    with pytest.raises(ValueError, match="pack_stream: a length=0: pass at least 1"):
        list(pack_stream([1, 0], 128, ranks=1))
    steps = pack_stream([100] * 9 + [300], 128, ranks=1, look_ahead=1)
    with pytest.raises(ValueError, match="sequence 9 has 300 tokens, and a micro-batch up to 128"):
        list(steps)
