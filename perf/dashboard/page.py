"""The dashboard: a history as one self-contained page, with the newest runs, changes with commits, all cases.

All figures are computed here; the page's script only filters cases and shows the selected one.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from bokeh.models import BooleanFilter, ColumnDataSource, CustomJS
from bokeh.models.widgets import Select, TextInput

from tritoncp._version import __version__
from tritoncp.perf.dashboard import case_details, charts, shell, trends
from tritoncp.perf.dashboard.case_details import (
    commit_range,
    commit_text,
    day_of,
    format_causes,
    status_class,
)
from tritoncp.perf.dashboard.compare import group_points
from tritoncp.perf.dashboard.shell import NUMBER, PERCENT, Column
from tritoncp.perf.dashboard.trends import STATUSES, Trend
from tritoncp.perf.records.history import History, Point


class Run(NamedTuple):
    """A run: when it began, its commit and versions."""

    time: str
    commit: str
    versions: str


class Event(NamedTuple):
    """A change of a case at one of its points. ratio: after / before, None for a failure; sure: whether it is
    a change of level or beyond the noise"""

    trend: Trend
    at: int
    before: float
    after: float | None
    sure: bool

    @property
    def ratio(self) -> float | None:
        return None if self.after is None else self.after / self.before


def page(history: History, repository: str = "") -> str:
    """Make the page, as HTML. repository: the web address to which commits are linked."""
    runs, lines = order_by_runs(history.points)
    all_trends = sorted(map(trends.find_trend, lines), key=lambda trend: trend.urgency)
    families = sorted({name for points in lines for point in points for name in point.baselines()})
    events = list_events(all_trends)
    chosen = BooleanFilter(booleans=[True] * len(all_trends))
    cases = _make_case_table(all_trends, chosen, repository)
    points = ColumnDataSource(charts.collect_points(all_trends, runs, families))
    # The points of the selected case, which the page's script sets.
    selected = ColumnDataSource({name: [] for name in (*points.data, "x")}, name="shown")
    filters = _make_filters(all_trends)
    models = {"cases": cases, "times": charts.make_time_chart(selected), **filters}
    if families:
        models["ratios"] = charts.make_ratio_chart(selected, families)
    if events:
        models["changes"] = _make_event_table(events, repository)
    arguments = {
        "cases": cases.source,
        "points": points,
        "shown": selected,
        "chosen": chosen,
        "filters": filters,
        "axes": [models[name].xaxis[0] for name in ("times", "ratios") if name in models],
        "entries": models["ratios"].legend[0].items if families else [],
    }
    now = datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="minutes")
    return shell.render(
        "dashboard.html",
        models,
        CustomJS(args=arguments, code=(shell.ASSETS / "page.js").read_text()),
        title="tritoncp performance",
        devices=list_devices(all_trends, runs),
        notes=_list_notes(history),
        now=now[:16],
        version=__version__,
    )


def order_by_runs(points: Sequence[Point]) -> tuple[dict[str, Run], list[list[Point]]]:
    """Return the runs by name, in order of time, and the points of each case on each series in that order."""
    runs: dict[str, Run] = {}
    in_order = sorted(points, key=lambda point: point.time)
    for point in in_order:
        runs.setdefault(point.run, Run(day_of(point), commit_text(point), _versions(point)))
    numbers = {run: i for i, run in enumerate(runs)}
    lines = group_points(in_order, by_series=True).values()
    return runs, [sorted(line, key=lambda point: numbers[point.run]) for line in lines]


def _versions(point: Point) -> str:
    names = ("tritoncp", "torch", "triton", "driver")
    return ", ".join(f"{name} {point.env[name]}" for name in names if name in point.env)


class DeviceRow(NamedTuple):
    """A device: its newest run, the number of cases measured in it and of all its cases, and the number of
    cases of each status, with the class of its text."""

    name: str
    newest: Run
    measured: int
    cases: int
    statuses: list[tuple[str, str, int]]


def list_devices(all_trends: Sequence[Trend], runs: dict[str, Run]) -> list[DeviceRow]:
    """List the devices, that of the worst case first. ``all_trends`` are in order of urgency."""
    rows = []
    for device in dict.fromkeys(str(trend.points[-1].series) for trend in all_trends):
        of_device = [trend for trend in all_trends if str(trend.points[-1].series) == device]
        newest = max((trend.points[-1].run for trend in of_device), key=[*runs].index)
        measured = sum(trend.points[-1].run == newest for trend in of_device)
        counts = Counter((status_class(trend), trend.newest.status) for trend in of_device)
        statuses = [(*kind, count) for kind, count in counts.items()]
        rows.append(DeviceRow(device, runs[newest], measured, len(of_device), statuses))
    return rows


def _list_notes(history: History) -> list[str]:
    notes = [] if trends.ruptures else [trends.MISSING]
    notes += [f"{len(history.problems)} lines could not be read"] if history.problems else []
    return [*notes, *map(str, history.problems[:50])]


# -- changes -------------------------------------------------------------------------------------------------


def list_events(all_trends: Sequence[Trend]) -> list[Event]:
    """List changes of level, changes of the newest run, and failures: the newest first, then by size."""
    events = []
    for trend in all_trends:
        points, newest, end = trend.points, trend.newest, len(trend.points) - 1
        events += [Event(trend, change.at, change.before, change.after, True) for change in trend.changes]
        for i, (before, after) in enumerate(pairwise(points), 1):
            if before.ms and not after.ms:
                events.append(Event(trend, i, before.ms, None, True))
        if newest.ratio and newest.status in ("slower", "faster", "maybe slower", "maybe faster"):
            ms = points[end].ms or 0.0
            events.append(Event(trend, end, ms / newest.ratio, ms, not newest.status.startswith("maybe")))

    def size(event: Event) -> float:
        return math.inf if event.ratio is None else abs(math.log(event.ratio))

    return sorted(events, key=lambda e: (e.trend.points[e.at].time, size(e)), reverse=True)


def _make_event_table(events: Sequence[Event], repository: str) -> Any:
    points = [event.trend.points for event in events]
    ranges = [commit_range(line, event.at, repository) for line, event in zip(points, events)]
    kinds = ["worse" if (e.ratio or 2) > 1 else "better" for e in events]
    kinds = [kind if event.sure else "unsure" for kind, event in zip(kinds, events)]
    link = '<a <% if (href) { %>href="<%- href %>"<% } %> rel="noreferrer"><%- value %></a>'
    case = '<a href="#<%- address %>"><%- value %></a>'
    size = f"<% if (Number.isFinite(value)) {{ %>{PERCENT}<% }} else {{ %>failed<% }} %>"
    change = f'<span class="<%- kind %>">{size}</span>'
    columns = {
        "date": Column("Date", [day_of(line[e.at])[:10] for line, e in zip(points, events)], 95),
        "case": Column("Case", [line[-1].case for line in points], 220, case),
        "change": Column("Change", [e.ratio and e.ratio - 1 for e in events], 85, change),
        "after": Column("Now, ms", [event.after for event in events], 85, NUMBER),
        "commits": Column("Commits", [text for text, _ in ranges], 200, link),
        "also": Column(
            "Changed there too", [format_causes(line, e.at) for line, e in zip(points, events)], 260
        ),
        "device": Column("Device", [str(line[-1].series) for line in points], 260),
    }
    more = {
        "href": [href for _, href in ranges],
        "kind": kinds,
        "address": [case_details.address_of(line[-1]) for line in points],
    }
    return shell.make_table(columns, more)


# -- cases ---------------------------------------------------------------------------------------------------


def _make_case_table(all_trends: Sequence[Trend], chosen: BooleanFilter, repository: str) -> Any:
    lasts = [trend.points[-1] for trend in all_trends]
    ends = np.cumsum([len(trend.points) for trend in all_trends])
    status = '<span class="<%- kind %>"><%- value %></span>'
    columns = {
        "case": Column(
            "Case", [point.case for point in lasts], 255, '<a href="#<%- address %>"><%- value %></a>'
        ),
        "ms": Column("Median, ms", [point.ms for point in lasts], 95, NUMBER),
        "change": Column("Newest", [(t.newest.ratio or math.nan) - 1 for t in all_trends], 85, PERCENT),
        "status": Column("Status", [trend.newest.status for trend in all_trends], 125, status),
        "loss": Column("Since best", [trend.loss - 1 for trend in all_trends], 90, PERCENT),
        "ratio": Column(
            "÷ baseline", [min(point.speedups().values(), default=None) for point in lasts], 90, NUMBER
        ),
        "measured": Column("Measured", [day_of(point) for point in lasts], 145),
        "runs": Column("Runs", [len(trend.points) for trend in all_trends], 60),
        "device": Column("Device", [str(point.series) for point in lasts], 260),
    }
    more: dict[str, Sequence[Any]] = {
        name: [p.tags.get(name, "") for p in lasts] for name in ("pass", "mask", "dtype")
    }
    more |= {
        "kind": [status_class(trend) for trend in all_trends],
        "words": [f"{p.case} {p.tags.get('model', '')} {p.tags.get('shape', '')}".lower() for p in lasts],
        "address": [case_details.address_of(point) for point in lasts],
        "html": [case_details.describe_case(trend, repository) for trend in all_trends],
        "figures": [case_details.figures_table(trend.points[-1]) for trend in all_trends],
        "start": [0, *ends[:-1].tolist()],
        "stop": ends.tolist(),
    }
    return shell.make_table(columns, more, chosen)


def _make_filters(all_trends: Sequence[Trend]) -> dict[str, Any]:
    """Make the controls that filter cases, by column."""
    lasts = [trend.points[-1] for trend in all_trends]
    present = {trend.newest.status for trend in all_trends}
    values = {
        "device": sorted({str(point.series) for point in lasts}),
        **{
            name: sorted({p.tags[name] for p in lasts if p.tags.get(name)})
            for name in ("pass", "mask", "dtype")
        },
        "status": [status for status in STATUSES if status in present],
    }
    looks: dict[str, Any] = {
        "sizing_mode": "stretch_width",
        "stylesheets": [shell.style_sheet("widgets.css")],
    }
    controls: dict[str, Any] = {}
    for name, present_values in values.items():
        options: list[Any] = [("", "all"), *((value, value) for value in present_values)]
        controls[name] = Select(title=name.capitalize(), options=options, value="", **looks)
    return controls | {"text": TextInput(title="Name, model or shape", **looks)}
