"""Rasters of a plan: the mask in its owners' colours, and the key traffic between ranks, as RGB tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tritoncp.masks.block_runs import Kind
from tritoncp.masks.mask import Mask
from tritoncp.planning.explanation import owner_shares
from tritoncp.planning.plan_data import PlanData
from tritoncp.planning.report import Colour, Facts, colours

if TYPE_CHECKING:
    from PIL import Image

SIDE = 720  # pixels of the mask
LENS = 320  # pixels of the detail in its corner
READS = 300  # pixels of the table of key traffic
WIDE = 500  # pixels of the bars of work
STRIPS = 256  # most pixels of the strips that show whose queries lie where
PAPER, FAINT = (255, 255, 255), (222, 226, 230)
OWN = (255, 236, 179)
FULL, MASKED, HIDDEN = 1.0, 0.55, 0.13  # opacity of the owner's colour
SOME = 0.4  # least opacity of a pixel that stands for many blocks, any of them listed
DEEP = (8, 48, 107)


class Theme(NamedTuple):
    """Colours of rasters: paper, a rank's own keys, and the most keys of another rank."""

    paper: Colour
    own: Colour
    deep: Colour


LIGHT = Theme(PAPER, OWN, DEEP)
DARK = Theme((24, 27, 31), (122, 98, 32), (126, 182, 255))
CELLS = 1 << 22  # (pixel row, block column) cells at a time
BLOCK_OPACITIES = (
    (FULL, "all visible"),
    (MASKED, "visible in a masked block"),
    (HIDDEN, "hidden in a masked block"),
)
SHARE_OPACITIES = ((FULL, "all blocks"), (0.7, "some"), (SOME, "few"))


def mask_pixels(plan: PlanData, side: int = SIDE, length: int | None = None, theme: Theme = LIGHT) -> Tensor:
    """Draw query positions down, key positions across, in the colour of the rank that computes: uint8
    [y, x, 3].

    Draws the first batch row and head, and the first ``length`` positions (None: all). A pixel of many blocks
    shows the share of them that are listed, never white if any are, and the mean colour of their owners.
    """
    near = length is not None or shows_blocks(plan.mask, side)
    shade = _pixel_shades(plan.mask, side, length) if near else _block_shares(plan.mask, side)
    owners = plan.owners[0]
    row = _cells(len(owners), len(shade))
    paint = torch.tensor([*colours(plan.world_size), FAINT], dtype=torch.float32)[owners]  # -1: no owner
    if near:
        colour = paint[_pixel_middles(length or plan.mask.q_len, side) // plan.mask.q_block]
    else:
        colour = torch.zeros(len(shade), 3).index_add_(0, row, paint)
        colour = colour / torch.bincount(row, minlength=len(shade))[:, None]
    paper = torch.tensor(theme.paper, dtype=torch.float32)
    pixels = paper + shade[..., None] * (colour[:, None] - paper)
    return pixels.round().to(torch.uint8)


def strip_pixels(plan: PlanData, theme: Theme = LIGHT) -> Tensor:
    """Draw ranks (or groups of neighbouring ranks) down, positions across, in the colour of the rank where it
    has the queries, paler where it has only some of a pixel's: uint8 [y, x, 3]."""
    share = owner_shares(plan, STRIPS, WIDE)
    first = -(-torch.arange(len(share)) * plan.world_size // len(share))
    paint = torch.tensor(colours(plan.world_size), dtype=torch.float32)[first, None]
    paper = torch.tensor(theme.paper, dtype=torch.float32)
    shade = torch.where(share > 0, SOME + (FULL - SOME) * share, 0)[..., None]
    return (paper + shade * (paint - paper)).round().to(torch.uint8)


def strips_height(world_size: int) -> int:
    """Return the pixels of all strips together: whole pixels for each, few enough for the picture."""
    lines = min(world_size, STRIPS)
    return lines * min(24, STRIPS // lines)


def shows_blocks(mask: Mask, side: int = SIDE) -> bool:
    """Return whether every block has a pixel of its own."""
    return max(mask.runs.shape[2:]) <= side


def legend(plan: PlanData) -> tuple[list[Colour], tuple[tuple[float, str], ...]]:
    """Return some ranks' colours, and the opacities of the mask with what each one means."""
    samples = colours(plan.world_size)[:: -(-plan.world_size // 4)]
    return samples, BLOCK_OPACITIES if shows_blocks(plan.mask) else SHARE_OPACITIES


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


def lens_length(plan: PlanData, whole: Tensor) -> int:
    """Return the number of first positions to enlarge in the corner of a thin mask's ``whole`` picture; 0 if
    single blocks are visible or the corner is not empty."""
    mask = plan.mask
    length = min(LENS // 2 * mask.q_block, mask.q_len, mask.kv_len)
    if shows_blocks(mask) or 4 * length > mask.q_len:
        return 0
    corner = whole[: len(whole) // 2, len(whole) // 2 :]
    return length if bool((corner == 255).all()) else 0


def reads_pixels(facts: Facts, side: int = READS, theme: Theme = LIGHT) -> Tensor:
    """Draw the bytes that each rank's queries (down) read of each rank's keys (across), darker for more:
    uint8 [y, x, 3]."""
    reads = facts.reads.double()
    own = torch.eye(len(reads), dtype=torch.bool)
    share = reads.masked_fill(own, 0)
    share = share / share.max().clamp(min=1)
    while len(share) > side:  # neighbouring ranks: their maximum
        short = -len(share) % 2
        share = torch.nn.functional.pad(share, (0, short, 0, short))
        share = share.unflatten(0, (-1, 2)).amax(1).unflatten(1, (-1, 2)).amax(2)
    pixels = tint(share, theme)
    if len(own) <= side:
        pixels[own] = torch.tensor(theme.own, dtype=torch.uint8)
    return pixels


def tint(share: Tensor, theme: Theme = LIGHT) -> Tensor:
    """Map shares to colours from paper (0) to deep blue (1), never paper above 0: uint8 [..., 3]."""
    share = torch.where(share > 0, 0.08 + 0.92 * share, 0)[..., None]
    paper, deep = torch.tensor(theme.paper).double(), torch.tensor(theme.deep).double()
    return (paper + share**0.8 * (deep - paper)).round().to(torch.uint8)


def to_image(pixels: Tensor, size: tuple[int, int] | None = None) -> Image.Image:
    """Convert pixels [y, x, 3] to a PIL image, resized to ``size`` (width, height)."""
    from PIL import Image

    high, wide, _ = pixels.shape
    image = Image.frombytes("RGB", (wide, high), bytes(pixels.flatten().tolist()))
    return image if size is None else image.resize(size, Image.Resampling.NEAREST)


def blend(colour: Colour, shade: float) -> Colour:
    """Blend a colour with white paper: opacity 0 is white, 1 the colour."""
    red, green, blue = (round(p + shade * (c - p)) for c, p in zip(colour, PAPER))
    return red, green, blue


def bar_columns(bars: Sequence[float]) -> list[tuple[float, float, int]]:
    """Return (left, width, rank) of the bars; with more ranks than pixels, of the busiest rank in each
    pixel."""
    step = WIDE / len(bars)
    if step >= 1:
        gap = min(0.2 * step, 8) if step > 3 else 0
        return [(rank * step + gap / 2, max(1, step - gap), rank) for rank in range(len(bars))]
    place = [int(rank * step) for rank in range(len(bars))]
    busiest: dict[int, int] = {}
    for rank, at in enumerate(place):
        if at not in busiest or bars[rank] > bars[busiest[at]]:
            busiest[at] = rank
    return [(at, 1, rank) for at, rank in busiest.items()]
