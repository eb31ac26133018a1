"""`tritoncp perf bisect`: finds the commit that made a case slower, by measuring commits between two."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from tritoncp.perf.dashboard.estimates import estimate
from tritoncp.perf.exit_codes import InputError, NothingMeasured, PerfCommand
from tritoncp.perf.records.history import read

RUN = f"{shlex.quote(sys.executable)} -m tritoncp perf run --tier full --only {{case}} --out {{out}}"


@click.command("bisect", cls=PerfCommand)
@click.argument("good")
@click.argument("bad")
@click.option("--case", required=True, metavar="NAME", help="The case that became slower.")
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True, help="Runs of each commit.")
@click.option(
    "--command",
    metavar="COMMAND",
    help="What measures {case} into the file {out}, in a checkout of a commit. [default: tritoncp perf run]",
)
def bisect(good: str, bad: str, case: str, runs: int, command: str | None) -> None:
    """Find the first commit after GOOD, up to BAD, in which a case is slower.

    Commits are those of the first parents. Each is checked out in a temporary folder and measured, and
    counts as slow above the geometric mean of GOOD's and BAD's times. Exits with 3 if BAD is not slower.

    \b
    Examples:
      tritoncp perf bisect v1.2 main --case causal-16k-fwd
    """
    command = command or RUN
    commits = list_commits(good, bad)
    first, last = (measure(commit, case, runs, command) for commit in (commits[0], commits[-1]))
    if last <= first * 1.01:
        raise NothingMeasured(
            f"{case} is not slower in {bad} ({last:.4g} ms) than in {good} ({first:.4g} ms)"
        )
    limit = math.sqrt(first * last)
    fast, slow = 0, len(commits) - 1
    while slow - fast > 1:
        middle = (fast + slow) // 2
        is_slow = measure(commits[middle], case, runs, command) > limit
        fast, slow = (fast, middle) if is_slow else (middle, slow)
    subject = _git("show", "--no-patch", "--format=%h %an: %s", commits[slow])
    click.echo(f"{case} is slower since {subject} ({first:.4g} -> {last:.4g} ms)")


def list_commits(good: str, bad: str) -> list[str]:
    """List the commits from ``good`` to ``bad`` along first parents. Raises InputError if there is none."""
    names = (f"{name}^{{commit}}" for name in (good, bad))
    ends = [_git("rev-parse", "--verify", "--end-of-options", name) for name in names]
    between = _git("rev-list", "--reverse", "--first-parent", f"{ends[0]}..{ends[1]}").split()
    if not between:
        raise InputError(f"{bad} has no commit after {good}: pass the older commit first")
    return [ends[0], *between]


def measure(commit: str, case: str, runs: int, command: str) -> float:
    """Measure a case in a commit, and return its time in milliseconds. Raises InputError if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        place, out = Path(folder, "checkout"), Path(folder, "out.jsonl")
        _git("worktree", "add", "--quiet", "--detach", str(place), commit)
        try:
            text = command.replace("{case}", shlex.quote(case)).replace("{out}", shlex.quote(str(out)))
            for _ in range(runs):
                paths = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
                env = {**os.environ, "PYTHONPATH": paths}
                subprocess.run(shlex.split(text), cwd=place, env=env, stdout=subprocess.DEVNULL, check=False)
        finally:
            _git("worktree", "remove", "--force", str(place))
        points = [point for point in read(out).points if point.case == case] if out.exists() else []
    found = estimate(points)
    if found is None:
        raise InputError(f"{commit[:10]}: {text} wrote no time of {case}; its messages are above")
    click.echo(f"{commit[:10]} {math.exp(found.mean):.4g} ms", err=True)
    return math.exp(found.mean)


def _git(*words: str) -> str:
    """Run git here. Raises InputError with its message."""
    result = subprocess.run(["git", *words], capture_output=True, text=True)
    if result.returncode:
        raise InputError(f"git {shlex.join(words)}: {result.stderr.strip()}")
    return result.stdout.strip()
