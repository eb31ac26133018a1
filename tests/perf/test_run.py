"""Benchmark runs on a CPU: lines, their order, time budgets, failures, resuming."""

import json
import time

import pytest
import torch
from click.testing import CliRunner

from tritoncp.perf.problem import Problem
from tritoncp.perf.records import history
from tritoncp.perf.run import main, show
from tritoncp.perf.suite import baselines, measure, timing
from tritoncp.perf.suite.cases import Case, select

CPU = torch.device("cpu")
QUICK = ["--device", "cpu", "--seconds", "0.01"]


def bench(monkeypatch, path, seconds: float = 60.0, **wrong) -> tuple[measure.Bench, history.Journal]:
    """Make a bench whose rounds take no time, with some contenders replaced."""
    monkeypatch.setattr(measure, "time_interleaved", lambda runs, *_: {name: {"ms": 1.0} for name in runs})
    real = baselines.contenders
    monkeypatch.setattr(
        baselines, "contenders", lambda case, tensors, *rest: real(case, tensors, *rest) | wrong
    )
    journal = history.Journal(path, "run", history.Series("a CPU"), {"torch": "2"})
    return measure.Bench(CPU, journal, time.monotonic() + seconds), journal


@pytest.mark.usefixtures("cpu_engine")
def test_a_run_writes_a_line_for_each_case_with_all_that_explains_it(tmp_path):
    result = CliRunner().invoke(main, [*QUICK, "--tier", "smoke", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    points = history.read(tmp_path).points
    assert [point.case[-4:] for point in points] == ["-fwd", "-bwd"]
    assert len({point.run for point in points}) == 1
    for point in points:
        assert {"torch", "triton", "tritoncp", "sources", "commit"} <= set(point.env)
        assert point.tags["mask"] == "causal" and point.work["flops"] > 0
        took = point.contenders
        assert "does not support backward on CPU" in took["flex"]["why"]
        assert "ms" not in took["flex"]
        for name in ("tritoncp", "flash"):
            assert 0 < took[name]["low"] <= took[name]["ms"] <= took[name]["high"]
        assert len(took["tritoncp"]["samples"]) >= 3 and "samples" not in took["flash"]
    assert "tritoncp ms" in result.output and "÷ flash" in result.output


@pytest.mark.usefixtures("cpu_engine")
def test_a_second_run_is_appended_and_json_equals_the_file(tmp_path):
    arguments = [*QUICK, "--tier", "smoke", "--only", "*-fwd", "--json", "--out", str(tmp_path)]
    first, second = (CliRunner().invoke(main, arguments) for _ in range(2))
    printed = [json.loads(line) for line in (first.stdout + second.stdout).splitlines()]
    points = history.read(tmp_path).points
    assert printed == [point.as_line() for point in points] and len({point.run for point in points}) == 2
    assert not [point for point in points if "-bwd" in point.case]


@pytest.mark.usefixtures("cpu_engine")
def test_a_wrong_contender_is_named_and_not_timed(monkeypatch, tmp_path):
    case = Case(Problem("causal", 16384), "forward").shrunk()
    tensors = baselines.inputs(case.problem, CPU)
    right = baselines.one_device(case.problem, tensors)
    wrong = baselines.Contender(lambda: right.call() * 1.01, right.leaves, right.dout)
    runner, journal = bench(monkeypatch, tmp_path / "a.jsonl", tritoncp=lambda: wrong, flash=lambda: 1 / 0)
    runner.run([case])
    (point,) = journal.points
    assert "wrong" in point.own["why"] and "ZeroDivisionError" in point.contenders["flash"]["why"]
    assert point.ms is None and point.speedups() == {} and runner.failures == 1
    assert history.read(tmp_path / "a.jsonl").points == [point]


@pytest.mark.long
def test_a_call_that_falls_back_to_loops_is_not_timed_as_its_route(monkeypatch, tmp_path):
    case = Case(Problem("causal", 16384), "forward").shrunk()
    runner, journal = bench(monkeypatch, tmp_path / "a.jsonl")
    runner.options = [{"ROUTE": "gluon"}, {"SPLIT_KV": 2}]
    runner.run([case])
    (point,) = journal.points
    why = point.contenders["tritoncp ROUTE=gluon"]["why"]
    assert "ROUTE='gluon' is for GPUs and cannot be interpreted" in why
    assert "ms" in point.own and "ms" in point.contenders["tritoncp SPLIT_KV=2"]


@pytest.mark.long
def test_kernel_options_are_measured_only_in_the_pass_that_they_change(monkeypatch, tmp_path):
    cases = [Case(Problem("causal", 16384), direction).shrunk() for direction in ("forward", "backward")]
    runner, journal = bench(monkeypatch, tmp_path / "a.jsonl")
    runner.options = [{"fwd_BLOCK_N": 32}, {"bwd_BLOCK_M2": 32}, {"num_stages": 2}]
    runner.patterns = ["tritoncp*"]
    runner.run(cases)
    forward, backward = (set(point.contenders) for point in journal.points)
    assert forward == {"tritoncp", "tritoncp fwd_BLOCK_N=32", "tritoncp num_stages=2"}
    assert backward == {"tritoncp", "tritoncp bwd_BLOCK_M2=32", "tritoncp num_stages=2"}
    assert all("ms" in figures for point in journal.points for figures in point.contenders.values())


def test_warming_runs_the_named_contenders_and_writes_nothing(tmp_path):
    options = ["--tier", "smoke", "--warm", "--try", '{"BLOCK_N": 64}', "--out", str(tmp_path)]
    result = CliRunner().invoke(main, [*QUICK, *options, "--contenders", "tritoncp BLOCK_N=64"])
    assert result.exit_code == 0 and result.output.count("right") == 1
    assert "tritoncp BLOCK_N=64" in result.output and not list(tmp_path.iterdir())


def test_simulated_ranks_have_kernel_options(monkeypatch, tmp_path):
    runner, journal = bench(monkeypatch, tmp_path / "a.jsonl")
    runner.options, runner.patterns = [{"BLOCK_N": 32}], ["tritoncp*", "whole"]
    runner.run([case for case in select("full") if case.name == "causal-s2-ring-16k-fwd"])
    (point,) = journal.points
    assert set(point.contenders) == {"tritoncp", "tritoncp BLOCK_N=32", "whole"}
    assert point.own["ms"] == 1.0


def test_a_table_says_that_a_baseline_is_untuned(capsys, tmp_path):
    journal = history.Journal(tmp_path / "a.jsonl", "run", history.Series("GPU"), {})
    journal.point("causal-8k-fwd", {"tritoncp": {"ms": 1.0}, "flex": {"ms": 2.0}}, goal={"flex": 1.2})
    tuned = {"flex": {"ms": 2.0}, "flex max-autotune": {"ms": 1.5}}
    journal.point("causal-16k-fwd", {"tritoncp": {"ms": 1.0}, **tuned}, goal={"flex": 1.2})
    show(journal)
    output = capsys.readouterr().out
    assert "untuned" in output and "1.50 (1.2)" in output and "2.00" not in output


def test_a_run_that_lost_the_device_ends_and_is_resumed_with_the_other_cases(monkeypatch, tmp_path):
    """Without this, every later contender and case would be recorded as wrong."""

    def lost():
        raise torch.AcceleratorError("an illegal memory access was encountered")

    cases = [
        Case(Problem("causal", 16384), "forward").shrunk(),
        Case(Problem("full", 16384), "forward").shrunk(),
    ]
    runner, journal = bench(monkeypatch, tmp_path / "a.jsonl", flash=lost)
    with pytest.raises(measure.DeviceLost, match=r"error in causal-.*; .*continue with --resume"):
        runner.run(cases)
    (point,) = journal.points
    assert point.case == cases[0].name and "not timed" in point.own["why"]
    assert "AcceleratorError: an illegal" in point.contenders["flash"]["why"]
    rest: list[Case] = []
    monkeypatch.setattr(runner, "_measure_problem", lambda group, variants: rest.extend(group))
    runner.run(cases)
    assert rest == cases[1:]


def test_each_contender_runs_once_a_round_and_the_first_round_is_dropped():
    order = []

    class Counting:
        def sample(self, run):
            return timing.Sample(float(run()), 0.5)

        def agree(self, x):
            return x

    def runs(name, times):
        def prepare():
            order.append(name)
            return lambda: next(times)

        return prepare

    figures = timing.time_interleaved(
        {"a": runs("a", iter([99, 1, 2, 3])), "b": runs("b", iter([99, 4, 4, 4]))},
        Counting(),
        seconds=0.0,
        least=3,
    )
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert figures["a"] == {"ms": 2.0, "low": 1.5, "high": 2.5, "host_ms": 0.5} and figures["b"]["ms"] == 4.0
