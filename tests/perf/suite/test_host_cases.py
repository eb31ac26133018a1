"""Figures without a GPU: the calls that they time."""

import time

import pytest
import torch

from tritoncp.kernels.launch import Launch
from tritoncp.perf.problem import Problem
from tritoncp.perf.records.history import Journal, Series, read
from tritoncp.perf.suite import host_cases
from tritoncp.perf.suite.host_cases import HostCase, measure, no_launches
from tritoncp.perf.suite.host_memory import start_peak


@pytest.mark.parametrize("world", [1, 2])
def test_goals_are_for_baselines_that_are_measured(world):
    ranks = {"world": 2, "schedule": "ring", "together": True} if world > 1 else {}
    problem = Problem("window", 2048, 2, 1, 8, 8, dtype="float32", **ranks)
    for which in host_cases.CPU_PASSES:
        case = HostCase(problem, which)
        assert set(case.goal) <= set(host_cases._call_contenders(case))


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", host_cases.select("smoke"), ids=lambda case: case.name)
def test_every_kind_of_case_gives_times(case):
    contenders = measure(case, 0.0)
    assert 0 < contenders["tritoncp"]["low"] <= contenders["tritoncp"]["ms"]
    has_memory = case.which in ("mask", "plan") and start_peak() is not None
    assert [name for name in contenders if "peak_bytes" in contenders[name]] == [*contenders] * has_memory
    if case.which == "mask":
        assert contenders["torch"]["ms"] > contenders["tritoncp"]["ms"]


@pytest.mark.parametrize("schedule", ["", "ring"])
def test_a_call_makes_every_launch_and_runs_none(schedule, monkeypatch):
    ranks = {"world": 2, "schedule": schedule, "together": True} if schedule else {}
    problem = Problem("causal", 256, 4, 2, 64, 64, dtype="float32", **ranks)
    makers = host_cases._call_contenders(HostCase(problem, "backward"))
    launches = []
    init = Launch.__new__
    monkeypatch.setattr(Launch, "__new__", lambda *a, **k: launches.append(a) or init(*a, **k))
    with no_launches():
        run = makers["tritoncp"]()
        forwards = len(launches)
        grads = run()
    assert forwards >= 1 and len(launches) - forwards >= 3  # delta, dQ, dK and dV
    assert not grads[0].nan_to_num().any(), "no kernel wrote into the gradient"


@pytest.mark.parametrize("mask", ["causal", "document"])
def test_contenders_of_the_cpu_engine_compute_the_same_gradients(mask):
    case = HostCase(Problem(mask, 256, 8, 2, 64, 64, dtype="float32"), "train")
    makers = host_cases._call_contenders(case)
    with host_cases.cpu_engine():
        results = {name: make()() for name, make in makers.items()}
    assert len(results) == (3 if mask == "causal" else 2)
    for grads in results.values():
        for got, want in zip(grads, results["tritoncp"], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_a_case_that_fails_is_a_line_and_the_others_go_on(tmp_path, monkeypatch):
    cases = host_cases.select("smoke")
    real = host_cases.measure

    def broken(case, seconds):
        if case == cases[0]:
            raise RuntimeError("out of something")
        return real(case, seconds)

    monkeypatch.setattr(host_cases, "measure", broken)
    journal = Journal(tmp_path / "a.jsonl", "r", Series("CPU"), {})
    assert host_cases.run(cases[:2], journal, time.monotonic() + 60, 0.0) == 1
    failed, right = read(tmp_path / "a.jsonl").points
    assert failed.own == {"why": "RuntimeError: out of something"} and right.ms
