"""Balancers: what the blocks of a mask cost and see -> who owns them.

A balancer is a function of a :class:`Work` that returns each rank's blocks. `make_plan(balancer=...)` takes
the name of one of those here, or a function of your own:

>>> def odd_and_even(work):
...     return [list(range(rank, len(work.costs), work.world_size)) for rank in range(work.world_size)]
>>> deal(odd_and_even, Work(torch.ones(5), 2))
[[0, 2, 4], [1, 3]]

Those here give ranks equal numbers of blocks, give or take one, of any number of blocks, fewer than ranks
included. A function of your own need not: shards are padded to the longest.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tritoncp.masks.block_runs import Runs
from tritoncp.masks.mask import Mask
from tritoncp.planning import balance_locality as _locality
from tritoncp.planning.balance_locality import joined, seen_by

MASKED = 1.25
"""Cost of a masked block where a full one costs 1. The products are the same; the loop that also compares
positions has 1.65 times the instructions of the one that does not (compiled for sm_90), and about two fifths
of a block's time are instructions beside the products."""


@dataclass(frozen=True, eq=False)
class Work:
    """The input of a balancer: the query blocks of one batch row.

    costs:      work of each block [blocks], summed over heads and masks
    world_size: ranks to deal them to
    runs:       what the blocks see: Runs [1, H, blocks, columns of keys] for each mask
    together:   whether the keys of block i go where its queries go. Where there are not as many keys as
                queries, they are dealt on their own, and columns are blocks of the other side

    >>> Work(torch.ones(4), 2).sees
    ()
    """

    costs: Tensor
    world_size: int
    runs: tuple[Runs, ...] = ()
    together: bool = True
    column: tuple[int, int] = (1, 1)  # (tokens of a column of the runs, tokens of a block)

    @cached_property
    def sees(self) -> tuple[Tensor, ...]:
        """For each mask, the blocks of keys that each block's queries see in any head: int64 [n, 3] rows
        (block, first key block, end), sorted and disjoint."""
        return tuple(_seen(runs, self.columns, *self.column) for runs in self.runs)

    @property
    def columns(self) -> int:
        """How many blocks of keys there are."""
        return len(self.costs) if self.together or not self.runs else self.runs[0].n_cols


Balancer = Callable[[Work], Sequence[Sequence[int]]]


def contiguous(work: Work) -> list[list[int]]:
    """Natural order, cut into even pieces.

    >>> contiguous(Work(torch.ones(5), 2))
    [[0, 1, 2], [3, 4]]
    """
    n = _check(work)
    return [list(piece) for piece in _pieces(n, work.world_size)]


