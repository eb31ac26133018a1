"""Balancers assign the query blocks of a mask to ranks, by the work of blocks and the keys that they see.

A balancer is a function of a :class:`Work` that returns each rank's blocks. `make_plan(balancer=...)` takes
the name of a balancer of this module, or any such function:

>>> def odd_and_even(work):
...     return [list(range(rank, len(work.costs), work.world_size)) for rank in range(work.world_size)]
>>> assign_blocks(odd_and_even, Work(torch.ones(5), 2))
[[0, 2, 4], [1, 3]]

With the balancers of this module, the numbers of blocks of ranks differ by at most one; with "lpt" and "spt"
each rank has up to ⌈blocks / ranks⌉, and the last ones may have fewer. Another function may assign any
number: shards are padded to the longest. ``tritoncp.balancers`` maps the names to the functions:

- "contiguous": even pieces in natural order: few remote keys for windows, uneven work for causal masks
- "head_tail": a piece from the front and one from the back: even for causal masks
- "per_document": small documents whole, large ones in pairs of pieces; nearly even work, not guaranteed
- "ptrr": blocks by descending work in zig-zag, as in torch: even work, but many keys are sent
- "lpt", "spt": blocks by descending ("longest processing time first") or by ascending work, each to the rank
  with the lowest work
- "locality": even work (max/mean up to 1.02 if blocks allow it) with the fewest remote keys; slow to compute
- "auto" is not in it: `make_plan` then compares all balancers, and natural order, by predicted time
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import reprlib
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch

from tritoncp.planning.locality.search import place_blocks
from tritoncp.planning.placement import pieces
from tritoncp.planning.work import Balancer, Work, document_starts


def contiguous(work: Work) -> list[list[int]]:
    """Cut the blocks into even pieces in natural order.

    >>> contiguous(Work(torch.ones(5), 2))
    [[0, 1, 2], [3, 4]]
    """
    return [list(piece) for piece in _even_pieces(len(work.costs), work.world_size)]


def head_tail(work: Work) -> list[list[int]]:
    """Give rank r pieces r and 2W - 1 - r of 2W even pieces, which balances a causal mask.

    >>> head_tail(Work(torch.ones(8), 2))
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    parts = _even_pieces(len(work.costs), 2 * work.world_size)
    return [[*parts[r], *parts[-1 - r]] for r in range(work.world_size)]


def ptrr(work: Work) -> list[list[int]]:
    """Assign blocks in zig-zag order, the costliest first: processing-time round-robin.

    It assigns in the order of torch's ``_PTRRLoadBalancer``, ties included, but counts a masked block as
    ``work.MASKED_BLOCK_COST`` (1.25) full ones, since kernels take longer for it. If rows mix both kinds of
    blocks in different shares, the placement differs from torch's, which counts blocks; see
    :func:`ptrr_unweighted`. If the number of ranks does not divide the number of blocks, the last round has
    fewer blocks, the cheapest; torch refuses that.

    >>> ptrr(Work(torch.tensor([1, 2, 3, 4, 5]), 2))
    [[0, 1, 4], [2, 3]]
    """
    return _zig_zag(work.costs, work.world_size)


def ptrr_unweighted(work: Work) -> list[list[int]]:
    """Assign blocks like :func:`ptrr`, but count masked and full blocks alike. This is the placement of
    torch's ``_PTRRLoadBalancer``, for plans that have to agree with torch's.

    With :func:`ptrr`, the work of two ranks differs by up to one row of blocks; here it may differ by
    more.
    """
    return _zig_zag(work.listed, work.world_size)


def lpt(work: Work) -> list[list[int]]:
    """Assign blocks by descending work (longest processing time first), each to the rank with the lowest work
    that has room for it. Ties are broken by the order of blocks, and of ranks.

    >>> lpt(Work(torch.tensor([1, 2, 3, 4, 5, 9]), 2))
    [[0, 2, 5], [1, 3, 4]]
    """
    return _block_by_block(work, ascending=False)


def spt(work: Work) -> list[list[int]]:
    """Assign blocks like :func:`lpt`, but by ascending work (shortest processing time first). The costliest
    blocks come last, when no others are left to even them out: the work of ranks differs by more.

    >>> spt(Work(torch.tensor([1, 2, 3, 4, 5, 9]), 2))
    [[0, 2, 4], [1, 3, 5]]
    """
    return _block_by_block(work, ascending=True)


