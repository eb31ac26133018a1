"""The drawing of a plan by Matplotlib: mask, owners, work, traffic and costs.

Matplotlib is imported when the first plan is drawn.
"""

from __future__ import annotations

import io
import itertools
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tritoncp.report.colours import rank_colours
from tritoncp.report.facts import PlanFacts
from tritoncp.report.text import format_costs, format_heading, format_meaning
from tritoncp.report.units import format_bytes, format_tokens, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tritoncp.planning.plan import Plan

SIDE = 720  # most pixels across the mask
FULL, MASKED = 1.0, 0.55  # opacity of the owner's colour
SOME = 0.4  # least opacity of a pixel that stands for many blocks, any of them listed
INK, GREY, OWN = "#212529", "#6c757d", "#f0be50"
NO_OWNER = (222, 226, 230)
MASK_WIDTH = 90  # characters of the mask above the picture
STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "text.parse_math": False,
    "axes.edgecolor": GREY, "axes.labelcolor": GREY, "axes.titlesize": 11, "axes.titlelocation": "left",
    "xtick.color": GREY, "ytick.color": GREY, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "svg.fonttype": "none",
}  # fmt: skip


def require_matplotlib() -> None:
    """Raise RuntimeError without Matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as missing:
        raise RuntimeError("the picture of a plan needs Matplotlib: pip install matplotlib") from missing


def draw_figure(facts: PlanFacts, path: str | Path | None = None) -> Figure:
    """Draw the picture, 1500 x 1220 pixels, and save it to ``path``, in a format of Matplotlib (.png, .svg,
    .pdf). Raises RuntimeError without Matplotlib, and OSError for a path that cannot be written."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    class PlanFigure(Figure):
        def _repr_png_(self) -> bytes:  # shown by notebooks
            png = io.BytesIO()
            self.savefig(png, format="png")
            return png.getvalue()

    panels = {"M": _draw_mask, "W": _draw_work, "R": _draw_reads, "T": _write_meaning}
    with matplotlib.rc_context(STYLE):
        figure = PlanFigure(figsize=(15, 12.2), dpi=100, layout="constrained")
        title = f"{shorten(facts.expression, MASK_WIDTH)}\n{format_heading(facts.plan)}"
        figure.suptitle(title.strip(), x=0.02, ha="left", size=12)
        axes = figure.subplot_mosaic("MW;MR;TT", width_ratios=(3, 2), height_ratios=(3, 7, 3.9))
        for name, draw in panels.items():
            draw(axes[name], facts)
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
    return figure


def colours(world_size: int) -> Tensor:
    """Return red, green and blue of each rank, and of -1 (no owner), from 0 to 1: float32 [W + 1, 3]."""
    return torch.tensor([*rank_colours(world_size), NO_OWNER]) / 255


def mask_pixels(plan: Plan, side: int = SIDE) -> Tensor:
    """Draw query blocks down, key blocks across, in the colour of the rank that computes, of the first batch
    row and head: red, green, blue and opacity, float32 [<= side, <= side, 4]. A pixel of many blocks has the
    mean of their owners' colours and of their opacities, at least SOME if any is listed."""
    runs = plan.mask.runs.select([0], [0])
    edges = [torch.arange(min(side, n) + 1) * n // max(1, min(side, n)) for n in runs.shape[2:]]
    masked, full = runs.count_in_cells(*edges)
    mean = (MASKED * masked + FULL * full) / (edges[0].diff()[:, None] * edges[1].diff())
    opacity = torch.where(masked + full > 0, mean.clamp(min=SOME), 0)
    paint = colours(plan.world_size)[plan.owners[0]]
    colour = [paint[begin:end].mean(0) for begin, end in itertools.pairwise(edges[0].tolist())]
    wide = torch.stack(colour)[:, None].expand(-1, opacity.shape[1], -1)
    return torch.cat([wide, opacity[..., None]], -1)


def _set_title(axes: Axes, title: str, note: str = "") -> None:
    axes.set_title(title, pad=20 if note else 6)
    axes.annotate(note, (0, 1), (0, 6), "axes fraction", textcoords="offset points", size=8.5, color=GREY)


def _set_token_ticks(axis: Any, length: int, label: str) -> None:
    positions = [length * quarter // 4 for quarter in range(5)]
    axis.set_ticks(positions, list(map(format_tokens, positions)))
    axis.set_label_text(label)


def _set_rank_ticks(axis: Any, world_size: int, most: int, label: str) -> None:
    ranks = range(0, world_size, -(-world_size // most))
    axis.set_ticks([rank + 0.5 for rank in ranks], list(map(str, ranks)))
    axis.set_tick_params(length=0)
    axis.set_label_text(label)


def _draw_mask(axes: Axes, facts: PlanFacts) -> None:
    mask = facts.plan.mask
    extent = (0, mask.kv_len, mask.q_len, 0)
    axes.imshow(mask_pixels(facts.plan).numpy(), extent=extent, aspect="auto", interpolation="none")
    note = "a point: queries of this row see keys of this column; its colour: the rank that computes them"
    _set_title(axes, "Who computes what", f"{note}, paler in masked blocks")
    axes.set_box_aspect(1)
    _set_token_ticks(axes.xaxis, mask.kv_len, "keys, by position in the sequence (tokens)")
    _set_token_ticks(axes.yaxis, mask.q_len, "queries, by position in the sequence (tokens)")


def _write_meaning(axes: Axes, facts: PlanFacts) -> None:
    """Write what the figures mean in plain words, and what each schedule would cost a layer."""
    sentences = [*format_meaning(facts), f"Why it is sent so: {facts.plan.reason}." * bool(facts.plan.reason)]
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, 190)]
    text = "\n".join([*lines, "", *format_costs(facts)])
    axes.set_axis_off()
    axes.set_title("What this means", y=0.86)
    axes.text(0, 0.82, text, va="top", size=8.5, linespacing=1.5, family="DejaVu Sans Mono")


def _draw_work(axes: Axes, facts: PlanFacts) -> None:
    """Draw a bar of work for each rank, and the mean as a dashed line."""
    plan, world_size = facts.plan, facts.plan.world_size
    mean, most, many = sum(plan.work) / world_size, max(plan.work), world_size > 128
    places = [rank + 0.5 for rank in range(world_size)]
    paint = colours(world_size)[:-1].tolist()
    axes.bar(places, plan.work, 1 if many else 0.9, color=paint, rasterized=many)
    axes.axhline(mean, color=INK, lw=1, ls="--")
    axes.set_xlim(0, world_size)
    axes.set_yticks([0, most], ["0", f"{most:.5g}"])
    axes.spines[["top", "right"]].set_visible(False)
    _set_rank_ticks(axes.xaxis, world_size, 16, "rank")
    note = f"blocks: mean {mean:.5g} (dashed), most {most:.5g}; max/mean {plan.imbalance:.3f}"
    _set_title(axes, "Work of each rank", note)


def _draw_reads(axes: Axes, facts: PlanFacts) -> None:
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
    axes.set_anchor("NW")
    most, total = format_bytes(int(remote.max())), format_bytes(int(remote.sum()))
    note = f"keys and values; strongest blue: {most} a pair, all {total}; yellow: own"
    _set_title(axes, "Whose keys each rank reads", note)
    _set_rank_ticks(axes.yaxis, world_size, 8, "rank that reads them")
    _set_rank_ticks(axes.xaxis, world_size, 8, "rank that has them")