def head_tail(work: Work) -> list[list[int]]:
    """Of 2W even pieces, rank r holds piece r and piece 2W - 1 - r: balances a causal mask.

    >>> head_tail(Work(torch.ones(8), 2))
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    n = _check(work)
    pieces = _pieces(n, 2 * work.world_size)
    return [[*pieces[r], *pieces[-1 - r]] for r in range(work.world_size)]


def ptrr(work: Work) -> list[list[int]]:
    """Processing-time round-robin, as torch's: the dearest block first, dealt in zig-zag.

    Where blocks do not divide, the last round is short; its blocks are the cheapest.

    >>> ptrr(Work(torch.tensor([1, 2, 3, 4, 5]), 2))
    [[0, 1, 4], [2, 3]]
    """
    n, world_size = _check(work), work.world_size
    order = work.costs.cpu().sort(descending=True, stable=True).indices
    rounds = -(-n // world_size)
    dealt = torch.cat([order, torch.arange(n, rounds * world_size)]).view(rounds, world_size)
    dealt[1::2] = dealt[1::2].flip(1)
    return [[block for block in rank if block < n] for rank in dealt.T.sort(dim=1).values.tolist()]


def per_document(work: Work) -> list[list[int]]:
    """Documents whole where they are small, in pairs of pieces (one from the front, one from the back) where
    they are not; the dearest first, to the rank with the least work that has room.

    A document is what a cut of the sequence leaves whole: found from the mask, of any length. Only what no
    rank has room for is dealt block by block.

    >>> from tritoncp.masks import and_masks, causal, create_block_mask, document
    >>> mod = and_masks(causal(), document(lengths=[16, 4, 4, 4, 4]))
    >>> (work,) = views([create_block_mask(mod, None, None, 32, 32, BLOCK_SIZE=4)], 2)
    >>> per_document(work)
    [[0, 3, 4, 6], [1, 2, 5, 7]]
    """
    n, world_size = _check(work), work.world_size
    costs = work.costs.tolist()
    before = list(itertools.accumulate(costs, initial=0.0))
    most = before[-1] / (2 * world_size)  # work of one group
    groups: list[list[int]] = []
    for first, end in itertools.pairwise([*_document_starts(work), n]):
        share = (before[end] - before[first]) / most if most else 0
        pairs = max(1, min((end - first + 1) // 2, math.ceil(share - 1e-9)))
        pieces = [range(first + p.start, first + p.stop) for p in _pieces(end - first, 2 * pairs)]
        groups += [[*pieces[i], *pieces[-1 - i]] for i in range(pairs)]
    return _lightest_first([(sum(costs[i] for i in group), group) for group in groups], costs, world_size)


def locality(work: Work) -> list[list[int]]:
    """Even work with the fewest remote keys: :mod:`tritoncp.planning.balance_locality`.

    >>> from tritoncp.masks import create_block_mask, sliding_window
    >>> (work,) = views([create_block_mask(sliding_window(100), None, None, 1024, 1024)], 4)
    >>> locality(work)
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    """
    _check(work)
    owner = _locality.place(work)
    held = [(owner == rank).nonzero()[:, 0].tolist() for rank in range(work.world_size)]
    return sorted(held, key=lambda blocks: sum(blocks) / max(1, len(blocks)) if blocks else len(owner))


balancers: dict[str, Balancer] = {
    "contiguous": contiguous,
    "head_tail": head_tail,
    "per_document": per_document,
    "ptrr": ptrr,
    "locality": locality,
}


def find(balancer: str | Balancer) -> tuple[str, Balancer]:
    """A balancer by its name, or a function and what to call it."""
    if callable(balancer):
        return getattr(balancer, "__name__", type(balancer).__name__), balancer
    if balancer not in balancers:
        raise ValueError(
            f"unknown balancer {balancer!r}; known: {', '.join(sorted(balancers))}, or a function of your own"
        )
    return balancer, balancers[balancer]


def deal(balancer: Balancer, work: Work) -> list[list[int]]:
    """Each rank's blocks, ascending, as the balancer says; ValueError where that is no placement."""
    name, said = find(balancer)[0], balancer(work)
    try:
        ranks = [sorted(int(block) for block in rank) for rank in said]
    except (TypeError, ValueError):
        raise ValueError(
            f"balancer {name} returned {_brief(said)}; it has to return a list of block numbers for each rank"
        ) from None
    if len(ranks) != work.world_size:
        raise ValueError(
            f"balancer {name} returned lists for {len(ranks)} ranks, there are {work.world_size}; a rank "
            "without blocks has an empty list"
        )
    n = len(work.costs)
    times = [0] * n
    for block in itertools.chain(*ranks):
        if not 0 <= block < n:
            raise ValueError(f"balancer {name} dealt block {block}; there are blocks 0 to {n - 1}")
        times[block] += 1
    wrong = [block for block, count in enumerate(times) if count != 1]
    if wrong:
        raise ValueError(
            f"balancer {name} has to deal each of the {n} blocks once; it dealt block {wrong[0]} "
            f"{times[wrong[0]]} times" + (f", and {len(wrong) - 1} others not once" if len(wrong) > 1 else "")
        )
    return ranks


def views(masks: Sequence[Mask], world_size: int, side: str = "q") -> list[Work]:
    """What a balancer is given for each batch row: of the queries' blocks, or, with side="kv", the keys'.

    masks: of one size; several are weighed together, each for one layer, however many heads it is listed for.
    """
    first = masks[0]
    runs = [mask.runs if side == "q" else mask.runs.transpose() for mask in masks]
    parts = [block_costs(each) / (each.shape[1] if len(runs) > 1 else 1) for each in runs]
    batch = max(map(len, parts))
    costs = torch.stack([part.expand(batch, -1) for part in parts]).sum(0)
    together = first.q_len == first.kv_len
    column = (first.kv_block, first.q_block) if together else (1, 1)
    return [
        Work(
            costs[row],
            world_size,
            tuple(each.batch_row(row if each.shape[0] > 1 else 0) for each in runs),
            together,
            column,
        )
        for row in range(batch)
    ]


