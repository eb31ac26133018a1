"""The drawing of a plan by Matplotlib: mask, owners, work, traffic and costs.

Matplotlib is imported when the first plan is drawn.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tritoncp.planning.report import rasters
from tritoncp.planning.report.facts import Facts
from tritoncp.planning.report.rasters import colours
from tritoncp.planning.report.text import format_choice, format_headline, format_meaning
from tritoncp.planning.report.units import format_bytes, format_tokens, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 100  # pixels an inch; sizes below are in pixels
INK, GREY, DEEP, OWN = "#212529", "#6c757d", "#084ea0", "#f0be50"
STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "text.parse_math": False,
    "axes.edgecolor": GREY, "axes.labelcolor": GREY, "axes.titlesize": 12, "axes.titlelocation": "left",
    "axes.facecolor": "none", "xtick.color": GREY, "ytick.color": GREY, "xtick.labelsize": 8,
    "ytick.labelsize": 8, "svg.fonttype": "none",
}  # fmt: skip


def draw_figure(facts: Facts) -> Figure:
    """Draw the picture, 1500 x 1220 pixels. Raises RuntimeError without Matplotlib."""
    strips = min(facts.plan.world_size, rasters.STRIPS)
    panels: list[tuple[Callable[[Axes, Facts], None], int]] = [
        (_draw_strips, max(96, min(150, 24 * strips))),
        (_draw_work, 130),
        (_draw_reads, 270),
        (_draw_schedules, 190),
    ]
    with _style():
        figure = _make_figure(1500, 1220)
        first, second = format_headline(facts)
        figure.text(100 / 1500, 1 - 48 / 1220, shorten(first, 90), size=16)
        figure.text(100 / 1500, 1 - 76 / 1220, second, size=10, color=GREY)
        _draw_mask(_add_axes(figure, 100, 118, rasters.SIDE, rasters.SIDE), facts)
        _write_meaning(figure, facts, 100, 118 + rasters.SIDE + 140)
        top = 146
        for draw, height in panels:
            draw(_add_axes(figure, 950, top, 500, height), facts)
            top += height + 104
    return figure


def write_drawing(facts: Facts, path: Path) -> None:
    """Write the picture to ``path``, in a format of Matplotlib (.png, .svg, .pdf). Raises OSError if that
    fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _style():
            draw_figure(facts).savefig(path)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def _style() -> AbstractContextManager[None]:
    """Return a context in which Matplotlib has the style of the drawing."""
    try:
        import matplotlib
    except ModuleNotFoundError as missing:
        raise RuntimeError("the picture of a plan needs Matplotlib: pip install matplotlib") from missing
    return matplotlib.rc_context(STYLE)


def _make_figure(width: int, height: int) -> Figure:
    """Return an empty figure that notebooks show as a PNG."""
    from matplotlib.figure import Figure

    class PlanFigure(Figure):
        def _repr_png_(self) -> bytes:
            png = io.BytesIO()
            self.savefig(png, format="png")
            return png.getvalue()

    return PlanFigure(figsize=(width / DPI, height / DPI), dpi=DPI)


def _add_axes(figure: Figure, left: int, top: int, width: int, height: int) -> Axes:
    """Add axes at a place in pixels from the top left corner of the figure."""
    wide, high = (round(DPI * size) for size in figure.get_size_inches())
    return figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))


def _draw_raster(axes: Axes, pixels: Any, width: float, height: float) -> None:
    axes.imshow(pixels.numpy(), extent=(0, width, height, 0), aspect="auto", interpolation="none")


def _set_title(axes: Axes, title: str, note: str = "") -> None:
    axes.set_title(title, pad=22 if note else 8)
    axes.annotate(note, (0, 1), (0, 8), "axes fraction", textcoords="offset points", size=8.5, color=GREY)


