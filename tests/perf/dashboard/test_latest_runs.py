"""The latest run against those before it: laws on the data of the page."""

import math

import numpy as np
import pytest
from click.testing import CliRunner

from tests.perf.synthetic_history import CEILINGS, H100, WORK, line
from tritoncp.cli import main
from tritoncp.perf.dashboard.compare import compare
from tritoncp.perf.dashboard.page import collect_data
from tritoncp.perf.records.history import History, Point, append
from tritoncp.perf.run import format_line


def facts_of(points: list[Point]) -> tuple[dict, dict[str, dict]]:
    """Return the facts of the page, and its lines by case."""
    facts, _ = collect_data(History(points, [], []))
    return facts, {row["case"]: row for row in facts["lines"]}


def noisy_times(seed: int, count: int = 20, newest: float = 1.0) -> list[float]:
    times = 2.0 * np.random.default_rng(seed).lognormal(0, 0.01, count)
    times[-1] *= newest
    return times.tolist()


def select(points: list[Point], *runs: str) -> list[Point]:
    return [point for point in points if point.run in runs]


def planted() -> list[Point]:
    """Make twenty runs in which the newest is slower, faster, fails or is missing in a case each."""
    points = line("slow", noisy_times(1, newest=1.15)) + line("fast", noisy_times(2, newest=0.85))
    points += line("fails", [*noisy_times(3, 19), None]) + line("missing", noisy_times(4, 19))
    points += line("gone", noisy_times(5, 10)) + line("broken", [*noisy_times(6, 10), *[None] * 10])
    return points + line("flat", noisy_times(7)) + line("new", noisy_times(8)[-1:] * 20)[-2:]


def test_each_case_has_its_status_in_the_latest_run():
    facts, lines = facts_of(planted())
    assert {case: row["status"] for case, row in lines.items()} == {
        "slow": "slower",
        "fast": "faster",
        "fails": "failing",
        "missing": "missing",
        "gone": "not measured",
        "broken": "still failing",
        "flat": "as before",
        "new": "too few runs",
    }
    (card,) = facts["cards"]
    names = [facts["runs"][run][1] for run in (card["run"], card["before"], *card["few"])]
    assert names == ["run19", "run18", "run14", "run15", "run16", "run17", "run18"] and card["cases"] == 6
    urgent = sorted(facts["lines"], key=lambda row: row["rank"])
    assert [row["case"] for row in urgent[:4]] == ["fails", "slow", "missing", "broken"]


def test_the_ratios_to_earlier_runs_are_those_of_perf_compare():
    points = planted()
    _, lines = facts_of(points)
    latest = select(points, "run19")
    for name, before in (("before", ["run18"]), ("few", [f"run{i}" for i in range(14, 19)])):
        rows = compare(select(points, *before), latest).rows
        ratios = {row.case: row.ratio for row in rows if row.ratio}
        assert len(ratios) == 4, "slow, fast, flat, new"
        for case, ratio in ratios.items():
            assert lines[case][name][0] == pytest.approx(ratio, abs=1e-5), (case, name)


def test_flat_cases_are_rarely_called_slower_and_a_planted_loss_is_found_in_its_run():
    points = []
    for seed in range(100):
        points += line(f"flat-{seed}", noisy_times(seed, 30))
        times = noisy_times(1000 + seed, 30)
        points += line(f"step-{seed}", times[:20] + [1.1 * ms for ms in times[20:]])
    _, lines = facts_of(points)
    false = sum(len(lines[f"flat-{seed}"]["regressions"]) for seed in range(100))
    assert false <= 45, "of 2900 points 1.5 per cent, where 0.8 are expected"
    assert sum(20 in lines[f"step-{seed}"]["regressions"] for seed in range(100)) >= 98


def test_the_regressions_of_the_newest_run_are_its_slow_and_failing_cases():
    points = planted()
    for seed in range(100, 140):
        points += line(f"more-{seed}", noisy_times(seed, newest=1.03 if seed % 2 else 1.0))
    _, lines = facts_of(points)
    for case, row in lines.items():
        newest = row["n"] - 1 in row["regressions"]
        assert newest == (row["status"] in ("slower", "failing")), (case, row)


@pytest.mark.parametrize("step", [1.0, 1.3])
def test_noise_is_not_that_of_a_step_of_the_level_nor_of_a_single_outlier(step):
    times = noisy_times(3, 40)
    times = times[:20] + [step * ms for ms in times[20:]]
    times[10] *= 1.4
    _, lines = facts_of(line("c", times))
    assert 0.015 < lines["c"]["noise"] < 0.05


