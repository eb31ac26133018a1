"""Trends of cases over runs: changes of level with the commits that made them, their possible causes, and the
current level compared with the one before it.

The changes are those of `levels.Fit.steps`; a change is open until the level returns, or until somebody
accepts it in the file ACCEPTED beside the history.
"""

from __future__ import annotations

import fnmatch
import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tritoncp.perf.dashboard import levels
from tritoncp.perf.dashboard.levels import LEAST, Array, Fit, LevelStep
from tritoncp.perf.exit_codes import InputError
from tritoncp.perf.records.history import ATTRIBUTES, Point, Series

ACCEPTED = "accepted.txt"  # lines of a case, a commit and a reason
NEAR = 3  # points before and after a change that are searched for causes; commits for which "faster" is news
# In order of urgency. "measure again": the newest runs differ, and are too few to be sure; "not compared":
# measured on a CPU that others may use, without a baseline in the same runs
STATUSES = (
    *("fails now", "slower", "likely slower", "measure again", "fails still", "accepted"),
    *("faster", "likely faster", "as before", "first run", "not compared"),
)


class Acceptance(NamedTuple):
    """A slower level that somebody accepts, since a commit. case: a name or a pattern"""

    case: str
    commit: str
    reason: str

    def holds(self, point: Point) -> bool:
        """Whether it is about this point's case and commit."""
        is_case = self.case == point.case or fnmatch.fnmatchcase(point.case, self.case)
        return is_case and str(point.env.get("commit", "")).startswith(self.commit)


class Change(NamedTuple):
    """A new level from point ``at`` on, at the first run of its commit; before and after are medians.

    first, last: the first runs of the earliest and the latest commit that can have made it
    """

    first: int
    at: int
    last: int
    before: float
    after: float
    certain: bool

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def status(self) -> str:
        word = "slower" if self.ratio > 1 else "faster"
        return word if self.certain else f"likely {word}"


class Cause(NamedTuple):
    """An attribute that changed near a change of level. away: number of points after it (0: at it)"""

    name: str
    before: str
    after: str
    away: int


class Newest(NamedTuple):
    """The present level divided by the level before it, None if unknown.

    status: one of STATUSES; since: the change that led to it; reason: why it is accepted; runs: number of
        runs before and since
    """

    status: str
    ratio: float | None = None
    since: Change | None = None
    reason: str = ""
    runs: tuple[int, int] = (0, 0)


class Trend(NamedTuple):
    """The trend of a case on one series: points in order of time, changes of level, comparison of the present
    level. loss: the present level divided by the lowest earlier one, at least 1"""

    points: list[Point]
    changes: list[Change]
    newest: Newest
    loss: float

    @property
    def urgency(self) -> tuple[float, ...]:
        """Sort key: new failures, slower cases by ratio, likely slower cases, cases to measure again, old
        failures, cases slower than their best level, then by distance below the goal."""
        last, newest = self.points[-1], self.newest
        group = STATUSES.index(newest.status)
        if group > STATUSES.index("fails still"):
            group = STATUSES.index("accepted") + (self.loss == 1)
        size = (newest.ratio or 1.0) if "slower" in newest.status else self.loss
        return group, -size, last.worst or math.inf


def read_acceptances(places: Iterable[Path]) -> list[Acceptance]:
    """Read the files ACCEPTED in folders, or beside files, of a history. Raises InputError for a line without
    a commit or a reason."""
    acceptances = []
    for folder in dict.fromkeys(place if place.is_dir() else place.parent for place in places):
        path = folder / ACCEPTED
        for number, text in enumerate(path.read_text().splitlines() if path.is_file() else (), 1):
            words = text.split(maxsplit=2)
            if not words or words[0].startswith("#"):
                continue
            if len(words) < 3 or len(words[1]) < 4:
                raise InputError(
                    f"{path}:{number}: {text!r} is not a case, at least four digits of a commit, and a "
                    "reason: write 'causal-16k-fwd 1a2b3c4d checks its bounds now'"
                )
            acceptances.append(Acceptance(*words))
    return acceptances