def _set_token_ticks(axis: Any, length: int, label: str) -> None:
    positions = [length * quarter // 4 for quarter in range(5)]
    axis.set_ticks(positions, list(map(format_tokens, positions)))
    axis.set_label_text(label)


def _set_rank_ticks(axis: Any, world_size: int, most: int, label: str) -> None:
    ranks = range(0, world_size, -(-world_size // most))
    axis.set_ticks([rank + 0.5 for rank in ranks], [str(rank) for rank in ranks])
    axis.set_tick_params(length=0)
    axis.set_label_text(label)


def _draw_mask(axes: Axes, facts: Facts) -> None:
    """Draw the blocks of the mask with their legend."""
    mask = facts.plan.mask
    _draw_raster(axes, rasters.mask_pixels(facts.plan), mask.kv_len, mask.q_len)
    note = "a point: queries of this row see keys of this column; its colour: the rank that computes them"
    axes.annotate(note, (0, 1), (0, 5), "axes fraction", textcoords="offset points", size=8.5, color=GREY)
    _set_token_ticks(axes.xaxis, mask.kv_len, "keys, by position in the sequence (tokens)")
    _set_token_ticks(axes.yaxis, mask.q_len, "queries, by position in the sequence (tokens)")
    _draw_legend(axes, facts)


def _draw_legend(axes: Axes, facts: Facts) -> None:
    """Draw samples of the ranks' colours below the mask, in each opacity."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    world_size = facts.plan.world_size
    samples = colours(world_size)[:: -(-world_size // 4)]
    handles = [
        tuple(Patch(color=(r / 255, g / 255, b / 255, opacity), lw=0) for r, g, b in samples)
        for opacity, _ in rasters.OPACITIES
    ]
    axes.legend(
        handles, [label for _, label in rasters.OPACITIES], loc="upper left", bbox_to_anchor=(0, -0.075),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, ncols=3, frameon=False, handlelength=4,
    )  # fmt: skip


def _write_meaning(figure: Figure, facts: Facts, left: int, top: int) -> None:
    """Write what the figures mean in plain words."""
    axes = _add_axes(figure, left, top, rasters.SIDE, 100)
    axes.set_axis_off()
    _set_title(axes, "What this means")
    line = 0.0
    for sentence in format_meaning(facts):
        subject, _, text = sentence.partition(": ")
        lines = textwrap.wrap(text, 92)
        for x, words, colour in ((0.0, subject, GREY), (0.2, "\n".join(lines), INK)):
            axes.text(x, 1 - 0.22 * line, words, color=colour, va="top", linespacing=1.45)
        line += len(lines) + 0.25


def _draw_strips(axes: Axes, facts: Facts) -> None:
    """Draw a strip for each rank that shows which queries it computes."""
    plan = facts.plan
    _draw_raster(axes, rasters.strip_pixels(plan), plan.mask.q_len, plan.world_size)
    _set_title(axes, "Who computes which queries", "a line for each rank")
    _set_rank_ticks(axes.yaxis, plan.world_size, 8, "rank")
    _set_token_ticks(axes.xaxis, plan.mask.q_len, "queries, by position in the sequence (tokens)")


def _draw_work(axes: Axes, facts: Facts) -> None:
    """Draw a bar of work for each rank, and the mean as a dashed line."""
    plan, world_size = facts.plan, facts.plan.world_size
    mean, most = sum(plan.work) / world_size, max(plan.work)
    paint = [[part / 255 for part in colour] for colour in colours(world_size)]
    many = world_size > 128
    places = [rank + 0.5 for rank in range(world_size)]
    axes.bar(places, plan.work, 1 if many else 0.9, color=paint, rasterized=many)
    axes.axhline(mean, color=INK, lw=1, ls="--")
    axes.set_xlim(0, world_size)
    axes.set_yticks([0, most], ["0", f"{most:.5g}"])
    axes.spines[["top", "right"]].set_visible(False)
    _set_rank_ticks(axes.xaxis, world_size, 16, "rank")
    note = f"blocks: mean {mean:.5g} (dashed), most {most:.5g}; max/mean {plan.imbalance:.3f}"
    _set_title(axes, "Work of each rank", note)


def _draw_reads(axes: Axes, facts: Facts) -> None:
    """Draw the bytes that each rank's queries (down) read of each rank's keys (across), and their totals."""
    from matplotlib.colors import ListedColormap

    world_size, reads = facts.plan.world_size, facts.reads.double()
    own = torch.eye(world_size, dtype=torch.bool)
    remote = reads.masked_fill(own, 0)
    extent = (0, world_size, world_size, 0)
    shown = remote.masked_fill(remote == 0, torch.nan)
    axes.imshow(shown.numpy(), "Blues", vmin=-0.1 * float(remote.max()), extent=extent, interpolation="none")
    diagonal = torch.where(own, 0, torch.nan).numpy()
    axes.imshow(diagonal, ListedColormap([OWN]), extent=extent, interpolation="none")
    axes.set_aspect("equal", anchor="NW")
    most, total = format_bytes(int(remote.max())), format_bytes(int(remote.sum()))
    note = f"keys and values; strongest blue: {most} a pair, all {total}; yellow: own"
    _set_title(axes, "Whose keys each rank reads", note)
    _set_rank_ticks(axes.yaxis, world_size, 8, "rank that reads them")
    _set_rank_ticks(axes.xaxis, world_size, 8, "rank that keeps them")


def _draw_schedules(axes: Axes, facts: Facts) -> None:
    """Draw forward and backward time, bytes sent and memory of each schedule."""
    shape, chosen = facts.shape, facts.plan.schedule.partition("+")[0]
    layer = f"{shape.batch} x {shape.heads}:{shape.kv_heads} heads of {shape.head_dim}, {facts.hardware.name}"
    _set_title(axes, "What each schedule would cost a layer", f"predicted for the slowest rank; {layer}")
    axes.set_axis_off()
    if not facts.costs:
        axes.text(0, 0.9, "one rank: nothing travels", transform=axes.transAxes)
        return
    longest = max(estimate.total for estimate in facts.costs)
    for row, estimate in enumerate(facts.costs):
        colour = DEEP if estimate.schedule == chosen else GREY
        axes.barh(row, estimate.forward, 0.4, color=colour)
        axes.barh(row, estimate.backward, 0.4, estimate.forward, color=colour, alpha=0.55)
        sent = facts.bytes_sent[estimate.schedule]
        times = f"{estimate.forward * 1e3:.3g} ms forward + {estimate.backward * 1e3:.3g} ms backward"
        amounts = (
            f"{format_bytes(sum(sent) / len(sent))} sent by a rank (most {format_bytes(max(sent))}), "
            f"{format_bytes(estimate.memory)} more memory"
        )
        weight = "bold" if estimate.schedule == chosen else "normal"
        axes.text(-0.02 * longest, row, estimate.schedule, ha="right", va="center", weight=weight)
        axes.text(estimate.total + 0.03 * longest, row, times, va="center", size=8.5)
        axes.text(0, row + 0.44, amounts, va="center", size=8, color=GREY)
    axes.set_xlim(-0.35 * longest, 2.2 * longest)
    axes.set_ylim(len(facts.costs) - 0.1, -0.4)
    axes.text(0, len(facts.costs), shorten(format_choice(facts), 84), size=8.5)
