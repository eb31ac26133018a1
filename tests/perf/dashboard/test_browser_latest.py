"""The latest run, the comparison of two sides and the list of changes, in a real browser."""

import re
from urllib.parse import quote

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.perf.browser_page import names, opened
from tests.perf.synthetic_history import CEILINGS, ENV, H100, H200, WORK, line, tags
from tritoncp.perf.dashboard import compare as comparing
from tritoncp.perf.dashboard.page import page as dashboard
from tritoncp.perf.records.history import History, Point

pytestmark = pytest.mark.browser
RUNS = 30
COMMITS = [f"{i:02x}" + "0" * 36 + f"{i:02x}" for i in range(RUNS)]
SLOW, FAILS, MISSING, FASTER = "case-41", "case-07", "case-33", "case-12"


def planted_history() -> History:
    """Make thirty runs of sixty cases on one GPU and of one on another: in the newest run of the first a case
    is slower, one is faster, one fails and one is missing; six were slower from the twentieth run on, with a
    driver. One figure is above the bound."""
    envs = [ENV | {"commit": COMMITS[i], "driver": "550" if i < 20 else "560"} for i in range(RUNS)]
    points: list[Point] = []
    for seed in range(60):
        case, random = f"case-{seed:02}", np.random.default_rng(seed)
        times = 10.0 * random.lognormal(0, 0.01, RUNS)
        times[20:] *= 1.08 if seed < 6 else 1.0
        times[-1] *= {SLOW: 1.25, FASTER: 0.8}.get(case, 1.0)
        times = [round(float(ms), 5) for ms in times]
        if case == FAILS:
            times[-1] = None
        work = WORK | {"flops": WORK["flops"] * (4 if seed == 50 else 1)}
        rows = line(case, times, envs=envs, flex=13.0, tags=tags(), work=work, ceilings=CEILINGS)
        for point in rows if seed % 2 else []:  # single runs then have an interval by order statistics
            if (ms := point.ms) is not None:
                point.contenders["tritoncp"]["samples"] = sorted(ms * random.lognormal(0, 0.01, 11))
        points += rows[:-1] if case == MISSING else rows
    points += line("case-00", [10.0 + i % 3 / 100 for i in range(12)], H100, envs=envs[:12], flex=13.0)
    return History(points, [], [])


@pytest.fixture(scope="module")
def history() -> History:
    return planted_history()


@pytest.fixture(scope="module")
def address(tmp_path_factory, history) -> str:
    path = tmp_path_factory.mktemp("latest") / "dashboard.html"
    path.write_text(dashboard(history, "https://github.com/owner/project"))
    return path.as_uri()


SIZES = [(400, "dark"), (1280, "light")]
MORE_SIZES = [(width, scheme) for width in (400, 1280, 1920) for scheme in ("light", "dark")]


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        *SIZES,
        *(pytest.param(*size, marks=pytest.mark.long) for size in MORE_SIZES if size not in SIZES),
    ],
)
def test_a_regression_of_the_newest_run_is_the_first_thing_on_the_page(width, scheme, browser, address):
    page = opened(browser, address, viewport={"width": width, "height": 700}, color_scheme=scheme)
    first = page.locator("#cards article").first
    expect(first.locator(".verdict")).to_have_text(
        re.compile("Worse: 1 failing now, [1-3] slower than their noise allows, 1 missing")
    )
    box = first.locator(".verdict").bounding_box()
    assert box["y"] < 250, "without scrolling"
    failing, slow = first.locator(".worst tbody tr").all()[:2]
    expect(failing).to_contain_text(FAILS + "fails now")
    expect(slow).to_contain_text(SLOW)
    assert slow.bounding_box()["y"] < 700
    expect(first).to_contain_text("Alarm: 1 case above the bound: 222 % of the bound in case-50")
    others = page.locator("#cards article").nth(1)
    expect(others).to_contain_text("NVIDIA H100")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.errors == []
    page.context.close()


def figures_of_command(history: History, before: str, after: str) -> dict[tuple[str, str], list[str]]:
    """Return the figures of `tritoncp perf compare`, by case and series, written as the page writes them."""

    def side(words: str) -> list[Point]:
        chosen = words.split(",")
        return [p for p in history.points if p.run in chosen or p.env["commit"].startswith(words)]

    comparison = comparing.compare(side(before), side(after))
    rows = zip(comparison.rows, comparing.lines(comparison, None), strict=True)
    return {
        (row.case, row.series): [cell.replace("+-", "-").replace("-", "−") for cell in cells]
        for row, (_, *cells) in rows
    }


def test_two_sides_have_the_figures_of_perf_compare(page, address, history):
    for before, after in (
        ("run28", "run29"),
        (COMMITS[3], COMMITS[25]),
        ("run24,run25,run26,run27,run28", "run29"),
        ("run3", "run4"),
    ):
        page.goto(f"{address}#view=compare&before={quote(before)}&after={quote(after)}")
        expect(page.locator("#compare-table caption")).to_contain_text(f"{after} against {before}")
        expected, rows = figures_of_command(history, before, after), read_comparison(page)
        assert len(rows) == len(expected)
        for case, series, ms_before, ms_after, change, interval, _, verdict in rows:
            cells = [ms_before, ms_after, change.replace("–", ""), interval, verdict]
            assert expected[case.split("\n")[0], series] == cells
        losses = [float(row[4].replace("−", "-").split()[0]) for row in rows if row[4] != "–"]
        assert losses == sorted(losses, reverse=True), "the largest loss first"


