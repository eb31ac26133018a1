"""`tritoncp perf run`: measures cases, writes a line for each after its measurement, shows a table.

A run that is interrupted leaves all its lines: they are appended to the file one at a time.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tritoncp.command_base import Seconds, make_console
from tritoncp.core.files import parse_json, slug
from tritoncp.perf.exit_codes import (
    FINE,
    INTERRUPTED,
    REGRESSION,
    InputError,
    NothingMeasured,
    PerfCommand,
)
from tritoncp.perf.progress import Progress
from tritoncp.perf.records.history import Journal, Point, Series, find_unfinished

if TYPE_CHECKING:
    import torch

BUDGET = {"smoke": 30.0, "core": 470.0, "full": 3600.0}  # seconds


@click.command(cls=PerfCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--tier", type=click.Choice(["smoke", "core", "full"]), default="core", show_default=True)
@click.option(
    "--only",
    "--filter",
    "only",
    multiple=True,
    default=("*",),
    metavar="PATTERN",
    help="Cases by name: 'causal-*-bwd', 'gemma4-global'; several patterns are measured in the given order.",
)
@click.option(
    "--budget",
    type=Seconds(zero=True),
    help="Start no case after this time: 90s, 2m. [default: smoke 30, core 470, full 3600]",
)
@click.option(
    "--seconds",
    type=Seconds(zero=True),
    default=1.5,
    show_default=True,
    help="Seconds of rounds for a case.",
)
@click.option(
    "--try",
    "options",
    multiple=True,
    metavar="JSON",
    help="""Also time tritoncp with these kernel options, as '{"BLOCK_N": 64}'; as often as you like.""",
)
@click.option(
    "--contenders",
    "patterns",
    multiple=True,
    default=("*",),
    metavar="PATTERN",
    help="Contenders to run besides tritoncp, by name: 'flash', 'flex*', 'tritoncp ROUTE=*'. Without 'flex*' "
    "the run does not use torch.compile.",
)
@click.option(
    "--warm",
    is_flag=True,
    help="Run the named contenders once, so that their kernels are compiled, without timing or writing.",
)
@click.option(
    "--device",
    type=click.Choice(["cuda", "host", "cpu"]),
    help="cuda: attention on the GPU. host: masks, plans and Python's part of a call, on the CPU. cpu: the "
    "attention cases on tiny shapes, to check the benchmark. [default: cuda, or host without a GPU]",
)
@click.option(
    "--clocks", help="Name of your clocks policy, as 'locked 1500 MHz'. [default: read from the GPU]"
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("perf/history"),
    show_default=True,
    help="Folder of <date>-<device>.jsonl, or one .jsonl file; appended to.",
)
@click.option("--resume", is_flag=True, help="Go on with the newest run of the same code on the same device.")
@click.option("--json", "as_json", is_flag=True, help="The same JSON lines on stdout, instead of the table.")
def main(
    tier: str,
    only: tuple[str, ...],
    budget: float | None,
    seconds: float,
    options: tuple[str, ...],
    patterns: tuple[str, ...],
    warm: bool,
    device: str | None,
    clocks: str | None,
    out: Path,
    resume: bool,
    as_json: bool,
) -> None:
    """Time tritoncp against PyTorch's attention, the important cases first.

    Every contender's answer is checked before it is timed. Under torchrun the cases of as many ranks are
    measured, by all of them together. Exits with 1 if tritoncp fails or is wrong in any case, with 3 if the
    budget is too short for any case. Ctrl-C keeps every line, and prints the command that continues.

    \b
    Examples:
      tritoncp perf run --tier smoke --device host
      tritoncp perf run --only 'causal-*-bwd' --budget 120 --out results
      torchrun --nproc-per-node 8 -m tritoncp perf run
    """
    deadline = time.monotonic() + (BUDGET[tier] if budget is None else budget)
    options_list = [_parse_options(text) for text in options]
    device = _choose_device(device)
    from tritoncp.call.engine_factory import name_functions
    from tritoncp.perf.suite import host_cases, machine
    from tritoncp.perf.suite.measure import Bench

    torch_device, group = _init_device(device)
    env = machine.environment(torch_device)
    series, cases = _select_cases(device, torch_device, group, tier, only, clocks)
    if warm and (device == "host" or group is not None):
        raise click.UsageError("--warm needs attention cases on one device; --device host compiles nothing")
    lead = group is None or group.rank() == 0
    progress = Progress(deadline, shown=lead)
    journal = _open_journal(out, series, env, resume, progress, as_json)
    if not lead:  # rank 0 writes
        journal.path, journal.as_json = Path(os.devnull), False
    num_resumed = len(journal.points)
    with _message_of_interrupt(progress, journal, lead), progress:
        if device == "host":
            failures = host_cases.run(cases, journal, deadline, seconds)
        else:
            name_functions()  # finds kernels that --warm compiled in another process in Triton's cache
            bench = Bench(torch_device, journal, deadline, seconds, options_list, group, patterns)
            if warm:
                bench.warm(cases)
                sys.exit(FINE)
            failures = bench.run(cases)
    if lead and not as_json:
        show(journal)
    sys.exit(REGRESSION if failures else _report_left_out(journal, num_resumed, lead))


@contextmanager
def _message_of_interrupt(progress: Progress, journal: Journal, lead: bool) -> Iterator[None]:
    """Turn Ctrl-C into a message and an exit code, in a ``with`` block."""
    try:
        yield
    except KeyboardInterrupt:
        if lead:
            stored = f"{len(journal.points)} cases are stored in {journal.path}: pass --resume to continue"
            click.echo(
                f"interrupted after {progress.done} of {progress.total} measurements; "
                + (stored if journal.points else "nothing is stored"),
                err=True,
            )
        sys.exit(INTERRUPTED)


def _choose_device(device: str | None) -> str:
    """Return the device to measure: the option, else "cuda" if there is a GPU, else "host". Other than for
    "cuda", TRITON_INTERPRET=1 is set, before Triton is imported."""
    if device in (None, "cuda"):
        import torch

        if torch.cuda.is_available():
            return "cuda"
        if device == "cuda":
            raise InputError("torch finds no GPU: pass --device host, for the cases that need none")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    return device or "host"


def _select_cases(
    device: str, torch_device: torch.device, group: Any, tier: str, only: Sequence[str], clocks: str | None
) -> tuple[Series, list[Any]]:
    """Return the series of the device and the cases to measure on it."""
    from tritoncp.perf.suite import host_cases, machine
    from tritoncp.perf.suite.cases import select

    def select_in(tier: str) -> list[Any]:
        if device == "host":
            return host_cases.select(tier, only)
        return select(tier, only, group.size() if group else 1)

    series = Series(machine.processor()) if device == "host" else machine.series(torch_device, clocks)
    if cases := select_in(tier):
        return series, cases
    names = " or ".join(map(repr, only))
    remedy = "; pass --tier full" if select_in("full") else ""
    raise InputError(f"--only {names}: no case of tier {tier} for this device matches{remedy}")


def _report_left_out(journal: Journal, num_resumed: int, lead: bool) -> int:
    """Print the number of cases for which there was no time, and return the exit code. Raises NothingMeasured
    if there was no time for any."""
    left_out = journal.left_out - {point.case for point in journal.points}
    if left_out and len(journal.points) == num_resumed:
        raise NothingMeasured(
            f"nothing was measured: the budget ended before the first of {len(left_out)} cases; pass a "
            "larger --budget"
        )
    if left_out and lead:
        click.echo(f"{len(left_out)} cases were left out: the budget ended", err=True)
    return FINE


def _init_device(device: str) -> tuple[torch.device, Any]:
    """Return this process's device, and the process group if torchrun started it."""
    import torch

    kind = "cuda" if device == "cuda" else "cpu"
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or device == "host":
        return torch.device(kind), None
    torch_device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(torch_device)
    torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    return torch_device, torch.distributed.group.WORLD


