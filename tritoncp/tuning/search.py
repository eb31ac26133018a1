"""Search for the fastest tiles of a kernel: compile candidates, drop those that do not fit or spill, check
results, then time the others by successive halving.

Successive halving (Jamieson and Talwalkar, arXiv 1502.07943): a round times all candidates once, and the
faster half gets twice the number of rounds; the default config is never dropped. A candidate is chosen if it
is at least 2 % faster than the default. Each stage may take half of the remaining time, and begins with the
candidates nearest to the default, so that even a short run compares some of them. Routes are compared with
the best tiles of route "loops".
"""

from __future__ import annotations

import datetime
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import triton
from rich.table import Table

from tritoncp.analysis.compile_pool import Compilers
from tritoncp.analysis.jobs import Job, Routed
from tritoncp.analysis.resource_table import find_faults, tiles
from tritoncp.command_base import make_bar, make_console
from tritoncp.kernels.options import ROUTES
from tritoncp.kernels.tile_rules import Config
from tritoncp.measured_tiles import tile_tables
from tritoncp.measured_tiles.tile_tables import MIN_SPEEDUP, Device
from tritoncp.perf.suite import machine
from tritoncp.tuning.device_bench import DeviceBench
from tritoncp.tuning.journal import TuningJournal
from tritoncp.tuning.targets import Target, candidates

MAX_TIMED = 24  # max number of candidates to time, those nearest to the default
ROUNDS = 4  # number of rounds of the first halving
COMPILE_TIMEOUT = 60.0  # seconds for one kernel


class Choice(NamedTuple):
    """The chosen config, and the median times of it and of the default in the last rounds of both."""

    config: Config
    ms: float
    rule_ms: float

    @property
    def gain(self) -> float:
        return self.rule_ms / self.ms