def read_comparison(page: Page) -> list[list[str]]:
    """Read the cells of all rows of the comparison, page by page."""
    script = (
        "[...document.querySelectorAll('#compare-table tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    rows = page.evaluate(script)
    while page.locator("#compare .next:enabled").count():
        page.locator("#compare .next").click()
        rows += page.evaluate(script)
    return rows


def test_a_comparison_without_a_common_series_and_its_interpolated_quantiles(page):
    from scipy.special import stdtrit

    expected = {freedom: float(stdtrit(freedom, 0.975)) for freedom in (1, 1.3, 2, 4.7, 10, 33.3, 1e6)}
    for freedom, quantile in expected.items():
        assert page.evaluate(f"student({freedom})") == pytest.approx(quantile, rel=1e-6)
    row = page.evaluate("compareSides(pointsOf('H200'), pointsOf('H100')).rows[0]")
    assert row["case"] == "case-00" and row["series"] == ""
    assert row["ratio"] == pytest.approx(10.01 / 10.25, rel=0.01) and row["low"] < row["ratio"] < row["high"]


def test_a_comparison_is_chosen_by_hand_and_its_address_can_be_sent(page, browser):
    page.get_by_role("link", name="Compare", exact=True).click()
    expect(page.get_by_role("heading", name="Compare two runs or commits")).to_be_focused()
    expect(page.locator("#compare-summary")).to_contain_text("not measured again: case-33")
    page.locator("#before").select_option(COMMITS[10])
    page.locator("#after").select_option("run25")
    page.get_by_role("button", name="Swap").click()
    summary = page.locator("#compare-summary").inner_text()
    sent = opened(browser, page.url)
    assert f"after={COMMITS[10]}" in page.url and "before=run25" in page.url
    expect(sent.locator("#compare-summary")).to_have_text(summary)
    sent.goto("about:blank")
    sent.goto(page.url.replace("before=run25", "before=no-such-run"))
    expect(sent.locator("#compare-summary")).to_contain_text("“no-such-run” names no run, version, commit")
    sent.context.close()
    page.go_back()
    page.get_by_role("link", name="The last 5 before").first.click()
    expect(page.locator("#before")).to_have_value("run24,run25,run26,run27,run28")


def test_all_changes_are_listed_newest_first_with_commits_and_candidates(page):
    rows = page.locator("#changes-list tbody tr")
    dates = page.locator("#changes-list td.date").all_inner_texts()
    assert dates == sorted(dates, reverse=True) and len(dates) >= 9
    expect(rows.first).to_contain_text(FAILS)
    steps = rows.filter(has_text="driver 550 → 560")
    assert 5 <= steps.count() <= 7
    expect(steps.first).to_contain_text(re.compile(r"\+[78]\.\d %"))
    target = steps.first.locator("a", has_text="…").get_attribute("href")
    assert re.fullmatch(r"https://github.com/owner/project/compare/[0-9a-f]{40}\.\.\.[0-9a-f]{40}", target)
    page.get_by_label("Status").select_option("slower")
    expect(rows.first).to_contain_text(SLOW + "NVIDIA H200")
    expect(rows.first).to_contain_text("one run so far")


def test_tables_sort_by_any_column_in_pages_of_fifty(page):
    assert len(names(page)) == 50
    page.get_by_role("navigation", name="Pages of 61 cases").get_by_role("button", name="Next").click()
    assert len(names(page)) == 11
    page.locator("#cases").get_by_role("button", name="Case").click()
    assert names(page)[0] == "case-59", "descending first"
    expect(page.locator("#cases th").first).to_have_attribute("aria-sort", "descending")
    page.locator("#cases").get_by_role("button", name="Case").click()
    assert names(page)[:3] == ["case-00", "case-00", "case-01"]
    for status, case in (("failing", FAILS), ("slower", SLOW), ("missing", MISSING), ("faster", FASTER)):
        page.get_by_label("Status").select_option(status)
        assert case in names(page) and len(names(page)) <= 4, status
    page.get_by_label("Status").select_option("over its bound")
    assert names(page) == ["case-50"] and "verdict=over+its+bound" in page.url
    page.locator("#cases").get_by_role("link", name="case-50").click()
    expect(page.locator("#case-failure")).to_contain_text(
        "tritoncp: 222 % of the bound: the figure or the count is wrong"
    )


def test_charts_over_runs_show_quartile_and_regressions_on_axes_that_fit(page, history):
    source = page.evaluate(
        "Object.fromEntries(Object.entries(charts['chart-overview'].document"
        ".get_model_by_name('overview-1').data).map(([key, xs]) => [key, Array.from(xs)]))"
    )
    assert len(source["x"]) == RUNS
    speedups = [p.speedups()["flex"] for p in history.points if p.run == "run20" and p.series == H200]
    assert source["y"][20] == pytest.approx(np.exp(np.mean(np.log(speedups))), rel=1e-3)
    assert source["worst"][20] == pytest.approx(np.quantile(speedups, 0.25), rel=1e-3)
    counts = page.evaluate(
        "Array.from(charts['chart-regressions'].document.get_model_by_name('regressions-1').data.y)"
    )
    assert len(counts) == RUNS and counts[20] >= 6 > max(counts[:20]) and counts[-1] >= 2
    low = page.evaluate("charts['chart-overview'].y_range.start")
    assert low > 1.05, "the axis fits the data, which does not reach 1"
    labels = page.evaluate("[...charts['chart-overview'].below[0].major_label_overrides.values()]")
    assert labels[-1] == f"2026-01-{RUNS}\n{COMMITS[-1][:9]}"
    page.get_by_text("The same as a table").first.click()
    row = page.locator("#overview-table tbody tr").filter(has_text=str(H200)).first
    expect(row).to_contain_text("2026-01-30")
