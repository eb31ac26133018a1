"""Tests of shifts: what each position gets, against a search of every document and path."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tritoncp
from tests.planning.test_packer import forests
from tests.planning.test_placement import placements
from tritoncp import Plan
from tritoncp.planning.shifts import Shift, shifted_documents, shifted_tree


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(-8, 8))
def test_each_document_shifts_like_a_separate_list(lengths: list[int], shift: int) -> None:
    within = torch.cat([torch.arange(n) for n in lengths])[None]
    expected, start = [], 0
    for n in lengths:
        expected += [start + i - shift if 0 <= i - shift < n else -1 for i in range(n)]
        start += n
    assert shifted_documents(within, shift).tolist() == [expected]


@given(forests(), st.integers(-6, 6))
def test_a_tree_shifts_along_every_path(forest, shift: int) -> None:
    parents, lengths = forest
    if not sum(lengths):
        return
    depth = tritoncp.tree(parents, lengths).depth.long()
    parent: list[int] = []  # of each token
    last: dict[int, int] = {-1: -1}  # last token of each segment, or of the segments above it
    for segment, (above, length) in enumerate(zip(parents, lengths)):
        last[segment] = last[above]
        for _ in range(length):
            parent.append(last[segment])
            last[segment] = len(parent) - 1

    def walk(token: int, steps: int) -> int:
        while steps and token >= 0:
            token, steps = parent[token], steps - 1
        return token

    earlier = [walk(token, abs(shift)) for token in range(len(parent))]
    if shift >= 0:
        assert shifted_tree(depth[None], shift).tolist() == [earlier]
        return
    later = [[t for t, ancestor in enumerate(earlier) if ancestor == token] for token in range(len(parent))]
    if all(len(tokens) <= 1 for tokens in later):
        assert shifted_tree(depth[None], shift).tolist() == [
            [tokens[0] if tokens else -1 for tokens in later]
        ]
        return
    with pytest.raises(
        ValueError, match=f"shift={shift}: token .* after it, one on each branch: shift the rows"
    ):
        shifted_tree(depth[None], shift)


@st.composite
def shifts(draw: Callable) -> tuple[Plan, Shift]:
    """Draw a plan and sources of its positions: any rows, some of them of several positions."""
    world, length = draw(st.integers(1, 5)), draw(st.integers(1, 24))
    plan = draw(placements(world, length))
    rows = draw(st.sampled_from([1, plan.q.batch]))
    numbers = st.lists(st.integers(-1, length - 1), min_size=length, max_size=length)
    return plan, Shift(plan.q, torch.tensor([draw(numbers) for _ in range(rows)]))


@given(shifts())
def test_moves_bring_each_source_once_to_each_rank_that_needs_it(case) -> None:
    plan, shift = case
    world, batch = range(plan.world_size), shift.batch
    owner: dict[tuple[int, int], tuple[int, int]] = {}  # (batch row, position) -> (rank, row)
    for rank in world:
        for b, row in enumerate(plan.q.positions(rank).expand(batch, -1).tolist()):
            owner |= {(b, position): (rank, i) for i, position in enumerate(row) if position >= 0}
    needs: dict[tuple[int, int], set[tuple[int, int]]] = {}  # (from, to) -> (batch row, position)
    for b, row in enumerate(shift.source.expand(batch, -1).tolist()):
        for position, source in enumerate(row):
            if source >= 0:
                pair = owner[b, source][0], owner[b, position][0]
                needs.setdefault(pair, set()).add((b, source))
    moves = [shift.moves(rank) for rank in world]
    for rank in world:
        remote = {pair: places for pair, places in needs.items() if pair[0] != pair[1]}
        assert moves[rank].counts == [len(remote.get((rank, other), ())) for other in world]
        assert moves[rank].sources == [len(remote.get((other, rank), ())) for other in world]
        sent = [place for other in world for place in sorted(remote.get((rank, other), ()))]
        rows = [(b, owner[b, position][1]) for b, position in sent]
        assert moves[rank].sent.T.tolist() == [list(row) if batch > 1 else [row[1]] for row in rows]
    assert shift.is_local == (not any(a != b for a, b in needs))
    sources = [[s for s in row if s >= 0] for row in shift.source.tolist()]
    assert shift.is_injective == all(len(set(row)) == len(row) for row in sources)