@dataclass
class Tuner:
    """One tuning run.

    compile_jobs: yields jobs with their reports, see :class:`tritoncp.analysis.compile_pool.Compilers`
    now:          a clock in seconds; no work is started after ``deadline``
    keep:         called with the choice of each target as soon as it is made
    show:         called with lines of progress
    counts:       numbers of candidates that failed, and of candidates for which there was no time
    """

    arch: str
    journal: TuningJournal
    compile_jobs: Callable[[list[Job]], Generator[tuple[Job, dict[str, Any]]]]
    deadline: float
    keep: Callable[[Target, Choice], None] = lambda target, choice: None
    now: Callable[[], float] = time.monotonic
    show: Callable[[str], object] = lambda line: None
    counts: Counter[str] = field(default_factory=Counter)
    chosen: dict[Target, Choice] = field(default_factory=dict)

    def candidates(self, target: Target) -> list[Config]:
        """Return the candidate configs, the default first."""
        loops = self.chosen.get(replace(target, kernel="forward"))
        return candidates(target, self.arch, *([loops.config] if loops and target.kernel == "route" else []))

    def select(self, target: Target, until: float) -> list[Config]:
        """Return the default config, and the candidates nearest to it that compile, fit and do not spill,
        both in the launch of a call on one device and in a step of a schedule."""
        rule, *rivals = listed = self.candidates(target)
        faults: dict[Config, str] = {}
        with closing(self._find_faults(target, listed)) as findings:
            for config, finding in findings:
                faults[config] = finding["fault"]
                if finding["failed"]:
                    self._fail(target, finding["fault"])
                if self.now() > until or sum(not fault for fault in faults.values()) >= MAX_TIMED:
                    break
        alive = [config for config in rivals if faults.get(config) == ""][: MAX_TIMED - 1]
        if self.now() > until:
            self.counts["left out"] += len(listed) - len(faults)
        self.show(f"{target.name}: {len(faults)} of {len(listed)} candidates compiled, {len(alive)} fit")
        return [rule, *alive]

    def _fail(self, target: Target, why: str) -> None:
        """Count a candidate that failed, and show the reason."""
        self.counts["failed"] += 1
        self.show(f"{target.name}: {why}")

    def _half(self, until: float) -> float:
        now = self.now()
        return now + (until - now) / 2

    def _find_faults(
        self, target: Target, configs: Sequence[Config]
    ) -> Generator[tuple[Config, dict[str, Any]]]:
        """Yield (config, fault or "") for all configs: those in the journal, then the others, which are
        compiled, in the order of completion."""
        jobs: dict[Job, Config] = {}
        for config in configs:
            if finding := self.journal.finding("compile", target, config):
                yield config, finding
            else:
                for job in (target.job(self.arch, config), target.step(self.arch, config)):
                    jobs[job] = config
        reports: dict[Config, list[dict[str, Any]]] = {}
        with closing(self.compile_jobs(list(jobs))) as done:
            for job, report in done:
                own = reports.setdefault(jobs[job], [])
                own.append(report)
                if len(own) == 2:
                    fault = next(filter(None, map(self._fault, own)), "")
                    finding = {"fault": fault, "failed": any("failed" in report for report in own)}
                    self.journal.add(finding, "compile", target, jobs[job])
                    yield jobs[job], finding

    def _fault(self, report: dict[str, Any]) -> str:
        """Return why a compiled candidate is not timed, "" if it is."""
        faults = find_faults(report, self.arch)
        if not faults and report["spill_bytes"]:
            faults.append(f"spills {report['spill_bytes']} bytes")
        return "; ".join(faults)

    def choose(self, target: Target, bench: DeviceBench, until: float) -> None:
        """Choose and keep the fastest correct candidate, or the default if no candidate is at least 2 %
        faster, or nothing if there was no time to measure both. After an interrupt the best choice so far is
        kept, and the interrupt raised again."""
        rule, *rivals = self.candidates(target)
        if target.kernel == "route" and not (rivals and replace(target, kernel="forward") in self.chosen):
            return  # no other route, or no measured tiles of route "loops" for comparison
        alive = self.select(target, self._half(until))
        best: Choice | None = None
        try:
            checked = self._half(until)
            alive = [config for config in alive if self._right(target, config, bench, checked)]
            if rule not in alive:
                return  # without the default, there is no comparison
            rounds = ROUNDS
            while self.now() < until:
                times = self._times(target, alive, bench, rounds, until)
                if times is None:
                    break
                winner = min(times, key=times.__getitem__)
                winner = winner if times[rule] / times[winner] > MIN_SPEEDUP else rule
                best = Choice(winner, times[winner], times[rule])
                self.show(f"{target.name}: {len(alive)} timed, best {best.gain:.2f}x of the rule")
                if len(alive) <= 2:
                    break
                rivals = sorted((c for c in alive if c != rule), key=times.__getitem__)
                alive = [rule, *rivals[: max(1, (len(alive) - 1) // 2)]]
                rounds *= 2
            if best is None:
                self.counts["left out"] += len(alive)
        finally:
            if best is not None:
                self.chosen[target] = best
                self.keep(target, best)

    def _right(self, target: Target, config: Config, bench: DeviceBench, until: float) -> bool:
        """Return whether a candidate's results are correct; False if there is no time for the check."""
        finding = self.journal.finding("check", target, config)
        if finding is None:
            if self.now() > until:
                self.counts["left out"] += 1
                return False
            if isinstance(config, Routed) and config.ROUTE in ROUTES[1:]:  # if it hangs, it is tried once
                self.journal.add({"wrong": "a run ended during its check"}, "check", target, config)
            finding = {"wrong": bench.wrong(target, config)}
            self.journal.add(finding, "check", target, config)
        if finding["wrong"] is not None:
            self._fail(target, finding["wrong"])
        return finding["wrong"] is None

    def _times(
        self, target: Target, alive: Sequence[Config], bench: DeviceBench, rounds: int, until: float
    ) -> dict[Config, float] | None:
        """Return median times over ``rounds`` rounds, None if there is no time. Each round runs all
        candidates once, and begins with another one. An incomplete set of rounds is repeated as a whole."""
        findings = [self.journal.finding("time", target, config, rounds) for config in alive]
        times = {config: finding["ms"] for config, finding in zip(alive, findings) if finding}
        if len(times) == len(alive):
            return times
        samples: dict[Config, list[float]] = {config: [] for config in alive}
        for config in alive:
            bench.milliseconds(target, config)  # warm-up
        for turn in range(rounds):
            first = turn % len(alive)
            for config in [*alive[first:], *alive[:first]]:
                if self.now() > until:
                    return None
                samples[config].append(bench.milliseconds(target, config))
        times = {config: statistics.median(own) for config, own in samples.items()}
        for config, ms in times.items():
            self.journal.add({"ms": ms}, "time", target, config, rounds)
        return times

    def run(self, requested: Sequence[Target], bench: DeviceBench) -> dict[Target, Choice]:
        """Tune the targets one after another; each may use an equal share of the remaining time."""
        for i, target in enumerate(requested):
            left = self.deadline - self.now()
            if left <= 0:
                self.counts["left out"] += sum(len(self.candidates(rest)) for rest in requested[i:])
                break
            self.choose(target, bench, self.now() + left / (len(requested) - i))
        return self.chosen


class TuningResult(NamedTuple):
    """The result of a run: an entry for each target's choice, numbers of candidates and of candidates for
    which there was no time, the journal, and whether Ctrl-C ended it."""

    rows: list[dict[str, Any]]
    total: int
    left_out: int
    journal: Path
    interrupted: bool


def autotune(
    targets: Sequence[Target], device: Device, budget: float, resume: bool, folder: Path, jobs: int | None
) -> TuningResult:
    """Tune targets within ``budget`` seconds. Choices and the journal are written to ``folder``, each choice
    when it is made: an interrupt loses none."""
    path = tile_tables.path_in(folder, device).with_suffix(".jsonl")
    code = machine.sources(tile_tables.PACKAGE)
    conditions = {"device": device.name, "arch": device.arch, "triton": triton.__version__, "code": code}
    journal = TuningJournal(path, conditions, resume)
    rows: list[dict[str, Any]] = []
    bar = make_bar(make_console(stderr=True))
    task = bar.add_task("", total=len(targets))

    def keep(target: Target, choice: Choice) -> None:
        """Store a choice, also the default, as a record that it was measured."""
        times = {"ms": round(choice.ms, 5), "rule_ms": round(choice.rule_ms, 5)}
        entry = {**target.entry, "config": asdict(choice.config), **times}
        rows.append(entry | {"gain": round(choice.gain, 3)})
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        tile_tables.write(folder, device, [entry], {"code": code, "time": now})
        bar.update(task, advance=1, refresh=True)

    total = sum(len(candidates(target, device.arch)) for target in targets)
    deadline, interrupted = time.monotonic() + budget, False
    with bar, closing(journal), Compilers(jobs, COMPILE_TIMEOUT) as pool:
        tuner = Tuner(
            device.arch, journal, pool.compile_jobs, deadline, keep, show=partial(click.echo, err=True)
        )
        try:
            tuner.run(targets, DeviceBench(torch.device("cuda", torch.cuda.current_device())))
        except KeyboardInterrupt:
            interrupted = True
    return TuningResult(rows, total, tuner.counts["left out"], path, interrupted)


def show_result(result: TuningResult, as_json: bool) -> None:
    """Print the results of a run, as a table or in JSON, and the number of targets and candidates left
    out."""
    if as_json:
        click.echo(json.dumps(result.rows, indent=1))
    elif result.rows:
        columns = "kernel", "mask", "D", "tiles", "ms", "rule ms", "gain"
        table = Table(*columns, box=None, padding=(0, 2, 0, 0))
        for row in result.rows:
            mask, width = " ".join(filter(None, (row["mask"], row.get("score")))), row["shape"].split(",")[1]
            times = str(row["ms"]), str(row["rule_ms"]), f"{row['gain']:.2f}"
            table.add_row(row["kernel"], mask, width, tiles(row["config"]), *times)
        make_console().print(table)
    more = f"the journal is {result.journal}; pass --resume to continue"
    if result.interrupted:
        outcome = "the choices above are stored" if result.rows else "nothing was chosen yet"
        click.echo(f"interrupted: {outcome}; {more}", err=True)
    elif not result.rows:
        click.echo(f"the table is empty: no kernel was timed against its default tiles; {more}", err=True)
    if result.left_out and not result.interrupted:
        count = f"{result.left_out} of {result.total} candidates"
        click.echo(f"the budget left out {count}: pass a larger --budget; {more}", err=True)
