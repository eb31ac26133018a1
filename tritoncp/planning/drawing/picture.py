"""The picture of a plan, drawn with Pillow: mask, owners, work, traffic and costs.

Pillow is imported when the first picture is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tritoncp.planning.drawing.rasters import (
    DEEP,
    LENS,
    OWN,
    PAPER,
    READS,
    SIDE,
    WIDE,
    bar_columns,
    blend,
    legend,
    lens_length,
    mask_pixels,
    reads_pixels,
    strip_pixels,
    strips_height,
    tint,
    to_image,
)
from tritoncp.planning.explanation import format_meaning
from tritoncp.planning.report import (
    Colour,
    Facts,
    colours,
    format_choice,
    format_headline,
    format_remote_bytes,
)
from tritoncp.planning.units import axis_ticks, format_bytes, format_seconds, format_tokens, shorten

if TYPE_CHECKING:
    from PIL import Image

LEFT, TOP = 104, 118  # pixels left of the mask and above it
BAND = 4  # least pixels of a rank's band in the mask for its number to stand beside it
LIGHTER = 0.55  # opacity of the backward part of a bar
INK, GREY = (33, 37, 41), (108, 117, 125)


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

    def text_upwards(self, x: float, y: float, text: str, size: int = 13, fill: Colour = GREY) -> None:
        """Draw a text that runs upwards, its middle at (x, y)."""
        from PIL import Image

        _, _, right, bottom = map(int, self.fonts[size].getbbox(text))
        glyphs = Image.new("L", (right, bottom + 2))
        type(self)(glyphs).draw.text((0, 0), text, 255, self.fonts[size])
        glyphs = glyphs.rotate(90, expand=True)
        place = int(x - glyphs.width / 2), int(y - glyphs.height / 2)
        self.image.paste(fill, (*place, place[0] + glyphs.width, place[1] + glyphs.height), glyphs)

    def wrap(self, text: str, wide: float, size: int = 13) -> list[str]:
        """Break a text into lines of at most ``wide`` pixels."""
        lines = [""]
        for word in text.split():
            longer = f"{lines[-1]} {word}".strip()
            if self.draw.textlength(longer, self.fonts[size]) <= wide or not lines[-1]:
                lines[-1] = longer
            else:
                lines.append(word)
        return lines

    def box(
        self, x: float, y: float, wide: float, high: float, fill: Colour | None, edge: Any = None
    ) -> None:
        """Draw a rectangle; it covers at least a pixel, unless its size is 0."""
        if wide > 0 and high > 0:
            self.draw.rectangle((x, y, x + max(wide, 1) - 1, y + max(high, 1) - 1), fill, edge)

    def line(self, x: float, y: float, to_x: float, to_y: float, fill: Colour = GREY) -> None:
        self.draw.line((x, y, to_x, to_y), fill)


def paint(facts: Facts) -> Image.Image:
    """Draw the picture, about 1500 x 1300 pixels. Raises RuntimeError without Pillow."""
    try:
        from PIL import Image
    except ModuleNotFoundError as missing:
        raise RuntimeError("the picture of a plan needs Pillow: pip install pillow") from missing

    work = TOP + strips_height(facts.plan.world_size) + 110  # top of the bars of work
    right = LEFT + SIDE + 128
    image = Image.new("RGB", (right + WIDE + 60, work + 912), PAPER)
    pen = Pen(image)
    first, second = format_headline(facts)
    pen.text(LEFT, 34, first, 24)
    pen.text(LEFT, 70, second, 15, GREY)
    _draw_mask(pen, facts)
    _draw_meaning(pen, facts, LEFT, TOP + SIDE + 118)
    _draw_strips(pen, facts, right, TOP)
    _draw_work(pen, facts, right, work)
    _draw_reads(pen, facts, right, work + 256)
    _draw_schedules(pen, facts, right, work + 646)
    return image


def _draw_mask(pen: Pen, facts: Facts) -> None:
    """Draw the mask with its scales and the legend, and a detail of a thin mask in the corner."""
    plan, mask = facts.plan, facts.plan.mask
    whole = mask_pixels(plan)
    pen.image.paste(to_image(whole, (SIDE, SIDE)), (LEFT, TOP))
    pen.box(LEFT - 1, TOP - 1, SIDE + 2, SIDE + 2, None, GREY)
    length = lens_length(plan, whole)
    if length:
        left, top = LEFT + SIDE - LENS - 24, TOP + 44
        pen.image.paste(to_image(mask_pixels(plan, LENS, length)), (left, top))
        pen.box(left - 1, top - 1, LENS + 2, LENS + 2, None, GREY)
        pen.text(left, top - 8, f"the first {format_tokens(length)} tokens", 13, GREY, "ls")
    for position, label in axis_ticks(mask.q_len):
        at = TOP + SIDE * position / mask.q_len
        pen.line(LEFT - 6, at, LEFT - 1, at)
        pen.text(LEFT - 10, at, label, 13, GREY, "rm")
    for position, label in axis_ticks(mask.kv_len):
        at = LEFT + SIDE * position / mask.kv_len
        pen.line(at, TOP + SIDE, at, TOP + SIDE + 5)
        pen.text(at, TOP + SIDE + 9, label, 13, GREY, "ma")
    note = "a point: the query of this row sees the key of this column; its colour: the rank that computes it"
    pen.text(LEFT, TOP - 10, note, 13, GREY, "ls")
    pen.text(LEFT + SIDE / 2, TOP + SIDE + 28, "keys, by position in the sequence (tokens)", 13, GREY, "ma")
    pen.text_upwards(22, TOP + SIDE / 2, "queries, by position in the sequence (tokens)")
    _label_bands(pen, facts)
    samples, opacities = legend(plan)
    x, y = float(LEFT), TOP + SIDE + 64
    for opacity, label in opacities:
        for part, colour in enumerate(samples):
            pen.box(x + 20 * part, y, 20, 14, blend(colour, opacity))
        x += 20 * len(samples) + 8
        pen.text(x, y + 7, label, 13, INK, "lm")
        x += pen.draw.textlength(label, pen.fonts[13]) + 26


def _label_bands(pen: Pen, facts: Facts) -> None:
    """Write the rank beside the rows of the mask, wherever a rank has a band of them high enough to see."""
    owners, last = facts.plan.owners[0], TOP - 14.0
    scale = SIDE / max(1, len(owners))
    ranks, counts = owners.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0) * scale
    if int(counts[counts * scale >= BAND].sum()) < len(owners) / 2:
        return  # most rows lie in bands that are too thin: the strips show their ranks
    pen.text(LEFT + SIDE + 8, TOP - 10, "rank", 12, GREY, "ls")
    for rank, count, end in zip(ranks.tolist(), counts.tolist(), ends.tolist()):
        at = TOP + end - count * scale / 2
        if rank >= 0 and count * scale >= BAND and at - last >= 13:
            pen.text(LEFT + SIDE + 8, at, str(rank), 12, colours(facts.plan.world_size)[rank], "lm")
            last = at


def _draw_meaning(pen: Pen, facts: Facts, x: int, y: int) -> None:
    """Write what the figures mean in plain words."""
    _draw_title(pen, x, y, "What this means", "")
    y += 30
    for sentence in format_meaning(facts.plan, facts.metrics, facts.most_sent):
        subject, _, text = sentence.partition(": ")
        pen.text(x, y, subject, 13, GREY)
        for line in pen.wrap(text, SIDE - 140):
            pen.text(x + 140, y, line, 13)
            y += 19
        y += 5


def _draw_strips(pen: Pen, facts: Facts, x: int, y: int) -> None:
    """Draw a strip for each rank that shows which queries it computes."""
    plan, top = facts.plan, y + 36
    world, high = plan.world_size, strips_height(plan.world_size)
    _draw_title(pen, x, y, "Who computes which queries", "a line for each rank")
    pen.image.paste(to_image(strip_pixels(plan), (WIDE, high)), (x, top))
    pen.box(x - 1, top - 1, WIDE + 2, high + 2, None, GREY)
    for rank in range(0, world, -(-world // 16)):
        at = top + high * (rank + 0.5) / world
        pen.text(x - 6, at, str(rank), 12, GREY, "rm")
    for position, label in axis_ticks(plan.mask.q_len):
        at = x + WIDE * position / plan.mask.q_len
        pen.line(at, top + high, at, top + high + 4)
        pen.text(at, top + high + 7, label, 12, GREY, "ma")
    pen.text(x + WIDE / 2, top + high + 24, "queries, by position in the sequence (tokens)", 12, GREY, "ma")
    pen.text_upwards(x - 36, top + high / 2, "rank", 12)


def _draw_work(pen: Pen, facts: Facts, x: int, y: int) -> None:
    """Draw a bar of work for each rank, and the mean as a dashed line."""
    plan, high = facts.plan, 150
    bars, most = plan.work, max(plan.work) or 1
    mean = sum(bars) / len(bars)
    note = f"blocks: mean {mean:.5g} (dashed), most {most:.5g}"
    _draw_title(pen, x, y, "Work of each rank", note)
    paint, base = colours(plan.world_size), y + 36 + high
    for left, wide, rank in bar_columns(bars):
        height = high * bars[rank] / most
        pen.box(x + left, base - height, wide, height, paint[rank])
    pen.line(x, base, x + WIDE, base)
    level = base - high * mean / most
    for start in range(0, WIDE, 8):
        pen.line(x + start, level, x + start + 4, level, INK)
    for rank in range(0, len(bars), -(-len(bars) // 16)):
        pen.text(x + WIDE * (rank + 0.5) / len(bars), base + 6, str(rank), 12, GREY, "ma")
    pen.text(x + WIDE / 2, base + 23, "rank", 12, GREY, "ma")
    pen.text(x - 6, base - high, f"{most:.5g}", 12, GREY, "rm")
    pen.text(x - 6, base, "0", 12, GREY, "rm")


def _draw_reads(pen: Pen, facts: Facts, x: int, y: int) -> None:
    """Draw the table of key traffic with its colour scale and the totals."""
    _draw_title(pen, x, y, "Whose keys each rank reads", "forward; darker: more bytes of keys and values")
    world = facts.plan.world_size
    top, left = y + 40, x + 30
    pen.image.paste(to_image(reads_pixels(facts), (READS, READS)), (left, top))
    pen.box(left - 1, top - 1, READS + 2, READS + 2, None, GREY)
    for rank in range(0, world, -(-world // 8)):
        at = READS * (rank + 0.5) / world
        pen.text(left - 6, top + at, str(rank), 12, GREY, "rm")
        pen.text(left + at, top + READS + 5, str(rank), 12, GREY, "ma")
    pen.text(left + READS / 2, top + READS + 22, "rank that keeps the keys", 12, GREY, "ma")
    pen.text_upwards(x - 18, top + READS / 2, "rank that reads them", 12)
    scale = left + READS + 34
    ramp = tint(torch.linspace(1, 0, 160))[:, None].expand(-1, 16, -1)
    pen.image.paste(to_image(ramp), (scale, top))
    pen.box(scale - 1, top - 1, 18, 162, None, GREY)
    most, total = format_remote_bytes(facts)
    pen.text(scale + 24, top, f"{most} a pair", 13, INK, "lt")
    pen.text(scale + 24, top + 160, "nothing", 13, INK, "ls")
    if world <= READS:
        pen.box(scale, top + 182, 16, 14, OWN, GREY)
        pen.text(scale + 24, top + 189, "its own", 13, INK, "lm")
    pen.text(scale, top + 222, "remote keys and", 13, GREY)
    pen.text(scale, top + 239, "values, all ranks:", 13, GREY)
    pen.text(scale, top + 258, total, 15)


def _draw_schedules(pen: Pen, facts: Facts, x: int, y: int) -> None:
    """Draw forward and backward time, bytes sent and memory of each schedule."""
    shape = facts.shape
    layer = f"{shape.batch} x {shape.heads}:{shape.kv_heads} heads of {shape.head_dim}, {facts.hardware.name}"
    _draw_title(pen, x, y, "What each schedule would cost a layer", "")
    pen.text(x, y + 22, f"predicted for the slowest rank; {layer}", 13, GREY)
    if not facts.costs:
        pen.text(x, y + 54, "one rank: nothing travels", 13)
        return
    most = max(estimate.total for estimate in facts.costs)
    at = x + 90.0
    for shade, label in ((1.0, "forward"), (LIGHTER, "backward")):
        pen.box(at, y + 46, 14, 11, blend(DEEP, shade))
        pen.text(at + 20, y + 51, label, 12, INK, "lm")
        at += 96
    pen.text(at, y + 51, "dark blue: this plan's schedule", 12, INK, "lm")
    for row, estimate in enumerate(facts.costs):
        top, chosen = y + 70 + 40 * row, estimate.schedule == facts.plan.schedule.partition("+")[0]
        paint = DEEP if chosen else GREY
        pen.text(x, top + 8, estimate.schedule, 15, INK if chosen else GREY, "lm")
        forward, backward = (250 * part / most for part in (estimate.forward, estimate.backward))
        pen.box(x + 90, top, max(1, forward), 17, paint)
        pen.box(x + 90 + forward, top, backward, 17, blend(paint, LIGHTER))
        pen.text(x + 98 + forward + backward, top + 8, format_seconds(estimate.total), 13, INK, "lm")
        sent = facts.bytes_sent[estimate.schedule]
        pen.text(
            x + 90,
            top + 20,
            f"{format_bytes(sum(sent) / len(sent))} sent by a rank (most {format_bytes(max(sent))}), "
            f"{format_bytes(estimate.memory)} more memory",
            12,
            GREY,
        )
    pen.text(x, y + 70 + 40 * len(facts.costs) + 4, shorten(format_choice(facts), 84), 13)


def _draw_title(pen: Pen, x: float, y: float, text: str, note: str) -> None:
    """Draw the title of a part of the picture, and a note behind it."""
    pen.text(x, y, text, 17)
    pen.text(x + pen.draw.textlength(text, pen.fonts[17]) + 12, y + 3, note, 13, GREY)
