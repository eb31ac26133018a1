"""The search for tiles: compile, drop candidates that do not fit or spill, check the results, then time the
rest by successive halving.

Successive halving (Jamieson and Talwalkar, arXiv 1502.07943): all candidates in turn within a round, twice
the rounds for the better half, the rule's own config always among them. A winner must beat the rule by 2 %. A
stage may take half of the time that is left, the candidates most like the rule first, so that even a short
run compares some of them with the rule.  Routes are compared with the best tiles of loops.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from tritoncp.analysis.jobs import Job, Routed
from tritoncp.analysis.resource_table import SHARED_BYTES
from tritoncp.kernels.options import ROUTES
from tritoncp.kernels.tile_rules import Config, family
from tritoncp.ops.tile_tables import MIN_SPEEDUP
from tritoncp.tuning.journal import TuningJournal
from tritoncp.tuning.progress import Tally
from tritoncp.tuning.targets import Target, candidates

MAX_TIMED = 24  # candidates at most: those most like the rule
ROUNDS = 4  # of the first halving
REPORTED = ("spill_bytes", "shared_bytes", "failed")


class LaunchBench(Protocol):
    """Measurements that need the device."""

    def wrong(self, target: Target, config: Config) -> str | None:
        """The reason why the results are not right, or None."""

    def milliseconds(self, target: Target, config: Config) -> float:
        """Time one execution."""


class Choice(NamedTuple):
    """A config, and its median and the rule's in the last round that both finished."""

    config: Config
    ms: float
    rule_ms: float

    @property
    def gain(self) -> float:
        return self.rule_ms / self.ms


Compile = Callable[[list[Job]], Generator[tuple[Job, dict[str, Any]]]]


