"""Pictures of the scaling study, drawn by Matplotlib from the lines of its plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tritoncp.perf.studies.plan_costs import GIB, LIMITS, MASKS, SCHEDULES, plan_cost

from tritoncp.planning.balance import balancers
from tritoncp.planning.units import format_tokens

PICTURES = {
    "planning": (
        "Time and memory of one rank's whole plan",
        'Packed documents, `schedule="auto"`; dashed: one second, 64 MiB.',
    ),
    "balance": (
        "Evenness against blocks a rank",
        "Every length and number of ranks; a point is a plan; dashed: 2 %. What counts is blocks a rank.",
    ),
    "schedules": (
        "What each schedule sends, keeps and takes",
        "The longest sequence, placed by `per_document`; the busiest rank of a layer, forward and backward.",
    ),
}
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377")


def draw(lines: Sequence[dict[str, Any]], folder: Path) -> None:
    """Draw the pictures, as SVG files. Needs Matplotlib: pip install matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "tritoncp", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif",
         "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e9ecef"}
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw_figure in zip(PICTURES, (_draw_planning, _draw_balance, _draw_schedules), strict=True):
        figure = draw_figure(lines)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")


def _make_panels(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.1 * columns + 0.6, 2.5 * rows + 0.6), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _draw_planning(lines: Sequence[dict[str, Any]]) -> Any:
    worlds = sorted({line["world"] for line in lines})[1:] or [lines[0]["world"]]
    figure, panels = _make_panels(2, len(worlds), sharex=True, sharey="row")
    for row, (unit, label) in enumerate({"s": "seconds of one core", "mib": "MiB"}.items()):
        for panel, world in zip(panels[row], worlds):
            for name, colour in zip(balancers, COLOURS):
                values = [
                    (line["tokens"], max(plan_cost(line)[unit], 1e-3))
                    for line in lines
                    if (line["mask"], line["world"], line["balancer"]) == ("documents", world, name)
                ]
                panel.plot(*zip(*sorted(values)), "o-", color=colour, label=name, markersize=3, linewidth=1.2)
            panel.axhline(LIMITS[unit], color="#212529", linestyle="--", linewidth=0.8)
            panel.set(xscale="log", yscale="log", title=f"{world} ranks" if row == 0 else "")
            _label_tokens(panel, lines)
        panels[row][0].set_ylabel(label)
    _add_legend(figure, panels[0][0])
    return figure


def _draw_balance(lines: Sequence[dict[str, Any]]) -> Any:
    figure, panels = _make_panels(1, len(MASKS), sharey=True)
    for panel, mask in zip(panels[0], MASKS):
        for name, colour in zip(balancers, COLOURS):
            values = [
                (line["tokens"] * 8 / line["world"], max(100 * (line["imbalance"] - 1), 0.01))
                for line in lines
                if (line["mask"], line["balancer"]) == (mask, name)
            ]
            panel.plot(*zip(*values), "o", color=colour, label=name, markersize=3.5, alpha=0.8)
        panel.axhline(2, color="#212529", linestyle="--", linewidth=0.8)
        panel.set(xscale="log", yscale="log", title=mask, xlabel="blocks a rank", ylim=(0.007, 2000))
        panel.set_yticks([0.01, 0.1, 1, 10, 100, 1000], ["≤ 0.01", "0.1", "1", "10", "100", "1000"])
        panel.minorticks_off()
    panels[0][0].set_ylabel("% that the busiest rank\nhas more work than the mean")
    _add_legend(figure, panels[0][0])
    return figure


def _draw_schedules(lines: Sequence[dict[str, Any]]) -> Any:
    longest = max(line["tokens"] for line in lines)
    figures: dict[str, Callable[[dict[str, float]], float]] = {
        "GiB sent": lambda costs: costs["sent"] / GIB,
        "GiB beyond the shard": lambda costs: costs["extra"] / GIB,
        "predicted ms": lambda costs: costs["ms"],
    }
    figure, panels = _make_panels(len(figures), len(MASKS), sharex=True, sharey="row")
    for row, (label, value) in enumerate(figures.items()):
        for panel, mask in zip(panels[row], MASKS):
            for name, colour in zip(SCHEDULES, COLOURS):
                values = [
                    (line["world"], max(value(line["schedules"][name]), 1e-3))
                    for line in lines
                    if (line["mask"], line["tokens"], line["balancer"]) == (mask, longest, "per_document")
                ]
                panel.plot(*zip(*sorted(values)), "o-", color=colour, label=name, markersize=3, linewidth=1.2)
            panel.set(xscale="log", yscale="log", title=mask if row == 0 else "")
            worlds = sorted({line["world"] for line in lines})
            panel.set_xticks(worlds, map(str, worlds), minor=False)
            panel.minorticks_off()
        panels[row][0].set_ylabel(f"{label}, {format_tokens(longest * 1024)} tokens")
    for panel in panels[-1]:
        panel.set_xlabel("ranks")
    _add_legend(figure, panels[0][0])
    return figure


def _label_tokens(panel: Any, lines: Sequence[dict[str, Any]]) -> None:
    sizes = sorted({line["tokens"] for line in lines})
    panel.set_xticks(sizes, [format_tokens(size * 1024) for size in sizes], minor=False)
    panel.minorticks_off()


def _add_legend(figure: Any, panel: Any) -> None:
    figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False)
