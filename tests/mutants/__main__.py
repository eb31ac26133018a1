"""Mutation testing: `make mutants` changes 100 places of each module and runs the tests of each place.

A mutant is killed if a test that runs its line fails, or takes too long. Tests run in copies of the checkout,
by processes that have imported torch and fork for each mutant. Survivors are printed: each needs a law,
unless it changes no result.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.mutants.lines import choose_tests, measure_lines, read_measured
from tests.mutants.sample import MODULES, Mutant, copy_checkout, draw_mutants

GOAL = 0.85  # share of mutants to be killed: about one in ten changes no result
MOST_BYTES = 8 << 30  # of each process that runs tests: a mutant may allocate without end
COLLECTION_SECONDS = 300  # seconds in which pytest collects the tests of a mutant
HEAVY = ("torch._dynamo", "torch.distributed", "torch.nn.attention.flex_attention", "triton.language")


class Result(NamedTuple):
    """A mutant, its line after the change, the count of its tests, and the first failure, "time" or ""."""

    mutant: Mutant
    changed: str
    tests: int
    failure: str

    def describe(self) -> str:
        place = f"{self.mutant.path}:{self.mutant.line}"
        end = f"killed by {self.failure}" if self.failure else f"survives {self.tests} tests"
        return f"{place} {end}\n  - {self.mutant.text}\n  + {self.changed}"


class FirstFailure:
    """Plugin of pytest that writes the first test, or module, that fails to a file, and ends the process if a
    test takes longer than a minute and five times its measured seconds."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        signal.alarm(60 + int(5 * read_measured("seconds")[nodeid]))

    def note(self, report: Any) -> None:
        if report.failed and not self.path.exists():
            self.path.write_text(report.nodeid)

    pytest_runtest_logreport = pytest_collectreport = note


@cache
def worker_copy() -> Path:
    """Return this process's copy of the checkout, with separate caches beside it."""
    copy = copy_checkout(Path(tempfile.mkdtemp(), "copy"))
    os.environ |= {"TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(copy.parent / "cache")}
    for name in HEAVY:  # no mutant changes them
        importlib.import_module(name)
    return copy


def run_tests(tests: list[str], *options: str) -> str:
    """Run tests in a fork; return the first that fails, "time" if one takes too long, or ""."""
    copy = worker_copy()
    failure = copy.parent / "failure"
    failure.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.alarm(COLLECTION_SECONDS)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        os.chdir(copy)
        with open(os.devnull, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.path[0] = str(copy)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        fixed = ["-n", "0", "-x", "-q", "-m", "", "-p", "no:cacheprovider", f"--basetemp={copy.parent}/tmp"]
        status = 1
        with contextlib.suppress(BaseException):  # a mutant that breaks pytest is killed
            status = int(pytest.main([*fixed, *options, *tests], plugins=[FirstFailure(failure)]))
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # ranks that a test left running
    said = failure.read_text() if failure.exists() else f"status {status}"
    return "" if status == 0 else "time" if status == -signal.SIGALRM else said


def try_mutant(mutant: Mutant, most: float) -> Result | None:
    """Run the tests of a mutant's line; None if the mutant is no program."""
    path, tests = worker_copy() / mutant.path, choose_tests(mutant, most)
    source, times = path.read_text(), path.stat()
    try:
        mutated, changed = mutant.change(source)
        compile(mutated, mutant.path, "exec")
    except (AttributeError, SyntaxError):  # cosmic-ray's operator for exceptions fails for dotted names
        return None
    path.write_text(mutated)
    try:
        return Result(mutant, changed, len(tests), run_tests(tests) if tests else "")
    finally:
        path.write_text(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def find_failing(tests: list[str]) -> set[str]:
    """Return the tests that fail without a mutant."""
    failing: set[str] = set()
    while (rest := sorted({*tests} - failing)) and (failure := run_tests(rest)) not in {"", *failing}:
        failing.add(failure)
    return failing


def report(results: dict[str, list[Result]]) -> float:
    """Print survivors and the score of each module; return the whole score."""
    rows, killed, counted = [], 0, 0
    for module, of_module in results.items():
        survivors = sorted(x for x in of_module if not x.failure)
        print(*(x.describe() for x in survivors), sep="\n")
        dead, late = len(of_module) - len(survivors), sum(x.failure == "time" for x in of_module)
        rows.append(f"{module:12} {dead} of {len(of_module)} killed ({late} late)")
        killed, counted = killed + dead, counted + len(of_module)
    print(*rows, f"score: {killed} of {counted} = {killed / max(counted, 1):.1%}, goal {GOAL:.0%}", sep="\n")
    return killed / max(counted, 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("modules", nargs="*", default=list(MODULES), help=f"of {', '.join(MODULES)}")
    parser.add_argument("--count", type=int, default=100, help="mutants of a module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, default=40, help="of tests for each mutant")
    parser.add_argument("--measured", action="store_true", help="use the lines that build/mutants has")
    args, start = parser.parse_args(), time.monotonic()
    if not args.measured:
        measure_lines(args.jobs)
    drawn = [(name, x) for name in args.modules for x in draw_mutants(name, args.count, args.seed)]
    results: dict[str, list[Result]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        # not multiprocessing.Pool: its processes may have no children, as the workers of a DataLoader
        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork")) as pool:
            measured = list(read_measured("seconds"))
            if args.measured and pool.submit(run_tests, measured, "--collect-only").result():
                parser.error("build/mutants names tests that no longer exist: run without --measured")
            pending = [(module, pool.submit(try_mutant, mutant, args.seconds)) for module, mutant in drawn]
            for number, (module, result) in enumerate(pending, 1):
                if outcome := result.result():
                    results[module].append(outcome)
                    minutes = (time.monotonic() - start) / 60
                    print(f"{number} of {len(pending)}, {minutes:.0f} min: {outcome.describe()}", flush=True)
            killers = {x.failure for of_module in results.values() for x in of_module if "::" in x.failure}
            failing = pool.submit(find_failing, sorted(killers)).result()
    for test in failing:
        print(f"{test} fails without a mutant: its kills do not count")
    for module, of_module in results.items():
        results[module] = [x._replace(failure="") if x.failure in failing else x for x in of_module]
    return int(report(results) < GOAL)


if __name__ == "__main__":
    sys.exit(main())
