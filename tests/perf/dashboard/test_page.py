"""The page as a file: its size, its data, and text of a history escaped."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

from tests.perf.synthetic_history import ENV, H100, line, tags
from tritoncp.cli import main
from tritoncp.perf.dashboard import changepoints
from tritoncp.perf.dashboard.columns import WIDE_NONE, WIDE_STEP
from tritoncp.perf.dashboard.page import collect_data, page
from tritoncp.perf.records.history import History, append, read


def history(points, resources=()) -> History:
    return History(points, list(resources), [])


def test_two_hundred_cases_of_five_hundred_runs_are_below_three_megabytes(big_page):
    assert len(big_page.html.encode()) < 3_000_000
    assert big_page.seconds < 60


def test_columns_hold_the_times_to_seven_digits():
    times = [1.0, 1.5, None, 40.0]
    summary, columns = collect_data(history(line("c", times)))
    planes = np.frombuffer(columns, "u1")[8 * len(times) : 12 * len(times)].reshape(4, len(times))
    numbers = np.ascontiguousarray(planes.T).view("<i4")[:, 0]
    assert numbers[2] == WIDE_NONE and summary["lines"][0]["fails"] == {2: "wrong: <b>out of tolerance</b>"}
    unit = summary["lines"][0]["unit"]
    for ms, number in zip(times, numbers):
        if ms is not None:
            assert unit * np.exp(number * WIDE_STEP) == pytest.approx(ms, rel=WIDE_STEP)


def test_a_change_names_its_commits_its_causes_and_the_change_of_baselines():
    envs = [ENV | {"commit": f"{i:040x}", "driver": "550" if i < 30 else "560"} for i in range(60)]
    summary, _ = collect_data(history(line("c", [1.0] * 30 + [1.1] * 30, envs=envs)))
    (change,) = summary["lines"][0]["changes"]
    assert (change["from"], change["at"]) == (29, 30)
    exact = {
        cause["name"]: (cause["before"], cause["after"]) for cause in change["causes"] if not cause["away"]
    }
    assert exact == {"commit": (envs[29]["commit"], envs[30]["commit"]), "driver": ("550", "560")}
    assert change["relative"] == {"flex": pytest.approx(1 / 1.1, rel=1e-3)}


def worst_first(points) -> list[dict]:
    """Return the lines in the order of the page."""
    summary, _ = collect_data(history(points))
    return sorted(summary["lines"], key=lambda line: line["rank"])


def test_a_regression_of_the_newest_run_comes_before_old_losses():
    """Of sixty cases with 1 % noise twenty have long been slower; two more have long failed."""
    points = []
    for seed in range(60):
        random = np.random.default_rng(seed)
        times = 2.0 * random.lognormal(0, 0.01, 30)
        times[15:] *= 1.2 if seed < 20 else 1.0
        times[-1] *= 1.15 if seed == 40 else 1.0
        points += line(f"case-{seed}", times)
    points += line("broken", [1.0] * 20 + [None] * 10) + line("never-worked", [None] * 30)
    first, *remaining = worst_first(points)
    assert (first["case"], first["latest"]["verdict"], first["rank"]) == ("case-40", "slower", 0)
    assert first["latest"]["low"] > 1.08 and first["latest"]["low"] < 1.15 < first["latest"]["high"]
    assert sum(line_of_case["latest"]["verdict"] == "slower" for line_of_case in remaining) <= 3
    remaining = [line_of_case for line_of_case in remaining if line_of_case["latest"]["verdict"] != "slower"]
    assert sorted(line_of_case["case"] for line_of_case in remaining[:2]) == ["broken", "never-worked"]
    lost = [line_of_case for line_of_case in remaining[2:] if line_of_case["loss"] > 1.1]
    assert lost == remaining[2 : 2 + len(lost)] and len(lost) >= 17, "some may have a slow latest run besides"
    assert {line_of_case["case"] for line_of_case in lost} <= {f"case-{seed}" for seed in range(20)}


def test_failures_of_the_newest_run_come_first():
    points = line("slow", [1.0] * 20 + [1.15]) + line("fails", [1.0] * 20 + [None]) + line("fine", [1.0] * 21)
    verdicts = [(row["case"], row["latest"]["verdict"]) for row in worst_first(points)]
    assert verdicts == [("fails", "failing"), ("slow", "slower"), ("fine", "as before")]


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ([1.15], "too few runs"),
        ([1.0] * 3 + [1.15], "too few runs"),
        ([None] * 9 + [1.0] * 3 + [1.15], "too few runs"),
        ([1.0] * 4 + [1.15], "slower"),
        ([1.0] * 4 + [None] * 3 + [1.15], "slower"),
        ([1.0] * 4 + [1.005], "as before"),
        ([1.0, 1.01, 0.99, 1.0, 1.01, 0.99, 1.0, 1.04], "slower"),
        ([1.0, 1.01, 0.99, 1.0, 1.01, 0.99, 1.0, 0.96], "faster"),
        ([1.0, 1.2, 0.9, 1.1, 0.8, 1.0, 1.2, 1.15], "as before"),
        ([1.0, 1.01, 0.99, 1.3, 1.0, 1.01, 0.99, 1.15], "slower"),
        ([1.0] * 9 + [1.15, 1.15], "slower"),
        ([1.0] * 10 + [1.15] * 10, "as before"),
        ([1.15] * 10 + [1.0] * 10 + [1.15], "slower"),
    ],
)  # fmt: skip
def test_the_newest_run_is_compared_with_the_level_before_it(times, verdict):
    summary, _ = collect_data(history(line("c", times)))
    (series,) = summary["lines"]
    assert series["latest"]["verdict"] == verdict, series["latest"]
    assert (series["latest"]["ratio"] is None) == (verdict == "too few runs")


def test_a_wrong_answer_whose_error_is_not_a_number_leaves_the_page_readable(tmp_path):
    (point,) = line("c", [None])
    point.contenders["tritoncp"]["errors"] = {"out": [float("nan"), float("inf")]}
    append(tmp_path / "a.jsonl", point.as_line())
    stored = read(tmp_path)
    assert [stored_point.case for stored_point in stored.points] == ["c"] and stored.problems == []
    summary, _ = collect_data(stored)
    json.dumps(summary, allow_nan=False)


def test_failures_are_no_times_and_do_not_move_a_change():
    times = [1.0] * 20 + [None] * 3 + [1.0] * 10 + [1.2] * 20
    summary, _ = collect_data(history(line("c", times)))
    assert [change["at"] for change in summary["lines"][0]["changes"]] == [33]
    assert set(summary["lines"][0]["fails"]) == {20, 21, 22}


def test_a_run_that_measured_a_case_twice_counts_its_last_figure():
    twice = line("c", [1.0, 1.0])
    twice[1] = type(twice[0])(**vars(twice[1]) | {"run": "run0"})
    summary, _ = collect_data(history(twice))
    assert summary["lines"][0]["n"] == 1 and len(summary["runs"]) == 1


def test_nothing_of_a_history_can_become_markup():
    evil = "</script><img src=x onerror=alert(1)><!--"
    html = page(history(line(evil, [1.0], tags=tags(mask=evil)), [{"kind": "resources", "kernel": evil}]))
    assert "<img" not in html and html.count("<script") == html.count("</script>") == 5
    assert not re.search(r"""(src|href)=["'](?!#|data:,)""", html.split("<script>")[0])


