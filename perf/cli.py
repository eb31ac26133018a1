"""`tritoncp perf`: run, compare, dashboard, ingest, import."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import click

from tritoncp.perf import compare as comparing
from tritoncp.perf.record import DiskFull, History, Problem, append, read
from tritoncp.perf.run import main as run

HISTORY, CONFIGS = Path("perf/history"), Path("kernels/configs")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def perf() -> None:
    """Measure, keep a history, compare, and show it."""


perf.add_command(run, "run")


class Percent(click.ParamType):
    """A part of one, as "5%" or "0.05"."""

    name = "percent"

    def convert(self, value: object, param: object, ctx: object) -> float:
        if isinstance(value, float):
            return value
        text = str(value).strip()
        try:
            found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            found = -1.0
        if not 0 <= found < math.inf:
            raise click.BadParameter(f"{text!r} is not a part like 5% or 0.05", param_hint="--fail-over")
        return found


@perf.command("compare")
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
    help="Of each side and case, only the newest so many runs.",
)
@click.option(
    "--fail-over",
    type=Percent(),
    metavar="PERCENT",
    help="Exit with 1 if a case is slower by more than this, or fails and did not. As 5%.",
)
@click.option(
    "--baseline",
    metavar="FAMILY",
    help="Compare multiples of this baseline's time in the same run (flex, flash, cudnn, ...).",
)
@click.option("--markdown", is_flag=True, help="For a comment on a pull request.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
def compare(
    before: str,
    after: str,
    history: Path,
    last: int | None,
    fail_over: float | None,
    baseline: str | None,
    markdown: bool,
    as_json: bool,
) -> None:
    """Ratio of times, AFTER over BEFORE, for each case: worst first, with a confidence interval.

    BEFORE and AFTER are files, folders, commits (HEAD~1), versions of tritoncp, runs or devices. A case is
    past --fail-over if its ratio is and the interval lies above 1.
    """
    try:
        sides = [comparing.side(word, history, _broken) for word in (before, after)]
    except comparing.Unknown as error:
        raise click.ClickException(str(error)) from error
    if last is not None:
        sides = [comparing.newest(points, last) for points in sides]
    try:
        found = comparing.compare(sides[0], sides[1], baseline)
    except ImportError as error:
        raise _without(error) from error
    if not found.rows:
        raise click.ClickException(f"{before} and {after} have no case in common: nothing is compared")
    if as_json:
        rows = [row._asdict() for row in found.rows]
        click.echo(json.dumps({**found._asdict(), "rows": rows, "geomean": found.geomean}, indent=2))
    elif markdown:
        click.echo(comparing.markdown(found, fail_over), nl=False)
    else:
        _show(found, fail_over)
    sys.exit(fail_over is not None and any(row.regressed(fail_over) for row in found.rows))


def _show(found: comparing.Comparison, limit: float | None) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    case, *rest = comparing.HEAD
    table = Table(Column(case, no_wrap=True, overflow="fold"), *rest)
    for row, text in zip(found.rows, comparing.lines(found, limit)):
        bad = row.regressed(limit or 0.0)
        table.add_row(*text, style="red" if bad else None)
    console = Console()
    console.print(table)
    for row in found.rows:
        if row.why:
            console.print(f"{row.case}: {row.why}", markup=False)
    console.print(comparing.summary(found, limit), markup=False)


@perf.command("dashboard")
@click.argument("places", nargs=-1, type=click.Path(exists=True, path_type=Path), metavar="[HISTORY]...")
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("dashboard.html"),
    show_default=True,
)
def dashboard(places: tuple[Path, ...], out: Path) -> None:
    """Write one page that shows a history: files and folders, perf/history by default.

    The page needs nothing else: it opens from a disk, without a network.
    """
    try:
        from tritoncp.perf.dashboard import page
    except ImportError as error:
        raise _without(error) from error
    history = _read(places or (HISTORY,))
    if not history.points:
        raise click.ClickException(f"no measurement in {', '.join(map(str, places or (HISTORY,)))}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(history), encoding="utf-8")
    click.echo(f"{out}: {len(history.points)} points, {out.stat().st_size / 1e6:.2f} MB", err=True)


def _without(error: ImportError) -> click.ClickException:
    return click.ClickException(f"{error}; pip install 'tritoncp[perf]' has what is missing")


def _read(places: tuple[Path, ...]) -> History:
    """A history; what is broken in it is said."""
    try:
        history = read(*places)
    except FileNotFoundError as error:
        raise click.ClickException(str(error)) from error
    for problem in history.problems:
        _broken(problem)
    return history


def _broken(problem: Problem) -> None:
    click.echo(str(problem), err=True)


@perf.command("ingest")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--history", type=click.Path(file_okay=False, path_type=Path), default=HISTORY, show_default=True
)
@click.option(
    "--configs", type=click.Path(file_okay=False, path_type=Path), default=CONFIGS, show_default=True
)
def ingest(folder: Path, history: Path, configs: Path) -> None:
    """Keep what `make gpu` left in FOLDER: lines for the history, tile shapes that won to be shipped.

    Every line is checked: what is broken, or was timed without having been checked, is named and left out,
    and the exit status is 1. Doing it twice adds nothing.
    """
    from tritoncp.perf.ingest import ingest as taken

    try:
        found = taken(folder, history, configs)
    except (FileNotFoundError, DiskFull) as error:
        raise click.ClickException(str(error)) from error
    for problem in found.problems:
        _broken(problem)
    click.echo(f"{found.added} lines added to {history}, {found.known} were there")
    for path, (won, lost) in found.shipped.items():
        click.echo(f"{path}: {won} entries" + f", {lost} removed: the rule is as fast" * bool(lost))
    if not found.shipped:
        click.echo("no tile shapes that are new")
    sys.exit(bool(found.problems))


@perf.command("import")
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="History file, appended to."
)
def import_(source: Path, out: Path) -> None:
    """Add a JSON file of pytest-benchmark to a history."""
    from tritoncp.perf.imported import points

    try:
        found = points(json.loads(source.read_bytes()))
    except (ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise click.ClickException(
            f"{source} is not what `pytest --benchmark-json` writes: {what}"
        ) from error
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        for point in found:
            append(out, point.as_line())
    except DiskFull as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{len(found)} benchmarks added to {out}", err=True)
