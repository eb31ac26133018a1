"""Pictures of a graph's predicted run: both streams as text, and as an image drawn with Pillow.

Pillow is imported when the first image is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tritoncp.chunking.streams.timeline import STREAMS, Span, Timeline
from tritoncp.planning.drawing.picture import GREY, INK, Pen
from tritoncp.planning.drawing.rasters import PAPER
from tritoncp.planning.report import Colour, colours
from tritoncp.planning.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from PIL import Image

SIGNS = {"product": "#", "attention": "@", "memory": "-", "message": "=", "wait": " "}
LABELS = {"compute": "compute", "communication": "messages"}
LEGEND = "# products  @ attention  - memory traffic  = messages; digits: the chunk, blank: idle"
LEFT, RIGHT, ROW, GAP = 110, 40, 34, 92  # pixels of the image: margins, a stream's height, between timelines
WIDTH = 1400
NO_CHUNK: Colour = (173, 181, 189)


def format_timeline(timeline: Timeline, width: int = 96, makespan: float | None = None) -> str:
    """Format a predicted run as text: a line of figures, and a line for each stream.

    width: columns of a stream; makespan: seconds that they stand for, by default those of the run
    """
    scale = (makespan or timeline.makespan) / width or 1.0
    lines = [str(timeline)]
    for stream in STREAMS:
        spans = [span for span in timeline.spans if span.stream == stream]
        lines.append(f"{LABELS[stream]:>8} |{_columns(spans, scale, width)}|")
        if any(span.chunk is not None for span in spans):
            lines.append(f"{'chunk':>8} |{_columns(spans, scale, width, chunks=True)}|")
    return "\n".join(lines)


def format_timelines(timelines: Mapping[str, Timeline], width: int = 96) -> str:
    """Format several runs as text on one scale of time, each under its title, with a legend."""
    longest = max(timeline.makespan for timeline in timelines.values())
    parts = [f"{title}: {format_timeline(one, width, longest)}" for title, one in timelines.items()]
    return "\n\n".join([*parts, LEGEND])


def _columns(spans: list[Span], scale: float, width: int, chunks: bool = False) -> str:
    """Return a sign for each column of time: of what takes most of it, or of that one's chunk."""
    shares: list[dict[str, float]] = [{} for _ in range(width)]
    for span in spans:
        sign = _chunk_sign(span) if chunks else SIGNS[span.kind]
        first, last = int(span.start / scale), min(width - 1, int(span.end / scale))
        for column in range(first, last + 1):
            overlap = min(span.end, (column + 1) * scale) - max(span.start, column * scale)
            shares[column][sign] = shares[column].get(sign, 0.0) + max(0.0, overlap)
    signs = ""
    for share in shares:
        share[" "] = share.get(" ", 0.0) + max(0.0, scale - sum(share.values()))
        signs += max(share, key=lambda sign: share[sign])
    return signs


def _chunk_sign(span: Span) -> str:
    if span.kind == "wait" or span.chunk is None:
        return " " if span.kind == "wait" else "."
    return "0123456789abcdefghijklmnopqrstuvwxyz"[span.chunk[1] % 36]


def draw_timelines(timelines: Mapping[str, Timeline]) -> Image.Image:
    """Draw several runs on one scale of time, chunks in their colours. Raises RuntimeError without Pillow."""
    try:
        from PIL import Image
    except ModuleNotFoundError as missing:
        raise RuntimeError("the picture of a timeline needs Pillow: pip install pillow") from missing

    longest = max(timeline.makespan for timeline in timelines.values()) or 1.0
    high = 2 * ROW + GAP
    image = Image.new("RGB", (LEFT + WIDTH + RIGHT, 60 + high * len(timelines)), PAPER)
    pen = Pen(image)
    chunks = [span.chunk[1] for one in timelines.values() for span in one.spans if span.chunk is not None]
    paint = colours(max(chunks, default=0) + 1)
    for at, (title, timeline) in enumerate(timelines.items()):
        _draw_streams(pen, title, timeline, 20 + at * high, WIDTH / longest, paint)
    x = LEFT
    for name, colour in [
        *((f"chunk {at}", one) for at, one in enumerate(paint) if chunks),
        ("no chunk", NO_CHUNK),
    ]:
        pen.box(x, 24 + high * len(timelines), 16, 14, colour)
        pen.text(x + 22, 31 + high * len(timelines), name, 13, INK, "lm")
        x += 110
    return image


def _draw_streams(
    pen: Pen, title: str, timeline: Timeline, top: int, scale: float, paint: list[Colour]
) -> None:
    """Draw both streams of a run under its title and its figures."""
    figures = (
        f"{format_seconds(timeline.makespan)}, {format_seconds(timeline.exposed)} of communication exposed, "
        f"at most {format_bytes(timeline.peak)} alive"
    )
    pen.text(LEFT, top, title, 17)
    pen.text(LEFT, top + 24, figures, 13, GREY)
    for row, stream in enumerate(STREAMS):
        y = top + 50 + row * ROW
        pen.text(LEFT - 10, y + ROW / 2 - 3, LABELS[stream], 13, INK, "rm")
        for span in timeline.spans:
            if span.stream == stream and span.kind != "wait":
                colour = NO_CHUNK if span.chunk is None else paint[span.chunk[1]]
                left, right = round(span.start * scale), round(span.end * scale)
                pen.box(LEFT + left, y, max(1, right - left), ROW - 6, colour)
        pen.line(LEFT, y + ROW - 6, LEFT + timeline.makespan * scale, y + ROW - 6)
