"""`make gpu`: checks, measures, tests and tunes on a GPU in nine minutes, the most valuable results first.

``python -m tritoncp.perf.gpu_run --dry-run`` prints the order and the time table of `gpu_parts`. Each command
runs in a process group of its own, which gets SIGINT shortly before the time of its part is over and SIGKILL
when it is over. Results that it has written by then remain.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import click
from tritoncp.perf import gpu_summary
from tritoncp.perf.exit_codes import INTERRUPTED, InputError, PerfCommand
from tritoncp.perf.gpu_parts import BUDGET, GRACE, PARTS, Part, Step, batches, fill, timetable

from tritoncp.core.environment import CACHE_DIR

ROOT = Path(__file__).resolve().parents[1]
POLL = 0.05  # seconds
DYING = 0.5  # seconds to wait for a killed process
PROBE = "import sys, torch; torch.cuda.is_available() or sys.exit(1); print(torch.cuda.get_device_name())"


@dataclass
class Commands:
    """Commands of one part, of which ``jobs`` run at a time; their output goes to ``log`` and to the screen.

    screen: the log, read as far as it is on the screen
    until:  time.monotonic() at which the process groups get SIGINT; ``grace`` seconds later SIGKILL
    """

    log: Path
    screen: BinaryIO
    jobs: int
    until: float
    grace: float
    environment: Mapping[str, str]
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, commands: Sequence[Sequence[str]], stdout: Path | None = None) -> str:
        """Run all commands. Returns "" if all exit with 0, else the first failure."""
        waiting, failures = deque(commands), []
        try:
            with self.log.open("ab") as log, open(stdout or self.log, "wb" if stdout else "ab") as out:
                while (waiting or self.running) and time.monotonic() < self.until:
                    while waiting and len(self.running) < self.jobs:
                        self.running.append(self._start(waiting.popleft(), log, out))
                    failures += self._reap()
                    self._show()
                    time.sleep(POLL)
                stopped = [*self.running]
                self._stop()
        finally:
            self._kill()
            self._show()
        if stopped or waiting:
            unstarted = f", {len(waiting)} commands not started" if waiting else ""
            return f"out of time{unstarted}"
        return failures[0] if failures else ""

    def _start(self, words: Sequence[str], log: BinaryIO, out: BinaryIO) -> subprocess.Popen[bytes]:
        """Start a command in a process group of its own."""
        log.write(f"+ {shlex.join(words)}\n".encode(errors="backslashreplace"))
        log.flush()
        return subprocess.Popen(
            words,
            cwd=ROOT,
            env=os.environ | dict(self.environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            start_new_session=True,
        )

    def _reap(self) -> list[str]:
        """Remove the commands that have ended, and return the failures among them."""
        finished_processes = [process for process in self.running if process.poll() is not None]
        for process in finished_processes:
            self.running.remove(process)
            self._signal(process, signal.SIGKILL)  # ends its descendants
        return [
            f"exit code {process.returncode}" if process.returncode > 0 else f"signal {-process.returncode}"
            for process in finished_processes
            if process.returncode
        ]

    def _stop(self) -> None:
        """Send SIGINT to the running commands and wait for the grace period; `_kill` ends the rest."""
        for process in self.running:
            self._signal(process, signal.SIGINT)
        end = time.monotonic() + self.grace
        while self.running and time.monotonic() < end:
            self._reap()
            self._show()
            time.sleep(POLL)

    def _kill(self) -> None:
        """Kill the commands that still run. Waits only briefly: a process that hangs in a driver stays."""
        for process in self.running:
            self._signal(process, signal.SIGKILL)
        for process in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=DYING)
        self.running.clear()

    @staticmethod
    def _signal(process: subprocess.Popen[bytes], number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended
            os.killpg(process.pid, number)

    def _show(self) -> None:
        """Print the part of the log that is not on the screen yet."""
        click.echo(self.screen.read(), nl=False)


@dataclass(frozen=True)
class Session:
    """Settings of a run: results folder, interpreter, and values that all commands share."""

    out: Path
    python: str
    jobs: int
    arguments: str
    budget: float
    environment: Mapping[str, str]

    def values(self, seconds: float = 0.0) -> dict[str, str]:
        """Values of the placeholders in commands. $seconds is less than ``seconds``, so that a command with
        that budget ends by itself."""
        return {
            "python": self.python,
            "out": str(self.out),
            "jobs": str(self.jobs),
            "seconds": str(max(1, int(0.9 * seconds - 5))),
            "arguments": self.arguments,
        }

    def run_part(self, part: Part, end: float) -> str:
        """Run the steps of a part, also after a failure. Returns "" or the first failure."""
        if part.needs and shutil.which(part.needs) is None:
            return f"not run: {part.needs} is not on PATH"
        log = self.out / f"{part.name}.log"
        log.write_bytes(b"")
        grace = GRACE * self.budget / BUDGET
        problems = []
        with log.open("rb") as screen:
            for step in part.steps:
                seconds = step.share * (end - grace - time.monotonic())
                environment = {**self.environment, **step.environment}
                until = time.monotonic() + seconds
                commands = Commands(log, screen, self.jobs, until, grace, environment)
                why = self._run_step(step, commands, self.values(seconds))
                problems += [why] if why and not step.optional else []
        return problems[0] if problems else ""

    def _run_step(self, step: Step, commands: Commands, values: Mapping[str, str]) -> str:
        if not step.batch:
            return commands.run(step.words(values), self.out / step.output if step.output else None)
        with tempfile.NamedTemporaryFile() as file:
            why = commands.run(step.words(values), Path(file.name))
            names = [line for line in Path(file.name).read_text().splitlines() if "::" in line]
        if not names:
            return why or "no test was collected"
        return commands.run([[*fill(step.batch, values), *batch] for batch in batches(names)]) or why


def plan_text(parts: Sequence[Part], budget: float, session: Session) -> str:
    """Format the order, the time table and the commands."""
    lines = [f"{'part':<10} {'seconds':>7} {'begins by':>9}  answers"]
    for part, begin, end in timetable(parts, budget):
        lines.append(f"{part.name:<10} {end - begin:>7.0f} {_clock(begin):>9}  {part.answers}")
        for step in part.steps:
            first, *more_commands = step.words(session.values(step.share * (end - begin)))
            lines.append(f"    $ {shlex.join(first)}")
            lines += (
                [f"      and {len(more_commands)} like it, {session.jobs} at a time"] if more_commands else []
            )
            if step.batch:
                lines.append(f"      then these tests, in batches, {session.jobs} at a time")
    *_, (_, _, end) = timetable(parts, budget)
    return "\n".join([*lines, f"{'end':<10} {'':>7} {_clock(end):>9}"])


def _clock(seconds: float) -> str:
    """
    >>> _clock(70.0), _clock(530)
    ('1:10', '8:50')
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def gpu_name(python: str) -> str | None:
    """Return the name of the GPU that torch under this interpreter finds; None without a GPU."""
    words = [python, "-c", PROBE]
    try:
        answer = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return None
    return (answer.stdout.strip() or "GPU") if answer.returncode == 0 else None


