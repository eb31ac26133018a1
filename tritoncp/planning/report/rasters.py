"""Rasters of a plan: the mask in its owners' colours, and the owners of queries.

A raster is a uint8 tensor [y, x, 4] of red, green, blue and opacity, to be drawn on paper of any colour.
"""

from __future__ import annotations

import colorsys

import torch
from torch import Tensor

from tritoncp.masks.mask import Mask
from tritoncp.planning.plan_data import PlanData
from tritoncp.planning.report.facts import owner_shares

SIDE = 720  # most pixels across the mask
STRIPS = 256  # most ranks that have a line of their own in the strips
STRIP_WIDTH = 500  # most pixels of a strip
NO_OWNER = (222, 226, 230)
FULL, MASKED = 1.0, 0.55  # opacity of the owner's colour
SOME = 0.4  # least opacity of a pixel that stands for many blocks, any of them listed
OPACITIES = ((FULL, "full block: all visible"), (MASKED, "masked block: some visible"))

Colour = tuple[int, int, int]
# Paul Tol's "bright" palette, distinct under colour blindness, and two more colours.
BRIGHT = (
    (68, 119, 170), (238, 102, 119), (34, 136, 51), (204, 187, 68),
    (102, 204, 238), (170, 51, 119), (221, 136, 68), (120, 120, 120),
)  # fmt: skip


def colours(world_size: int) -> list[Colour]:
    """Return a colour for each rank: a distinct palette for up to eight; beyond, hues from blue over green,
    yellow and red to purple, so that a hue lies on one stretch of ranks."""
    if world_size <= len(BRIGHT):
        return list(BRIGHT[:world_size])
    result = []
    for rank in range(world_size):
        rgb = colorsys.hls_to_rgb((0.62 - 0.8 * rank / world_size) % 1, (0.40, 0.56)[rank % 2], 0.62)
        result.append((round(255 * rgb[0]), round(255 * rgb[1]), round(255 * rgb[2])))
    return result


def mask_pixels(plan: PlanData, side: int = SIDE) -> Tensor:
    """Draw query blocks down, key blocks across, in the colour of the rank that computes, of the first batch
    row and head. A pixel of many blocks has the mean of their owners' colours and of their opacities, at
    least SOME if any is listed."""
    owners, shade = plan.owners[0], _opacities(plan.mask, side)
    row = _cells(len(owners), len(shade))
    paint = torch.tensor([*colours(plan.world_size), NO_OWNER], dtype=torch.float32)[owners]  # -1: no owner
    colour = torch.zeros(len(shade), 3).index_add_(0, row, paint)
    return _raster((colour / torch.bincount(row, minlength=len(shade))[:, None])[:, None], shade)


def strip_pixels(plan: PlanData) -> Tensor:
    """Draw ranks (or groups of neighbouring ranks) down, positions across, in the colour of the rank where it
    has the queries, paler where it has only some of a pixel's."""
    share = owner_shares(plan, STRIPS, STRIP_WIDTH)
    first = -(-torch.arange(len(share)) * plan.world_size // len(share))
    paint = torch.tensor(colours(plan.world_size), dtype=torch.float32)[first, None]
    return _raster(paint, torch.where(share > 0, SOME + (FULL - SOME) * share, 0))


def _raster(colour: Tensor, opacity: Tensor) -> Tensor:
    """Join colours [..., 3] and opacities [y, x] from 0 to 1."""
    channels = [colour.expand(*opacity.shape, 3), 255 * opacity[..., None]]
    return torch.cat(channels, -1).round().to(torch.uint8)


def _opacities(mask: Mask, side: int) -> Tensor:
    """Return each pixel's opacity, of the first batch row and head: float32 [<= side, <= side]."""
    runs = mask.runs.select([0], [0])
    rows, columns = runs.shape[2:]
    high, wide = min(side, rows), min(side, columns)
    edges = [
        (torch.arange(pixels + 1) * blocks + pixels - 1) // pixels  # first block of each pixel
        for pixels, blocks in ((high, rows), (wide, columns))
    ]
    masked, full = runs.count_in_cells(*edges)
    total, blocks = masked * MASKED + full * FULL, edges[0].diff()[:, None] * edges[1].diff()
    return torch.where(total > 0, (total / blocks).clamp(min=SOME), 0).float()


def _cells(blocks: int, pixels: int) -> Tensor:
    """Return the pixel of each block: int64 [blocks]."""
    return torch.arange(blocks) * pixels // blocks
