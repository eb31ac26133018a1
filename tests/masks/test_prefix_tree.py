"""Prefix trees: segments in any order are refused with the permutation that mends them, and sizes stay small.

That the mask, its intervals and its blocks agree is tested for all closed forms in test_closed_forms.py;
attention with it for the masks of tests/zoo.py.
"""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritoncp import make_plan, tree
from tritoncp.masks import create_block_mask

segments = st.integers(1, 9).flatmap(
    lambda n: st.tuples(
        st.tuples(*(st.integers(-1, i - 1) for i in range(n))),
        st.lists(st.integers(0, 4), min_size=n, max_size=n),
        st.permutations(range(n)),
    )
)


@given(segments)
def test_the_permutation_of_the_error_brings_segments_into_order(case) -> None:
    parent, lengths, shuffle = case
    places = {segment: place for place, segment in enumerate(shuffle)}
    shuffled = [parent[segment] for segment in shuffle]
    parent = [places[above] if above >= 0 else -1 for above in shuffled]
    try:
        tree(parent, lengths)
        order = list(range(len(parent)))
    except ValueError as error:
        order = [int(i) for i in re.search(r"permutation \[([\d, ]+)\]", str(error))[1].split(",")]
        assert order != sorted(order)
    assert sorted(order) == list(range(len(parent)))
    place = {segment: i for i, segment in enumerate(order)}
    ordered = [place[parent[i]] if parent[i] >= 0 else -1 for i in order]
    mask_mod = tree(ordered, [lengths[i] for i in order])
    assert all(above < i for i, above in enumerate(ordered))
    if sum(lengths):
        index = torch.arange(sum(lengths))
        seen = mask_mod(None, None, index[:, None], index).sum(1)
        assert torch.equal(seen, mask_mod.depth + 1)  # a token sees its whole path
        assert mask_mod.query_intervals(len(index), len(index)) is not None


def test_a_tree_may_have_no_tokens() -> None:
    assert create_block_mask(tree([-1, 0], [0, 0]), 1, 1, 0, 0).runs.shape == (1, 1, 0, 0)
    assert create_block_mask(tree([[-1]] * 2, [[0]] * 2), 2, 1, 0, 0).runs.shape == (2, 1, 0, 0)


def test_a_window_may_exceed_every_length() -> None:
    index = torch.arange(7)
    near, whole = (tree([-1, 0, 0], [3, 2, 2], window=(left, -1)) for left in (2**70, -1))
    assert torch.equal(*(mod(None, None, index[:, None], index) for mod in (near, whole)))
    assert repr(whole) == "tree(tokens=[7])"
    assert repr(tree([-1], [7], window=(3, -1))) == "tree(tokens=[7], left=3)"


def forest(n: int) -> list[int]:
    """Return the parents of prompts with 9 answers each."""
    return [-1 if i % 10 == 0 else i // 10 * 10 for i in range(n)]


def comb(n: int) -> list[int]:
    """Return the parents of one long path with a leaf at each segment."""
    return [i - 1 if i % 2 else i - 2 if i else -1 for i in range(n)]


def walk(n: int) -> list[int]:
    """Return the parents of a random tree whose paths alternately grow and go back: rows of blocks see
    thousands of ranges."""
    back, path, parent = (
        torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(0)).tolist(),
        [],
        [],
    )
    for i in range(n):
        if back[i] and len(path) > 1:
            path.pop()
        parent.append(path[-1] if path else -1)
        path.append(i)
    return parent


@pytest.mark.parametrize("parents", [forest, comb, walk])
def test_a_plan_of_a_million_tokens_is_small(parents) -> None:
    """10,000 segments: mask, tensors and slots of a plan take less than 16 MiB, and the ranges that rows see
    are not listed."""
    lengths = torch.arange(10_000) % 97 + 56
    lengths[-1] += 2**20 - lengths.sum()
    mask_mod = tree(parents(10_000), lengths)
    mask = create_block_mask(mask_mod, 1, 1, 2**20, 2**20)
    plan = make_plan(mask, world_size=8)
    runs = plan.mask.runs
    assert "by_rows" not in vars(runs) and len(runs.stored[1]) < 40_000
    captured = mask_mod.leave.nbytes + mask_mod.depth.nbytes
    assert mask.nbytes + captured + sum(slots.nbytes for slots in plan.q.slots) < 16 << 20
