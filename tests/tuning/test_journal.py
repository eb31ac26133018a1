"""Runs that end early and are resumed from their journal, and journals with malformed lines."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter

import pytest

from tests.tuning.stand_ins import BEST, TARGET, Compiler, Formula, cost, tuner
from tritoncp.tuning.journal import Journal
from tritoncp.tuning.search import MAX_TIMED, ROUNDS
from tritoncp.tuning.targets import candidates

# The n-th step of a stage at which a run is killed; "times", "halving": samples before and after a halving.
KILLED = {"compile": 7, "steps": 5, "check": 3, "time": 2, "times": 30, "halving": 200}


def kill_run(path, stage):
    """Start a run in a process of its own, which kills itself at its n-th step of a stage, as in KILLED."""
    count = 0

    def die(at):
        nonlocal count
        count += at == stage
        if count == KILLED[stage]:
            os.kill(os.getpid(), signal.SIGKILL)

    class Dies(Compiler):
        def __call__(self, jobs):
            for job, report in super().__call__(jobs):
                die("steps" if job.variant else "compile")
                yield job, report

    class Device(Formula):
        def wrong(self, target, config):
            die("check")
            return super().wrong(target, config)

        def milliseconds(self, target, config):
            die("times")
            die("halving")
            return super().milliseconds(target, config)

    process = os.fork()
    if not process:
        try:
            search = tuner(path, Dies())
            add = search.journal.add

            def written(at, *rest):
                die("time" if at == "time" else "")
                add(at, *rest)

            search.journal.add = written
            search.run([TARGET], Device(cost))
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL


@pytest.mark.parametrize("stage", KILLED)
def test_a_killed_run_is_resumed_at_every_stage(tmp_path, stage):
    """After kill -9 during compilation, checks, measurements or writing, a resumed run repeats no finding and
    makes the choice of an undisturbed run."""
    kill_run(tmp_path, stage)
    done = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    stages = Counter(line["finding"][0] for line in done[1:])
    if stage in stages:
        assert stages[stage] == KILLED[stage] - 1
    rest, second_bench = Compiler(), Formula(cost)
    search = tuner(tmp_path, rest, resume=True)
    assert search.run([TARGET], second_bench)[TARGET].config == BEST
    whole, plain = Compiler(), Formula(cost)
    tuner(tmp_path / "plain", whole).run([TARGET], plain)
    assert len(rest.asked) == len(whole.asked) - stages["compile"]
    assert len(rest.steps) == len(whole.steps) - stages["steps"]
    assert len(second_bench.checks) == len(plain.checks) - stages["check"]
    again = MAX_TIMED * (ROUNDS + 1) if stage == "halving" else 0  # a halving that was over is not repeated
    assert len(second_bench.samples) == len(plain.samples) - again


def test_two_runs_do_not_write_to_one_journal(tmp_path):
    first = tuner(tmp_path)
    with pytest.raises(RuntimeError, match=r"another tritoncp autotune writes to .*journal.jsonl.*--out"):
        tuner(tmp_path)
    first.journal.close()
    tuner(tmp_path)


@pytest.mark.parametrize("line", ["17", '{"finding": ', "[" * 100_000, "\udcff", ""])
def test_a_line_that_is_cut_off_costs_that_line_alone(tmp_path, line):
    """In place of the finding about the first candidate, and as the last line, without an end."""
    path = tmp_path / "journal.jsonl"
    search = tuner(tmp_path)
    search.run([TARGET], Formula(cost))
    search.journal.close()
    first, _, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, line, *rest, line]), errors="surrogateescape")
    second_compiler = Compiler()
    assert tuner(tmp_path, second_compiler, resume=True).run([TARGET], Formula(cost))[TARGET].config == BEST
    assert len(second_compiler.asked) == 1


@pytest.mark.parametrize("other", ["conditions", "no resume"])
def test_findings_of_other_conditions_or_an_older_run_are_not_taken_over(tmp_path, other):
    search = tuner(tmp_path)
    search.run([TARGET], Formula(cost))
    search.journal.close()
    compiler = Compiler()
    second_search = tuner(tmp_path, compiler)
    if other == "conditions":
        second_search.journal.close()
        second_search.journal = Journal(tmp_path / "journal.jsonl", {"device": "another"}, resume=True)
    second_search.select(TARGET, 1e9)
    assert len(compiler.asked) == len(candidates(TARGET, "sm_90"))