def _zig_zag(costs: torch.Tensor, world_size: int) -> list[list[int]]:
    """Assign blocks in zig-zag order, the costliest first, equal ones in their order."""
    n = len(costs)
    order = costs.cpu().sort(descending=True, stable=True).indices
    rounds = -(-n // world_size)
    rounds_of_ranks = torch.cat([order, torch.arange(n, rounds * world_size)]).view(rounds, world_size)
    rounds_of_ranks[1::2] = rounds_of_ranks[1::2].flip(1)
    return [[block for block in rank if block < n] for rank in rounds_of_ranks.T.sort(dim=1).values.tolist()]


def per_document(work: Work) -> list[list[int]]:
    """Keep small documents whole, and cut large ones into pairs of pieces (one from the front, one from the
    back); assign the costliest first, to the rank with the lowest work that has room. There is no bound on
    max/mean: whole documents with the same number of blocks need not have equal work.

    Documents may have any length: a boundary is a position across which the mask shows no pair. A group for
    which no rank has room is assigned block by block.

    >>> from tritoncp.masks import and_masks, causal, create_block_mask, document
    >>> mod = and_masks(causal(), document(lengths=[16, 4, 4, 4, 4]))
    >>> from tritoncp.planning.work import work_of_rows
    >>> (work,) = work_of_rows([create_block_mask(mod, None, None, 32, 32, BLOCK_SIZE=4)], 2)
    >>> per_document(work)
    [[0, 3, 4, 6], [1, 2, 5, 7]]
    """
    n, world_size = len(work.costs), work.world_size
    costs = work.costs.tolist()
    before = list(itertools.accumulate(costs, initial=0.0))
    most = before[-1] / (2 * world_size)  # work of one group
    groups: list[list[int]] = []
    for first, end in itertools.pairwise([*document_starts(work), n]):
        share = (before[end] - before[first]) / most if most else 0
        pairs = max(1, min((end - first + 1) // 2, math.ceil(share - 1e-9)))
        parts = [range(first + p.start, first + p.stop) for p in _even_pieces(end - first, 2 * pairs)]
        groups += [[*parts[i], *parts[-1 - i]] for i in range(pairs)]
    room = [len(piece) for piece in _even_pieces(n, world_size)]
    return _lightest_first([group for group in groups if group], costs, room)


def locality(work: Work) -> list[list[int]]:
    """Balance the work with the fewest remote keys: :mod:`tritoncp.planning.locality`.

    >>> from tritoncp.masks import create_block_mask, sliding_window
    >>> from tritoncp.planning.work import work_of_rows
    >>> (work,) = work_of_rows([create_block_mask(sliding_window(100), None, None, 1024, 1024)], 4)
    >>> locality(work)
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    """
    owner = place_blocks(work)
    blocks_of_rank = [(owner == rank).nonzero()[:, 0].tolist() for rank in range(work.world_size)]
    return sorted(
        blocks_of_rank, key=lambda blocks: sum(blocks) / max(1, len(blocks)) if blocks else len(owner)
    )


BalancerName = Literal[
    "auto", "contiguous", "head_tail", "per_document", "ptrr", "ptrr_unweighted", "lpt", "spt", "locality"
]
balancers: dict[str, Balancer] = {
    "contiguous": contiguous,
    "head_tail": head_tail,
    "per_document": per_document,
    "ptrr": ptrr,
    "ptrr_unweighted": ptrr_unweighted,
    "lpt": lpt,
    "spt": spt,
    "locality": locality,
}


def resolve_balancer(balancer: str | Balancer) -> tuple[str, Balancer]:
    """Return the name and the function of a balancer given by name or as a function."""
    if callable(balancer):
        return getattr(balancer, "__name__", type(balancer).__name__), balancer
    if not isinstance(balancer, str) or balancer not in balancers:
        raise ValueError(
            f"unknown balancer {balancer!r}; known: auto, {', '.join(sorted(balancers))}, or a function"
        )
    return balancer, balancers[balancer]


def assign_blocks(balancer: Balancer, work: Work) -> list[list[int]]:
    """Return the blocks that a balancer assigns to each rank, ascending. Raises ValueError unless each block
    is assigned once."""
    name, result, ranks = resolve_balancer(balancer)[0], balancer(work), []
    with contextlib.suppress(TypeError, ValueError):
        ranks = [sorted(int(block) for block in rank) for rank in result]
    if len(ranks) != work.world_size:
        raise ValueError(
            f"balancer {name} returned {reprlib.repr(result)}; it has to return a list of block numbers for "
            f"each of {work.world_size} ranks, empty for a rank without blocks"
        )
    n, counts = len(work.costs), Counter(itertools.chain(*ranks))
    wrong = sorted(block for block in {*range(n), *counts} if counts[block] != (0 <= block < n))
    if wrong:
        rest = len(wrong) - 1
        raise ValueError(
            f"balancer {name} has to assign each of the blocks 0 to {n - 1} once; it assigned block "
            f"{wrong[0]} {counts[wrong[0]]} times" + f", and {rest} others are wrong" * (rest > 0)
        )
    return ranks


def _block_by_block(work: Work, ascending: bool) -> list[list[int]]:
    """Assign single blocks in the order of their work, at most ⌈blocks / ranks⌉ to a rank."""
    n, world_size = len(work.costs), work.world_size
    return _lightest_first(
        [[i] for i in range(n)], work.costs.tolist(), [-(-n // world_size)] * world_size, ascending
    )


def _lightest_first(
    groups: Sequence[list[int]], costs: Sequence[float], room: list[int], ascending: bool = False
) -> list[list[int]]:
    """Assign groups of blocks, the costliest first, to the rank with the lowest work that has room for the
    whole group; if no rank has room, one block at a time.

    room: max number of blocks of each rank, updated in place. ascending: the cheapest first
    """
    ranks: list[list[int]] = [[] for _ in room]
    available = [(0.0, rank) for rank, most in enumerate(room) if most]
    sign = 1 if ascending else -1
    pending = [(sign * sum(costs[i] for i in blocks), blocks) for blocks in groups]
    heapq.heapify(pending)
    while pending:
        key, blocks = heapq.heappop(pending)
        skipped = []
        while available and room[available[0][1]] < len(blocks):
            skipped.append(heapq.heappop(available))
        if available:
            load, rank = heapq.heappop(available)
            ranks[rank] += blocks
            room[rank] -= len(blocks)
            skipped += [(load + sign * key, rank)] * (room[rank] > 0)
        else:
            for block in blocks:
                heapq.heappush(pending, (sign * costs[block], [block]))
        for entry in skipped:
            heapq.heappush(available, entry)
    return [sorted(blocks) for blocks in ranks]


def _even_pieces(n: int, count: int) -> list[range]:
    """Cut range(n) into `count` contiguous pieces whose lengths differ by at most one, the longer ones
    first."""
    cuts = itertools.accumulate(pieces(n, count), initial=0)
    return [range(a, b) for a, b in itertools.pairwise(cuts)]
