"""The input of balancers: the work of each query block, and the key blocks that it sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tritoncp.masks.mask import Mask
from tritoncp.masks.runs.block_runs import Runs, merge_runs
from tritoncp.masks.runs.transposed_runs import transpose
from tritoncp.masks.visible_keys import count_visible_keys

MASKED_BLOCK_COST = 1.25
"""Cost of a masked block in units of a full block. The products are the same; the loop that also compares
positions has 1.65 times the instructions of the one that does not (compiled for sm_90), and about two fifths
of a block's time are instructions beside the products. torch's load balancer counts both alike."""


@dataclass(frozen=True, eq=False)
class Work:
    """The input of a balancer: the query blocks of one batch row.

    costs:      work of each block, summed over heads and masks: [blocks]
    world_size: ranks to assign them to
    runs:       the key blocks that the query blocks see: Runs [1, H, blocks, columns of keys] for each mask
    together:   whether the keys of block i are on the rank of its queries. If there are more or fewer keys
                than queries, keys are assigned separately, and columns are blocks of the other side

    >>> Work(torch.ones(4), 2).sees
    ()
    """

    costs: Tensor
    world_size: int
    runs: tuple[Runs, ...] = ()
    together: bool = True
    column: tuple[int, int] = (1, 1)  # (tokens of a column of the runs, tokens of a block)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")

    @cached_property
    def visible(self) -> tuple[Runs, ...]:
        """For each mask, the blocks of keys that each block's queries see in any head, as FULL blocks: Runs
        [1, 1, blocks, columns]."""
        return tuple(_visible_columns(runs, self.columns, *self.column) for runs in self.runs)

    @cached_property
    def sees(self) -> tuple[Tensor, ...]:
        """For each mask, the blocks of keys that each block's queries see in any head: int64 [n, 3] rows
        (block, first key block, end), sorted and disjoint."""
        return tuple(runs.table() for runs in self.visible)

    @cached_property
    def readers(self) -> Tensor:
        """The blocks that see each column, with the columns of all masks side by side: int64 [n, 3] rows
        (column, first block, end)."""
        tables = [transpose(runs).table() for runs in self.visible] or [torch.zeros(0, 3, dtype=torch.int64)]
        shift = torch.tensor([self.columns, 0, 0])
        return torch.cat([table + i * shift for i, table in enumerate(tables)])

    @cached_property
    def listed(self) -> Tensor:
        """Number of masked and full blocks in the row of each block, summed over heads and masks like
        ``costs``: [blocks]; ``costs`` if there are no runs."""
        if not self.runs:
            return self.costs
        parts = [torch.stack(runs.counts()).sum(0)[0].double() for runs in self.runs]  # [H, blocks] each
        heads = [len(part) if len(parts) > 1 else 1 for part in parts]
        return torch.stack([part.sum(0) / count for part, count in zip(parts, heads, strict=True)]).sum(0)

    @property
    def columns(self) -> int:
        """Number of key blocks."""
        return len(self.costs) if self.together or not self.runs else self.runs[0].n_cols


Balancer = Callable[[Work], Sequence[Sequence[int]]]


def work_of_rows(masks: Sequence[Mask], world_size: int, side: str = "q", selected: int = 0) -> list[Work]:
    """Return the input of a balancer for each batch row: query blocks, or key blocks with side="kv". A block
    cut by the end of the sequence counts as a fraction, as in ``Plan.work``.

    masks: masks of one size; their work is summed, and each counts as one layer, however many heads it has.
    selected: keys that a query selects at run time; 0: all that the mask shows. It counts for queries only.

    >>> from tritoncp.masks import full_mask
    >>> work_of_rows([full_mask(40, 40, block=16)], 2)[0].costs.tolist()
    [3.25, 3.25, 1.875]
    """
    first = masks[0]
    runs = [mask.runs if side == "q" else transpose(mask.runs) for mask in masks]
    selected = selected if side == "q" else 0
    costs_of_masks = [
        costs_of_selected(mask, selected) if selected else block_costs(runs_of_mask)
        for mask, runs_of_mask in zip(masks, runs, strict=True)
    ]
    parts = [x / (mask.H if len(masks) > 1 else 1) for x, mask in zip(costs_of_masks, masks, strict=True)]
    batch = max(map(len, parts))
    together = first.q_len == first.kv_len
    own, other = (first.q_block, first.kv_block) if side == "q" else (first.kv_block, first.q_block)
    length = first.q_len if side == "q" else first.kv_len
    held = (length - torch.arange(parts[0].shape[1]) * own).clamp(max=own)  # tokens of each block
    costs = torch.stack([part.expand(batch, -1) for part in parts]).sum(0) * held / own
    column = (other, own) if together else (1, 1)
    return [
        Work(
            costs[row],
            world_size,
            tuple(runs_of_mask.select([row if runs_of_mask.shape[0] > 1 else 0]) for runs_of_mask in runs),
            together,
            column,
        )
        for row in range(batch)
    ]


def block_costs(runs: Runs) -> Tensor:
    """Sum the work of each row of blocks over all heads: float64 [B, rows]."""
    masked, full = runs.counts()
    return (masked * MASKED_BLOCK_COST + full).sum(1).double()


def costs_of_selected(mask: Mask, selected: int) -> Tensor:
    """Sum the work of each row of blocks over all heads, if a query selects ``selected`` keys of those that
    the mask shows: float64 [B, rows], in units of a full block.

    >>> from tritoncp.masks import causal, create_block_mask
    >>> costs_of_selected(create_block_mask(causal(), 1, 1, 10, 10, BLOCK_SIZE=4), 4).tolist()
    [[0.625, 1.0, 1.0]]
    """
    taken = count_visible_keys(mask, mask.B, mask.H).clamp(max=selected).sum(1).double()
    rows = mask.runs.shape[2]
    blocks = torch.nn.functional.pad(taken, (0, rows * mask.q_block - mask.q_len)).unflatten(1, (rows, -1))
    held = (mask.q_len - torch.arange(rows) * mask.q_block).clamp(max=mask.q_block)
    return blocks.sum(2) / (held * mask.kv_block)


def _visible_columns(runs: Runs, n_cols: int, column: int, block: int) -> Runs:
    """Unite the columns that each row lists for any head, in ``n_cols`` columns of ``block`` tokens."""
    united = runs.unite()
    if column == block:
        return united
    row, start, end = united.table().unbind(1)
    end = (-(-end * column // block)).clamp(max=n_cols)
    return Runs.from_table(merge_runs(row, start * column // block, end, n_cols), runs.shape[2], n_cols)


def document_starts(work: Work, shared: Tensor | None = None) -> list[int]:
    """Return the first block of each document: it and later blocks see no keys of earlier blocks. If a
    document ends inside a block, the next block counts as a start, although it sees that block. For several
    masks, return the boundaries that all have. Without blocks, return [0].

    shared: bool [blocks], blocks whose keys are not counted
    """
    n = len(work.costs)
    crossings = torch.zeros(
        n + 2, dtype=torch.int64
    )  # [i]: number of blocks whose keys are visible across cut i
    for visible in work.visible if work.together else ():
        table = transpose(visible).table()
        column, first, last = (table if shared is None else table[~shared[table[:, 0]]]).unbind(1)
        low = torch.full((n,), n).scatter_reduce_(0, column, first, "amin")
        high = torch.zeros(n, dtype=torch.int64).scatter_reduce_(0, column, last, "amax")
        blocks = torch.arange(n)
        steps = torch.zeros(n + 2, dtype=torch.int64)
        for begin, end in ((blocks + 1, high), (low + 1, blocks + 1)):  # cuts between a block and its readers
            nonempty, ones = end > begin, torch.ones_like(blocks)
            steps.index_add_(0, begin[nonempty], ones[nonempty]).index_add_(0, end[nonempty], -ones[nonempty])
        crossings = torch.maximum(crossings, steps.cumsum(0))
    crossing, crossing_before = crossings[1:n], crossings[: max(0, n - 1)]
    starts = (crossing == 0) | ((crossing == 1) & (crossing_before > 0))
    return [0, *((starts if work.runs else starts[:0]).nonzero()[:, 0] + 1).tolist()]
