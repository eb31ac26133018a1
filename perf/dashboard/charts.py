"""The charts of a case. The page's script fills their data source with the points of the selected case."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool
from bokeh.models.annotations import Span
from bokeh.plotting import figure

from tritoncp.perf.dashboard.trends import Trend

# Readable on white and on near-black, and distinct for most colour-blind readers (after Okabe and Ito).
COLOURS = ("#0f7bc2", "#d95f02", "#12936e", "#b35a9c", "#a07800", "#7570b3", "#cc3311", "#5a7d2a")
GREY = "#7d8794"  # colour of axes and text, on white and on near-black
HOVER = [("", "@time"), ("commit", "@commit"), ("versions", "@versions")]


def collect_points(
    all_trends: Sequence[Trend], runs: Mapping[str, Any], families: Sequence[str]
) -> dict[str, Any]:
    """Collect the points of all cases as columns, case after case, NaN for missing values.

    runs: time, commit and versions of each run; families: of baselines; columns "ratio 0", ... are their
    times over tritoncp's
    """
    points = [point for trend in all_trends for point in trend.points]
    own = [point.own for point in points]
    speedups = [point.speedups() for point in points]
    levels = [level for trend in all_trends for level in find_levels(trend)]
    columns: dict[str, list[float]] = {
        "ms": [row.get("ms", math.nan) for row in own],
        "low": [row.get("low", row.get("ms", math.nan)) for row in own],
        "high": [row.get("high", row.get("ms", math.nan)) for row in own],
        "level": levels,
        "failed": [math.nan if point.ms else level for point, level in zip(points, levels)],
    }
    columns |= {
        f"ratio {i}": [ratios.get(name, math.nan) for ratios in speedups] for i, name in enumerate(families)
    }
    texts = {name: [getattr(runs[p.run], name) for p in points] for name in ("time", "commit", "versions")}
    return texts | {name: np.array(values, np.float32) for name, values in columns.items()}


def find_levels(trend: Trend) -> list[float]:
    """Return the level at each point: the median between the neighbouring changes."""
    edges = [0, *(change.at for change in trend.changes), len(trend.points)]
    pieces = [trend.points[start:stop] for start, stop in pairwise(edges)]
    levels = [statistics.median([point.ms for point in piece if point.ms] or [1.0]) for piece in pieces]
    return [level for level, piece in zip(levels, pieces) for _ in piece]


def sparkline(trend: Trend, width: int = 80, height: int = 18) -> str:
    """Return the points of a polyline of a case's last 60 times, from the first to the newest. One in twenty
    times may be cut off at each end, so that a disturbed run does not flatten the others.

    >>> from tritoncp.perf.records.history import Point, Series
    >>> from tritoncp.perf.dashboard.trends import find_trend
    >>> figures = [{"tritoncp": {"ms": ms}} for ms in (1.0, 3.0, 2.0)]
    >>> sparkline(find_trend([Point("r", "t", "c", Series("d"), {}, own) for own in figures]))
    '1,17 40,1 79,9'
    """
    times = [point.ms for point in trend.points if point.ms][-60:]
    if len(times) < 2:
        return ""
    ordered, rare = sorted(times), len(times) // 20
    low, high = ordered[rare], ordered[-1 - rare]
    step, scale = (width - 2) / (len(times) - 1), (height - 2) / ((high - low) or 1.0)
    return " ".join(
        f"{1 + i * step:.0f},{height - 1 - scale * (min(max(ms, low), high) - low):.0f}"
        for i, ms in enumerate(times)
    )


def make_time_chart(source: ColumnDataSource) -> Any:
    """Make the chart of a case's times: median, quartiles, level and failures."""
    plot = _make_figure("milliseconds", 300)
    plot.varea("x", "low", "high", source=source, fill_color=COLOURS[0], fill_alpha=0.2)
    plot.line("x", "ms", source=source, line_color=COLOURS[0], line_width=1.2)
    dots = plot.scatter("x", "ms", source=source, color=COLOURS[0], size=5)
    plot.step(
        "x",
        "level",
        source=source,
        line_color=GREY,
        line_width=2,
        line_dash="dashed",
        mode="before",
        alpha=0.8,
    )
    crosses = plot.scatter("x", "failed", source=source, marker="x", size=11, line_width=3, color=COLOURS[6])
    tips = [("median", "@ms{0.0000} ms"), ("quartiles", "@low{0.0000} … @high{0.0000}"), *HOVER]
    plot.add_tools(HoverTool(renderers=[dots], tooltips=tips))
    plot.add_tools(HoverTool(renderers=[crosses], tooltips=[("failed", ""), *HOVER]))
    return plot


def make_ratio_chart(source: ColumnDataSource, families: Sequence[str]) -> Any:
    """Make the chart of speedups: the baselines' times divided by tritoncp's."""
    plot = _make_figure("baseline ÷ tritoncp", 280)
    for i, name in enumerate(families):
        looks = {"source": source, "color": COLOURS[i % len(COLOURS)], "legend_label": name}
        plot.line("x", f"ratio {i}", line_width=1.8, **looks)
        dots = plot.scatter("x", f"ratio {i}", size=4, **looks)
        plot.add_tools(
            HoverTool(renderers=[dots], tooltips=[(f"{name} ÷ tritoncp", f"@{{ratio {i}}}{{0.000}}"), *HOVER])
        )
    # A Span does not widen the range of the data, as a line would.
    plot.add_layout(Span(location=1, dimension="width", line_color=GREY, line_dash="dotted"))
    legend = plot.legend[0]
    legend.update(
        background_fill_alpha=0, border_line_alpha=0, label_text_color=GREY, click_policy="hide", ncols=3
    )
    plot.add_layout(legend, "above")
    return plot


def _make_figure(label: str, height: int) -> Any:
    """Make a chart over runs, without a background: the page's colour shows through."""
    plot: Any = figure(
        height=height,
        sizing_mode="stretch_width",
        x_axis_label="run",
        y_axis_label=label,
        tools="xpan,xbox_zoom,reset",
        active_drag=None,
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_color=None,
    )
    plot.xaxis.ticker = FixedTicker(ticks=[])  # the page's script sets it
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.min_border_left = 70
    plot.min_border_right = 40
    for axis in plot.axis:
        axis.update(
            axis_label_text_color=GREY, major_label_text_color=GREY, axis_line_color=GREY,
            major_tick_line_color=GREY, minor_tick_line_color=None, axis_label_text_font_style="normal",
        )  # fmt: skip
    plot.grid.grid_line_color = GREY
    plot.grid.grid_line_alpha = 0.25
    return plot
