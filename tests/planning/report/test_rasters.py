"""Tests of the rasters of a plan: every pixel has the colour of an owner and the opacity of its blocks."""

import pytest
import torch

from tritoncp.masks.closed_forms import causal, document, sliding_window
from tritoncp.masks.mask import create_block_mask
from tritoncp.masks.mask_mod import and_masks
from tritoncp.planning.build import build
from tritoncp.planning.plan import Plan
from tritoncp.planning.report import rasters
from tritoncp.planning.report.rasters import FULL, MASKED, SOME, colours


def document_plan(size: int, world_size: int, balancer: str | None = "ptrr", block: int = 128) -> Plan:
    """Build the plan of a causal mask of two documents, the first a quarter of the tokens."""
    mod = and_masks(causal(), document(lengths=[size // 4, size - size // 4]))
    return build(create_block_mask(mod, 1, 1, size, size, BLOCK_SIZE=block), world_size, balancer=balancer)


@pytest.mark.parametrize("balancer", ["ptrr", "contiguous", None])
@pytest.mark.parametrize("block", [128, 16])  # a block a pixel, and 8 x 8
def test_a_pixel_has_the_owners_colour_and_the_share_of_its_blocks(balancer: str | None, block: int) -> None:
    plan, side = document_plan(4096, 4, balancer, block), 32
    pixels, paint = rasters.mask_pixels(plan, side), torch.tensor(colours(4)).float()
    opacity = torch.tensor([MASKED, FULL, FULL, 0.0])[plan.mask.runs.to_kinds()[0, 0].long()]
    share = opacity.view(side, 128 // block, side, 128 // block).mean((1, 3))
    strength = torch.where(share > 0, share.clamp(min=SOME), 0)
    colour = paint[plan.owners[0]].view(side, -1, 3).mean(1)[:, None].expand(-1, side, -1)
    assert (pixels[..., 3] - 255 * strength).abs().max() <= 1
    assert (pixels[..., :3] - colour)[strength > 0].abs().max() <= 1


def test_a_thin_window_over_a_long_sequence_is_still_seen() -> None:
    size = 1 << 18
    plan = build(create_block_mask(sliding_window(10), 1, 1, size, size), 8, balancer="contiguous")
    pixels = rasters.mask_pixels(plan, 256)
    assert bool((pixels[..., 3].diagonal() > 0).all()) and int(pixels[0, -1, 3]) == 0


def test_the_strips_show_each_ranks_queries() -> None:
    plan = document_plan(4096, 4, "head_tail")
    pixels = rasters.strip_pixels(plan)
    owns = plan.owners[0] == torch.arange(4)[:, None]
    assert torch.equal(pixels[..., 3], 255 * owns)
    assert torch.equal(pixels[..., :3], torch.tensor(colours(4))[:, None].expand(-1, owns.shape[1], -1))
