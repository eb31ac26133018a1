"""Balancers: the cost of every block -> who owns it.

A balancer takes costs [n] and a world size and returns each rank's blocks, ascending. Ranks hold equal
numbers of blocks, give or take one; any number of blocks goes, fewer than ranks included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

Balancer = Callable[[Tensor, int], list[list[int]]]


def contiguous(costs: Tensor, world_size: int) -> list[list[int]]:
    """Natural order, cut into even pieces.

    >>> contiguous(torch.ones(5), 2)
    [[0, 1, 2], [3, 4]]
    """
    n = _check(costs, world_size)
    return [list(piece) for piece in _pieces(n, world_size)]


def head_tail(costs: Tensor, world_size: int) -> list[list[int]]:
    """Of 2W even pieces, rank r holds piece r and piece 2W - 1 - r: balances a causal mask.

    >>> head_tail(torch.ones(8), 2)
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    n = _check(costs, world_size)
    pieces = _pieces(n, 2 * world_size)
    return [[*pieces[r], *pieces[-1 - r]] for r in range(world_size)]


def ptrr(costs: Tensor, world_size: int) -> list[list[int]]:
    """Processing-time round-robin, as torch's: the dearest block first, dealt in zig-zag.

    Where blocks do not divide, the last round is short; its blocks are the cheapest.

    >>> ptrr(torch.tensor([1, 2, 3, 4, 5]), 2)
    [[0, 1, 4], [2, 3]]
    """
    n = _check(costs, world_size)
    order = costs.cpu().sort(descending=True, stable=True).indices
    rounds = -(-n // world_size)
    dealt = torch.cat([order, torch.arange(n, rounds * world_size)]).view(rounds, world_size)
    dealt[1::2] = dealt[1::2].flip(1)
    return [[block for block in rank if block < n] for rank in dealt.T.sort(dim=1).values.tolist()]


balancers: dict[str, Balancer] = {"contiguous": contiguous, "head_tail": head_tail, "ptrr": ptrr}


def _pieces(n: int, count: int) -> list[range]:
    """range(n) in `count` contiguous pieces whose lengths differ by at most one, the longer ones first."""
    short, longer = divmod(n, count)
    cuts = [i * short + min(i, longer) for i in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


def _check(costs: Tensor, world_size: int) -> int:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if costs.ndim != 1:
        raise ValueError(
            f"a balancer takes the costs of one batch row, [blocks], got {tuple(costs.shape)}: "
            "call it once for each row, or sum over them"
        )
    return len(costs)
