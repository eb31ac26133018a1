"""The whole path of a benchmark run, on a CPU: what is written, in which order, and what stops it."""

import json
import time

import pytest
import torch
from click.testing import CliRunner

from tritoncp.perf import baselines, measure, timing
from tritoncp.perf.cases import GOALS, Case, select
from tritoncp.perf.run import brief, main

CPU = torch.device("cpu")
QUICK = ["--device", "cpu", "--seconds", "0.01"]


def lines_of(folder) -> list[dict]:
    (path,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def bench(monkeypatch, seconds: float = 60.0, **wrong) -> tuple[measure.Bench, list[dict]]:
    """A bench whose rounds take no time, with some contenders put in other's place."""
    monkeypatch.setattr(measure, "interleaved", lambda runs, *_: dict.fromkeys(runs, figure(1.0)))
    real = baselines.contenders
    monkeypatch.setattr(baselines, "contenders", lambda case, given, *rest: real(case, given, *rest) | wrong)
    lines: list[dict] = []
    return measure.Bench(CPU, lines.append, time.monotonic() + seconds), lines


def figure(ms: float) -> timing.Figure:
    return timing.Figure(ms, ms, ms, 0.1, 9)


def test_a_run_writes_environment_checks_times_and_standings(tmp_path):
    done = CliRunner().invoke(main, [*QUICK, "--tier", "smoke", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    lines = lines_of(tmp_path)
    assert len({line["run"] for line in lines}) == 1
    assert lines[0]["kind"] == "run" and {"torch", "triton", "device", "sources", "commit"} <= set(lines[0])
    checks = {line["contender"]: line for line in lines if line["kind"] == "check"}
    assert checks["tritoncp"]["ok"] and set(checks["tritoncp"]["errors"]) == {"out", "dq", "dk", "dv"}
    assert "does not support backward on CPU" in checks["flex"]["why"]
    times = [line for line in lines if line["kind"] == "time"]
    assert {line["contender"] for line in times} == {"tritoncp", "flash"}
    assert all(0 < line["low"] <= line["ms"] <= line["high"] and line["samples"] >= 7 for line in times)
    standings = [line for line in lines if line["kind"] == "standing"]
    assert [line["case"][-4:] for line in standings] == ["-fwd", "-bwd"]
    assert "tritoncp ms" in done.output and "÷ flash" in done.output


def test_a_second_run_is_appended_and_json_is_what_the_file_holds(tmp_path):
    arguments = [*QUICK, "--tier", "smoke", "--only", "*-fwd", "--json", "--out", str(tmp_path)]
    first, second = (CliRunner().invoke(main, arguments) for _ in range(2))
    whole = (next(tmp_path.glob("*.jsonl"))).read_text()
    assert first.stdout + second.stdout == whole
    assert len({line["run"] for line in lines_of(tmp_path)}) == 2
    assert not [line for line in lines_of(tmp_path) if "-bwd" in line.get("case", "")]


def test_nothing_is_started_after_the_budget(tmp_path):
    done = CliRunner().invoke(main, [*QUICK, "--budget", "0", "--out", str(tmp_path)])
    assert done.exit_code == 0
    kinds = [line["kind"] for line in lines_of(tmp_path)]
    assert kinds == ["run", *["left out"] * len(select("core"))]


def test_a_wrong_contender_is_named_and_not_timed(monkeypatch):
    case = Case("causal", "forward", 16384).shrunk()
    given = baselines.inputs(case, CPU)
    right = baselines.ours(case, given)
    wrong = baselines.Contender(lambda: right.call() * 1.01, right.leaves, right.dout)
    runner, lines = bench(monkeypatch, tritoncp=lambda: wrong, flash=lambda: 1 / 0)
    runner.run([case])
    checks = {line["contender"]: line for line in lines if line["kind"] == "check"}
    assert "wrong" in checks["tritoncp"]["why"] and "ZeroDivisionError" in checks["flash"]["why"]
    assert not [line for line in lines if line["kind"] in ("time", "standing")]
    assert runner.failures == 1


def test_later_sizes_take_the_flex_variants_that_won_the_first(monkeypatch):
    runner, _ = bench(monkeypatch)
    asked = []

    def problem(cases, variants):
        asked.append((cases[0].mask, cases[0].seq, list(variants)))
        if cases[0].mask == "causal":
            runner.best.setdefault("causal", ["flex tma"])

    monkeypatch.setattr(runner, "_problem", problem)
    monkeypatch.setattr(Case, "shrunk", lambda self: self)
    cases = [Case(mask, "forward", seq) for mask, seq in
             [("causal", 16384), ("window", 16384), ("alibi", 16384), ("causal", 8192)]]  # fmt: skip
    runner.run(cases)
    everything = measure.QUICK
    assert asked == [
        ("causal", 16384, everything),
        ("window", 16384, everything),
        ("alibi", 16384, ["flex tma"]),
        ("causal", 8192, ["flex tma"]),
    ]


def test_everyone_runs_once_a_round_and_the_first_round_is_thrown_away():
    order = []

    class Counting:
        def sample(self, run):
            return timing.Sample(float(run()), 0.5)

    def runs(name, times):
        def prepare():
            order.append(name)
            return lambda: next(times)

        return prepare

    found = timing.interleaved(
        {"a": runs("a", iter([99, 1, 2, 3])), "b": runs("b", iter([99, 4, 4, 4]))},
        Counting(),
        seconds=0.0,
        least=3,
    )
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert found["a"] == timing.Figure(2.0, 1.5, 2.5, 0.5, 3) and found["b"].ms == 4.0


def test_every_core_case_has_a_goal():
    assert {(case.mask, case.which) for case in select("core")} == set(GOALS)


def test_mistakes_are_explained(tmp_path):
    none = CliRunner().invoke(main, ["--device", "cpu", "--only", "casual-*", "--out", str(tmp_path)])
    assert none.exit_code == 1 and "no case of tier core is named like 'casual-*'" in none.output
    if not torch.cuda.is_available():
        gpu = CliRunner().invoke(main, ["--out", str(tmp_path)])
        assert gpu.exit_code == 1 and "torch finds no GPU here" in gpu.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["check", "left out", "standing", "run"])
def test_every_kind_of_line_has_a_short_form(kind):
    line = {"kind": kind, "case": "c", "contender": "x", "ok": False, "why": "so", "setup_s": 1,
            "speedup": {"flex": 1.5}}  # fmt: skip
    assert {"check": "so", "left out": "so", "standing": "÷flex 1.5", "run": "case=c"}[kind] in brief(line)
