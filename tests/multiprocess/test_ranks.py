"""The helper that starts the ranks of all multiprocess tests."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.multiprocess.ranks import RankFailed, run


def test_results_come_back_by_rank_from_closures():
    def work(group, offset):
        x = torch.tensor([group.rank() + offset])
        dist.all_reduce(x, group=group)
        return group.rank(), x

    assert run(3, work, 10) == [(0, 33), (1, 33), (2, 33)]


def test_the_exception_of_a_rank_is_raised_here_with_its_rank():
    def work(group):
        if group.rank() == 1:
            raise KeyError("lost")
        dist.barrier()

    with pytest.raises(KeyError, match="lost") as caught:
        run(2, work)
    assert "on rank 1 of 2" in caught.value.__notes__[0]


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankFailed, match="rank 0 of 1 ended without a word"):
        run(1, lambda group: os._exit(3))


def test_ranks_that_wait_forever_are_named():
    with pytest.raises(RankFailed, match=r"no word in time from ranks \[0\]"):
        run(1, lambda group: __import__("time").sleep(60), timeout=0.5)
