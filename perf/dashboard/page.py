"""The dashboard: a history as one self-contained page, with the newest runs, changes with commits, all cases.

All figures are computed here; the page's script only sorts and filters rows, and shows the selected case.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from bokeh.models import ColumnDataSource, CustomJS

from tritoncp._version import __version__
from tritoncp.perf.dashboard import charts, shell, trends
from tritoncp.perf.dashboard.case_details import commit_text, day_of, since_text, status_class
from tritoncp.perf.dashboard.compare import group_points
from tritoncp.perf.dashboard.trends import STATUSES, Acceptance, Change, Trend
from tritoncp.perf.records.history import History, Point

# Classes of statuses for which a badge is not green, most urgent first
BADGE_COLOURS = {"worse": "red", "unsure": "orange"}


class Run(NamedTuple):
    """A run: when it began, its commit and versions."""

    time: str
    commit: str
    versions: str


class Event(NamedTuple):
    """A change of level of a case, or, without a change, a failure at one of its points. ratio: after /
    before, None for a failure"""

    trend: Trend
    at: int
    after: float | None
    change: Change | None = None

    @property
    def ratio(self) -> float | None:
        return self.change.ratio if self.change else None

    @property
    def kind(self) -> str:
        """The class of its text."""
        if self.change and not self.change.certain:
            return "unsure"
        return "worse" if (self.ratio or 2) > 1 else "better"


def page(history: History, repository: str = "", acceptances: Sequence[Acceptance] = ()) -> str:
    """Make the page, as HTML. repository: the web address to which commits are linked; acceptances: slower
    levels that somebody accepts"""
    runs, all_trends = sort_trends(history.points, acceptances)
    families = sorted({name for point in history.points for name in point.baselines()})
    points = ColumnDataSource(charts.collect_points(all_trends, runs, families))
    # The points of the selected case, which the page's script sets.
    selected = ColumnDataSource({name: [] for name in (*points.data, "x")}, name="shown")
    models = {"times": charts.make_time_chart(selected)}
    if families:
        models["ratios"] = charts.make_ratio_chart(selected, families)
    arguments = {
        "points": points,
        "shown": selected,
        "axes": [model.xaxis[0] for model in models.values()],
        "entries": models["ratios"].legend[0].items if families else [],
    }
    now = datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="minutes")
    return shell.render(
        "dashboard.html",
        models,
        CustomJS(args=arguments, code=(shell.ASSETS / "page.js").read_text()),
        title="tritoncp performance",
        devices=list_devices(all_trends, runs),
        trends=all_trends,
        events=list_events(all_trends),
        sparkline=charts.sparkline,
        filters=_list_filters(all_trends),
        repository=repository,
        notes=_list_notes(history),
        now=now[:16],
        version=__version__,
    )


def make_badge(points: Sequence[Point], acceptances: Sequence[Acceptance] = ()) -> dict[str, Any]:
    """Make the JSON of a badge for shields.io: how many cases fail now, are slower, or may be slower, and
    since which commit; or that no case does.

    >>> from tritoncp.perf.records.history import Series
    >>> make_badge([Point("r", "t", "c", Series("d"), {}, {"tritoncp": {"ms": 1.0}})])
    {'schemaVersion': 1, 'label': 'performance', 'message': '1 first run', 'color': 'brightgreen'}
    """
    _, all_trends = sort_trends(points, acceptances)
    counts = Counter((status_class(trend), _status_text(trend)) for trend in all_trends)
    kinds = {kind for kind, _ in counts}
    kind = next(kind for kind in (*BADGE_COLOURS, *kinds) if kind in kinds)
    texts = [f"{count} {text}" for (of_kind, text), count in counts.items() if of_kind == kind]
    colour = BADGE_COLOURS.get(kind, "brightgreen")
    return {"schemaVersion": 1, "label": "performance", "message": ", ".join(texts), "color": colour}


def sort_trends(
    points: Sequence[Point], acceptances: Sequence[Acceptance]
) -> tuple[dict[str, Run], list[Trend]]:
    """Return the runs by name, in order of time, and the trends of all cases, worst first."""
    runs, lines = order_by_runs(points)
    return runs, sorted(trends.find_trends(lines, acceptances), key=lambda trend: trend.urgency)


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
    """A device: its newest run, the number of cases in this run and of all cases, and the number of cases of
    each status, with the class of its text."""

    name: str
    newest: Run
    measured: int
    cases: int
    statuses: list[tuple[str, str, int]]


def list_devices(all_trends: Sequence[Trend], runs: dict[str, Run]) -> list[DeviceRow]:
    """List the devices, beginning with the device of the worst case. ``all_trends`` are in order of
    urgency."""
    rows = []
    for device in dict.fromkeys(str(trend.points[-1].series) for trend in all_trends):
        of_device = [trend for trend in all_trends if str(trend.points[-1].series) == device]
        newest = max((trend.points[-1].run for trend in of_device), key=[*runs].index)
        measured = sum(trend.points[-1].run == newest for trend in of_device)
        counts = Counter((status_class(trend), _status_text(trend)) for trend in of_device)
        statuses = [(*kind, count) for kind, count in counts.items()]
        rows.append(DeviceRow(device, runs[newest], measured, len(of_device), statuses))
    return rows


def _status_text(trend: Trend) -> str:
    """Return the status, with the commit since which it is so."""
    status, change = trend.newest.status, trend.newest.since
    return f"{status} since {since_text(trend.points, change)}" if change else status


def _list_notes(history: History) -> list[str]:
    notes = [f"{len(history.problems)} lines could not be read"] if history.problems else []
    return [*notes, *map(str, history.problems[:50])]


def list_events(all_trends: Sequence[Trend]) -> list[Event]:
    """List changes of level and failures: the newest first, then by size."""
    events = []
    for trend in all_trends:
        points = trend.points
        events += [Event(trend, change.at, change.after, change) for change in trend.changes]
        for i, (before, after) in enumerate(pairwise(points), 1):
            if before.ms and not after.ms:
                events.append(Event(trend, i, None))

    def size(event: Event) -> float:
        return math.inf if event.ratio is None else abs(math.log(event.ratio))

    return sorted(events, key=lambda e: (e.trend.points[e.at].time, size(e)), reverse=True)


def _list_filters(all_trends: Sequence[Trend]) -> dict[str, list[str]]:
    """List the values by which cases can be filtered."""
    lasts = [trend.points[-1] for trend in all_trends]
    present = {trend.newest.status for trend in all_trends}
    tags = {name: {p.tags[name] for p in lasts if p.tags.get(name)} for name in ("pass", "mask", "dtype")}
    values = {"device": {str(point.series) for point in lasts}, **tags}
    return {name: sorted(choices) for name, choices in values.items()} | {
        "status": [status for status in STATUSES if status in present]
    }
