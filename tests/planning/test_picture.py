"""Tests of the picture and the page of a plan, at every size."""

import re
from html.parser import HTMLParser
from io import BytesIO
from itertools import product

import pytest
import torch
from PIL import Image

from tritoncp.masks.closed_forms import causal, document, sliding_window
from tritoncp.masks.mask import create_block_mask, full_mask
from tritoncp.masks.mask_mod import and_masks
from tritoncp.planning import units
from tritoncp.planning.build import build
from tritoncp.planning.drawing import page as html_page
from tritoncp.planning.drawing import picture, rasters
from tritoncp.planning.drawing.rasters import FULL, HIDDEN, MASKED, PAPER, SIDE, SOME
from tritoncp.planning.explanation import format_meaning
from tritoncp.planning.plan import Plan
from tritoncp.planning.report import Facts, colours


def document_plan(size: int, world_size: int, balancer: str | None = "ptrr", block: int = 128) -> Plan:
    """Build the plan of a causal mask of two documents, the first a quarter of the tokens."""
    mod = and_masks(causal(), document(lengths=[size // 4, size - size // 4]))
    return build(create_block_mask(mod, 1, 1, size, size, BLOCK_SIZE=block), world_size, balancer=balancer)


def blend(colour: tuple[int, int, int], shade: float) -> torch.Tensor:
    """Blend a colour with white paper by the opacity ``shade``: int64 [3]."""
    return torch.tensor([round(p + shade * (c - p)) for c, p in zip(colour, PAPER)])


@pytest.mark.parametrize("balancer", ["ptrr", "contiguous", None])
@pytest.mark.parametrize("size", [1024, 1000])
def test_every_pixel_has_the_colour_of_its_owner_and_the_strength_of_its_pair(size, balancer) -> None:
    plan, side = document_plan(size, 4, balancer), 64
    pixels, dense = rasters.mask_pixels(plan, side).int(), plan.mask.to_dense()[0, 0]
    kinds, paint = plan.mask.runs.to_kinds()[0, 0], colours(4)
    holder = torch.full((size,), -1)
    for rank in range(4):
        positions = plan.q.positions(rank)[0]
        holder[positions[positions >= 0]] = rank
    at = [int((i + 0.5) * size / side) for i in range(side)]
    for y, q in enumerate(at):
        owner = int(holder[q // 128 * 128])
        for x, kv in enumerate(at):
            kind = int(kinds[q // 128, kv // 128])
            shade = {3: 0.0, 1: FULL, 2: FULL}.get(kind, MASKED if dense[q, kv] else HIDDEN)
            assert (pixels[y, x] - blend(paint[owner], shade)).abs().max() <= 1, (y, x)


def test_where_a_pixel_is_many_blocks_it_shows_their_share() -> None:
    plan, side = document_plan(4096, 2, "contiguous", block=16), 32  # 8 x 8 blocks a pixel
    pixels = rasters.mask_pixels(plan, side).int()
    listed = (plan.mask.runs.to_kinds()[0, 0] != 3).float().view(side, 8, side, 8).mean((1, 3))
    strength = torch.where(listed > 0, SOME + (1 - SOME) * listed, 0)
    for y in range(side):
        for x in range(side):
            want = blend(colours(2)[y // (side // 2)], float(strength[y, x]))
            assert (pixels[y, x] - want).abs().max() <= 1, (y, x)


def test_a_thin_window_over_a_long_sequence_is_still_seen() -> None:
    size = 1 << 18
    plan = build(create_block_mask(sliding_window(10), 1, 1, size, size), 8, balancer="contiguous")
    pixels = rasters.mask_pixels(plan, 256)
    assert bool((pixels.diagonal().T != 255).any(1).all()) and bool((pixels[0, -1] == 255).all())


def test_a_thin_mask_has_a_detail_of_its_first_tokens() -> None:
    size = 1 << 17
    packed_long = and_masks(causal(), document(lengths=[1000] * (size // 1000) + [size % 1000]))
    plan = build(create_block_mask(packed_long, 1, 1, size, size), 8)
    length = rasters.lens_length(plan, rasters.mask_pixels(plan))
    assert length == rasters.LENS // 2 * 128
    pixels, kinds = rasters.mask_pixels(plan, 64, 2048).int(), plan.mask.runs.to_kinds()[0, 0]
    at = [int((i + 0.5) * 2048 / 64) for i in range(64)]
    for (y, q), (x, kv) in product(enumerate(at), enumerate(at)):
        visible = kv <= q and kv // 1000 == q // 1000
        shade = {3: 0.0, 1: FULL}.get(int(kinds[q // 128, kv // 128]), MASKED if visible else HIDDEN)
        want = blend(colours(8)[int(plan.owners[0, q // 128])], shade)
        assert (pixels[y, x] - want).abs().max() <= 1, (q, kv)
    assert html_page.html(Facts.of(plan)).count("data:image/png") == 8  # four pictures, light and dark
    single_blocks, full_corner = document_plan(4096, 4), build(full_mask(size, size), 8)
    for other in (single_blocks, full_corner):
        assert rasters.lens_length(other, rasters.mask_pixels(other)) == 0


def test_several_heads_and_ragged_shapes_are_drawn() -> None:
    plan = build(full_mask(1000, 300, B=2, H=3, block=(64, 32)), 3)
    assert rasters.mask_pixels(plan, 40).shape == (40, 40, 3) and rasters.mask_pixels(plan, 8).shape == (
        8,
        8,
        3,
    )
    assert plan.plot().size == document_plan(1024, 3).plot().size


@pytest.mark.parametrize("world_size", [1, 4, 700])
def test_bars_are_the_work(world_size: int) -> None:
    work = [float(rank % 7 + 1) for rank in range(world_size)]
    drawn = rasters.bar_columns(work)
    assert all(left >= 0 and left + wide <= rasters.WIDE + 1e-6 for left, wide, _ in drawn)
    bars = {rank for _, _, rank in drawn}
    assert bars == set(range(world_size)) or max(work) == max(work[rank] for rank in bars)


def test_reads_are_darker_for_more_and_its_own_apart() -> None:
    facts = Facts.of(document_plan(4096, 4), heads=4, kv_heads=2)
    pixels, reads = rasters.reads_pixels(facts), facts.reads
    assert pixels.shape == (4, 4, 3) and tuple(pixels[1, 1].tolist()) == rasters.OWN
    remote = [(int(reads[r, s]), int(pixels[r, s].int().sum())) for r in range(4) for s in range(4) if r != s]
    ordered = sorted(remote)
    assert [dark for _, dark in ordered] == sorted((dark for _, dark in remote), reverse=True)
    assert rasters.reads_pixels(facts, side=2).shape == (2, 2, 3)


def test_plot_returns_the_saved_picture(tmp_path) -> None:
    plan = document_plan(1024, 4)
    image = plan.plot(tmp_path / "new" / "plan.png", heads=4, kv_heads=2)
    assert Image.open(tmp_path / "new" / "plan.png").tobytes() == image.tobytes()
    assert image.size[0] > SIDE and image._repr_png_(), "a notebook shows it"
    with pytest.raises(ValueError, match=r"'plan.pdf': the picture is a \.png, the page an \.html"):
        plan.plot("plan.pdf")


class Page(HTMLParser):
    """Collect every attribute of a page that could fetch a resource, and its visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.visible_text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        assert tag not in ("script", "link", "iframe")
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_data(self, data) -> None:
        self.visible_text += data


def test_the_page_is_self_contained(tmp_path) -> None:
    plan = document_plan(4096, 4)
    plan.plot(tmp_path / "plan.html", heads=16, kv_heads=4)
    text = (tmp_path / "plan.html").read_text()
    page = Page(text)
    assert len(page.links) == 6 and all(link.startswith("data:image/png;base64,") for link in page.links)
    assert "http" not in re.sub(r"base64,[\w+/=]*", "", text) and "url(" not in text
    for rank, blocks in enumerate(plan.work):
        assert f"<title>rank {rank}: {blocks:g} blocks</title>" in text
    facts = Facts.of(plan, heads=16, kv_heads=4)
    for estimate in facts.costs:
        time = units.format_seconds(estimate.forward)
        assert estimate.schedule in page.visible_text and time in page.visible_text
    assert f"{plan.imbalance:.3f}" in page.visible_text


def test_the_strips_show_each_ranks_queries() -> None:
    plan = document_plan(4096, 4, "head_tail")
    pixels = rasters.strip_pixels(plan).int()
    owners, paint = plan.owners[0], colours(4)
    assert pixels.shape == (4, len(owners), 3)
    for rank, block in product(range(4), range(len(owners))):
        want = paint[rank] if int(owners[block]) == rank else PAPER
        assert tuple(pixels[rank, block].tolist()) == want
    assert rasters.strips_height(64) == 256 and rasters.strips_height(4096) == rasters.STRIPS


def test_the_page_has_legends_axes_and_plain_words() -> None:
    facts = Facts.of(document_plan(65536, 64, block=256))
    text = html_page.html(facts)
    words = Page(text).visible_text
    for part in ("forward", "backward", "queries, by position", "16K", "rank that keeps the keys"):
        assert part in words, part
    sentences = format_meaning(facts.plan, facts.metrics, facts.most_sent)
    assert all(line.partition(": ")[2] in words for line in sentences)
    assert "prefers-color-scheme: dark" in text


def test_bars_shorter_than_a_pixel_are_drawn() -> None:
    pen = picture.Pen(Image.new("RGB", (8, 8), PAPER))
    pen.box(2, 3, 0.2, 0.9, (0, 0, 0))
    assert [pen.image.getpixel(at) for at in ((2, 3), (1, 3), (3, 3))] == [(0, 0, 0), PAPER, PAPER]
    document_plan(128, 2).plot()  # one rank has the only block, and the other schedules cost next to nothing


def test_one_rank_has_a_picture_and_a_page() -> None:
    facts = Facts.of(document_plan(1024, 1))
    page = BytesIO()
    picture.paint(facts).save(page, "PNG")
    assert "nothing travels" in html_page.html(facts) and page.tell() > 1000


def test_without_pillow_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(RuntimeError, match="needs Pillow: pip install pillow"):
        document_plan(1024, 2).plot()