def test_the_command_writes_the_page_and_names_broken_lines(tmp_path):
    for point in [*line("c", [1.0, 1.1]), *line("d", [2.0], H100)]:
        append(tmp_path / "a.jsonl", point.as_line())
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"kind": "ca\n')
    out = tmp_path / "sub" / "page.html"
    result = CliRunner().invoke(main, ["perf", "dashboard", str(tmp_path), "-o", str(out)])
    assert result.exit_code == 0 and "3 points" in result.output and "a.jsonl:4: not JSON" in result.output
    assert out.read_text().startswith("<!doctype html>")
    (tmp_path / "empty").mkdir()
    nothing = CliRunner().invoke(main, ["perf", "dashboard", str(tmp_path / "empty"), "-o", str(out)])
    assert nothing.exit_code == 3 and "no measurement in" in nothing.output


def test_charts_and_page_agree_on_names():
    """Every source and element that the page's code asks for is there."""
    from tritoncp.perf.dashboard.page import HERE, SCRIPTS

    html_of_page = page(history(line("c", [1.0])))
    assert {path.stem for path in HERE.glob("*.js")} == set(SCRIPTS)
    script = "".join((HERE / f"{name}.js").read_text() for name in SCRIPTS)
    charts = html_of_page.split('id="data-charts">')[1].split("</script>")[0]
    names = set(re.findall(r'"name":\s*"([^"]+)"', json.dumps(json.loads(charts.replace("<\\/", "</")))))
    for source in re.findall(r'put\("[\w-]+", "([\w-]+)"', script):
        assert source in names, source
    html = (HERE / "page.html").read_text()
    for element in re.findall(r'\$\("([\w-]+)"\)', script):
        assert f'id="{element}"' in html, element


def test_without_ruptures_the_page_is_made_and_says_what_is_missing(monkeypatch, tmp_path):
    """As on Python 3.14, for which ruptures has no release."""
    monkeypatch.setattr(changepoints, "ruptures", None)
    for point in line("c", [1.0] * 30 + [1.1] * 30):
        append(tmp_path / "history.jsonl", point.as_line())
    files = [str(tmp_path / "history.jsonl"), "--out", str(tmp_path / "page.html")]
    done = CliRunner().invoke(main, ["perf", "dashboard", *files])
    assert done.exit_code == 0 and "Python 3.14" in done.stderr
    summary, _ = collect_data(read(tmp_path / "history.jsonl"))
    assert summary["missing"] == changepoints.MISSING and summary["lines"][0]["changes"] == []
