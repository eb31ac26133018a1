"""Texts of one case on the dashboard, as HTML: its newest run, changes, failures, last figures."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from html import escape
from typing import Any
from urllib.parse import urlencode, urlsplit

from tritoncp.perf.dashboard import trends
from tritoncp.perf.dashboard.shell import html_table, percent
from tritoncp.perf.dashboard.trends import Trend
from tritoncp.perf.records.history import OURS, Point

FAILURES = 5  # number of failures that are listed, the newest
CLASSES = {"fails now": "worse", "fails still": "worse", "slower": "worse", "faster": "better"}


def day_of(point: Point) -> str:
    """Format the time of a measurement to the minute, in UTC; text that is not a time is returned
    unchanged."""
    try:
        when = datetime.datetime.fromisoformat(point.time)
    except ValueError:
        return point.time
    zoned = when.astimezone(datetime.UTC) if when.tzinfo else when
    return zoned.isoformat(sep=" ", timespec="minutes")[:16]


def commit_text(point: Point) -> str:
    """Return the short form of a commit, with + for uncommitted changes."""
    commit = str(point.env.get("commit", "no commit"))
    return commit[:10] + "+" * commit.endswith("+") if re.fullmatch(r"[0-9a-f]{40}\+?", commit) else commit


def commit_range(points: Sequence[Point], at: int, repository: str) -> tuple[str, str]:
    """Return (commits from the point before ``at`` to that at ``at``, web address that compares them or
    "")."""
    last, first = points[max(0, at - 1)], points[at]
    before, after = (str(point.env.get("commit", "")).removesuffix("+") for point in (last, first))
    text = commit_text(first) if before == after else f"{commit_text(last)} … {commit_text(first)}"
    linked = (
        repository and before != after and all(re.fullmatch("[0-9a-f]{7,64}", x) for x in (before, after))
    )
    address = compare_address(repository, before, after) if linked else ""
    return text, address


def compare_address(repository: str, before: str, after: str) -> str:
    """Return the address that compares two commits.

    >>> compare_address("https://gitlab.com/owner/project", "12ab", "34cd")
    'https://gitlab.com/owner/project/-/compare/12ab...34cd'
    """
    folder = "/-" if "gitlab" in (urlsplit(repository).hostname or "") else ""
    return f"{repository.rstrip('/')}{folder}/compare/{before}...{after}"


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


def describe_newest(trend: Trend) -> str:
    """Describe the newest run of a case."""
    newest = trend.newest
    mark = f'<span class="{status_class(trend)}">'
    if newest.ratio is None:
        return f"{mark}{newest.status}</span>"
    text = f"{mark}{newest.status} {percent(newest.ratio - 1)}</span>"
    if newest.low is None or newest.high is None:
        return f"{text} (too few runs to be sure: {newest.earlier} before)"
    interval = f"{percent(newest.low - 1)} … {percent(newest.high - 1)}"
    return f"{text} (99 % interval {interval}, {newest.earlier} before)"


def describe_case(trend: Trend, repository: str) -> str:
    """Describe a case: its newest run, changes of level, and failures."""
    last = trend.points[-1]
    tags = " · ".join([str(last.series), *filter(None, map(str, last.tags.values()))])
    parts = [
        f'<p class="help">{escape(tags)}</p>',
        f"<p>Newest run, {day_of(last)}: {describe_newest(trend)}.</p>",
    ]
    if not last.ms:
        parts.append(f'<p class="worse">{escape(last.own["why"])}</p>')
    items = [_describe_change(trend, change, repository) for change in reversed(trend.changes)]
    failures = [point for point in trend.points if not point.ms][-FAILURES:]
    items += [
        f'<span class="worse">failed</span> {day_of(point)}, <code>{escape(commit_text(point))}</code>: '
        + escape(point.own["why"])
        for point in reversed(failures)
    ]
    return "".join(parts) + (f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>" if items else "")


def _describe_change(trend: Trend, change: trends.Change, repository: str) -> str:
    """Describe a change of level: size, commits, other changed attributes, baselines in the same runs."""
    points, at = trend.points, change.at
    kind = "slower" if change.ratio > 1 else "faster"
    commits, href = commit_range(points, at, repository)
    code = f"<code>{escape(commits)}</code>"
    code = f'<a href="{escape(href)}" rel="noreferrer">{code}</a>' if href else code
    mark = CLASSES[kind]
    text = f'<span class="{mark}">{percent(change.ratio - 1)}, {kind}</span>'
    text += f" ({change.before:.4g} → {change.after:.4g} ms) {day_of(points[at])}, {code}. "
    nothing = (
        "Only the commit changed there."
        if trends.find_causes(points, at)
        else "Nothing that is recorded changed there: look at the machine."
    )
    causes = format_causes(points, at)
    text += escape(f"Changed there: {causes}." if causes else nothing)
    baselines = [points[i].baselines() for i in (max(0, at - 1), at)]
    moved = [
        f"{name} {percent(ms / baselines[0][name] - 1)}"
        for name, ms in baselines[1].items()
        if name in baselines[0]
    ]
    return text + (escape(f" Baselines in the same runs: {', '.join(moved)}.") if moved else "")


def format_causes(points: Sequence[Point], at: int) -> str:
    """Name the versions and drivers that changed near a point, and how many points away."""
    return "; ".join(
        f"{cause.name} {cause.before} → {cause.after}"
        + (f" ({abs(cause.away)} {'later' if cause.away > 0 else 'before'})" if cause.away else "")
        for cause in trends.find_causes(points, at)
        if cause.name != "commit"
    )


def figures_table(point: Point) -> str:
    """Format the newest figures of all contenders, and facts of their work."""
    rows = [_format_contender(name, figures) for name, figures in point.contenders.items()]
    heads = ("Who", "Median, ms", "Quartiles", "TFLOP/s", "Host, ms", "Set-up, s", "Memory, MiB", "Why not")
    lines = [
        f"<h2>Figures of {day_of(point)}, <code>{escape(commit_text(point))}</code></h2>",
        html_table(heads, rows),
    ]
    work = point.work
    facts = [f"most work over the mean {work['imbalance']:.3f}"] if "imbalance" in work else []
    facts += [f"a rank sends at most {work['wire_bytes'] / 1e6:.2f} MB"] if work.get("wire_bytes") else []
    facts += [f"{name} {value}" for name, value in point.state.items()]
    lines.append(f'<p class="help">{escape("; ".join(map(str, facts)))}</p>' if facts else "")
    return "".join(lines)


def _format_contender(name: str, figures: dict[str, Any]) -> list[str]:
    def number(key: str, scale: float = 1.0) -> str:
        return f"{figures[key] / scale:.4g}" if isinstance(figures.get(key), int | float) else "–"

    kind = ' class="worse"' if name == OURS and "ms" not in figures else ""
    quartiles = f"{number('low')} … {number('high')}" if "low" in figures else "–"
    numbers = [number("tflops"), number("host_ms"), number("setup_s"), number("peak_bytes", 1 << 20)]
    why = escape(str(figures.get("why", "")))
    return [escape(name), f"<span{kind}>{number('ms')}</span>", quartiles, *numbers, why]
