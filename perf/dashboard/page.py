"""A history as one self-contained page: data, charts and code in one file.

Columns of numbers are quantised, deflated and decoded in the page; charts are Bokeh's, made here and filled
in the page; its style and code are in perf/dashboard/assets/.
"""

from __future__ import annotations

import base64
import datetime
import itertools
import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.embed import json_item
from bokeh.resources import Resources
from tritoncp.perf.dashboard import changepoints, charts, latest_runs
from tritoncp.perf.dashboard.columns import NONE, STEP, WIDE_NONE, WIDE_STEP, median_time, pack_columns
from tritoncp.perf.dashboard.compare import LEVEL, group_points
from tritoncp.perf.dashboard.repository import compare_address
from tritoncp.perf.records.history import ATTRIBUTES, History, Point, Series

from tritoncp._version import __version__

STUDENT = 128  # intervals of the table of Student's t
HERE = Path(__file__).parent / "assets"
SCRIPTS = (
    "elements",
    "data",
    "charts",
    "latest",
    "overview",
    "comparison",
    "case",
    "kernels",
    "page",
)  # in this order


def page(history: History, repository: str = "") -> str:
    """Make the page, as HTML. repository: the web address to which commits are linked."""
    facts, columns = collect_data(history, repository)
    parts = {
        "style": (HERE / "page.css").read_text(),
        "script": _escape_script("\n".join((HERE / f"{name}.js").read_text() for name in SCRIPTS)),
        "bokeh": _escape_script("\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)),
        "charts": _escape_script(
            json.dumps({name: json_item(chart) for name, chart in charts.make_charts(facts).items()})
        ),
        "about": _compress(json.dumps(facts, separators=(",", ":")).encode()),
        "points": _compress(columns),
    }
    text = (HERE / "page.html").read_text()
    head, *sections = text.split("{{")
    return head + "".join(parts[name] + after for name, after in (part.split("}}", 1) for part in sections))


def _escape_script(text: str) -> str:
    """Escape </script>: in JavaScript and JSON strings, <\\/ is the same text."""
    return text.replace("</", "<\\/").replace("<!--", "<\\!--")


def _compress(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def collect_data(history: History, repository: str = "") -> tuple[dict[str, Any], bytes]:
    """Collect the data of the page: names and facts, and the columns of all points (see `pack_columns`)."""
    in_order = sorted(history.points, key=lambda point: _seconds(point.time))
    lines = [points for _, points in sorted(group_points(in_order, by_series=True).items())]
    begun: dict[str, int] = {}  # the time at which each run began, in order of time
    for point in in_order:
        begun.setdefault(point.run, _seconds(point.time))
    runs = {run: i for i, run in enumerate(begun)}
    lines = [sorted(points, key=lambda point: runs[point.run]) for points in lines]
    env_texts = [[_attributes(point) for point in points] for points in lines]
    envs = {text: i for i, text in enumerate(dict.fromkeys(itertools.chain(*env_texts)))}
    env_of_run = {
        point.run: envs[text]
        for points, texts in zip(lines, env_texts, strict=True)
        for point, text in zip(points, texts, strict=True)
    }
    devices = sorted({str(points[0].series) for points in lines})
    families = sorted({name for points in lines for point in points for name in point.baselines()})
    summaries = [_summarize_line(points, devices, families) for points in lines]
    cards = _summarize_tracks(lines, summaries, runs)
    facts = {
        "version": __version__,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "confidence": changepoints.CONFIDENCE,
        "steps": {"narrow": [STEP, NONE], "wide": [WIDE_STEP, WIDE_NONE]},
        "level": LEVEL,
        "student": _tabulate_student(),
        "compare": compare_address(repository),
        "devices": devices,
        "families": families,
        "colours": charts.COLOURS,
        "runs": [[time, run, env_of_run[run]] for run, time in begun.items()],
        "envs": [json.loads(text) for text in envs],
        "cards": cards,
        "lines": _rank_lines(summaries),
        "resources": [
            {key: value for key, value in line.items() if key not in ("kind", "run") and value is not None}
            for line in history.kernels()
        ],
        "problems": [str(problem) for problem in history.problems],
        "missing": changepoints.MISSING if changepoints.ruptures is None else "",
    }
    numbers = [
        ([runs[point.run] for point in points], [envs[text] for text in texts])
        for points, texts in zip(lines, env_texts, strict=True)
    ]
    return facts, pack_columns(lines, numbers, [line["unit"] for line in summaries], families)


def _summarize_tracks(
    lines: list[list[Point]], summaries: list[dict[str, Any]], runs: dict[str, int]
) -> list[dict[str, Any]]:
    """Summarise the latest run of each track, and add to the summary of each line the number of its card and
    how it did there."""
    cards = []
    for number, track in enumerate(latest_runs.find_tracks(lines, runs)):
        cards.append(card := latest_runs.summarize_track(track, lines, runs))
        for i in track.lines:
            summaries[i] |= latest_runs.summarize_line(lines[i], card, runs) | {"card": number}
    return cards


def _tabulate_student() -> list[float]:
    """Tabulate the half-width of Student's interval over 1 / degrees of freedom, from 0 (normal) to 1: smooth
    enough for the page to interpolate by cubics to seven digits."""
    return [
        round(changepoints.student_quantile(STUDENT / max(k, 1e-9), LEVEL), 9) for k in range(STUDENT + 1)
    ]


def _seconds(time: str) -> int:
    try:
        return int(datetime.datetime.fromisoformat(time).timestamp())
    except ValueError:
        return 0


def _attributes(point: Point) -> str:
    return json.dumps({name: str(point.env[name]) for name in ATTRIBUTES if name in point.env})


def _summarize_line(points: list[Point], devices: list[str], families: list[str]) -> dict[str, Any]:
    """Summarise a case on one series: its last point and the changes before it."""
    last = points[-1]
    contenders = {
        name: {key: value for key, value in figures.items() if key not in ("samples", "errors")}
        for name, figures in last.contenders.items()
    }
    timed_indices = [i for i, point in enumerate(points) if point.ms]
    times = [points[i].ms or 0.0 for i in timed_indices]
    level_changes = changepoints.find_changes(times)
    line = {
        "case": last.case,
        "device": devices.index(str(last.series)),
        "tags": last.tags,
        "n": len(points),
        "unit": median_time(points),
        "fails": {i: point.own["why"] for i, point in enumerate(points) if not point.ms},
        "changes": _list_changes(points, timed_indices, level_changes, families),
        "loss": _loss(level_changes),
        "latest": _compare_latest(points, times, level_changes),
        "last": contenders,
    }
    extra = {"work": last.work, "ceilings": last.ceilings, "goal": last.goal, "state": last.state}
    return line | {name: value for name, value in extra.items() if value}


def _rank_lines(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add each line's "rank", the most urgent first: new failures of the latest run; slower cases, by their
    loss against the few runs before; missing cases; figures above the bound; cases that still fail; cases
    that are slower than at their best; cases that are farthest below their goal."""
    order = {key: rank for rank, key in enumerate(sorted({_urgency(line) for line in lines}))}
    return [line | {"rank": order[_urgency(line)]} for line in lines]


def _urgency(line: dict[str, Any]) -> tuple[float, ...]:
    groups = ("failing", "slower", "missing", "over its bound", "still failing")
    status = "over its bound" if line.get("alarms") and line["status"] not in groups else line["status"]
    group = groups.index(status) if status in groups else len(groups)
    slowest = -line["few"][0] if status == "slower" else 0.0
    speedups = Point("", "", "", Series(""), {}, line["last"]).speedups()
    goals = [speedups.get(name, goal) / goal for name, goal in line.get("goal", {}).items()]
    return group, slowest, -line["loss"], min(goals, default=1.0)


def _compare_latest(
    points: list[Point], times: list[float], level_changes: Sequence[changepoints.Change]
) -> dict[str, Any]:
    """Compare the newest point with the level before it."""
    if not points[-1].ms:
        before = points[-2].ms if len(points) > 1 else None
        return {"verdict": "failing" if before else "still failing"}
    latest = changepoints.compare_latest(times, level_changes)._asdict()
    return {name: round(x, 5) if isinstance(x, float) else x for name, x in latest.items()}


def _loss(level_changes: Sequence[changepoints.Change]) -> float:
    """Return the level now over the lowest before a change; 1 if it never was lower."""
    if not level_changes:
        return 1.0
    return max(1.0, level_changes[-1].after / min(change.before for change in level_changes))


def _list_changes(
    points: list[Point],
    timed_indices: list[int],
    level_changes: Sequence[changepoints.Change],
    families: list[str],
) -> list[dict[str, Any]]:
    """List change points, by index, with their possible causes; timed_indices: of points with a time."""
    edges = [0, *(change.at for change in level_changes), len(timed_indices)]
    rows = []
    for k, change in enumerate(level_changes):
        before, after = (
            [points[i] for i in timed_indices[a:b]]
            for a, b in ((edges[k], edges[k + 1]), (edges[k + 1], edges[k + 2]))
        )
        at = timed_indices[change.at]
        causes = [cause._asdict() for cause in changepoints.causes(points, at)]
        relative = {name: _median_speedup(after, name) / _median_speedup(before, name) for name in families}
        rows.append({
            "at": at,
            "from": timed_indices[change.at - 1],
            "before": change.before,
            "after": change.after,
            "causes": causes,
            "relative": {name: round(x, 4) for name, x in relative.items() if not math.isnan(x)},
        })  # fmt: skip
    return rows


def _median_speedup(points: list[Point], family: str) -> float:
    speedups = [speedup[family] for speedup in (point.speedups() for point in points) if family in speedup]
    return float(np.median(speedups)) if speedups else math.nan
