"""The HTML page of a plan: mask, owners, work, traffic and costs in one file that fetches nothing."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

from torch import Tensor

from tritoncp.planning.drawing.rasters import (
    DARK,
    LENS,
    WIDE,
    bar_columns,
    legend,
    lens_length,
    mask_pixels,
    reads_pixels,
    strip_pixels,
    to_image,
)
from tritoncp.planning.explanation import format_meaning
from tritoncp.planning.plan_data import PlanData
from tritoncp.planning.report import (
    Colour,
    Facts,
    colours,
    format_choice,
    format_headline,
    format_remote_bytes,
    format_title,
)
from tritoncp.planning.units import axis_ticks, format_bytes, format_seconds, format_tokens

Ticks = Sequence[tuple[float, str]]  # (share of the axis, label)

STYLE = """
:root { --ink: #212529; --grey: #5c636a; --line: #dee2e6; --paper: #fff; --taken: #e7f1ff; --bar: #08306b }
:root { color-scheme: light dark }
@media (prefers-color-scheme: dark) {
:root { --ink: #e6e8ea; --grey: #a9b0b7; --line: #3a4047; --paper: #181b1f; --taken: #1d3354; --bar: #7eb6ff }
}
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper) }
body { margin: 2rem auto; max-width: 1320px; padding: 0 1.5rem; overflow-wrap: anywhere }
h1 { font-size: 1.6rem; margin: 0 } h2 { font-size: 1.1rem; margin: 0 0 .3rem }
p { margin: .2rem 0; color: var(--grey) } section { margin-bottom: 1.6rem }
main { display: grid; grid-template-columns: minmax(420px, 1.3fr) minmax(380px, 1fr); gap: 2rem }
main { margin-top: 1.2rem } img { image-rendering: pixelated; width: 100%; display: block }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem; margin: 0 } dd { margin: 0 }
dt, .chart span { color: var(--grey) }
.chart { display: grid; grid-template-columns: auto auto 1fr; gap: 2px 6px; margin: 0 }
.chart span { font-size: 12px; line-height: 1 } .chart .area { border: 1px solid var(--grey) }
.chart .down, .chart .across { position: relative } .chart .down { width: 3.2rem }
.chart .across { height: 1rem; grid-column: 3 } .chart .below { grid-column: 3; text-align: center }
.chart .side { writing-mode: vertical-rl; transform: rotate(180deg); text-align: center }
.down span { position: absolute; right: 0; transform: translateY(-50%) }
.across span { position: absolute; transform: translateX(-50%); padding-top: 3px; white-space: nowrap }
.across span:first-child { transform: none } .across span.end { transform: translateX(-100%) }
.reads { max-width: 400px } .strips img { height: 16rem } .wide { overflow-x: auto }
svg { width: 100%; height: auto; display: block; fill: var(--grey); font-size: 13px }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums } th { font-weight: 600 }
th, td { text-align: right; padding: .28rem .5rem; border-bottom: 1px solid var(--line) }
th, td { overflow-wrap: normal }
th:first-child, td:first-child { text-align: left } tr.taken { background: var(--taken); font-weight: 600 }
td.bars { width: 30%; min-width: 120px } td.bars div { display: flex; height: 14px }
.bars i, .key i { background: var(--bar) } .back { opacity: .5 }
.key { white-space: nowrap; margin-right: 1.2rem; display: inline-block }
.key i { display: inline-block; width: 14px; height: 12px; margin-right: 1px }
@media (max-width: 900px) { main { grid-template-columns: minmax(0, 1fr); gap: 0 } }
@media (max-width: 500px) { body { margin: 1rem auto; padding: 0 .8rem } h1 { font-size: 1.25rem } }
@media (max-width: 500px) { dl { grid-template-columns: 1fr; gap: 0 } dd { margin-bottom: .5rem } }
@media print { main { display: block } }
"""


def html(facts: Facts) -> str:
    """Return the page: one file that fetches nothing. Bars show their figures under the mouse."""
    first, second = map(escape, format_headline(facts))
    plan = facts.plan
    most, total = format_remote_bytes(facts)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{first}</title><style>{STYLE}</style><h1>{first}</h1><p>{second}</p><main><div>",
        f"<section><h2>What this means</h2>{_meaning_html(facts)}</section>",
        f"<section><h2>Who sees whom, and who computes it</h2>{_mask_html(plan)}</section></div><div>",
        f"<section><h2>Who computes which queries</h2>{_strips_html(plan)}</section>",
        "<section><h2>Work of each rank</h2><p>Height: blocks that a rank computes; dashed: the mean. The "
        f"most is {plan.imbalance:.3f} times the mean.</p>"
        f"{_work_svg(plan.work, colours(plan.world_size))}</section>",
        f"<section><h2>Whose keys each rank reads</h2>{_reads_html(facts)}<p>Stronger blue: more bytes, at "
        f"most {most} for a pair of ranks; all ranks together read {total} of others' keys and values. "
        "Amber: a rank's own.</p></section></div></main>",
        f"<section><h2>What each schedule would cost a layer</h2>{_cost_table(facts)}</section>",
        f"<p>{escape(format_title(plan))}</p></html>",
    ]
    return "".join(parts) + "\n"


def _meaning_html(facts: Facts) -> str:
    """Format the plain words about the plan as a list of terms."""
    sentences = (line.partition(": ") for line in format_meaning(facts.plan, facts.metrics, facts.most_sent))
    return f"<dl>{''.join(f'<dt>{escape(term)}<dd>{escape(text)}' for term, _, text in sentences)}</dl>"


def _mask_html(plan: PlanData) -> str:
    """Format the mask with its axes and legend, and the first positions of a thin mask enlarged."""
    mask, whole = plan.mask, mask_pixels(plan)
    words = "in the sequence (tokens)"
    chart = _chart_html(
        _picture_html("queries down, keys across", whole, mask_pixels(plan, theme=DARK)),
        down=_token_ticks(mask.q_len),
        across=_token_ticks(mask.kv_len),
        side=f"queries, by position {words}",
        below=f"keys, by position {words}",
    )
    text = "<p>A point: the query of this row sees this column's key; its colour: the rank that computes it."
    length = lens_length(plan, whole)
    if length:
        detail = _picture_html(
            "a detail", mask_pixels(plan, LENS, length), mask_pixels(plan, LENS, length, DARK)
        )
        text += f"</p><h2>The first {format_tokens(length)} tokens</h2><div class=reads>{detail}</div><p>"
    return f"{chart}{text}</p><p>{_legend_html(plan)}</p>"


def _strips_html(plan: PlanData) -> str:
    """Format a strip for each rank that shows which queries it computes."""
    picture = _picture_html("ranks down, queries across", strip_pixels(plan), strip_pixels(plan, DARK))
    return _chart_html(
        picture,
        down=_rank_ticks(plan.world_size, 16),
        across=_token_ticks(plan.mask.q_len),
        side="rank",
        below="queries, by position in the sequence (tokens)",
        name="chart strips",
    )


def _reads_html(facts: Facts) -> str:
    """Format the table of key traffic with its axes."""
    ticks = _rank_ticks(facts.plan.world_size, 8)
    return _chart_html(
        _picture_html("readers down, owners across", reads_pixels(facts), reads_pixels(facts, theme=DARK)),
        down=ticks,
        across=ticks,
        side="rank that reads them",
        below="rank that keeps the keys",
        name="chart reads",
    )


def _chart_html(
    picture: str, *, down: Ticks, across: Ticks, side: str, below: str, name: str = "chart"
) -> str:
    """Format a picture with axes: labels and a title at the left and below. Ticks are (share, label)."""
    left = "".join(f"<span style='top:{100 * at:.2f}%'>{label}</span>" for at, label in down)
    bottom = "".join(
        f"<span{' class=end' if at == 1 else ''} style='left:{100 * at:.2f}%'>{label}</span>"
        for at, label in across
    )
    return (
        f"<figure class='{name}'><span class=side>{side}</span><div class=down>{left}</div>"
        f"<div class=area>{picture}</div><div class=across>{bottom}</div><span class=below>{below}</span>"
        "</figure>"
    )


def _token_ticks(length: int) -> Ticks:
    """List round positions as shares of the axis, with their labels."""
    return [(position / max(1, length), label) for position, label in axis_ticks(length)]


def _rank_ticks(world_size: int, most: int) -> Ticks:
    """List at most ``most`` ranks as shares of the axis, with their numbers."""
    return [((rank + 0.5) / world_size, str(rank)) for rank in range(0, world_size, -(-world_size // most))]


def _picture_html(name: str, light: Tensor, dark: Tensor) -> str:
    """Format an image with its variant for dark mode."""
    return (
        f"<picture><source media='(prefers-color-scheme: dark)' srcset='{_png_url(dark)}'>"
        f"<img alt='{name}' src='{_png_url(light)}'></picture>"
    )


def _png_url(pixels: Tensor) -> str:
    """Encode an image [y, x, 3] as a data: URL of a PNG."""
    png = io.BytesIO()
    to_image(pixels).save(png, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"


def _legend_html(plan: PlanData) -> str:
    """Format the legend of the mask: samples of the ranks' colours in each opacity."""
    samples, opacities = legend(plan)
    labels = []
    for opacity, name in opacities:
        boxes = "".join(
            f"<i style='background:{_css_colour(colour)};opacity:{opacity}'></i>" for colour in samples
        )
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
    step = -(-len(work) // 12)
    names = [
        f"<text x='{WIDE * (rank + 0.5) / len(work):.1f}' y='{high + 15}'>{rank}</text>"
        for rank in range(0, len(work), step)
    ]
    return (
        f"<svg viewBox='0 0 {WIDE} {high + 38}' role=img aria-label='work of each rank'>{''.join(bars)}<path "
        f"d='M0 {mean:.2f}H{WIDE}' stroke='var(--ink)' stroke-dasharray='4'><title>the mean</title></path>"
        f"<path d='M0 {high}H{WIDE}' stroke='var(--grey)'/><g text-anchor='middle'>"
        f"{''.join(names)}<text x='{WIDE / 2}' y='{high + 34}'>rank</text></g></svg>"
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
    names = ("schedule", "", "forward", "backward", "sent by a rank, mean", "most", "memory more")
    head = "".join(f"<th>{name}" for name in names)
    rows, most = [], max(estimate.total for estimate in facts.costs)
    for estimate in facts.costs:
        sent = facts.bytes_sent[estimate.schedule]
        forward, backward = (100 * part / most for part in (estimate.forward, estimate.backward))
        bars = (
            f"<div><i style='width:{forward:.1f}%'></i><i class=back style='width:{backward:.1f}%'></i></div>"
        )
        cells = (
            format_seconds(estimate.forward),
            format_seconds(estimate.backward),
            *map(format_bytes, (sum(sent) / len(sent), max(sent), estimate.memory)),
        )
        row_class = " class=taken" if estimate.schedule == facts.plan.schedule.partition("+")[0] else ""
        rows.append(
            f"<tr{row_class}>"
            + f"<td>{estimate.schedule}<td class=bars>{bars}"
            + "".join(f"<td>{cell}" for cell in cells)
        )
    key = "<span class=key><i></i> forward</span><span class=key><i class=back></i> backward</span>"
    table, choice = f"<table><tr>{head}{''.join(rows)}</table>", escape(format_choice(facts))
    return (
        f"<p>{escape(assumptions)}</p><p>{key} shaded row: this plan's schedule</p>"
        f"<div class=wide>{table}</div><p>{choice}</p>"
    )
