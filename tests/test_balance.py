"""Balancers deal every block once, evenly; PTRR is torch's."""

from itertools import chain

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor.experimental._context_parallel import _load_balancer as theirs

from tritoncp.balance import balancers, contiguous, head_tail, ptrr
from tritoncp.masks import and_masks, causal, create_block_mask, document

costs_lists = st.lists(st.integers(0, 20), max_size=60)


@given(costs_lists, st.integers(1, 9), st.sampled_from(sorted(balancers)))
def test_every_block_once_in_order_and_evenly(costs: list[int], world_size: int, name: str) -> None:
    ranks = balancers[name](torch.tensor(costs, dtype=torch.int64), world_size)
    assert len(ranks) == world_size
    assert sorted(chain(*ranks)) == list(range(len(costs)))
    assert all(rank == sorted(rank) for rank in ranks)
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.integers(1, 9))
def test_ptrr_is_torchs(costs: list[int], world_size: int) -> None:
    costs = costs[: len(costs) // world_size * world_size]
    assume(costs)
    work = torch.tensor(costs)
    assert ptrr(work, world_size) == theirs._PTRRLoadBalancer.ptrr_scheduling(work, world_size).tolist()


@given(st.integers(1, 6), st.integers(1, 6))
def test_head_tail_is_torchs(piece: int, world_size: int) -> None:
    n = 2 * world_size * piece
    want = theirs._HeadTailLoadBalancer(n, world_size, "cpu")._generate_indices()
    assert list(chain(*head_tail(torch.ones(n), world_size))) == want[0].tolist()


def test_ptrr_of_torchs_first_example() -> None:
    costs = torch.tensor([9, 14, 2, 20, 10, 15, 8, 14, 16, 19, 15, 3, 12, 1, 12, 10])
    assert ptrr(costs, 4) == [[3, 12, 13, 14], [2, 4, 7, 9], [1, 8, 11, 15], [0, 5, 6, 10]]


def test_ptrr_of_torchs_document_example() -> None:
    mod = and_masks(causal(), document(lengths=[4 * 8, 8 * 8, 4 * 8]))
    costs = create_block_mask(mod, None, None, 128, 128, BLOCK_SIZE=8).costs()[0]
    assert costs.tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]
    assert ptrr(costs, 2) == [[2, 3, 5, 6, 8, 11, 12, 13], [0, 1, 4, 7, 9, 10, 14, 15]]


@given(st.lists(st.floats(0, 1e6), max_size=60), st.integers(1, 9))
def test_ptrr_is_within_the_dearest_block_of_even(costs: list[float], world_size: int) -> None:
    """Zig-zag: between any two ranks the gap telescopes to at most the largest cost."""
    work = torch.tensor(costs, dtype=torch.float64)
    sums = [float(work[rank].sum()) for rank in ptrr(work, world_size)]
    assert max(sums) - min(sums) <= max(costs, default=0) * (1 + 1e-9)


@given(st.integers(0, 60), st.integers(1, 9))
def test_contiguous_is_natural_order(n: int, world_size: int) -> None:
    assert list(chain(*contiguous(torch.ones(n), world_size))) == list(range(n))


@pytest.mark.parametrize("balancer", balancers.values())
def test_mistakes_say_what_to_do(balancer) -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        balancer(torch.ones(4), 0)
    with pytest.raises(ValueError, match=r"one batch row, \[blocks\], got \(2, 4\)"):
        balancer(torch.ones(2, 4), 2)