def _parse_options(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text.encode())
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not JSON: {error}", param_hint="--try") from error
    if not isinstance(value, dict):
        raise click.BadParameter(f"{text!r} is not an object, as '{{\"BLOCK_N\": 64}}'", param_hint="--try")
    return value


def _open_journal(
    out: Path, series: Series, env: dict[str, Any], resume: bool, progress: Progress, as_json: bool
) -> Journal:
    """Open the journal of this run: the resumed run's file, or the file of today."""
    run = hashlib.sha256(f"{time.time_ns()}{os.getpid()}".encode()).hexdigest()[:12]
    one_file = out.suffix == ".jsonl" or (out.exists() and not out.is_dir())
    (out.parent if one_file else out).mkdir(parents=True, exist_ok=True)
    day = datetime.date.today().isoformat()
    path = out if one_file else out / f"{day}-{slug(series.device)}.jsonl"
    unfinished_run = find_unfinished(out, series, env) if resume else None
    if unfinished_run is None:
        if resume:
            progress.show("--resume: there is no run of this code on this device; a new one starts", False)
        return Journal(path, run, series, env, progress, as_json)
    path, points = unfinished_run
    progress.show(f"resuming run {points[0].run} in {path}: {len(points)} cases are there", False)
    return Journal(path, points[0].run, series, env, progress, as_json, points)


