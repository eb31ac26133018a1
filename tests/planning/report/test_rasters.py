"""Tests of the rasters of a plan: every pixel has the colour of an owner and the opacity of its blocks."""

from itertools import product

import pytest
import torch

from tritoncp.masks.closed_forms import causal, document, sliding_window
from tritoncp.masks.mask import create_block_mask
from tritoncp.masks.mask_mod import and_masks
from tritoncp.planning.build import build
from tritoncp.planning.plan import Plan
from tritoncp.planning.report import rasters
from tritoncp.planning.report.facts import Facts
from tritoncp.planning.report.rasters import FULL, MASKED, SOME, colours


def document_plan(size: int, world_size: int, balancer: str | None = "ptrr", block: int = 128) -> Plan:
    """Build the plan of a causal mask of two documents, the first a quarter of the tokens."""
    mod = and_masks(causal(), document(lengths=[size // 4, size - size // 4]))
    return build(create_block_mask(mod, 1, 1, size, size, BLOCK_SIZE=block), world_size, balancer=balancer)


def is_painted(pixel: torch.Tensor, colour: tuple[int, int, int], opacity: float) -> bool:
    """Return whether a pixel has this opacity and, unless that is 0, this colour."""
    want = torch.tensor([*colour, round(255 * opacity)])
    return bool((pixel.int() - want)[0 if opacity else 3 :].abs().max() <= 1)


@pytest.mark.parametrize("balancer", ["ptrr", "contiguous", None])
def test_a_block_has_the_colour_of_its_owner_and_the_opacity_of_its_kind(balancer: str | None) -> None:
    plan = document_plan(4096, 4, balancer)
    pixels, kinds, paint = rasters.mask_pixels(plan), plan.mask.runs.to_kinds()[0, 0], colours(4)
    assert pixels.shape == (32, 32, 4)
    for y, x in product(range(32), range(32)):
        shade = {0: MASKED, 1: FULL, 2: FULL, 3: 0.0}[int(kinds[y, x])]
        assert is_painted(pixels[y, x], paint[int(plan.owners[0, y])], shade), (y, x)


def test_where_a_pixel_is_many_blocks_it_shows_their_share() -> None:
    plan, side = document_plan(4096, 2, "contiguous", block=16), 32  # 8 x 8 blocks a pixel
    pixels = rasters.mask_pixels(plan, side)
    opacity = torch.tensor([MASKED, FULL, FULL, 0.0])[plan.mask.runs.to_kinds()[0, 0].long()]
    share = opacity.view(side, 8, side, 8).mean((1, 3))
    strength = torch.where(share > 0, share.clamp(min=SOME), 0)
    for y in range(side):
        for x in range(side):
            assert is_painted(pixels[y, x], colours(2)[y // (side // 2)], float(strength[y, x])), (y, x)


def test_a_thin_window_over_a_long_sequence_is_still_seen() -> None:
    size = 1 << 18
    plan = build(create_block_mask(sliding_window(10), 1, 1, size, size), 8, balancer="contiguous")
    pixels = rasters.mask_pixels(plan, 256)
    assert bool((pixels[..., 3].diagonal() > 0).all()) and int(pixels[0, -1, 3]) == 0


def test_reads_are_stronger_for_more_and_its_own_apart() -> None:
    facts = Facts.of(document_plan(4096, 4), heads=4, kv_heads=2)
    pixels, reads = rasters.reads_pixels(facts), facts.reads
    assert pixels.shape == (4, 4, 4) and tuple(pixels[1, 1].tolist()) == (*rasters.OWN, 255)
    remote = sorted((int(reads[r, s]), int(pixels[r, s, 3])) for r in range(4) for s in range(4) if r != s)
    assert [opacity for _, opacity in remote] == sorted(opacity for _, opacity in remote)


def test_the_strips_show_each_ranks_queries() -> None:
    plan = document_plan(4096, 4, "head_tail")
    pixels = rasters.strip_pixels(plan)
    owners, paint = plan.owners[0], colours(4)
    assert pixels.shape == (4, len(owners), 4)
    for rank, block in product(range(4), range(len(owners))):
        assert is_painted(pixels[rank, block], paint[rank], float(int(owners[block]) == rank))


def test_every_rank_has_a_colour_of_its_own() -> None:
    for world_size in (1, 8, 9, 64):
        assert len(set(colours(world_size))) == world_size
