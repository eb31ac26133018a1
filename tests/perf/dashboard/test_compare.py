"""Ratios and their intervals, and sides of a history."""

import json
import math
import random
import statistics
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.perf.synthetic_history import H100, H200, line, perf, point, tags
from tritoncp.perf.dashboard import compare
from tritoncp.perf.records.history import Point, Series, append


def runs(case: str, times, **more) -> list[Point]:
    return [point(case, ms, run=f"r{i}", **more) for i, ms in enumerate(times)]


def test_intervals_of_samples_hold_the_truth_as_often_as_they_say():
    draw, hits = random.Random(0), 0
    for _ in range(400):
        sides = []
        for truth in (2.0, 2.1):
            samples = [truth * draw.lognormvariate(0, 0.02) for _ in range(20)]
            sides.append([point("c", statistics.median(samples), samples=samples)])
        row = compare.compare(*sides).rows[0]
        hits += row.low <= 1.05 <= row.high
    assert 0.92 <= hits / 400 <= 0.99, hits


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 5), (8, 4)])
def test_the_interval_of_several_runs_is_welchs(before, after):
    draw = random.Random(before)
    sides = [[draw.lognormvariate(0, noise) for _ in range(n)] for n, noise in ((before, 0.02), (after, 0.1))]
    row = compare.compare(*(runs("c", times) for times in sides)).rows[0]
    logs = [[math.log(x) for x in times] for times in sides]
    expected = stats.ttest_ind(logs[1], logs[0], equal_var=False).confidence_interval(0.95)
    assert (math.log(row.low), math.log(row.high)) == pytest.approx((expected.low, expected.high), rel=1e-6)


def test_an_interval_is_unknown_without_samples():
    row = compare.compare([point("c", 1.0)], [point("c", 1.2)]).rows[0]
    assert (row.low, row.high) == (None, None) and row.regressed(0.1), "unknown is no excuse"


def test_the_worst_cases_come_first_and_the_mean_is_geometric():
    before = [point(name, 1.0) for name in ("same", "slow", "fast", "broke", "gone")]
    after = [
        point("same", 1.0),
        point("slow", 1.5),
        point("fast", 0.5),
        point("broke", None),
        point("new", 1.0),
    ]
    comparison = compare.compare(before, after)
    assert [row.case for row in comparison.rows] == ["broke", "slow", "same", "fast"]
    assert comparison.geomean == pytest.approx((1.5 * 0.5) ** (1 / 3))
    assert (comparison.missing, comparison.new) == (["gone"], ["new"]) and comparison.rows[
        0
    ].why == "it broke"
    assert [row.case for row in comparison.rows if row.regressed(0.05)] == ["broke", "slow"]
    failed_twice = compare.compare([point("c", None)], [point("c", None)])
    assert failed_twice.geomean is None and not failed_twice.rows[0].regressed(0.05), "it failed before, too"


def test_series_are_compared_only_with_themselves_if_any_is_common():
    points = [point("c", 1.0), point("c", 2.0, series=H100)]
    assert [row.ratio for row in compare.compare(points, points).rows] == [1.0, 1.0]
    (row,) = compare.compare(points[:1], points[1:]).rows
    assert row.ratio == 2.0 and row.series == ""


def test_every_output_of_two_devices_names_the_device(tmp_path):
    for name, slow, others in (("before", 1.0, ["gone"]), ("after", 1.3, ["new"])):
        for i, noise in enumerate((1.0, 1.01, 0.99)):
            for series, factor in ((H200, slow), (H100, 2.0)):
                written = point("c", factor * noise, run=str(i), series=series)
                append(tmp_path / f"{name}.jsonl", written.as_line())
                append(tmp_path / f"{name}.jsonl", replace(written, case=others[0]).as_line())
    words = [tmp_path / "before.jsonl", tmp_path / "after.jsonl", "--fail-over", "5"]
    facts = json.loads(perf("compare", *words, "--json", "--html", tmp_path / "page.html").stdout)
    slower, gone = f"c on {H200}", [f"gone on {series}" for series in (H200, H100)]
    assert [reason["case"] for reason in facts["reasons"]] == [slower, *gone]
    assert facts["missing"] == gone and facts["new"] == [f"new on {series}" for series in (H200, H100)]
    texts = perf("compare", *words, "--markdown").stdout, (tmp_path / "page.html").read_text()
    for text in (*texts, perf("compare", *words).stdout.replace("\n", "")):
        assert "on NVIDIA H200" in text and "on NVIDIA H100" in text
    for pattern, code in (("new", 0), ("c on NVIDIA H1*", 0), ("gone", 1)):
        assert perf("compare", *words[:2], "--allow-missing", "--require", pattern).exit_code == code


def test_a_noisy_ratio_does_not_stand_above_a_sure_one():
    before = [*runs("sure", [1.0, 1.01, 0.99]), *runs("noisy", [1.0, 2.0, 0.5])]
    after = [*runs("sure", [1.1, 1.11, 1.09]), *runs("noisy", [1.5, 2.9, 0.8])]
    assert [row.case for row in compare.compare(before, after).rows] == ["sure", "noisy"]