def show(journal: Journal) -> None:
    """Print a table of tritoncp's times and the speedups over each family's best time; cases farthest below
    their goal first."""
    from rich.table import Table

    points = list(
        {point.case: point for point in journal.points}.values()
    )  # the last point of a case has the widest search
    families = sorted({name for point in points for name in point.best_of_families()})
    memory = ["MiB"] * any("peak_bytes" in point.own for point in points)
    table = Table(title="time over tritoncp's (goal)")
    table.add_column("case", no_wrap=True)
    for heading in ("tritoncp ms", *memory, *(f"÷ {name}" for name in families)):
        table.add_column(heading)
    for point in sorted(points, key=_sort_key):
        speedups = point.speedups()
        untuned = point.best_of_families().keys() - point.baselines().keys()
        cells = [
            "untuned" if name in untuned else _cell(speedups.get(name), point.goal.get(name))
            for name in families
        ]
        peak = [_mib(point.own.get("peak_bytes"))] * len(memory)
        table.add_row(point.case, f"{point.ms:.4g}" if point.ms else "[red]failed[/]", *peak, *cells)
    console = make_console()
    console.print(table)
    for point in points:
        if not point.ms:
            console.print(f"{point.case}: tritoncp: {point.own['why']}", markup=False)
    console.print(f"every line is in {journal.path}", markup=False)


def _mib(count: int | None) -> str:
    """
    >>> _mib(3 << 19), _mib(3 << 30), _mib(None)
    ('1.5', '3072', '–')
    """
    if count is None:
        return "–"
    mib = count / 2**20
    return f"{mib:.1f}" if mib < 10 else f"{mib:.0f}"


def _cell(ratio: float | None, goal: float | None) -> str:
    """
    >>> _cell(1.234, 1.2), _cell(1.0, 1.2), _cell(None, 1.2)
    ('1.23 (1.2)', '[red]1.00 (1.2)[/]', '–')
    """
    if ratio is None:
        return "–"
    text = f"{ratio:.2f}" + (f" ({goal})" if goal else "")
    return f"[red]{text}[/]" if goal and ratio < goal else text


def _sort_key(point: Point) -> float:
    """Return the sort key of a case: failures, then cases farthest below their goal, then cases without a
    goal."""
    return (point.worst if point.goal else None) or (9.0 if point.ms else 0.0)


if __name__ == "__main__":
    main()