def test_the_first_runs_have_no_verdict_but_their_ratios():
    for count in range(1, 7):
        facts, lines = facts_of(line("c", [1.0] * (count - 1) + [1.3]))
        assert lines["c"]["status"] == ("slower" if count > 4 else "too few runs")
        assert (lines["c"]["before"] or [None])[0] == (pytest.approx(1.3) if count > 1 else None)
        assert (facts["cards"][0]["before"] is None) == (count == 1)


def renamed(points: list[Point], prefix: str) -> list[Point]:
    return [type(point)(**vars(point) | {"run": prefix + point.run}) for point in points]


def test_runs_that_share_no_case_do_not_miss_each_others():
    """As runs of one device and of four ranks; a run of some cases connects to those of all."""
    single = line("a", noisy_times(1)) + line("b", noisy_times(2))
    ranks = renamed(line("ring-w4", noisy_times(3)), "ranks-")
    other = line("a", noisy_times(4), H100)
    facts, lines = facts_of([*single, *ranks, *other])
    assert sorted(card["cases"] for card in facts["cards"]) == [1, 1, 2]
    assert {row["status"] for row in facts["lines"]} == {"as before"}
    partial = [point for point in single if (point.case, point.run) != ("b", "run19")]
    facts, lines = facts_of([*partial, *ranks])
    assert lines["b"]["status"] == "missing" and lines["ring-w4"]["status"] == "as before"


def over_its_bound() -> Point:
    """Make a measurement at 363 % of the bound: 4.4 TFLOP in less than a millisecond and a half."""
    least = WORK["flops"] / CEILINGS["matmul_tflops"] / 1e9
    (point,) = line("causal-8k-fwd", [least / 3.63], flex=2 * least, work=WORK, ceilings=CEILINGS)
    return point


def test_a_value_above_its_bound_is_an_alarm_on_the_page_and_on_the_screen(tmp_path):
    point = over_its_bound()
    _, lines = facts_of([point])
    ((contender, share),) = lines["causal-8k-fwd"]["alarms"]
    assert contender == "tritoncp" and math.isclose(share, 3.63)
    text = "tritoncp: 363 % of the bound: the figure or the count is wrong"
    assert f"ALARM: {text}" in format_line(point.as_line())
    possible = type(point)(**vars(point) | {"contenders": {"tritoncp": {"ms": 20.0}}})
    assert "ALARM" not in format_line(possible.as_line())
    assert facts_of([possible])[1]["causal-8k-fwd"]["alarms"] == []


@pytest.mark.parametrize("flops", [0, -1, 10**400, 1e308])
def test_impossible_counts_of_work_raise_no_alarm(flops):
    point = over_its_bound()
    _, lines = facts_of([type(point)(**vars(point) | {"work": WORK | {"flops": flops}})])
    assert lines["causal-8k-fwd"]["alarms"] == []


def test_the_table_of_a_run_ends_with_its_alarms(capsys):
    from tritoncp.perf.records.history import Journal
    from tritoncp.perf.run import show

    point = over_its_bound()
    journal = Journal(path=None, run="run0", series=point.series, env={}, points=[point])
    show(journal)
    printed = " ".join(capsys.readouterr().out.split())
    assert "ALARM: causal-8k-fwd: tritoncp: 363 % of the bound: the figure or the count is wrong" in printed


@pytest.mark.parametrize(
    ("options", "url"),
    [
        (["--repo-url", "https://gitlab.example.org/group/project.git"],
         "https://gitlab.example.org/group/project/-/compare/BEFORE...AFTER"),
        ([], "https://github.com/owner/project/compare/BEFORE...AFTER"),
    ],
)  # fmt: skip
def test_commits_are_linked_to_the_repository(options, url, tmp_path, monkeypatch):
    import base64
    import json
    import re
    import subprocess
    import zlib

    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(
        ["git", "remote", "add", "origin", "https://me:secret@github.com/owner/project.git"], check=True
    )
    for point in line("c", [1.0, 1.1]):
        append(tmp_path / "a.jsonl", point.as_line())
    result = CliRunner().invoke(main, ["perf", "dashboard", "a.jsonl", *options])
    assert result.exit_code == 0
    html = (tmp_path / "dashboard.html").read_text()
    data = re.search(r'id="data-about">([^<]+)<', html)[1]
    assert json.loads(zlib.decompress(base64.b64decode(data)))["compare"] == url
    assert "secret" not in html
    refused = CliRunner().invoke(main, ["perf", "dashboard", "a.jsonl", "--repo-url", "javascript:alert(1)"])
    assert refused.exit_code == 2 and "leads to no web page" in refused.output