class _Case(NamedTuple):
    """A case on one series. timed: indices of the points that have a time; times: their comparable times,
    None if there are none; blocks: their block numbers"""

    points: Sequence[Point]
    timed: list[int]
    times: list[float] | None
    blocks: list[int]
    fit: Fit | None


def find_trend(points: Sequence[Point], acceptances: Sequence[Acceptance] = ()) -> Trend:
    """Find the changes of a case, whose points are in order of time, and compare its present level."""
    return find_trends([points], acceptances)[0]


def find_trends(lines: Sequence[Sequence[Point]], acceptances: Sequence[Acceptance] = ()) -> list[Trend]:
    """Find the trends of cases, as `find_trend` does; the cases of a series share an estimate of noise."""
    cases = [_prepare(points) for points in lines]
    by_series: dict[Series, list[int]] = {}
    for i, points in enumerate(lines):
        by_series.setdefault(points[-1].series, []).append(i)
    priors: dict[int, Array] = {}
    for indices in by_series.values():
        priors |= zip(indices, levels.pool([cases[i].fit for i in indices]))
    return [_find_trend(case, priors[i], acceptances) for i, case in enumerate(cases)]


def _prepare(points: Sequence[Point]) -> _Case:
    timed = [i for i, point in enumerate(points) if point.ms]
    times = comparable_times([points[i] for i in timed])
    blocks = number_blocks([points[i] for i in timed])
    return _Case(points, timed, times, blocks, levels.fit(times or [], blocks))


def _find_trend(case: _Case, prior: Array, acceptances: Sequence[Acceptance]) -> Trend:
    points, timed, times, blocks, fit = case
    steps = fit.steps(prior) if fit else []
    likely = [step for step in steps if step.likely]
    changes = _make_changes(times, blocks, likely) if times and likely else []
    if points[-1].ms and times is None:
        newest = Newest("not compared")
    elif points[-1].ms:
        makers = [points[i] for i in timed]
        newest = _compare_newest(makers, times or [], blocks, steps, changes, acceptances)
    else:
        newest = Newest("fails now" if len(points) > 1 and points[-2].ms else "fails still")
    lowest = min((change.before for change in changes), default=math.inf)
    loss = max(1.0, changes[-1].after / lowest) if changes else 1.0
    return Trend(
        [*points], [_renumber(change, timed) for change in changes], _renumber_newest(newest, timed), loss
    )


def number_blocks(points: Sequence[Point]) -> list[int]:
    """Number the blocks of successive points: a block has one commit, with the same versions and driver.
    Without a commit each point is a block.

    >>> from tritoncp.perf.records.history import Series
    >>> envs = [{"commit": "a"}, {"commit": "a"}, {"commit": "b"}, {"commit": "b", "driver": "1"}, {}, {}]
    >>> number_blocks([Point("r", "t", "c", Series("d"), env, {}) for env in envs])
    [0, 0, 1, 2, 3, 4]
    """
    names = (*ATTRIBUTES, "sources")
    blocks = [0] * min(1, len(points))
    for before, point in pairwise(points):
        is_same = all(before.env.get(name) == point.env.get(name) for name in names)
        blocks.append(blocks[-1] + (not is_same or not point.env.get("commit")))
    return blocks


def comparable_times(points: Sequence[Point]) -> list[float] | None:
    """Return the times of points that have one. Times of a host case are divided by the slowdown of the
    baselines in the same point, since other work on the CPU slows both; None without such a baseline."""
    times = [point.ms for point in points if point.ms]
    if not times or not points[0].on_host:
        return times
    rows = [point.best_of_families() for point in points]
    common = [name for name in rows[0] if all(name in row for row in rows)]
    if not common:
        return None
    paces = [statistics.fmean(math.log(row[name]) for name in common) for row in rows]
    usual = statistics.median(paces)
    return [ms * math.exp(usual - pace) for ms, pace in zip(times, paces)]


