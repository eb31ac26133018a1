"""Drawings of a plan, as a picture and as an HTML page: mask, owners, work, traffic and costs.

Both are drawn from the same :class:`tritoncp.planning.report.Facts` and the same two rasters. Pillow is
imported when the first picture is made; the page contains all its data and fetches nothing.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tritoncp.masks.block_runs import Kind
from tritoncp.masks.mask import Mask
from tritoncp.planning.report import Colour, Facts, choice, colours, title

if TYPE_CHECKING:
    from PIL import Image

    from tritoncp.planning.plan import Plan

SIDE = 720  # pixels of the mask
LENS = 320  # pixels of the detail in its corner
READS = 300  # pixels of the table of key traffic
WIDE = 500  # pixels of the right-hand side
LEFT, TOP = 92, 118
PAPER, INK, GREY, FAINT = (255, 255, 255), (33, 37, 41), (108, 117, 125), (222, 226, 230)
OWN = (255, 236, 179)
FULL, MASKED, HIDDEN = 1.0, 0.55, 0.13  # opacity of the owner's colour
SOME = 0.4  # least opacity of a pixel that stands for many blocks, any of them listed
DEEP = (8, 48, 107)
CELLS = 1 << 22  # (pixel row, block column) cells at a time
BLOCKS = ((FULL, "all visible"), (MASKED, "visible in a masked block"), (HIDDEN, "hidden in a masked block"))
SHARES = ((FULL, "all blocks"), (0.7, "some"), (SOME, "few"))


# -- rasters -----------------------------------------------------------------------------------------


def mask_pixels(plan: Plan, side: int = SIDE, length: int | None = None) -> Tensor:
    """Draw query positions down, key positions across, in the colour of the rank that computes: uint8
    [y, x, 3].

    Draws the first batch row and head, and the first ``length`` positions (None: all). A pixel of many blocks
    shows the share of them that are listed, never white if any are, and the mean colour of their owners.
    """
    near = length is not None or _by_block(plan.mask, side)
    shade = _pixel_shades(plan.mask, side, length) if near else _block_shares(plan.mask, side)
    owners = plan.owners[0]
    row = _cells(len(owners), len(shade))
    paint = torch.tensor([*colours(plan.world_size), FAINT], dtype=torch.float32)[owners]  # -1: no owner
    if near:
        colour = paint[_pixel_middles(length or plan.mask.q_len, side) // plan.mask.q_block]
    else:
        colour = torch.zeros(len(shade), 3).index_add_(0, row, paint)
        colour = colour / torch.bincount(row, minlength=len(shade))[:, None]
    paper = torch.tensor(PAPER, dtype=torch.float32)
    pixels = paper + shade[..., None] * (colour[:, None] - paper)
    return pixels.round().to(torch.uint8)


def _by_block(mask: Mask, side: int = SIDE) -> bool:
    """Return whether every block has a pixel of its own."""
    return max(mask.runs.shape[2:]) <= side


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
    return (2 * torch.arange(pixels) + 1) * length // (2 * pixels)


def lens(plan: Plan, whole: Tensor) -> int:
    """Return the number of first positions to enlarge in the corner of a thin mask's ``whole`` picture; 0 if
    single blocks are visible or the corner is not empty."""
    mask = plan.mask
    length = min(LENS // 2 * mask.q_block, mask.q_len, mask.kv_len)
    if _by_block(mask) or 4 * length > mask.q_len:
        return 0
    corner = whole[: len(whole) // 2, len(whole) // 2 :]
    return length if bool((corner == 255).all()) else 0


def reads_pixels(facts: Facts, side: int = READS) -> Tensor:
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
    pixels = _tint(share)
    if len(own) <= side:
        pixels[own] = torch.tensor(OWN, dtype=torch.uint8)
    return pixels


def _tint(share: Tensor) -> Tensor:
    """Map shares to colours from white (0) to deep blue (1), never white above 0: uint8 [..., 3]."""
    share = torch.where(share > 0, 0.08 + 0.92 * share, 0)[..., None]
    white, deep = torch.tensor(PAPER).double(), torch.tensor(DEEP).double()
    return (white + share**0.8 * (deep - white)).round().to(torch.uint8)


def _image(pixels: Tensor, size: tuple[int, int] | None = None) -> Image.Image:
    from PIL import Image

    high, wide, _ = pixels.shape
    image = Image.frombytes("RGB", (wide, high), bytes(pixels.flatten().tolist()))
    return image if size is None else image.resize(size, Image.Resampling.NEAREST)


# -- the picture -------------------------------------------------------------------------------------


class Pen:
    """A Pillow drawing with the fonts of the picture."""

    def __init__(self, image: Image.Image) -> None:
        from PIL import ImageDraw, ImageFont

        self.image, self.draw = image, ImageDraw.Draw(image)
        self.fonts = {size: ImageFont.load_default(size) for size in (12, 13, 15, 17, 24)}

    def text(
        self, x: float, y: float, text: str, size: int = 13, fill: Colour = INK, anchor: str = "la"
    ) -> None:
        self.draw.text((x, y), text, fill, self.fonts[size], anchor=anchor)

    def box(
        self, x: float, y: float, wide: float, high: float, fill: Colour | None, edge: Any = None
    ) -> None:
        if wide > 0 and high > 0:
            self.draw.rectangle((x, y, x + wide - 1, y + high - 1), fill, edge)

    def line(self, x: float, y: float, to_x: float, to_y: float, fill: Colour = GREY) -> None:
        self.draw.line((x, y, to_x, to_y), fill)


def paint(facts: Facts) -> Image.Image:
    """Draw the picture, about 1500 x 960 pixels. Raises RuntimeError without Pillow."""
    try:
        from PIL import Image
    except ModuleNotFoundError as missing:
        raise RuntimeError("the picture of a plan needs Pillow: pip install 'tritoncp[plot]'") from missing

    image = Image.new("RGB", (LEFT + SIDE + 120 + WIDE + 60, TOP + SIDE + 124), PAPER)
    pen, right = Pen(image), LEFT + SIDE + 120
    _headline(pen, facts)
    _mask(pen, facts)
    _work(pen, facts, right, TOP)
    _reads(pen, facts, right, TOP + 236)
    _schedules(pen, facts, right, TOP + 612)
    return image


def headline(facts: Facts) -> tuple[str, str]:
    """Format the two title lines of a picture: the mask, and the plan's placement."""
    plan, mask = facts.plan, facts.plan.mask
    mask_name = "" if mask.mask_mod is None else f" · {name_of(mask)}"
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    listed = 100 - mask.sparsity()
    return (
        f"{tokens(mask.q_len)} tokens on {ranks}{mask_name}",
        f"order {plan.balancer} · schedule {plan.schedule} · blocks of {mask.q_block} x {mask.kv_block} · "
        f"{listed:.3g} % of all pairs lie in listed blocks · max/mean work {plan.imbalance:.3f}",
    )


