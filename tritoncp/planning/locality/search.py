"""The search for a placement: windows of pieces of several blocks, then swaps of single blocks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tritoncp.masks.runs.block_runs import merge_ranges
from tritoncp.planning.locality.branches import whole_branches
from tritoncp.planning.locality.pieces import even_counts, join_blocks, loads
from tritoncp.planning.locality.windows import choose_windows
from tritoncp.planning.work import Work

EVEN_RATIO = 1.018  # work is even up to this max/mean
MIN_PIECES = 512  # up to twice as many blocks are placed one by one
FEW_RANKS = 16  # up to so many ranks, several choices of windows are compared
# (number of sizes of the first window, tolerance of a rank's work): each pair yields a placement.
CHOICES = ((64, 0.01), (64, 0.02), (31, 0.01), (31, 0.004))


def place_blocks(work: Work) -> Tensor:
    """Return the owner of each block: int64 [blocks]. The numbers of blocks of ranks differ by at most
    one."""
    work = replace(work, costs=work.costs.double())
    n, ranks = len(work.costs), work.world_size
    if n <= ranks or ranks == 1:
        return assign_in_order(work)
    cap = EVEN_RATIO * float(work.costs.sum()) / ranks
    few = ranks <= FEW_RANKS
    fewest = max(MIN_PIECES, ranks * (32 if few else 16))
    size = 1 << max(1, n // fewest).bit_length() - 1
    pieces, choices = join_blocks(work, size), CHOICES if few else ((max(4, 1024 // ranks), 0.01),)
    windows = (choose_windows(pieces, *choice) for choice in choices)
    natural, *candidates = assign_in_order(pieces), whole_branches(pieces), *windows
    placements = [natural, *(owner for owner in candidates if owner is not None)]
    best = min(
        placements,
        key=lambda owner: (
            max(float(loads(owner, pieces.costs, ranks).max()), cap),
            count_remote(owner, pieces),
        ),
    )
    if best is natural:
        return even_work(assign_in_order(work), work, cap)
    return even_work(even_counts(best.repeat_interleave(size)[:n], work), work, cap)


def assign_in_order(work: Work) -> Tensor:
    """Return the owner of each block in even pieces in natural order."""
    return torch.arange(len(work.costs)) * work.world_size // max(1, len(work.costs))


def count_remote(owner: Tensor, work: Work) -> int:
    """Count the columns that each rank sees but does not have, over all ranks and masks."""
    total, width = 0, work.columns
    for row, start, end in (table.unbind(1) for table in work.sees):
        line = owner[row] * width  # runs of neighbouring ranks may merge, which keeps the sum of lengths
        start, end = merge_ranges(line + start, line + end)
        total += int((end - start).sum())
        if work.together:
            own = owner * width + torch.arange(width)
            at = torch.searchsorted(start, own, right=True)
            total -= int((own < torch.nn.functional.pad(end, (1, 0), value=-1)[at]).sum())
    return total


def even_work(owner: Tensor, work: Work, cap: float) -> Tensor:
    """Swap blocks between the busiest rank and the others, the idlest first, until no rank's work exceeds
    ``cap`` or no swap helps."""
    load = loads(owner, work.costs, work.world_size)
    for _ in range(16 * work.world_size):
        busy = int(load.argmax())
        if float(load[busy]) <= cap:
            return owner
        given = (owner == busy).nonzero()[:, 0]
        for other in load.argsort(stable=True).tolist():
            taken, excess = (owner == other).nonzero()[:, 0], float(load[busy] - load[other])
            moved = work.costs[given][:, None] - work.costs[taken]
            pair = int((moved - excess / 2).abs().argmin()) if moved.numel() else 0
            if moved.numel() and 0 < (change := float(moved.flatten()[pair])) < excess:
                owner[given[pair // len(taken)]], owner[taken[pair % len(taken)]] = other, busy
                load[busy] -= change
                load[other] += change
                break
        else:
            return owner
    return owner
