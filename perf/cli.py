"""`tritoncp perf`: run, compare, dashboard."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from tritoncp.command_base import OutputFile, make_console
from tritoncp.perf.bisection import bisect
from tritoncp.perf.dashboard import compare as comparing
from tritoncp.perf.dashboard import gate
from tritoncp.perf.dashboard.suites import SUITE_HEAD, suite_lines
from tritoncp.perf.exit_codes import (
    EPILOG,
    NOTHING_MEASURED,
    InputError,
    NothingMeasured,
    PerfCommand,
    input_errors,
)
from tritoncp.perf.records.history import BrokenLine, Point, read
from tritoncp.perf.run import main as run

HISTORY = Path("perf/history")


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
def perf() -> None:
    """Measure, keep a history, compare, and show it.

    \b
    Examples:
      tritoncp perf run --tier smoke --device host
      tritoncp perf compare HEAD~1 HEAD --fail-over 5%
      tritoncp perf dashboard --out dashboard.html
    """


perf.add_command(run, "run")
perf.add_command(bisect)


def _parse_percent(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    """Parse a percentage, with or without %, to a fraction."""
    if text is None:
        return None
    number = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) ?%?", text.strip())
    part = float(number[1]) / 100 if number else math.inf
    if not math.isfinite(part):
        raise click.BadParameter(f"{text!r} is not a percentage: 5 and 5% both mean five per cent")
    return part


@perf.command("compare", cls=PerfCommand)
@click.argument("before")
@click.argument("after")
@click.option(
    "--history",
    type=click.Path(path_type=Path),
    default=HISTORY,
    show_default=True,
    help="Where commits, runs, versions and devices are looked up.",
)
@click.option(
    "--last",
    type=click.IntRange(1),
    metavar="RUNS",
    help="Use only so many newest runs of each side and case.",
)
@click.option(
    "--fail-over",
    callback=_parse_percent,
    metavar="PERCENT",
    help="Exit with 1 if a case is slower by more than this. Always a percentage, with or without its sign: "
    "5 and 5% are five per cent, 0.5 is half of one.",
)
@click.option(
    "--allow-missing",
    is_flag=True,
    help="Report cases that were measured before and not after, without exiting with 1.",
)
@click.option(
    "--require",
    "required",
    multiple=True,
    metavar="PATTERN",
    help="Exit with 1 unless a case like this has a time in AFTER: 'causal-*-fwd'; as often as you like.",
)
@click.option(
    "--allow-new-device",
    is_flag=True,
    help="Exit with 0 if BEFORE has no measurement on AFTER's devices, as in a first run; different devices "
    "are not compared then.",
)
@click.option("--html", type=OutputFile(), metavar="FILE", help="Also write a page of it.")
@click.option("--markdown", is_flag=True, help="For a comment on a pull request.")
@click.option("--csv", type=OutputFile(), metavar="FILE", help="Also write the rows, for a spreadsheet.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout: verdict, reasons, rows.")
def compare(
    before: str,
    after: str,
    history: Path,
    last: int | None,
    fail_over: float | None,
    allow_missing: bool,
    required: tuple[str, ...],
    allow_new_device: bool,
    html: Path | None,
    markdown: bool,
    csv: Path | None,
    as_json: bool,
) -> None:
    """Ratio of times, AFTER over BEFORE, for each case: worst first, with a confidence interval.

    BEFORE and AFTER are files, folders, commits (HEAD~1), branches (their newest measured commit), versions
    of tritoncp, runs or devices. Suites are the cases of a pass, with the geometric mean. Exits with 1
    if a case is past --fail-over (its ratio is, and the interval lies above 1), fails and did not, or is not
    measured again.

    \b
    Examples:
      tritoncp perf compare HEAD~1 HEAD --fail-over 5%
      tritoncp perf compare main feature --html comparison.html
    """
    if html is not None:
        from tritoncp.perf.dashboard.comparison_page import comparison_page
    try:
        sides = [_read_side(before, history, allow_new_device), _read_side(after, history)]
        devices = [{str(point.series) for point in points} for points in sides]
        if allow_new_device and not devices[0] & devices[1]:
            present, new = (", ".join(sorted(names)) or "no device" for names in devices)
            first_run = (
                f"first measurements on {new}: nothing to compare with, since the history has {present}"
            )
            comparison = comparing.compare([], [point for point in sides[1] if point.ms])
        else:
            first_run = ""
            sides = [points if last is None else comparing.newest(points, last) for points in sides]
            with input_errors():
                comparison = comparing.compare(*sides)
        result = gate.judge(comparison, fail_over, allow_missing, required, first_run)
    except (InputError, NothingMeasured) as error:
        if as_json:
            word = gate.VERDICTS[error.exit_code]
            reason = gate.Reason(word, "", str(error))
            click.echo(json.dumps(gate.describe(word, error.exit_code, [reason]), indent=2))
        raise
    if html is not None:
        described = [comparing.describe_side(*side) for side in zip((before, after), sides)]
        page = comparison_page(f"{after} against {before}", described, result)
        html.write_text(page, encoding="utf-8")
    if csv is not None:
        csv.write_text(result.as_csv(), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(result.as_json(), indent=2))
    elif markdown:
        click.echo(result.markdown(), nl=False)
    else:
        _print_comparison(result, zip((before, after), sides))
    if result.exit_code == NOTHING_MEASURED:
        raise NothingMeasured(f"{result.reasons[0].text}: nothing is compared")
    sys.exit(result.exit_code)


def _read_side(word: str, history: Path, allow_empty: bool = False) -> list[Point]:
    """Read the points of a side (file, commit, run, ...); raise if there is none, unless allowed."""
    problems: list[BrokenLine] = []
    try:
        points = comparing.side(word, history, problems.append)
    finally:
        _report_problems(problems)
    if points or (allow_empty and not problems):
        return points
    if problems:
        raise InputError(f"{word}: no line is a measurement; pass a file of tritoncp perf run")
    raise NothingMeasured(f"{word} has no measurement: nothing is compared")


def _print_comparison(result: gate.Gate, sides: Iterable[tuple[str, list[Point]]]) -> None:
    from rich.table import Column, Table
    from rich.text import Text

    comparison, limit = result.comparison, result.limit
    case, *columns = comparing.HEAD
    table = Table(Column(case, no_wrap=True, overflow="fold"), *columns)
    for row, text in zip(comparison.rows, comparing.lines(comparison, limit)):
        bad = row.regressed(limit or 0.0)
        table.add_row(*map(Text, text), style="red" if bad else None)
    console = make_console()
    for name, side in zip(("before", "after"), sides):
        console.print(f"{name}: {comparing.describe_side(*side)}", markup=False)
    if comparison.rows:
        console.print(table)
    if len(comparison.rows) > 1:
        suites = Table(*SUITE_HEAD)
        for text in suite_lines(comparison.suites):
            suites.add_row(*map(Text, text))
        console.print(suites)
    for row in comparison.rows:
        if row.why:
            console.print(f"{comparison.label(row)}: {row.why}", markup=False)
    console.print(result.summary, markup=False)
    for reason in result.reasons:
        if reason.kind == "required":
            console.print(f"{reason.case}: {reason.text}", markup=False)


@perf.command("dashboard", cls=PerfCommand)
@click.argument("places", nargs=-1, type=click.Path(exists=True, path_type=Path), metavar="[HISTORY]...")
@click.option(
    "-o",
    "--out",
    type=OutputFile(),
    default=Path("dashboard.html"),
    show_default=True,
)
@click.option(
    "--repo-url",
    metavar="URL",
    default="",
    help="Where commits are linked to, as https://github.com/owner/project. [default: no links]",
)
@click.option(
    "--badge",
    type=OutputFile(),
    metavar="FILE",
    help="Also write the JSON of a badge for shields.io: the number of slower cases.",
)
def dashboard(places: tuple[Path, ...], out: Path, repo_url: str, badge: Path | None) -> None:
    """Write a history (files and folders, by default perf/history) as one self-contained HTML page.

    \b
    Examples:
      tritoncp perf dashboard
      tritoncp perf dashboard perf/history --out dashboard.html
    """
    from tritoncp.perf.dashboard import trends
    from tritoncp.perf.dashboard.page import make_badge, page

    places = places or (HISTORY,)
    history = read(*places)
    _report_problems(history.problems)
    if not history.points:
        kind = InputError if history.problems else NothingMeasured
        raise kind(
            f"no measurement in {', '.join(map(str, places))}: `tritoncp perf run` writes there; a history "
            "elsewhere is an argument, as in `tritoncp perf dashboard FOLDER`"
        )
    acceptances = trends.read_acceptances(places)
    out.write_text(page(history, repo_url, acceptances), encoding="utf-8")
    if badge is not None:
        badge.write_text(json.dumps(make_badge(history.points, acceptances)) + "\n", encoding="utf-8")
    click.echo(f"{out}: {len(history.points)} points, {out.stat().st_size / 1e6:.2f} MB", err=True)


def _report_problems(problems: Sequence[BrokenLine]) -> None:
    for problem in problems:
        click.echo(str(problem), err=True)
