"""The HTML page of a plan: mask, owners, work, traffic and costs in one file that fetches nothing."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

from torch import Tensor

from tritoncp.planning.drawing.rasters import (
    LENS,
    WIDE,
    bar_columns,
    legend,
    lens_length,
    mask_pixels,
    reads_pixels,
    to_image,
)
from tritoncp.planning.plan_data import PlanData
from tritoncp.planning.report import (
    Colour,
    Facts,
    colours,
    format_bytes,
    format_choice,
    format_headline,
    format_remote_bytes,
    format_seconds,
    format_title,
    format_tokens,
)

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
    first, second = map(escape, format_headline(facts))
    plan = facts.plan
    most, total = format_remote_bytes(facts)
    whole = mask_pixels(plan)
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{first}</title><style>{STYLE}</style><h1>{first}</h1><p>{second}</p><main><div>",
        "<section><h2>Who sees whom, and who computes it</h2><figure>",
        f"<img alt='queries down, keys across' src='{_png_url(whole)}'></figure>",
        f"<p>Queries (down, 0 to {format_tokens(plan.mask.q_len)}) see keys (across, 0 to "
        f"{format_tokens(plan.mask.kv_len)}); the colour is the rank's that computes.</p>",
        f"<p>{_legend_html(plan)}</p>{_detail_html(plan, whole)}</section></div><div>",
        f"<section><h2>Work of each rank</h2><p>Blocks; the most is {plan.imbalance:.3f} times the mean.</p>"
        f"{_work_svg(plan.work, colours(plan.world_size))}</section>",
        "<section><h2>Whose keys each rank reads</h2><img class=reads alt='readers down, owners across' "
        f"src='{_png_url(reads_pixels(facts))}'><p>Queries of a rank (down), keys of a rank (across); at "
        f"most {most} a pair, all ranks together {total} of others' keys and values. Its own: light "
        "amber.</p></section></div></main>",
        f"<section><h2>What each schedule would cost a layer</h2>{_cost_table(facts)}</section>",
        f"<p>{escape(format_title(plan))}</p></html>",
    ]
    return "".join(parts) + "\n"


def _detail_html(plan: PlanData, whole: Tensor) -> str:
    """Format the first positions of a thin mask as an enlarged picture; empty for other masks."""
    length = lens_length(plan, whole)
    if not length:
        return ""
    return (
        f"<h2>The first {format_tokens(length)} tokens</h2><img class=reads alt='a detail' "
        f"src='{_png_url(mask_pixels(plan, LENS, length))}'>"
    )


def _png_url(pixels: Tensor) -> str:
    """Encode an image [y, x, 3] as a data: URL of a PNG."""
    png = io.BytesIO()
    to_image(pixels).save(png, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"


def _legend_html(plan: PlanData) -> str:
    """Format the legend of the mask: samples of the ranks\' colours in each opacity."""
    labels = []
    for name, samples in legend(plan):
        boxes = "".join(f"<i style='background:{_css_colour(colour)}'></i>" for colour in samples)
        labels.append(f"<span class=key>{boxes} {name}</span>")
    return "".join(labels)


def _css_colour(colour: Colour) -> str:
    """Format a colour as #rrggbb."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _work_svg(work: Sequence[float], paint: Sequence[Colour]) -> str:
    """Format the work of each rank as bars in SVG, the mean as a dashed line."""
    high, most = 150, max(work) or 1
    bars = [
        f"<rect x='{left:.2f}' y='{high - high * work[rank] / most:.2f}' width='{wide:.2f}' "
        f"height='{high * work[rank] / most:.2f}' fill='{_css_colour(paint[rank])}'>"
        f"<title>rank {rank}: {work[rank]:g} blocks</title></rect>"
        for left, wide, rank in bar_columns(work)
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


def _cost_table(facts: Facts) -> str:
    """Format times, bytes sent and memory of each schedule as a table."""
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
        sent = facts.bytes_sent[estimate.schedule]
        cells = (
            estimate.schedule,
            format_seconds(estimate.forward),
            format_seconds(estimate.backward),
            *map(format_bytes, (sum(sent) / len(sent), max(sent), estimate.memory)),
        )
        row_class = " class=taken" if estimate.schedule == facts.plan.schedule.partition("+")[0] else ""
        rows.append(f"<tr{row_class}>" + "".join(f"<td>{cell}" for cell in cells))
    table, choice = f"<table><tr>{head}{''.join(rows)}</table>", escape(format_choice(facts))
    return f"<p>{escape(assumptions)}</p>{table}<p>{choice}</p>"