@contextlib.contextmanager
def settings() -> Iterator[dict[str, str]]:
    """Make the environment of every command: this checkout on the path, a temporary cache of generated code
    unless TRITONCP_CACHE_DIR is set, and compiled kernels even where TRITON_INTERPRET is set."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        folder = CACHE_DIR.read() or cache
        yield {
            "PYTHONPATH": paths,
            "PYTHONUNBUFFERED": "1",
            CACHE_DIR.name: folder,
            "TRITON_INTERPRET": "0",
        }


@click.command(cls=PerfCommand, context_settings={"help_option_names": ["-h", "--help"]}, epilog=None)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("gpu-out"),
    show_default=True,
    help="Folder of logs and results, for `tritoncp perf ingest`.",
)
@click.option(
    "--jobs", type=click.IntRange(1, 1024), help="Commands at a time. [default: one per core, 12 at most]"
)
@click.option("--only", multiple=True, type=click.Choice([part.name for part in PARTS]), help="Parts to run.")
@click.option(
    "--budget",
    type=click.FloatRange(0, min_open=True),
    default=BUDGET,
    show_default=True,
    help="Seconds for the run; scales the time of every part.",
)
@click.option("--dry-run", is_flag=True, help="Print the order and the time table, and run nothing.")
@click.option("--python", default=sys.executable, help="Interpreter of the parts. [default: this one]")
@click.argument("arguments", nargs=-1, metavar="[-- PYTEST ARGUMENTS]")
def main(
    out: Path,
    jobs: int | None,
    only: tuple[str, ...],
    budget: float,
    dry_run: bool,
    python: str,
    arguments: tuple[str, ...],
) -> None:
    """Check, measure, test and tune on this machine's GPU, the most valuable results first.

    A part that fails or runs out of time does not stop those after it. Exits with 1 if any part failed.
    """
    begin, began = time.monotonic(), datetime.datetime.now(datetime.UTC)
    parts = [part for part in PARTS if not only or part.name in only]
    jobs = jobs or min(12, os.cpu_count() or 1)
    session = Session(out.resolve(), python, jobs, shlex.join(arguments), budget, {})
    if dry_run:
        click.echo(plan_text(parts, budget, session))
        return
    if not (ROOT / "tests/gpu").is_dir():
        raise InputError(f"{ROOT} has no tests/gpu: gpu_run needs a checkout of tritoncp")
    device = gpu_name(python)
    if device is None:
        raise InputError("make gpu: torch finds no GPU here")
    out.mkdir(parents=True, exist_ok=True)
    (out / "check.json").unlink(missing_ok=True)
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # SIGTERM, for example from `timeout`, acts as Ctrl-C
    results: list[dict[str, Any]] = []
    with settings() as environment:
        interrupted = _run(replace(session, environment=environment), parts, begin, results)
    summary = gpu_summary.collect(session.out, device, began, results)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    gpu_summary.show(summary)
    failed = [result["part"] for result in results if result["outcome"] == "failed"]
    if failed:
        click.echo(f"make gpu: failed: {' '.join(failed)}")
    sys.exit(INTERRUPTED if interrupted else 1 if failed else 0)


def _run(session: Session, parts: Sequence[Part], begin: float, results: list[dict[str, Any]]) -> bool:
    """Run the parts and append the outcome of each to ``results``. Returns whether Ctrl-C ended the run."""
    for part, _, end in timetable(parts, session.budget):
        started = time.monotonic()
        click.echo(f"== {part.name}, until {_clock(end)}: {part.answers}")
        try:
            why = session.run_part(part, begin + end)
        except KeyboardInterrupt:
            why = "interrupted"
        except OSError as error:  # a command that cannot be started, a full disk
            why = str(error)
        outcome = "not run" if why.startswith("not run") else "failed" if why else "done"
        seconds = round(time.monotonic() - started, 1)
        results.append({"part": part.name, "outcome": outcome, "seconds": seconds, "why": why})
        if why == "interrupted":
            results += [
                {"part": later_part.name, "outcome": "not run", "seconds": 0.0, "why": "not run: interrupted"}
                for later_part in parts[parts.index(part) + 1 :]
            ]
            return True
    return False


if __name__ == "__main__":
    main()
