"""The search for a placement: windows of pieces of several blocks, made even block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from tritoncp.masks.block_runs import merge_ranges
from tritoncp.planning.locality.branches import whole_branches
from tritoncp.planning.locality.pieces import View, even_counts, loads
from tritoncp.planning.locality.windows import choose_windows
from tritoncp.planning.work import Work

EVEN_RATIO = 1.018  # max/mean work that counts as even
MIN_PIECES = 512  # blocks up to twice as many are placed one by one
FEW_RANKS = 16  # ranks up to which several choices of windows are compared
# Sizes of the first window that are tried, and the tolerance of a rank's work; each yields a placement.
CHOICES = ((64, 0.01), (64, 0.02), (31, 0.01), (31, 0.004))


def place_blocks(work: Work) -> Tensor:
    """Return the owner of each block: int64 [blocks]. Ranks hold equal numbers of blocks to within one."""
    view, ranks = View.of(work), work.world_size
    if view.n <= ranks or ranks == 1:
        return assign_in_order(view)
    cap = EVEN_RATIO * float(view.costs.sum()) / ranks
    few = ranks <= FEW_RANKS
    fewest = max(MIN_PIECES, ranks * (32 if few else 16))
    size = 1 << max(1, view.n // fewest).bit_length() - 1
    pieces, choices = view.in_pieces(size), CHOICES if few else ((max(4, 1024 // ranks), 0.01),)
    windows = (choose_windows(pieces, *choice) for choice in choices)
    natural, *others = assign_in_order(pieces), whole_branches(pieces), *windows
    placements = [natural, *(owner for owner in others if owner is not None)]
    best = min(
        placements,
        key=lambda owner: (
            max(float(loads(owner, pieces.costs, ranks).max()), cap),
            count_remote(owner, pieces),
        ),
    )
    if best is natural:
        return even_work(assign_in_order(view), view, cap)
    return even_work(even_counts(best.repeat_interleave(size)[: view.n], view), view, cap)


def assign_in_order(view: View) -> Tensor:
    """Return the owner of each block in even pieces in natural order."""
    return torch.arange(view.n) * view.world_size // max(1, view.n)


def count_remote(owner: Tensor, view: View) -> int:
    """Count the columns that ranks see and other ranks hold."""
    (row, start, end), width = view.runs, view.masks * view.width
    line = owner[row] * width  # runs of neighbouring ranks may touch and merge: only lengths count
    start, end = merge_ranges(line + start, line + end)
    if not view.together:
        return int((end - start).sum())
    own = owner.repeat(view.masks) * width + torch.arange(width)
    at = torch.searchsorted(start, own, right=True)
    is_seen = own < torch.nn.functional.pad(end, (1, 0), value=-1)[at]
    return int((end - start).sum()) - int(is_seen.sum())


def even_work(owner: Tensor, view: View, cap: float) -> Tensor:
    """Swap two blocks of the busiest rank and of another, the least busy first, while that makes it less
    busy, until no rank's work exceeds ``cap``."""
    load = loads(owner, view.costs, view.world_size)
    for _ in range(16 * view.world_size):
        busy = int(load.argmax())
        if float(load[busy]) <= cap:
            break
        given = (owner == busy).nonzero()[:, 0]
        for other in load.argsort(stable=True).tolist():
            taken, excess = (owner == other).nonzero()[:, 0], float(load[busy] - load[other])
            moved = view.costs[given][:, None] - view.costs[taken]
            pair = int((moved - excess / 2).abs().argmin()) if moved.numel() else 0
            if moved.numel() and 0 < (change := float(moved.flatten()[pair])) < excess:
                owner[given[pair // len(taken)]], owner[taken[pair % len(taken)]] = other, busy
                load[busy] -= change
                load[other] += change
                break
        else:
            break
    return owner