def test_an_absent_device_is_named_and_cases_without_any_device_are_missing():
    before = [point("c", 1.0), point("c", 2.0, series=H100), point("mask", 1.0, series=Series("CPU"))]
    comparison = compare.compare(before, [point("c", 1.0)])
    assert [row.case for row in comparison.rows] == ["c"] and comparison.missing == ["mask on CPU"]
    assert comparison.absent_series == [
        str(H100)
    ] and "no measurement after on: NVIDIA H100" in compare.summary(comparison, 1)


@pytest.mark.long
def test_the_mean_of_a_suite_is_geometric_and_its_interval_holds_the_truth_as_often_as_it_says():
    """Cases of a suite share the disturbance of a run, which an interval from single cases would not know."""
    draw, hits = np.random.default_rng(1), 0
    for _ in range(400):
        sides = []
        for factors in ((1.0, 1.0, 1.0), (1.1, 1.0, 0.98)):
            runs = draw.lognormal(0, 0.02, 4)
            sides.append(
                [
                    point(f"c{case}", factor * pace * draw.lognormal(0, 0.003), run=str(run))
                    for run, pace in enumerate(runs)
                    for case, factor in enumerate(factors)
                ]
            )
        (suite,) = compare.compare(*sides).suites
        assert suite.ratio == pytest.approx(compare.compare(*sides).geomean) and suite.cases == 3
        hits += suite.low <= (1.1 * 0.98) ** (1 / 3) <= suite.high
    assert 0.92 <= hits / 400 <= 0.99, hits


def test_suites_are_passes_on_devices_without_cases_that_fail():
    def side(slow, fails):
        times = {"a": 1.0 * slow, "b": 2.0, "c": fails}
        points = [p for case, ms in times.items() for p in line(case, [ms] * 2, tags=tags(), flex=3.0)]
        return [*points, *line("a", [5.0] * 2, series=H100, tags=tags(which="backward"), flex=10.0)]

    suites = compare.compare(side(1.0, 1.0), side(1.21, None)).suites
    assert [(s.name, s.series, s.cases) for s in suites] == [
        ("forward", str(H200), 2),
        ("backward", str(H100), 1),
    ]
    assert suites[0].ratio == pytest.approx(1.1) and suites[0].worst == pytest.approx(1.21)
    before, after = suites[0].speedups["flex"]
    assert (before, before / after) == pytest.approx((math.sqrt(3.0 * 1.5), 1.1))


def test_a_branch_is_its_newest_measured_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def git(*words: str) -> str:
        ready = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", *words]
        return subprocess.run(ready, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet", "-b", "trunk")
    commits = []
    for i in range(4):
        if i == 2:
            git("checkout", "--quiet", "-b", "feature")
        git("commit", "--quiet", "--allow-empty", "-m", str(i))
        commits.append(git("rev-parse", "HEAD"))
    for commit, ms in zip(commits[:3], (1.0, 2.0, 3.0)):
        append(tmp_path / "a.jsonl", point("c", ms, run=commit, commit=commit).as_line())
    words = ["compare", "trunk", "feature", "--history", "a.jsonl"]
    (row,) = json.loads(perf(*words, "--json").stdout)["rows"]
    assert (row["before"], row["after"]) == pytest.approx((2.0, 3.0)), "feature's tip was not measured"
    assert f"after: feature: 1 run of {commits[2][:10]}" in perf(*words).stdout
    assert perf("compare", "trunk", "HEAD", "--history", "a.jsonl").exit_code == 2, "HEAD is a commit"


@pytest.fixture
def history(tmp_path) -> Path:
    path = tmp_path / "history" / "a.jsonl"
    path.parent.mkdir()
    for commit, factor in (("a" * 40, 1.0), ("b" * 40, 1.1)):
        for i in range(3):
            slow = 1.0 + i / 1000
            append(path, point("c", slow * factor, run=f"{commit[0]}{i}", commit=commit).as_line())
            append(path, point("d", slow, run=f"{commit[0]}{i}", commit=commit).as_line())
    append(path, point("c", 1.3, run="other", series=H100, commit="c" * 40).as_line())
    return path


def test_sides_are_commits_and_runs_of_a_history(history):
    for before, after in (("aaaa", "bbbbbbb"), ("a0", "b0")):
        done = perf("compare", before, after, "--history", history.parent, "--fail-over", "5%", "--json")
        result = json.loads(done.output)
        assert done.exit_code == 1 and [row["case"] for row in result["rows"]] == ["c", "d"]
        assert result["rows"][0]["ratio"] == pytest.approx(1.1)
        assert result["geomean"] == pytest.approx(1.1**0.5)


def test_the_newest_runs_are_selected_and_broken_lines_are_named(history):
    with history.open("a") as file:
        file.write("{}\n")
    for words, ratio in (((), 1.1 / 1.05), (("--last", "3"), 1.0)):
        result = perf("compare", history, "bbbb", "--history", history, *words, "--json")
        rows = {row["case"]: row["ratio"] for row in json.loads(result.stdout)["rows"]}
        assert rows["c"] == pytest.approx(ratio, rel=0.01)
        assert "a.jsonl:14: not a line of a history" in result.stderr
