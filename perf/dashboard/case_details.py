"""Texts about cases for the dashboard's templates: commits, changes of the environment, addresses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlencode

from tritoncp.perf.dashboard import shell, trends
from tritoncp.perf.dashboard.shell import percent
from tritoncp.perf.dashboard.trends import Trend
from tritoncp.perf.records.history import Point

CLASSES = {"fails now": "worse", "fails still": "worse", "slower": "worse", "faster": "better"}


def day_of(point: Point) -> str:
    """Format the time of a measurement to the minute."""
    return point.time[:16].replace("T", " ")


def commit_text(point: Point) -> str:
    """Return the short form of a commit, with + for uncommitted changes."""
    commit = str(point.env.get("commit", "no commit"))
    return commit[:10] + "+" * commit.endswith("+") if re.fullmatch(r"[0-9a-f]{40}\+?", commit) else commit


def commit_range(points: Sequence[Point], at: int, repository: str) -> tuple[str, str]:
    """Return (commits from the point before ``at`` to that at ``at``, web address that compares them or
    "")."""
    last, first = points[max(0, at - 1)], points[at]
    before, after = (str(point.env.get("commit", "")).removesuffix("+") for point in (last, first))
    if before == after:
        return commit_text(first), ""
    linked = repository and all(re.fullmatch("[0-9a-f]{7,64}", commit) for commit in (before, after))
    address = f"{repository.rstrip('/')}/compare/{before}...{after}" if linked else ""
    return f"{commit_text(last)} … {commit_text(first)}", address


def address_of(point: Point) -> str:
    """Return the URL fragment that selects a case on the page.

    >>> from tritoncp.perf.records.history import Series
    >>> address_of(Point("r", "t", "a b", Series("GPU"), {}, {}))
    'case=a+b&on=GPU'
    """
    return urlencode({"case": point.case, "on": str(point.series)})


def status_class(trend: Trend) -> str:
    status = trend.newest.status
    return "unsure" if status.startswith("maybe") else CLASSES.get(status, "faint")


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
    commit_range=commit_range,
    format_causes=format_causes,
    baseline_moves=baseline_moves,
)
