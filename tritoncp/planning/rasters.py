"""Rasters of a plan: the mask in its owners' colours, the owners of queries, the key traffic between ranks.

A raster is a uint8 tensor [y, x, 4] of red, green, blue and opacity, to be drawn on paper of any colour.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritoncp.masks.block_runs import Kind
from tritoncp.masks.mask import Mask
from tritoncp.planning.explanation import owner_shares
from tritoncp.planning.plan_data import PlanData
from tritoncp.planning.report import Facts, colours

SIDE = 720  # pixels of the mask
LENS = 320  # pixels of the detail in its corner
STRIPS = 256  # most ranks that have a line of their own in the strips
STRIP_WIDTH = 500  # most pixels of a strip
NO_OWNER = (222, 226, 230)
OWN = (240, 190, 80)
REMOTE = (8, 78, 160)
FULL, MASKED, HIDDEN = 1.0, 0.55, 0.13  # opacity of the owner's colour
SOME = 0.4  # least opacity of a pixel that stands for many blocks, any of them listed
CELLS = 1 << 22  # (pixel row, block column) cells at a time
BLOCK_OPACITIES = (
    (FULL, "all visible"),
    (MASKED, "visible in a masked block"),
    (HIDDEN, "hidden in a masked block"),
)
SHARE_OPACITIES = ((FULL, "all blocks"), (0.7, "some"), (SOME, "few"))


def mask_pixels(plan: PlanData, side: int = SIDE, length: int | None = None) -> Tensor:
    """Draw query positions down, key positions across, in the colour of the rank that computes.

    Draws the first batch row and head, and the first ``length`` positions (None: all). The opacity of a pixel
    of many blocks is the share of them that are listed, never 0 if any are, and its colour the mean of their
    owners'.
    """
    near = length is not None or shows_blocks(plan.mask, side)
    shade = _pixel_shades(plan.mask, side, length) if near else _block_shares(plan.mask, side)
    owners = plan.owners[0]
    row = _cells(len(owners), len(shade))
    paint = torch.tensor([*colours(plan.world_size), NO_OWNER], dtype=torch.float32)[owners]  # -1: no owner
    if near:
        colour = paint[_pixel_middles(length or plan.mask.q_len, side) // plan.mask.q_block]
    else:
        colour = torch.zeros(len(shade), 3).index_add_(0, row, paint)
        colour = colour / torch.bincount(row, minlength=len(shade))[:, None]
    return _raster(colour[:, None], shade)


def strip_pixels(plan: PlanData) -> Tensor:
    """Draw ranks (or groups of neighbouring ranks) down, positions across, in the colour of the rank where it
    has the queries, paler where it has only some of a pixel's."""
    share = owner_shares(plan, STRIPS, STRIP_WIDTH)
    first = -(-torch.arange(len(share)) * plan.world_size // len(share))
    paint = torch.tensor(colours(plan.world_size), dtype=torch.float32)[first, None]
    return _raster(paint, torch.where(share > 0, SOME + (FULL - SOME) * share, 0))


def reads_pixels(facts: Facts) -> Tensor:
    """Draw the bytes that each rank's queries (down) read of each rank's keys (across), stronger for more."""
    reads = facts.reads.double()
    own = torch.eye(len(reads), dtype=torch.bool)
    remote = reads.masked_fill(own, 0)
    share = remote / remote.max().clamp(min=1)
    pixels = _raster(torch.tensor(REMOTE), torch.where(share > 0, 0.08 + 0.92 * share, 0))
    pixels[own] = torch.tensor([*OWN, 255], dtype=torch.uint8)
    return pixels


def shows_blocks(mask: Mask, side: int = SIDE) -> bool:
    """Return whether every block has a pixel of its own."""
    return max(mask.runs.shape[2:]) <= side


def lens_length(plan: PlanData, whole: Tensor) -> int:
    """Return the number of first positions to enlarge in the corner of a thin mask's ``whole`` raster; 0 if
    single blocks are visible or the corner is not empty."""
    mask = plan.mask
    length = min(LENS // 2 * mask.q_block, mask.q_len, mask.kv_len)
    if shows_blocks(mask) or 4 * length > mask.q_len:
        return 0
    corner = whole[: len(whole) // 2, len(whole) // 2 :, 3]
    return length if bool((corner == 0).all()) else 0


def _raster(colour: Tensor, opacity: Tensor) -> Tensor:
    """Join colours [..., 3] and opacities [y, x] from 0 to 1."""
    channels = [colour.expand(*opacity.shape, 3), 255 * opacity[..., None]]
    return torch.cat(channels, -1).round().to(torch.uint8)


def _pixel_shades(mask: Mask, side: int, length: int | None) -> Tensor:
    """Return each pixel's opacity at the position in its middle: float32 [side, side]."""
    q, kv = _pixel_middles(length or mask.q_len, side), _pixel_middles(length or mask.kv_len, side)
    rows = torch.arange(int(q[-1]) // mask.q_block + 1)[None]
    kinds = mask.runs.batch_row(0).take(rows).to_kinds()[0, 0][q // mask.q_block][:, kv // mask.kv_block]
    shade = torch.zeros(side, side)
    shade[(kinds == Kind.FULL) | (kinds == Kind.BOUNDED)] = FULL
    masked = kinds == Kind.MASKED
    shade[masked] = MASKED
    if mask.interval is not None:
        lo, hi = (bound[0, 0, q].long()[:, None] for bound in mask.interval)
        shade[masked & ((kv < lo) | (kv >= hi))] = HIDDEN
    return shade


def _block_shares(mask: Mask, side: int) -> Tensor:
    """Return each pixel's opacity, by the share of its blocks that are listed: float32 [<= side, <= side]."""
    runs = mask.runs.batch_row(0)
    rows, columns = runs.shape[2:]
    high, wide = min(side, rows), min(side, columns)
    row, start, end, _ = runs._flat()
    first = row < rows
    row, start, end = row[first], start[first], end[first]
    at = _cells(rows, high)[row]
    edges = (torch.arange(wide + 1) * columns + wide - 1) // wide  # first column of each pixel
    shade = torch.zeros(high, wide)
    for top in range(0, high, max(1, CELLS // columns)):
        bottom = min(high, top + max(1, CELLS // columns))
        inside = (at >= top) & (at < bottom)
        steps = torch.zeros((bottom - top) * (columns + 1), dtype=torch.int32)
        line = (at[inside] - top) * (columns + 1)
        one = torch.ones(len(line), dtype=torch.int32)
        steps.index_add_(0, line + start[inside], one).index_add_(0, line + end[inside], -one)
        listed = steps.view(-1, columns + 1).cumsum_(1)[:, :columns].cumsum(1)
        count = torch.nn.functional.pad(listed, (1, 0))[:, edges].diff(dim=1)
        blocks = torch.bincount(_cells(rows, high), minlength=high)[top:bottom, None] * edges.diff()
        shade[top:bottom] = torch.where(count > 0, SOME + (FULL - SOME) * count / blocks, 0)
    return shade


def _cells(blocks: int, pixels: int) -> Tensor:
    """Return the pixel of each block: int64 [blocks]."""
    return torch.arange(blocks) * pixels // blocks


def _pixel_middles(length: int, pixels: int) -> Tensor:
    """Return the position in the middle of each pixel of ``length`` positions: int64 [pixels]."""
    return (2 * torch.arange(pixels) + 1) * length // (2 * pixels)