def name_of(mask: Mask) -> str:
    """Return the name of the mask_mod, shortened to one line."""
    name = getattr(mask.mask_mod, "__name__", None) or repr(mask.mask_mod)
    name = name if name != "<lambda>" else "a lambda"
    return name if len(name) <= 72 else f"{name[:71]}…"


def tokens(count: int) -> str:
    """Format a number of tokens with a binary unit.

    >>> tokens(131072), tokens(8 << 20), tokens(1000)
    ('128K', '8M', '1000')
    """
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= size and count % (size // 4) == 0:
            return f"{count / size:g}{unit}"
    return str(count)


def _headline(pen: Pen, facts: Facts) -> None:
    first, second = headline(facts)
    pen.text(LEFT, 34, first, 24)
    pen.text(LEFT, 70, second, 15, GREY)


def _mask(pen: Pen, facts: Facts) -> None:
    plan, mask = facts.plan, facts.plan.mask
    whole = mask_pixels(plan)
    pen.image.paste(_image(whole, (SIDE, SIDE)), (LEFT, TOP))
    pen.box(LEFT - 1, TOP - 1, SIDE + 2, SIDE + 2, None, GREY)
    length = lens(plan, whole)
    if length:
        left, top = LEFT + SIDE - LENS - 24, TOP + 44
        pen.image.paste(_image(mask_pixels(plan, LENS, length)), (left, top))
        pen.box(left - 1, top - 1, LENS + 2, LENS + 2, None, GREY)
        pen.text(left, top - 8, f"the first {tokens(length)} tokens", 13, GREY, "ls")
    for part in range(5):
        at = SIDE * part / 4
        pen.line(LEFT - 6, TOP + at, LEFT - 1, TOP + at)
        pen.line(LEFT + at, TOP + SIDE, LEFT + at, TOP + SIDE + 5)
        pen.text(LEFT - 10, TOP + at, tokens(mask.q_len * part // 4), 13, GREY, "rm")
        pen.text(LEFT + at, TOP + SIDE + 9, tokens(mask.kv_len * part // 4), 13, GREY, "ma")
    pen.text(
        LEFT, TOP - 10, "queries (down) see keys (across); colour: the rank that computes", 13, GREY, "ls"
    )
    x, y = float(LEFT), TOP + SIDE + 46
    world = plan.world_size
    samples = colours(world)[:: -(-world // 4)]
    for shade, label in BLOCKS if _by_block(mask) else SHARES:
        for part, colour in enumerate(samples):
            pen.box(x + 20 * part, y, 20, 14, _blend(colour, shade))
        x += 20 * len(samples) + 8
        pen.text(x, y + 7, label, 13, INK, "lm")
        x += pen.draw.textlength(label, pen.fonts[13]) + 26


def _blend(colour: Colour, shade: float) -> Colour:
    red, green, blue = (round(p + shade * (c - p)) for c, p in zip(colour, PAPER))
    return red, green, blue


def _work(pen: Pen, facts: Facts, x: int, y: int) -> None:
    plan, high = facts.plan, 150
    bars, most = plan.work, max(plan.work) or 1
    mean = sum(bars) / len(bars)
    note = f"blocks: mean {mean:.5g} (dashed), most {most:.5g}"
    _title(pen, x, y, "Work of each rank", note)
    paint, base = colours(plan.world_size), y + 36 + high
    for left, wide, rank in _columns(bars):
        height = high * bars[rank] / most
        pen.box(x + left, base - height, wide, height, paint[rank])
    pen.line(x, base, x + WIDE, base)
    level = base - high * mean / most
    for start in range(0, WIDE, 8):
        pen.line(x + start, level, x + start + 4, level, INK)
    for rank in range(0, len(bars), -(-len(bars) // 16)):
        pen.text(x + WIDE * (rank + 0.5) / len(bars), base + 6, str(rank), 12, GREY, "ma")


def _columns(bars: Sequence[float]) -> list[tuple[float, float, int]]:
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


def _reads(pen: Pen, facts: Facts, x: int, y: int) -> None:
    _title(pen, x, y, "Whose keys each rank reads", "queries of a rank (down), keys of a rank (across)")
    world = facts.plan.world_size
    top, left = y + 40, x + 30
    pen.image.paste(_image(reads_pixels(facts), (READS, READS)), (left, top))
    pen.box(left - 1, top - 1, READS + 2, READS + 2, None, GREY)
    for rank in range(0, world, -(-world // 8)):
        at = READS * (rank + 0.5) / world
        pen.text(left - 6, top + at, str(rank), 12, GREY, "rm")
        pen.text(left + at, top + READS + 5, str(rank), 12, GREY, "ma")
    scale = left + READS + 34
    ramp = _tint(torch.linspace(1, 0, 160))[:, None].expand(-1, 16, -1)
    pen.image.paste(_image(ramp), (scale, top))
    pen.box(scale - 1, top - 1, 18, 162, None, GREY)
    most, total = most_and_total(facts)
    pen.text(scale + 24, top, f"{most} a pair", 13, INK, "lt")
    pen.text(scale + 24, top + 160, "nothing", 13, INK, "ls")
    if world <= READS:
        pen.box(scale, top + 182, 16, 14, OWN, GREY)
        pen.text(scale + 24, top + 189, "its own", 13, INK, "lm")
    pen.text(scale, top + 222, "remote keys and", 13, GREY)
    pen.text(scale, top + 239, "values, all ranks:", 13, GREY)
    pen.text(scale, top + 258, total, 15)


def most_and_total(facts: Facts) -> tuple[str, str]:
    """Format the bytes of remote keys and values: the largest of a pair of ranks, and the total."""
    remote = facts.reads.clone().fill_diagonal_(0)
    return size_of(int(remote.max())), size_of(int(remote.sum()))


def size_of(count: float) -> str:
    """Format a number of bytes with a binary unit.

    >>> size_of(1536), size_of(5 << 30), size_of(0)
    ('1.5 KiB', '5 GiB', '0 bytes')
    """
    for size, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:g} bytes"


def duration(seconds: float) -> str:
    """Format a time with its unit.

    >>> duration(0.00312), duration(3.05), duration(2e-5)
    ('3.12 ms', '3.05 s', '20 us')
    """
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _schedules(pen: Pen, facts: Facts, x: int, y: int) -> None:
    shape = facts.shape
    layer = f"{shape.batch} x {shape.heads}:{shape.kv_heads} heads of {shape.head_dim}, {facts.hardware.name}"
    _title(pen, x, y, "What each schedule would cost a layer", "")
    pen.text(x, y + 22, f"predicted for the slowest rank; {layer}", 13, GREY)
    if not facts.costs:
        pen.text(x, y + 54, "one rank: nothing travels", 13)
        return
    most = max(estimate.total for estimate in facts.costs)
    for row, estimate in enumerate(facts.costs):
        top, chosen = y + 50 + 40 * row, estimate.schedule == facts.plan.schedule.partition("+")[0]
        paint = DEEP if chosen else GREY
        pen.text(x, top + 8, estimate.schedule, 15, INK if chosen else GREY, "lm")
        forward, backward = (250 * part / most for part in (estimate.forward, estimate.backward))
        pen.box(x + 90, top, max(1, forward), 17, paint)
        pen.box(x + 90 + forward, top, backward, 17, _blend(paint, 0.55))
        pen.text(x + 98 + forward + backward, top + 8, duration(estimate.total), 13, INK, "lm")
        sent = facts.sent[estimate.schedule]
        pen.text(
            x + 90,
            top + 20,
            f"{size_of(sum(sent) / len(sent))} sent by a rank (most {size_of(max(sent))}), "
            f"{size_of(estimate.memory)} of memory more",
            12,
            GREY,
        )
    pen.text(x, y + 50 + 40 * len(facts.costs) + 4, _shorten(choice(facts)), 13)


def _shorten(text: str) -> str:
    return text if len(text) <= 84 else f"{text[:83]}…"


def _title(pen: Pen, x: float, y: float, text: str, note: str) -> None:
    pen.text(x, y, text, 17)
    pen.text(x + pen.draw.textlength(text, pen.fonts[17]) + 12, y + 3, note, 13, GREY)


# -- the page ----------------------------------------------------------------------------------------

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #212529 }
body { margin: 2rem auto; max-width: 1320px; padding: 0 1.5rem }
h1 { font-size: 1.6rem; margin: 0 } h2 { font-size: 1.1rem; margin: 0 0 .3rem }
p { margin: .2rem 0; color: #6c757d } section { margin-bottom: 1.6rem }
main { display: grid; grid-template-columns: minmax(420px, 1.3fr) minmax(380px, 1fr); gap: 2rem }
main { margin-top: 1.2rem } img { image-rendering: pixelated; width: 100%; border: 1px solid #adb5bd }
.reads { width: 300px } svg { width: 100%; height: auto; display: block } figure { margin: 0 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums } th { font-weight: 600 }
th, td { text-align: right; padding: .28rem .5rem; border-bottom: 1px solid #dee2e6 }
th:first-child, td:first-child { text-align: left } tr.taken { background: #e7f1ff; font-weight: 600 }
.key { white-space: nowrap; margin-right: 1.2rem }
.key i { display: inline-block; width: 14px; height: 12px; margin-right: 1px }
@media (max-width: 900px) { main { grid-template-columns: 1fr } }
@media print { main { display: block } }
"""


def html(facts: Facts) -> str:
    """Return the page: one file that fetches nothing. Bars show their figures under the mouse."""
    first, second = map(escape, headline(facts))
    plan = facts.plan
    most, total = most_and_total(facts)
    whole = mask_pixels(plan)
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{first}</title><style>{STYLE}</style><h1>{first}</h1><p>{second}</p><main><div>",
        "<section><h2>Who sees whom, and who computes it</h2><figure>",
        f"<img alt='queries down, keys across' src='{_data(whole)}'></figure>",
        f"<p>Queries (down, 0 to {tokens(plan.mask.q_len)}) see keys (across, 0 to "
        f"{tokens(plan.mask.kv_len)}); the colour is the rank's that computes.</p>",
        f"<p>{_keys(plan)}</p>{_detail(plan, whole)}</section></div><div>",
        f"<section><h2>Work of each rank</h2><p>Blocks; the most is {plan.imbalance:.3f} times the mean.</p>"
        f"{_bars(plan.work, colours(plan.world_size))}</section>",
        "<section><h2>Whose keys each rank reads</h2><img class=reads alt='readers down, owners across' "
        f"src='{_data(reads_pixels(facts))}'><p>Queries of a rank (down), keys of a rank (across); at most "
        f"{most} a pair, all ranks together {total} of others' keys and values. Its own: light "
        "amber.</p></section></div></main>",
        f"<section><h2>What each schedule would cost a layer</h2>{_costs(facts)}</section>",
        f"<p>{escape(title(plan))}</p></html>",
    ]
    return "".join(parts) + "\n"


def _detail(plan: Plan, whole: Tensor) -> str:
    length = lens(plan, whole)
    if not length:
        return ""
    return (
        f"<h2>The first {tokens(length)} tokens</h2><img class=reads alt='a detail' "
        f"src='{_data(mask_pixels(plan, LENS, length))}'>"
    )


def _data(pixels: Tensor) -> str:
    png = io.BytesIO()
    _image(pixels).save(png, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"


def _keys(plan: Plan) -> str:
    paint = colours(plan.world_size)
    samples = paint[:: -(-len(paint) // 4)]
    labels = []
    for shade, name in BLOCKS if _by_block(plan.mask) else SHARES:
        boxes = "".join(f"<i style='background:{_css(_blend(colour, shade))}'></i>" for colour in samples)
        labels.append(f"<span class=key>{boxes} {name}</span>")
    return "".join(labels)


def _css(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _bars(work: Sequence[float], paint: Sequence[Colour]) -> str:
    high, most = 150, max(work) or 1
    bars = [
        f"<rect x='{left:.2f}' y='{high - high * work[rank] / most:.2f}' width='{wide:.2f}' "
        f"height='{high * work[rank] / most:.2f}' fill='{_css(paint[rank])}'>"
        f"<title>rank {rank}: {work[rank]:g} blocks</title></rect>"
        for left, wide, rank in _columns(work)
    ]
    mean = high - high * sum(work) / len(work) / most
    step = -(-len(work) // 16)
    names = [
        f"<text x='{WIDE * (rank + 0.5) / len(work):.1f}' y='{high + 15}'>{rank}</text>"
        for rank in range(0, len(work), step)
    ]
    return (
        f"<svg viewBox='0 0 {WIDE} {high + 20}' role=img aria-label='work of each rank'>{''.join(bars)}<path "
        f"d='M0 {mean:.2f}H{WIDE}' stroke='#212529' stroke-dasharray='4'><title>the mean</title></path><path "
        f"d='M0 {high}H{WIDE}' stroke='#6c757d'/><g font-size='11' text-anchor='middle' "
        f"fill='#6c757d'>{''.join(names)}</g></svg>"
    )


def _costs(facts: Facts) -> str:
    shape, hardware = facts.shape, facts.hardware
    if not facts.costs:
        return "<p>One rank: nothing travels.</p>"
    assumptions = (
        f"Batch {shape.batch}, {shape.heads}:{shape.kv_heads} heads of {shape.head_dim}, "
        f"{shape.itemsize} bytes an element, on {hardware.name} ({hardware.source}); "
        "predicted for the slowest rank, not measured."
    )
    names = ("schedule", "forward", "backward", "sent by a rank, mean", "most", "memory more")
    head = "".join(f"<th>{name}" for name in names)
    rows = []
    for estimate in facts.costs:
        sent = facts.sent[estimate.schedule]
        cells = (
            estimate.schedule,
            duration(estimate.forward),
            duration(estimate.backward),
            *map(size_of, (sum(sent) / len(sent), max(sent), estimate.memory)),
        )
        row_class = " class=taken" if estimate.schedule == facts.plan.schedule.partition("+")[0] else ""
        rows.append(f"<tr{row_class}>" + "".join(f"<td>{cell}" for cell in cells))
    return (
        f"<p>{escape(assumptions)}</p><table><tr>{head}{''.join(rows)}</table><p>{escape(choice(facts))}</p>"
    )
