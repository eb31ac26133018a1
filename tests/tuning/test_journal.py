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


@pytest.mark.parametrize("at", [1, 5, 130, 200])
def test_after_an_interrupt_a_resumed_run_repeats_nothing_and_chooses_the_same(tmp_path, at):
    choices_by_target = {}
    bench, compiler = Formula(cost, interrupt=at), Compiler()
    first = tuner(tmp_path, compiler, choices=choices_by_target)
    with pytest.raises(KeyboardInterrupt):
        first.run([TARGET], bench)
    first.journal.close()
    done = len(bench.checks)
    second_bench, silent = Formula(cost), Compiler()
    assert tuner(tmp_path, silent, resume=True).run([TARGET], second_bench)[TARGET].config == BEST
    assert compiler.asked and silent.asked == [] and second_bench.checks == []
    assert done == MAX_TIMED
    if at == 200:  # the first halving was over: its choice was written, and it is not timed again
        assert choices_by_target[TARGET].config == BEST
        plain = Formula(cost)
        tuner(tmp_path / "plain").run([TARGET], plain)
        assert len(second_bench.samples) == len(plain.samples) - MAX_TIMED * (ROUNDS + 1)


def test_an_interrupt_while_compiling_is_resumed_too(tmp_path):
    class Stops(Compiler):
        def __call__(self, jobs):
            for i, report in enumerate(super().__call__(jobs)):
                if i == 10:
                    raise KeyboardInterrupt
                yield report

    with pytest.raises(KeyboardInterrupt):
        tuner(tmp_path, Stops()).run([TARGET], Formula(cost))
    rest = Compiler()
    assert tuner(tmp_path, rest, resume=True).run([TARGET], Formula(cost))[TARGET].config == BEST
    assert len(rest.asked) == len(candidates(TARGET, "sm_90")) - 10


KILLED = {"compile": 7, "steps": 5, "check": 3, "time": 2, "times": 30}


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
    stages = Counter(line["stage"] for line in done)
    assert stages[stage] == (0 if stage == "times" else KILLED[stage] - 1) and stages["time"] <= 1
    rest, second_bench = Compiler(), Formula(cost)
    search = tuner(tmp_path, rest, resume=True)
    assert search.run([TARGET], second_bench)[TARGET].config == BEST
    whole, plain = Compiler(), Formula(cost)
    tuner(tmp_path / "plain", whole).run([TARGET], plain)
    assert len(rest.asked) == len(whole.asked) - stages["compile"]
    assert len(rest.steps) == len(whole.steps) - stages["steps"]
    assert len(second_bench.checks) == len(plain.checks) - stages["check"]
    assert len(second_bench.samples) == len(plain.samples)


def test_two_runs_do_not_write_to_one_journal(tmp_path):
    first = tuner(tmp_path)
    with pytest.raises(RuntimeError, match=r"another tritoncp autotune writes to .*journal.jsonl.*--out"):
        tuner(tmp_path)
    first.journal.close()
    tuner(tmp_path)


def test_a_torn_last_line_costs_that_line_alone(tmp_path):
    path = tmp_path / "journal.jsonl"
    search = tuner(tmp_path)
    search.run([TARGET], Formula(cost))
    search.journal.close()
    whole = path.read_text().splitlines()
    path.write_text("\n".join(whole[:20]) + "\n" + whole[20][: len(whole[20]) // 2])
    rest = Compiler()
    assert tuner(tmp_path, rest, resume=True).run([TARGET], Formula(cost))[TARGET].config == BEST
    assert (
        len(rest.asked) == len(candidates(TARGET, "sm_90")) - 18
    )  # the first two lines are the run and the target
    broken = [line for line in path.read_text().splitlines() if not is_json(line)]
    assert broken == [whole[20][: len(whole[20]) // 2]]


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"stage": "compile", "target": "t", "config": ' + "[" * 100_000,
        '{"stage": "compile", "target": "t", "config": {}, "found": []}',
        '{"stage": "compile", "target": "t", "config": 5, "found": {}}',
        '{"stage": "time", "target": "t", "config": {}, "found": {"ms": NaN}}',
        '{"stage": "check", "target": "t", "config": {}, "found": {"wrong": 3}}',
        "\udcff",
        "17",
    ],
    ids=["brackets", "torn", "list", "number", "nan", "wrong", "bytes", "no object"],
)
def test_a_malformed_line_costs_that_line_alone(tmp_path, line):
    """A malformed line is appended, and put in place of a finding about the first candidate."""
    path = tmp_path / "journal.jsonl"
    search = tuner(tmp_path)
    search.run([TARGET], Formula(cost))
    search.journal.close()
    first, target, *rest = path.read_text().splitlines()
    entry = json.loads(rest[0])
    if line.startswith("{") and not line.endswith("["):
        line = json.dumps(json.loads(line) | {"target": entry["target"], "config": entry["config"]})
    path.write_text("\n".join([first, target, line, *rest[1:], ""]), errors="surrogateescape")
    second_compiler = Compiler()
    assert tuner(tmp_path, second_compiler, resume=True).run([TARGET], Formula(cost))[TARGET].config == BEST
    assert len(second_compiler.asked) == 1


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_journal_that_is_no_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "journal.jsonl"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(OSError, match=r"journal\.jsonl"):
        tuner(tmp_path)


def is_json(line):
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


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
    second_search.static(TARGET)
    assert len(compiler.asked) == len(candidates(TARGET, "sm_90"))
