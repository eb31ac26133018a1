"""The dashboard's charts without data: the page fills their sources, by name."""

from __future__ import annotations

from typing import Any

from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, VSpan
from bokeh.models.annotations import Span
from bokeh.plotting import figure

# Readable on white and on near-black, and distinct for most colour-blind readers (after Okabe and Ito).
COLOURS = ("#0f7bc2", "#d95f02", "#12936e", "#b35a9c", "#a07800", "#7570b3", "#cc3311", "#5a7d2a")
OURS = COLOURS[0]
WORSE = "#cc3311"


def make_charts(facts: dict[str, Any]) -> dict[str, Any]:
    """Make every chart, by the id of its element on the page."""
    return {
        "chart-overview": _make_line_chart(
            "overview", facts["devices"], "baseline ÷ tritoncp", quartiles=True
        ),
        "chart-regressions": _make_count_chart(facts["devices"]),
        "chart-time": _make_time_chart(),
        "chart-ratio": _make_line_chart("ratio", facts["families"], "baseline ÷ tritoncp"),
        "chart-roofline": _make_roofline(),
        "chart-work": _make_bar_chart("work", "work, blocks"),
        "chart-bytes": _make_bar_chart("bytes", "sent forward, MB"),
    }


def _make_figure(x: str, y: str, height: int = 260, **options: Any) -> Any:
    plot: Any = figure(
        height=height,
        sizing_mode="stretch_width",
        x_axis_label=x,
        y_axis_label=y,
        tools="xpan,xbox_zoom,reset",
        active_drag=None,
        toolbar_location="above",
        **options,
    )
    plot.outline_line_color = None
    if options.get("x_axis_type") != "log":
        plot.xaxis.ticker.min_interval = 1  # measurements, runs and ranks are whole numbers
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    return plot


def _make_source(name: str, *columns: str) -> ColumnDataSource:
    return ColumnDataSource({column: [] for column in columns}, name=name)


def _make_time_chart() -> Any:
    """Make the chart of a case's times: median, quartiles, levels, failures, changes of attributes."""
    plot = _make_figure("run: date and commit", "milliseconds", 300)
    _show_runs(plot)
    marks = _make_source("marks", "x", "what")
    plot.add_glyph(marks, VSpan(x="x", line_color="#888888", line_dash="dotted", line_width=1))
    steps = _make_source("changes", "x", "colour")
    plot.add_glyph(steps, VSpan(x="x", line_color="colour", line_width=3, line_alpha=0.6))
    commits = _make_source("commits", "x", "y")
    plot.scatter("x", "y", source=commits, marker="dash", angle=1.5708, size=7, color="#888888", alpha=0.5)
    points = _make_source("time", "x", "ms", "low", "high", "when", "commit", "versions")
    plot.varea("x", "low", "high", source=points, fill_color=OURS, fill_alpha=0.2)
    plot.line("x", "ms", source=points, line_color=OURS, line_width=1.2)
    dots = plot.scatter("x", "ms", source=points, color=OURS, size=4)
    levels = _make_source("levels", "x0", "x1", "y")
    plot.segment(
        "x0", "y", "x1", "y", source=levels, line_width=2.5, line_color="#888888", line_dash="dashed"
    )
    failures = _make_source("failures", "x", "y", "when", "why")
    crosses = plot.scatter("x", "y", source=failures, marker="x", size=11, line_width=3, color=WORSE)
    plot.add_tools(
        HoverTool(
            renderers=[dots],
            tooltips=[
                ("", "@when"),
                ("median", "@ms{0.0000} ms"),
                ("quartiles", "@low{0.0000} … @high{0.0000}"),
                ("commit", "@commit"),
                ("versions", "@versions"),
            ],
        ),
        HoverTool(renderers=[crosses], tooltips=[("failed", "@when"), ("why", "@why")]),
    )
    return plot


def _make_line_chart(name: str, labels: list[str], y: str, quartiles: bool = False) -> Any:
    """Make a chart with a line for each label, from the source "<name>-<i>"; with ``quartiles`` another one
    below it, from its column "worst"."""
    plot = _make_figure("run: date and commit", y)
    _show_runs(plot)
    columns = ("x", "y", "when", *(("worst",) if quartiles else ()))
    for i, label in enumerate(labels):
        source = _make_source(f"{name}-{i}", *columns)
        colour = COLOURS[i % len(COLOURS)]
        dash = ("solid", "dashed", "dotdash")[i // len(COLOURS) % 3]
        plot.line("x", "y", source=source, line_color=colour, line_width=1.8, line_dash=dash)
        if quartiles:
            plot.line("x", "worst", source=source, line_color=colour, line_width=1.4, line_dash="dotted")
            plot.scatter("x", "worst", source=source, color=colour, size=4, marker="inverted_triangle")
        dots = plot.scatter("x", "y", source=source, color=colour, size=4)
        tips = [(label, "@y{0.000}"), *([("worst quartile", "@worst{0.000}")] if quartiles else [])]
        plot.add_tools(HoverTool(renderers=[dots], tooltips=[*tips, ("", "@when")]))
    # A Span does not widen the range of the data, as a line would.
    plot.add_layout(Span(location=1, dimension="width", line_color="#888888", line_dash="dotted"))
    return plot


def _make_count_chart(labels: list[str]) -> Any:
    """Make a chart of the number of regressions in each run, with bars for each label."""
    plot = _make_figure("run: date and commit", "regressions", 180)
    _show_runs(plot)
    plot.y_range.start = 0
    plot.yaxis.ticker.min_interval = 1
    for i, label in enumerate(labels):
        source = _make_source(f"regressions-{i}", "x", "width", "y", "when")
        bars = plot.vbar("x", top="y", width="width", source=source, color=COLOURS[i % len(COLOURS)])
        plot.add_tools(HoverTool(renderers=[bars], tooltips=[(label, "@y"), ("", "@when")]))
    return plot


def _show_runs(plot: Any) -> None:
    """Give a chart an x axis whose ticks and labels the page sets: of runs."""
    plot.xaxis.ticker = FixedTicker(ticks=[])
    plot.x_range.range_padding = 0.03
    plot.min_border_left = 70  # so that the axes of charts below each other agree


def _make_roofline() -> Any:
    plot = _make_figure("FLOP per byte", "TFLOP/s", 320, x_axis_type="log", y_axis_type="log")
    roof = _make_source("roof", "x", "y")
    plot.line("x", "y", source=roof, line_color="#888888", line_width=2)
    all_points = _make_source("roofline", "x", "y", "case", "part")
    dots = plot.scatter("x", "y", source=all_points, color=OURS, size=7, alpha=0.35)
    own = _make_source("roofline-own", "x", "y", "case", "part")
    own_dots = plot.scatter("x", "y", source=own, color=WORSE, size=13, marker="diamond")
    tips = [("case", "@case"), ("TFLOP/s", "@y{0.0}"), ("of the bound", "@part{0 %}")]
    plot.add_tools(HoverTool(renderers=[dots, own_dots], tooltips=tips))
    return plot


def _make_bar_chart(name: str, y: str) -> Any:
    plot = _make_figure("rank", y, 220)
    source = _make_source(name, "x", "y")
    bars = plot.vbar("x", top="y", width=0.8, source=source, color=OURS)
    plot.y_range.start = 0
    plot.add_tools(HoverTool(renderers=[bars], tooltips=[("rank", "@x"), (y, "@y{0,0.00}")]))
    return plot
