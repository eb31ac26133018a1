"""The dashboard as a file: no regression is hidden, text of a history stays text, missing data are
reported."""

import json
import re

import pytest

from tests.perf.synthetic_history import ENV, H100, H200, line, perf, tags, write
from tritoncp.perf.dashboard import trends
from tritoncp.perf.dashboard.case_details import compare_address, since_text
from tritoncp.perf.dashboard.page import list_devices, list_events, order_by_runs, page
from tritoncp.perf.records.history import History, Point


def devices(points: list[Point]) -> list[str]:
    """Return the texts of the rows of a history's devices, in order."""
    runs, lines = order_by_runs(points)
    all_trends = sorted(map(trends.find_trend, lines), key=lambda trend: trend.urgency)
    rows = list_devices(all_trends, runs)
    texts = [" ".join(f"{count} {status}" for _, status, count in row.statuses) for row in rows]
    return [f"{row.name} {text} {row.measured} of {row.cases}" for row, text in zip(rows, texts)]


def test_a_partial_run_is_named_as_one_and_a_case_that_it_slowed_is_counted():
    """A run that measured 4 of 42 cases, one of them 1.6 times slower, after five full runs."""
    points = [p for i in range(42) for p in line(f"case-{i}", [1.0] * 5 + [1.6 if i == 7 else 1.0])]
    points = [p for p in points if p.run != "run5" or p.case in ("case-5", "case-6", "case-7", "case-8")]
    (row,) = devices(points)
    assert "4 of 42" in row and "1 measure again" in row
    html = page(History(points, []))
    assert '<span class="unsure">4 of 42</span>' in html
    assert html.count("<polyline points=") == 42 and '<polyline points="1,17 ' in html


def test_a_regression_is_seen_until_its_case_is_measured_again():
    """The run after the regression measured other cases."""
    slow, other = line("slow", [1.0] * 6 + [1.3] * 6), line("other", [1.0] * 14)
    (row,) = devices(slow + other)
    assert f"1 slower since {6:04x}000000" in row and "1 of 2" in row


def test_the_worst_device_comes_first_and_says_what_is_worst():
    fine = line("fine", [1.0] * 6, H100)
    bad = [*line("slow", [1.0] * 6 + [1.2] * 6), *line("fails", [1.0] * 6 + [None]), *line("new", [1.0])]
    first, second = devices(fine + bad)
    assert str(H200) in first and first.index("1 fails now") < first.index("1 slower") < first.index(
        "first run"
    )
    assert "1 as before" in second


def test_changes_are_newest_first_with_commits_and_what_else_changed():
    envs = [ENV | {"commit": f"{i:040x}", "driver": "550" if i < 30 else "560"} for i in range(60)]
    points = line("step", [1.0] * 30 + [1.1] * 30, envs=envs) + line(
        "last", [1.0] * 54 + [1.3] * 6, envs=envs
    )
    points += line("broke", [1.0] * 40 + [None] * 20, envs=envs)
    _, lines = order_by_runs(points[::-1])
    all_trends = [trends.find_trend(points_of_case) for points_of_case in lines]
    events = list_events(all_trends)
    assert [(e.trend.points[0].case, e.at) for e in events] == [("last", 54), ("broke", 40), ("step", 30)]
    repository = "https://github.com/owner/project"
    step = events[2]
    href = compare_address(step.trend.points, step.change.first, step.change.last, repository)
    last = step.change.last
    assert href == f"{repository}/compare/{29:040x}...{last:040x}"
    assert since_text(step.trend.points, step.change).startswith(f"{30:040x}"[:10])
    described = re.sub(r"<[^>]+>", "", page(History(points, [])))
    assert "+10.0 %, slower" in described and "driver 550 → 560" in described
    assert "Baselines in the same runs: flex +0.0 %" in described
    assert compare_address(step.trend.points, 30, 30, "") == ""


def test_nothing_of_a_history_can_become_markup():
    evil = "</script><img src=x onerror=alert(1)><!--cases--><!--"
    points = line(evil, [1.0, 2.0, None], tags=tags(mask=evil, model=evil), envs=[ENV | {"commit": evil}] * 3)
    points[-1].contenders[evil] = {"why": evil}
    html = page(History(points, []))
    start = html.index("<main>")
    body, scripts = html[start:].split("</main>")
    assert "<img" not in body and body.count('data-root-id="') == html.count('data-root-id="')
    assert len(re.findall("</script", scripts)) == 3 and "<img src=x" not in scripts
    assert not re.search(r"""(src|href)=["'](?!#|data:,)""", body)


def test_the_command_writes_the_page_and_names_broken_lines(tmp_path):
    write(write(tmp_path / "a.jsonl", c=[1.0, 1.1]), H100, d=[2.0])
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"kind": "ca\n')
    out = tmp_path / "page.html"
    result = perf("dashboard", tmp_path, "-o", out)
    assert result.exit_code == 0 and "3 points" in result.output and "a.jsonl:4: not JSON" in result.output
    assert out.read_text().startswith("<!doctype html>") and "1 lines could not be read" in out.read_text()


def test_accepted_changes_are_read_beside_the_history(tmp_path):
    write(tmp_path / "a.jsonl", slow=[1.0] * 10 + [1.2] * 10)
    out = tmp_path / "page.html"
    assert perf("dashboard", tmp_path, "-o", out).exit_code == 0
    assert f"1 slower since {10:04x}000000" in out.read_text()
    (tmp_path / "accepted.txt").write_text(f"slow {10:04x}000 sums in float32 now\n")
    assert perf("dashboard", tmp_path / "a.jsonl", "-o", out).exit_code == 0
    assert "1 accepted" in out.read_text() and "accepted: sums in float32 now" in out.read_text()
    (tmp_path / "accepted.txt").write_text("slow\n")
    assert perf("dashboard", tmp_path, "-o", out).exit_code == 2


@pytest.mark.long
def test_a_badge_counts_the_worst_cases_of_the_page(tmp_path):
    for times, message, colour in (
        ([1.0] * 20, "1 as before", "brightgreen"),
        ([1.0] * 19 + [1.3], "1 measure again", "orange"),
        ([1.0] * 10 + [1.3] * 10, f"1 slower since {10:04x}000000", "red"),
        ([1.0] * 19 + [None], "1 fails now", "red"),
    ):
        (tmp_path / "a.jsonl").unlink(missing_ok=True)
        write(tmp_path / "a.jsonl", c=times, fine=[2.0] * 20 if colour != "brightgreen" else [])
        words = ["dashboard", tmp_path, "-o", tmp_path / "page.html", "--badge", tmp_path / "badge.json"]
        assert perf(*words).exit_code == 0
        badge = json.loads((tmp_path / "badge.json").read_text())
        assert badge == {"schemaVersion": 1, "label": "performance", "message": message, "color": colour}


def test_a_comparison_has_its_page(tmp_path):
    sides = [
        write(tmp_path / f"{name}.jsonl", **{"slow": [factor, factor], "fine<b>": [1.0, 1.0]})
        for name, factor in (("before", 1.0), ("after", 1.3))
    ]
    result = perf("compare", *sides, "--fail-over", "5", "--html", tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    assert result.exit_code == 1 and "Does not pass" in html and "1 past 5 %" in html and "TOO SLOW" in html
    assert "Before, " in html and "2 runs of 0000000000" in html and "Suites" in html
    assert html.count("<circle") == 2 and "fetch(" not in html
    assert "fine<b>" not in html.split("<script>")[0]