def _make_changes(times: Sequence[float], blocks: Sequence[int], steps: Sequence[LevelStep]) -> list[Change]:
    """Return the changes between the medians of the pieces between steps."""
    changes = []
    starts = [0, *(blocks.index(step.last) for step in steps)]
    ends = [*(blocks.index(step.first) for step in steps), len(times)]
    medians = [statistics.median(times[a : max(b, a + 1)]) for a, b in zip(starts, ends)]
    for step, (before, after) in zip(steps, pairwise(medians)):
        first, at, last = map(blocks.index, (step.first, step.best, step.last))
        if abs(math.log(after / before)) >= LEAST / 2 and (after > before) == step.up:
            changes.append(Change(first, at, last, before, after, step.certain))
    return changes


def _compare_newest(
    points: Sequence[Point],
    times: Sequence[float],
    blocks: Sequence[int],
    steps: Sequence[LevelStep],
    changes: Sequence[Change],
    acceptances: Sequence[Acceptance],
) -> Newest:
    """Compare the present level with the one before it, and the newest block with the present level."""
    if len(times) == 1:
        return Newest("first run")

    def since(status: str, change: Change, reason: str = "") -> Newest:
        start = max((other.last for other in changes if other.at < change.at), default=0)
        runs = change.first - start, len(times) - change.last
        return Newest(status, changes[-1].after / change.before, change, reason, runs)

    doubts = [step for step in steps if not step.likely and step.last > blocks[-1] - NEAR]
    accepted = Newest("as before")
    for change in reversed(_find_open(changes)):
        makers = [points[i] for i in (change.first, change.at, change.last)]
        reason = next((a.reason for a in acceptances if any(map(a.holds, makers))), "")
        if not reason:
            return since(change.status, change)
        accepted = since("accepted", change, reason)
    if doubts:
        at = blocks.index(doubts[-1].first)
        start = max((change.last for change in changes if change.last < at), default=0)
        ratio = statistics.median(times[blocks.index(doubts[-1].best) :]) / statistics.median(times[start:at])
        return Newest("measure again", ratio, runs=(at - start, len(times) - at))
    if accepted.reason:
        return accepted
    if changes and changes[-1].ratio < 1 and blocks[changes[-1].at] > blocks[-1] - NEAR:
        return since(changes[-1].status, changes[-1])
    start, at = changes[-1].last if changes else 0, blocks.index(blocks[-1])
    if at <= start:  # one commit
        at = len(times) - 1
    ratio = statistics.median(times[at:]) / statistics.median(times[start:at] or times[at:])
    return Newest("as before", ratio, runs=(at - start, len(times) - at))


def _find_open(changes: Sequence[Change]) -> list[Change]:
    """Return the changes to a slower level from which the level has not returned."""
    return [
        change
        for i, change in enumerate(changes)
        if change.ratio > 1 and min(later.after for later in changes[i:]) > change.before * (1 + LEAST)
    ]


def _renumber(change: Change, timed: Sequence[int]) -> Change:
    """Convert a change from indices of points that have a time to indices of all points."""
    return change._replace(first=timed[change.first], at=timed[change.at], last=timed[change.last])


def _renumber_newest(newest: Newest, timed: Sequence[int]) -> Newest:
    return newest._replace(since=newest.since and _renumber(newest.since, timed))


def find_causes(points: Sequence[Point], at: int) -> list[Cause]:
    """List other changes at point ``at`` or up to NEAR points away, nearest first.

    >>> from tritoncp.perf.records.history import Series
    >>> points = [Point("r", "t", "c", Series("d"), {"torch": v}, {}) for v in ("2.12", "2.13")]
    >>> find_causes(points, 1)
    [Cause(name='torch', before='2.12', after='2.13', away=0)]
    """
    nearby = []
    for i in range(max(1, at - NEAR), min(len(points), at + NEAR + 1)):
        before, after = points[i - 1].env, points[i].env
        nearby += [
            Cause(name, str(before[name]), str(after[name]), i - at)
            for name in ATTRIBUTES
            if name in before and name in after and before[name] != after[name]
        ]
    return sorted(nearby, key=lambda cause: abs(cause.away))