def block_costs(runs: Runs) -> Tensor:
    """Work of each row of blocks, over all heads: float64 [B, rows]."""
    masked, full = runs.counts()
    return (masked * MASKED + full).sum(1).double()


def _seen(runs: Runs, n_cols: int, column: int, block: int) -> Tensor:
    """Union over heads and kinds of what each row lists, in ``n_cols`` columns of ``block`` tokens."""
    rows = runs.shape[2]
    row, start, end, _ = runs._flat()
    row, start, end = (
        row % max(1, rows),
        start * column // block,
        (-(-end * column // block)).clamp(max=n_cols),
    )
    line = row * (n_cols + 2)
    start, end = joined(line + start, line + end)  # rows stay apart: no line is full
    row = start // (n_cols + 2)
    return torch.stack([row, start - row * (n_cols + 2), end - row * (n_cols + 2)], 1)


def _document_starts(work: Work) -> list[int]:
    """First blocks of documents: where nothing is seen across, or, where a document ends inside a block, the
    block behind it, from which only that block is seen. Of several masks, what holds for all."""
    n = len(work.costs)
    across = torch.zeros(n + 2, dtype=torch.int64)  # [i]: how many blocks are seen from the other side of i
    for sees in work.sees if work.together else ():
        column, first, last = seen_by(sees, n, n).unbind(1)
        low = torch.full((n,), n).scatter_reduce_(0, column, first, "amin")
        high = torch.zeros(n, dtype=torch.int64).scatter_reduce_(0, column, last, "amax")
        place = torch.arange(n)
        step = torch.zeros(n + 2, dtype=torch.int64)
        for begin, end in ((place + 1, high), (low + 1, place + 1)):  # cuts between a block and who sees it
            some, one = end > begin, torch.ones_like(place)
            step.index_add_(0, begin[some], one[some]).index_add_(0, end[some], -one[some])
        across = torch.maximum(across, step.cumsum(0))
    here, left = across[1:n], across[: max(0, n - 1)]
    starts = (here == 0) | ((here == 1) & (left > 0))
    return [0] * (n > 0) + ((starts if work.sees else starts[:0]).nonzero()[:, 0] + 1).tolist()


def _lightest_first(
    groups: Sequence[tuple[float, list[int]]], costs: Sequence[float], world_size: int
) -> list[list[int]]:
    """Groups (work, blocks), the dearest first, to the rank with the least work that has room for all of it;
    where none has, one block at a time."""
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    room = [len(piece) for piece in _pieces(len(costs), world_size)]
    light = [(0.0, rank) for rank in range(world_size) if room[rank]]
    todo = [(-work, blocks) for work, blocks in groups if blocks]
    heapq.heapify(todo)
    while todo:
        work, blocks = heapq.heappop(todo)
        passed = []
        while light and room[light[0][1]] < len(blocks):
            passed.append(heapq.heappop(light))
        if light:
            load, rank = heapq.heappop(light)
            ranks[rank] += blocks
            room[rank] -= len(blocks)
            passed += [(load - work, rank)] * (room[rank] > 0)
        else:
            for block in blocks:
                heapq.heappush(todo, (-costs[block], [block]))
        for entry in passed:
            heapq.heappush(light, entry)
    return [sorted(blocks) for blocks in ranks]


def _pieces(n: int, count: int) -> list[range]:
    """range(n) in `count` contiguous pieces whose lengths differ by at most one, the longer ones first."""
    short, longer = divmod(n, count)
    cuts = [i * short + min(i, longer) for i in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


def _brief(said: Any) -> str:
    text = repr(said)
    return text if len(text) < 80 else f"{text[:77]}..."


def _check(work: Work) -> int:
    if work.world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {work.world_size}")
    if work.costs.ndim != 1:
        raise ValueError(
            f"a balancer takes the costs of one batch row, [blocks], got {tuple(work.costs.shape)}: "
            "call it once for each row, or sum over them"
        )
    return len(work.costs)