@dataclass
class Tuner:
    """One tuning run.

    compile_jobs: yields jobs with their reports, see :class:`tritoncp.analysis.compile_pool.Compilers`
    now:          a clock in seconds; no work is started after ``deadline``
    keep:         called with each target's choice at once
    """

    arch: str
    journal: TuningJournal
    compile_jobs: Compile
    deadline: float
    keep: Callable[[Target, Choice], None] = lambda target, choice: None
    now: Callable[[], float] = time.monotonic
    tally: Tally = field(default_factory=Tally)
    chosen: dict[Target, Choice] = field(default_factory=dict)

    def candidates(self, target: Target) -> list[Config]:
        """The candidates; the first is the config that calls use by default."""
        loops = self.chosen.get(replace(target, kernel="forward"))
        return candidates(target, self.arch, *([loops.config] if loops and target.kernel == "route" else []))

    def select(self, target: Target, until: float) -> list[Config]:
        """Select the candidates that compile, fit and do not spill, also as steps of a schedule; the rule's
        own first."""
        self.tally.target = target.name
        rule, *_ = listed = self.candidates(target)
        reports = {}
        for config, report in self._compile("compile", target, listed, self._half(until), rule):
            reports[config] = report
            self.tally.count(tried=1, failed="failed" in report, why=report.get("failed"))
        rivals = [
            config
            for config in listed
            if config != rule and config in reports and not self._why(reports[config])
        ][: MAX_TIMED - 1]
        steps = dict(self._compile("steps", target, rivals, until))
        waiting = len(rivals) - len(steps)
        alive = [config for config in rivals if config in steps and not self._why(steps[config])]
        if rule in reports and "failed" not in reports[rule]:
            alive = [rule, *alive]
        left_out = len(listed) - len(reports) + waiting
        self.tally.count(pruned=len(reports) - len(alive) - waiting, left_out=left_out)
        return alive

    def _half(self, until: float) -> float:
        now = self.now()
        return now + (until - now) / 2

    def _compile(
        self, stage: str, target: Target, configs: Sequence[Config], until: float, least: Config | None = None
    ) -> Generator[tuple[Config, dict[str, Any]]]:
        """Yield the journal's findings about these configs, then compile the rest until time is up; ``least``
        is compiled in any case, since the rest cannot be compared without it."""
        jobs = {}
        for config in configs:
            finding = self.journal.finding(stage, target, config)
            if finding is not None:
                yield config, finding
            else:
                job = target.job(self.arch, config) if stage == "compile" else target.step(self.arch, config)
                jobs[job] = config
        with closing(self.compile_jobs(list(jobs))) as done:
            for job, report in done:
                finding = {name: report[name] for name in REPORTED if name in report}
                config = jobs.pop(job)
                self.journal.add(stage, target, config, finding)
                yield config, finding
                if self.now() > until and least not in jobs.values():
                    break

    def _why(self, report: dict[str, Any]) -> str:
        """The reason why a candidate is not worth a measurement; "" if it is."""
        if "failed" in report:
            return report["failed"]
        limit = SHARED_BYTES[family(self.arch)]
        if report["shared_bytes"] > limit:
            return f"{report['shared_bytes']} bytes of shared memory, there are {limit}"
        return f"spills {report['spill_bytes']} bytes" if report["spill_bytes"] else ""

    def choose(self, target: Target, bench: LaunchBench, until: float) -> Choice | None:
        """Choose the fastest right candidate, if it beats the rule; else the rule. None without a measurement
        of both.  An interrupt is passed on after the best choice so far was written down."""
        rule, *rivals = self.candidates(target)
        if target.kernel == "route" and not (rivals and replace(target, kernel="forward") in self.chosen):
            return None  # no other route, or no measured loops to compare with
        alive = self.select(target, self._half(until))
        best: Choice | None = None
        try:
            checked = self._half(until)
            alive = [config for config in alive if self._right(target, config, bench, checked)]
            if rule not in alive:
                return None  # no baseline for the comparison
            rounds = ROUNDS
            while self.now() < until:
                times = self._times(target, alive, bench, rounds, until)
                if times is None:
                    break
                best = self._best(times, rule)
                self.tally.best = f"{best.gain:.2f}x of the rule"
                self.tally.count()
                if len(alive) <= 2:
                    break
                rivals = sorted((c for c in alive if c != rule), key=times.__getitem__)
                alive = [rule, *rivals[: max(1, (len(alive) - 1) // 2)]]
                rounds *= 2
            if best is None:
                self.tally.count(left_out=len(alive))
        finally:
            if best is not None:
                self.keep(target, best)
        return best

    def _right(self, target: Target, config: Config, bench: LaunchBench, until: float) -> bool:
        """Whether a candidate's results are right; False if time is up before the check."""
        finding = self.journal.finding("check", target, config)
        if finding is None:
            if self.now() > until:
                self.tally.count(left_out=1)
                return False
            if isinstance(config, Routed) and config.ROUTE in ROUTES[1:]:  # one that never ends is tried once
                self.journal.add("check", target, config, {"wrong": "was being checked when a run ended"})
            finding = {"wrong": bench.wrong(target, config)}
            self.journal.add("check", target, config, finding)
        self.tally.count(failed=finding["wrong"] is not None, why=finding["wrong"])
        return finding["wrong"] is None

    def _times(
        self, target: Target, alive: Sequence[Config], bench: LaunchBench, rounds: int, until: float
    ) -> dict[Config, float] | None:
        """Medians over ``rounds`` rounds. A round runs each candidate once, beginning with the next one; None
        if time is up before."""
        missing = [c for c in alive if self.journal.finding("time", target, c, rounds) is None]
        if missing:  # an incomplete set of rounds is repeated as a whole
            samples: dict[Config, list[float]] = {config: [] for config in alive}
            for config in alive:
                bench.milliseconds(target, config)  # warm
            for turn in range(rounds):
                first = turn % len(alive)
                for config in [*alive[first:], *alive[:first]]:
                    if self.now() > until:
                        return None
                    samples[config].append(bench.milliseconds(target, config))
            for config, config_samples in samples.items():
                self.journal.add("time", target, config, {"ms": statistics.median(config_samples)}, rounds)
        findings = {config: self.journal.finding("time", target, config, rounds) for config in alive}
        return {config: entry["ms"] for config, entry in findings.items() if entry is not None}

    @staticmethod
    def _best(times: dict[Config, float], rule: Config) -> Choice:
        fastest = min(times, key=times.__getitem__)
        winner = fastest if times[rule] / times[fastest] > MIN_SPEEDUP else rule
        return Choice(winner, times[winner], times[rule])

    def run(self, requested: Sequence[Target], bench: LaunchBench) -> dict[Target, Choice]:
        """Tune every target in turn; each may use its share of the time that is left."""
        for i, target in enumerate(requested):
            left = self.deadline - self.now()
            if left <= 0:
                self.tally.count(left_out=sum(len(self.candidates(rest)) for rest in requested[i:]))
                break
            choice = self.choose(target, bench, self.now() + left / (len(requested) - i))
            if choice is not None:
                self.chosen[target] = choice
        return self.chosen
