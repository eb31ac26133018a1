"""A history as one self-contained page: data, charts and code in one file.

Columns of numbers are quantised, deflated and decoded in the page; charts are Bokeh's, made here and filled
in the page; its style and code are in perf/dashboard/assets/.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.embed import json_item
from bokeh.resources import Resources

from tritoncp._version import __version__
from tritoncp.perf.dashboard import changepoints, charts
from tritoncp.perf.dashboard.compare import group_points
from tritoncp.perf.records.history import ATTRIBUTES, History, Point, Series

STEP = 2.5e-4  # quantisation step of log(time): an error of at most an eighth of a per mille
NONE = -32768  # a failure or an absent baseline
HERE = Path(__file__).parent / "assets"


def page(history: History) -> str:
    """Make the page, as HTML."""
    facts, columns = collect_data(history)
    parts = {
        "style": (HERE / "page.css").read_text(),
        "script": _escape_script((HERE / "page.js").read_text()),
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


def collect_data(history: History) -> tuple[dict[str, Any], bytes]:
    """Collect the data of the page: names and facts, and the columns of all points (see `_make_columns`)."""
    in_order = sorted(history.points, key=lambda point: _seconds(point.time))
    lines = [points for _, points in sorted(group_points(in_order, by_series=True).items())]
    begun: dict[str, int] = {}  # the time at which each run began, in order of time
    for point in in_order:
        begun.setdefault(point.run, _seconds(point.time))
    runs = {run: i for i, run in enumerate(begun)}
    envs: dict[str, int] = {}
    for points in lines:
        for point in points:
            envs.setdefault(_attributes(point), len(envs))
    devices = sorted({str(points[0].series) for points in lines})
    families = sorted({name for points in lines for point in points for name in point.baselines()})
    facts = {
        "version": __version__,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "confidence": changepoints.CONFIDENCE,
        "step": STEP,
        "none": NONE,
        "devices": devices,
        "families": families,
        "colours": charts.COLOURS,
        "runs": [[time, run] for run, time in begun.items()],
        "envs": [json.loads(text) for text in envs],
        "lines": _rank_lines([_summarize_line(points, devices, families) for points in lines]),
        "resources": [
            {key: value for key, value in line.items() if key not in ("kind", "run") and value is not None}
            for line in history.kernels()
        ],
        "problems": [str(problem) for problem in history.problems],
        "missing": changepoints.MISSING if changepoints.ruptures is None else "",
    }
    columns = [_make_columns(points, runs, envs, families) for points in lines]
    return facts, b"".join(
        _split_byte_planes(np.concatenate(column)) for column in zip(*columns, strict=True)
    )


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
        "unit": _median_time(points),
        "fails": {i: point.own["why"] for i, point in enumerate(points) if not point.ms},
        "changes": _list_changes(points, timed_indices, level_changes, families),
        "loss": _loss(level_changes),
        "latest": _compare_latest(points, times, level_changes),
        "last": contenders,
    }
    extra = {"work": last.work, "ceilings": last.ceilings, "goal": last.goal, "state": last.state}
    return line | {name: value for name, value in extra.items() if value}


def _rank_lines(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add each line's "rank", the most urgent first: new failures of the latest run; slower cases, by the
    lower end of the interval; cases that still fail; cases that are slower than at their best; cases that
    are farthest below their goal."""
    order = {key: rank for rank, key in enumerate(sorted({_urgency(line) for line in lines}))}
    return [line | {"rank": order[_urgency(line)]} for line in lines]


def _urgency(line: dict[str, Any]) -> tuple[float, ...]:
    latest = line["latest"]
    group = {"failing": 0, "slower": 1, "still failing": 2}.get(latest["verdict"], 3)
    speedups = Point("", "", "", Series(""), {}, line["last"]).speedups()
    goals = [speedups.get(name, goal) / goal for name, goal in line.get("goal", {}).items()]
    return group, -latest["low"] if group == 1 else 0.0, -line["loss"], min(goals, default=1.0)


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


def _median_time(points: list[Point]) -> float:
    """Return the median time of a line, which is the unit of its logarithms."""
    times = [point.ms for point in points if point.ms]
    return float(np.median(times)) if times else 1.0


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


def _make_columns(
    points: list[Point], runs: dict[str, int], envs: dict[str, int], families: list[str]
) -> list[np.ndarray]:
    """Return the columns of a line's points: int32 run and env; int16, in STEPs of a logarithm, time over the
    line's unit, time over lower quartile, upper quartile over time, then each family's time over tritoncp's.
    Missing values are NONE."""
    unit = _median_time(points)
    own_figures = [point.own for point in points]
    logs = [
        [_quantize(figures.get("ms"), unit) for figures in own_figures],
        [_quantize(figures.get("ms"), figures.get("low", figures.get("ms"))) for figures in own_figures],
        [_quantize(figures.get("high", figures.get("ms")), figures.get("ms")) for figures in own_figures],
    ]
    speedups = [point.speedups() for point in points]
    logs += [[_quantize(figures.get(name), 1.0) for figures in speedups] for name in families]
    numbers = [runs[point.run] for point in points], [envs[_attributes(point)] for point in points]
    return [*(np.array(x, "<i4") for x in numbers), *(np.array(x, "<i2") for x in logs)]


def _quantize(x: float | None, unit: float | None) -> int:
    """
    >>> _quantize(1.01, 1.0), _quantize(None, 1.0)
    (40, -32768)
    """
    if x is None or unit is None:
        return NONE
    return max(-32767, min(32767, round(math.log(x / unit) / STEP)))


def _split_byte_planes(x: np.ndarray) -> bytes:
    """Reorder bytes by significance, all lowest bytes first, which deflate compresses better."""
    return np.ascontiguousarray(x.view(np.uint8).reshape(len(x), -1).T).tobytes()
