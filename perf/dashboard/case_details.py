"""Texts about cases for the dashboard's templates: commits, changes of the environment, addresses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlencode

from tritoncp.perf.dashboard import shell, trends
from tritoncp.perf.dashboard.shell import percent
from tritoncp.perf.dashboard.trends import Change, Trend
from tritoncp.perf.records.history import Point

CLASSES = {"fails now": "worse", "fails still": "worse", "slower": "worse", "faster": "better"}
CLASSES |= dict.fromkeys(("likely slower", "measure again", "likely faster"), "unsure")


def day_of(point: Point) -> str:
    """Format the time of a measurement to the minute."""
    return point.time[:16].replace("T", " ")


def commit_text(point: Point) -> str:
    """Return the short form of a commit, with + for uncommitted changes."""
    commit = str(point.env.get("commit", "no commit"))
    return commit[:10] + "+" * commit.endswith("+") if re.fullmatch(r"[0-9a-f]{40}\+?", commit) else commit


def since_text(points: Sequence[Point], change: Change) -> str:
    """Return the commit that made a change, or the first and the last commit that may have made it."""
    first, last = (commit_text(points[at]) for at in (change.first, change.last))
    if first == last:
        return first
    commits = dict.fromkeys(commit_text(point) for point in points[change.first : change.last + 1])
    return f"{first} {'or' if len(commits) == 2 else '…'} {last}"


def advice_text(points: Sequence[Point], change: Change) -> str:
    """Say which runs would make a change certain, or tell which commit made it."""
    if change.certain and change.first == change.last:
        return ""
    first, at, last = (commit_text(points[i]) for i in (change.first, change.at, change.last))
    measured = [at] if first == last else list(dict.fromkeys((at, last if at == first else first)))
    return f"to be certain, measure {' and '.join(measured)} again"


def compare_address(points: Sequence[Point], first: int, last: int, repository: str) -> str:
    """Return the web address that compares the commit before point ``first`` with that of ``last``, or ""."""
    ends = points[max(0, first - 1)], points[last]
    before, after = (str(point.env.get("commit", "")).removesuffix("+") for point in ends)
    linked = repository and all(re.fullmatch("[0-9a-f]{7,64}", commit) for commit in (before, after))
    return f"{repository.rstrip('/')}/compare/{before}...{after}" if linked and before != after else ""


def commit_before(points: Sequence[Point], at: int) -> str:
    """Return the commit that was measured before a point."""
    return commit_text(points[max(0, at - 1)])


def address_of(point: Point) -> str:
    """Return the URL fragment that selects a case on the page.

    >>> from tritoncp.perf.records.history import Series
    >>> address_of(Point("r", "t", "a b", Series("GPU"), {}, {}))
    'case=a+b&on=GPU'
    """
    return urlencode({"case": point.case, "on": str(point.series)})


def status_class(trend: Trend) -> str:
    status = trend.newest.status
    return CLASSES.get(status, "faint")


def format_causes(points: Sequence[Point], at: int) -> str:
    """Name the versions and drivers that changed near a point, and how many points away."""
    return "; ".join(
        f"{cause.name} {cause.before} → {cause.after}"
        + (f" ({abs(cause.away)} {'later' if cause.away > 0 else 'before'})" if cause.away else "")
        for cause in trends.find_causes(points, at)
        if cause.name != "commit"
    )


def baseline_moves(points: Sequence[Point], at: int) -> list[str]:
    """List by how much each baseline's time changed at a point."""
    before, after = (points[i].baselines() for i in (max(0, at - 1), at))
    return [f"{name} {percent(ms / before[name] - 1)}" for name, ms in after.items() if name in before]


shell.TEMPLATES.filters.update(day=day_of, commit=commit_text, kind=status_class, address=address_of)
shell.TEMPLATES.globals.update(
    since_text=since_text,
    advice_text=advice_text,
    compare_address=compare_address,
    commit_before=commit_before,
    format_causes=format_causes,
    baseline_moves=baseline_moves,
)
