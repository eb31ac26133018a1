"""Text of a graph's predicted run: a line for each stream, a sign for each stretch of time."""

from __future__ import annotations

from collections.abc import Mapping

from tritoncp.chunking.streams.timeline import STREAMS, Span, Timeline

SIGNS = {"product": "#", "attention": "@", "memory": "-", "message": "=", "wait": " "}
LABELS = {"compute": "compute", "communication": "messages"}
LEGEND = "# products  @ attention  - memory traffic  = messages; digits: the chunk, blank: idle"


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
