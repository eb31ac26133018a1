"""The latest run of each series, against the run before it and the five runs before it.

Runs of a series that share a case, directly or through other runs, form a track: runs of one device and of
four ranks measure different cases, and neither's cases are missing from the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from tritoncp.perf.dashboard import changepoints
from tritoncp.perf.dashboard.compare import estimate
from tritoncp.perf.records.history import Point
from tritoncp.perf.records.roofline import find_alarms

FEW = 5  # runs before the latest that it is compared with
Lines = Sequence[Sequence[Point]]


class Track(NamedTuple):
    """Lines that share runs, and those runs in order of time; lines and runs by number."""

    lines: list[int]
    runs: list[int]


def find_tracks(lines: Lines, runs: Mapping[str, int]) -> list[Track]:
    """Group the lines of each series that share runs.

    lines: points of each case on each series, in order of time; runs: numbers of runs, in order of time
    """
    columns: dict[tuple[str, int], int] = {}  # of a series and a run
    pairs = [
        (i, columns.setdefault((str(points[0].series), runs[point.run]), len(columns)))
        for i, points in enumerate(lines)
        for point in points
    ]
    rows, cells = np.array(pairs).T
    graph = coo_array((np.ones(len(pairs)), (rows, len(lines) + cells)), [len(lines) + len(columns)] * 2)
    _, labels = connected_components(graph, directed=False)
    tracks: dict[int, Track] = {}
    for i, label in enumerate(labels[: len(lines)]):
        tracks.setdefault(int(label), Track([], [])).lines.append(i)
    for (_, run), label in zip(columns, labels[len(lines) :]):
        tracks[int(label)].runs.append(run)
    return [Track(track.lines, sorted(track.runs)) for track in tracks.values()]


def summarize_track(track: Track, lines: Lines, runs: Mapping[str, int]) -> dict[str, Any]:
    """Return the numbers of the latest run, of the run before it (None: there is none), and of up to five
    before it; and the number of cases in the latest run."""
    latest = track.runs[-1]
    measured = [i for i in track.lines if runs[lines[i][-1].run] == latest]
    series = str(lines[track.lines[0]][0].series)
    earlier = track.runs[-1 - FEW : -1]
    before = earlier[-1] if earlier else None
    return {"series": series, "run": latest, "before": before, "few": earlier, "cases": len(measured)}


def summarize_line(
    points: Sequence[Point], card: Mapping[str, Any], runs: Mapping[str, int]
) -> dict[str, Any]:
    """Summarise a case in the latest run of its track.

    status: "failing" (it did not before), "still failing", "missing" (a run of the few before has it), "not
    measured" (not in those either); else, against the few before, "slower", "faster", "as before" or "too few
    runs"
    before, few: time over that in the run before, and over that in the few before: the ratio and whether it
    is "slower" or "faster" by more than the noise of the case, "" if neither, None where noise is unknown
    noise: half-width of that noise, as a part of the time, against the few runs before
    regressions: indices of points that were slower than the few before them, or the first to fail
    alarms: contenders whose rate in the last measurement is above the bound
    """
    noise = estimate_noise([point.ms for point in points[:-1] if point.ms])
    facts: dict[str, Any] = {"regressions": find_regressions(points, noise)}
    if noise is not None:
        facts["noise"] = round(math.expm1(noise * math.sqrt(1 + 1 / FEW)), 5)
    if runs[points[-1].run] != card["run"]:
        missing = any(runs[point.run] in card["few"] for point in points)
        return facts | {"status": "missing" if missing else "not measured"}
    facts["alarms"] = [list(alarm) for alarm in find_alarms(points[-1])]
    earlier = {"before": [card["before"]], "few": card["few"]}
    for name, numbers in earlier.items():
        facts[name] = _compare(points[-1:], [point for point in points if runs[point.run] in numbers], noise)
    return facts | {"status": _name_status(points, facts["few"])}


def _name_status(points: Sequence[Point], few: list[Any] | None) -> str:
    if not points[-1].ms:
        return "failing" if len(points) > 1 and points[-2].ms else "still failing"
    if few is None or few[1] is None:
        return "too few runs"
    return few[1] or "as before"


def _compare(latest: Sequence[Point], earlier: Sequence[Point], noise: float | None) -> list[Any] | None:
    """Return the ratio of times, and its relation to the noise; None if a side has no time."""
    after, before = estimate(latest), estimate(earlier)
    if after is None or before is None:
        return None
    distance = after.mean - before.mean
    return [round(math.exp(distance), 5), _judge(distance, noise, before.runs)]


def _judge(distance: float, noise: float | None, runs: int) -> str | None:
    if noise is None:
        return None
    if abs(distance) <= max(noise * math.sqrt(1 + 1 / runs), math.log1p(changepoints.LEAST)):
        return ""
    return "slower" if distance > 0 else "faster"


def estimate_noise(times: Sequence[float]) -> float | None:
    """Estimate the noise of a case: the half-width, in logarithms, of the 99 % prediction interval for one
    time against an exact level; None with fewer than four times.

    From the differences of neighbours, whose standard deviation over √2 is that of the times: a step of the
    level is a single difference, and is left out with those beyond six robust standard deviations. Neighbours
    share a time, so n times count as 0.8 (n - 1) degrees of freedom: then of 1000 times of a flat series 5 to
    8 lie above the interval (simulated, with 4 to 50 times).
    """
    if len(times) < changepoints.LEAST_BEFORE:
        return None
    distances = np.abs(np.diff(np.log(np.asarray(times, dtype=np.float64))))
    least = changepoints.LEAST / 20
    limit = changepoints.GROSS * max(1.4826 * float(np.median(distances)), math.sqrt(2) * least)
    inliers = distances[distances <= limit]
    deviation = max(math.sqrt(float(np.mean(inliers**2)) / 2), least)
    return changepoints.student_quantile(0.8 * (len(times) - 1), changepoints.CONFIDENCE) * deviation


def find_regressions(points: Sequence[Point], noise: float | None) -> list[int]:
    """List the points that are slower than the few before them by more than the noise, or fail and the point
    before did not."""
    failures = [i for i in range(1, len(points)) if not points[i].ms and points[i - 1].ms]
    timed = [i for i, point in enumerate(points) if point.ms]
    logs = np.log([points[i].ms or 1.0 for i in timed])
    if noise is None:
        return failures
    sums = np.concatenate([[0.0], np.cumsum(logs)])
    ends = np.arange(1, len(logs))
    starts = np.maximum(0, ends - FEW)
    counts = ends - starts
    distances = logs[1:] - (sums[ends] - sums[starts]) / counts
    limits = np.maximum(noise * np.sqrt(1 + 1 / counts), math.log1p(changepoints.LEAST))
    slower = [timed[int(k) + 1] for k in np.flatnonzero(distances > limits)]
    return sorted([*failures, *slower])
