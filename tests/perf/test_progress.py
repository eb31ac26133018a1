"""Output of a run while it measures, and after Ctrl-C; tables outside of a terminal."""

import json
import re
import signal
import time

import pytest
import torch

from tests.perf.conftest import FIGURES
from tests.perf.synthetic_history import perf, write
from tritoncp.perf.records.history import Journal, Series, read
from tritoncp.perf.suite import host_cases, measure, timing
from tritoncp.perf.suite.cases import select

SMOKE = ["--device", "host", "--tier", "smoke", "--seconds", "0"]


@pytest.fixture
def measured(monkeypatch) -> list[str]:
    """Names of measured cases; a measurement takes no time, and the third one is interrupted once."""
    names: list[str] = []
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)

    def fake(case, seconds):
        names.append(case.name)
        if len(names) == 3:
            signal.raise_signal(signal.SIGINT)
        return FIGURES

    monkeypatch.setattr(host_cases, "measure", fake)
    yield names
    signal.signal(signal.SIGINT, previous)


def test_resume_measures_the_rest_after_ctrl_c(measured, tmp_path):
    words = ["run", *SMOKE, "--only", "plan-*", "--only", "*", "--out", tmp_path]
    result = perf(*words)
    assert result.exit_code == 130 and "interrupted after 2 of 4 measurements" in result.stderr
    (file,) = tmp_path.iterdir()
    assert str(file) in result.stderr and "--resume" in result.stderr and len(read(tmp_path).points) == 2
    measured[:] = measured[:2]  # Ctrl-C again, before the first new measurement
    assert "interrupted after 0 of 2 measurements" in perf(*words, "--resume").stderr
    result = perf(*words, "--resume")
    assert result.exit_code == 0 and "2 cases are there" in result.stderr
    points = read(tmp_path).points
    assert len({point.run for point in points}) == 1
    assert sorted(point.case for point in points) == sorted(case.name for case in host_cases.select("smoke"))


@pytest.mark.usefixtures("instant")
def test_each_line_has_its_number_and_the_time_left(tmp_path):
    result = perf("run", *SMOKE, "--out", tmp_path, "--json")
    assert [json.loads(text)["kind"] for text in result.stdout.splitlines()] == ["case"] * 4
    result = perf("run", *SMOKE, "--out", tmp_path)
    assert "━" not in result.stderr
    starts = re.findall(r"^\[(\d) of 4(, \d:\d\d:\d\d left)?\] ", result.stderr, re.MULTILINE)
    assert [number for number, _ in starts] == list("1234") and not starts[-1][1]


@pytest.mark.usefixtures("instant")
def test_a_terminal_has_a_bar_below_the_lines(monkeypatch, tmp_path):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    result = perf("run", *SMOKE, "--out", tmp_path, "--json")
    assert [json.loads(text)["kind"] for text in result.stdout.splitlines()] == ["case"] * 4
    assert "━" in result.stderr and "4/4" in result.stderr and "[4 of 4] " in result.stderr


def test_a_resumed_run_compiles_the_slow_variants_that_the_first_one_did_not_reach(monkeypatch, tmp_path):
    """Otherwise the ratios to flex attention of a resumed run would be untuned for good."""
    cases = [case for case in select("core") if case.problem.mask in ("causal", "full")]
    journal = Journal(tmp_path / "a.jsonl", "run", Series("a GPU"), {})
    for case in cases:
        slow = {"flex max-autotune": {"ms": 1.0}} if case.problem.mask == "full" else {}
        journal.point(case.name, {"tritoncp": {"ms": 1.0}, "flex": {"ms": 2.0}, **slow})
    bench = measure.Bench(torch.device("cuda"), journal, time.monotonic() + 60)
    bench.clock = timing.WallClock()
    measured = []
    monkeypatch.setattr(bench, "_measure_problem", lambda group, variants: measured.append((group, variants)))
    bench.run(cases)
    ((group, variants),) = measured
    assert {case.problem.mask for case in group} == {"causal"} and group[0].problem.seq == 16384
    assert variants == [*measure.QUICK, *measure.THOROUGH]


@pytest.mark.usefixtures("instant")
def test_tables_in_a_pipe_are_not_cut(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "30")
    name = "causal-" + "x" * 150
    for side, times in (("a", [1.0, 1.01]), ("b", [1.2, 1.21])):
        write(tmp_path / f"{side}.jsonl", **{name: times})
    result = perf("compare", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--fail-over", "5")
    (row,) = (text for text in result.stdout.splitlines() if name in text and "TOO SLOW" in text)
    assert "1.005" in row and "1.205" in row
    result = perf("run", *SMOKE, "--out", tmp_path / ("y" * 100))
    assert re.search(r"plan-document-w8-fetch-64k +│ +1 ", result.stdout)
    assert ("y" * 100) + "/" in result.stdout
