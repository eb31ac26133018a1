"""The page in a real browser, opened from disk: its content and its controls. Run by `make test-browser`."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.perf.browser_page import names, opened
from tests.perf.synthetic_history import CEILINGS, ENV, H100, WORK, line, noisy, tags
from tritoncp.perf.dashboard.page import page as dashboard
from tritoncp.perf.records.history import History

pytestmark = pytest.mark.browser
MASKS = ("causal", "document", "window")
KERNEL = {"kind": "resources", "kernel": "forward", "arch": "sm_90", "head_dim": 128, "dtype": "bfloat16",
          "config": [128, 64, 8, 3], "registers": 200, "spill_bytes": 16, "shared_bytes": 98304}  # fmt: skip


def example_history() -> History:
    """Make a history of two GPUs, three masks, two passes; one case is slower since a driver, one fails, one
    has markup in its name, one is a plan."""
    envs = [
        ENV | {"commit": f"{i:04x}".ljust(40, "0"), "driver": "550" if i < 25 else "560"} for i in range(40)
    ]
    points = []
    for mask in MASKS:
        for which in ("forward", "backward"):
            for series in (None, H100):
                more = {"series": series} if series else {}
                times = 2.0 * noisy(len(points), 40)
                if mask == "window" and series is None and which == "forward":
                    times[25:] *= 1.08
                points += line(f"{mask}-{which}", times, envs=envs, tags=tags(mask, which), work=WORK,
                               ceilings=CEILINGS, flex=2.6, **more)  # fmt: skip
    points += line("broken", [1.0] * 39 + [None], tags=tags(dtype="float16"))
    points += line("<b onclick=alert(1)>bold</b>", [1.0] * 12, tags=tags(model="<i>Llama</i>"))
    ranks = {"imbalance": 1.01, "wire_bytes": 3_000_000, "rank_work": [10, 12], "rank_bytes": [3_000_000, 10]}
    points += line("plan-w2", [1.0] * 3, tags=tags(which="plan"), work=ranks)
    return History(points, [KERNEL], [])


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("page") / "dashboard.html"
    path.write_text(dashboard(example_history()))
    return path.as_uri()


def test_it_opens_from_disk_and_asks_for_nothing_else(page, address):
    names_of_cases = names(page)
    page.get_by_role("link", name="window-forward").first.click()
    page.wait_for_timeout(200)
    assert [url for url in page.asked if not url.startswith(("data:", "blob:"))] == [address]
    refused = page.evaluate(
        """() => new Promise((done) => {
            addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective));
            fetch("https://example.com").catch(() => 0);
        })"""
    )
    assert refused == "connect-src" and len(names_of_cases) == 15
    page.errors.clear()  # the refusal


def test_failures_come_first_then_a_slow_latest_run_then_a_lost_level(page):
    assert names(page)[:4] == ["broken", "window-backward", "document-forward", "window-forward"]
    rows = page.locator("#cases tbody tr")
    expect(rows.nth(0)).to_contain_text("fails now")
    expect(rows.nth(1)).to_contain_text("+22.0 %+18.9 … +25.2 %")
    expect(rows.nth(3)).to_contain_text(re.compile(r"\+[78]\.\d %"))
    expect(page.get_by_role("row").filter(has_text="plan-w2")).to_contain_text("not measured")
    status = "15 of 15 cases, 1 failing, 2 slower in the latest run, 1 slower than at best"
    expect(page.get_by_role("status")).to_have_text(status)
    card = page.locator(".card").filter(has_text="NVIDIA H200").first
    expect(card).to_contain_text("Worse: 1 failing now, 2 slower than their noise allows")
    expect(card).to_contain_text("slower than at best1 of 9")
    page.get_by_role("link", name="window-backward").first.click()
    expect(page.locator("#case-latest")).to_contain_text(
        "The latest run is slower than those before: +22.0 % (99 %"
    )


def test_filters_narrow_the_list_say_so_and_are_in_the_address(page):
    page.get_by_label("Mask").select_option("window")
    expect(page.get_by_role("status")).to_contain_text("4 of 15 cases")
    page.get_by_label("GPU").select_option(str(H100))
    page.get_by_label("Pass").select_option("backward")
    assert names(page) == ["window-backward"] and "mask=window" in page.url
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert names(page) == ["window-backward"], "a view is a link"
    page.get_by_role("button", name="Clear").click()
    page.get_by_label("Dtype").select_option("float16")
    assert names(page) == ["broken"]
    page.get_by_label("Dtype").select_option("")
    page.get_by_label("Name").fill("llama")
    assert names(page) == ["<b onclick=alert(1)>bold</b>"]
    page.get_by_label("Name").fill("no such thing")
    assert names(page) == []
    expect(page.get_by_role("status")).to_contain_text("0 of 15 cases")


def test_a_change_is_explained(page):
    page.get_by_role("link", name="window-forward").first.click()
    expect(page.get_by_role("heading", level=2, name="window-forward")).to_be_focused()
    change = page.locator("#changes li").first
    for message in ("slower", "0018000000", "0019000000", "driver 550 → 560", "flex ÷ tritoncp −"):
        expect(change).to_contain_text(message)
    expect(page.locator("#roof-text")).to_contain_text("of the bound (790 TFLOP/s")
    expect(page.locator("#contenders")).to_contain_text("RuntimeError: no name for this mask")
    page.go_back()
    assert len(names(page)) == 15


def test_a_failure_is_shown_with_its_reason(page):
    page.locator("#cases").get_by_role("link", name="broken").click()
    expect(page.locator("#case-failure")).to_contain_text("Failing: wrong: <b>out of tolerance</b>")
    assert page.locator("#case b").count() == 0, "text of a history is never markup"
    page.locator("#back").click()
    page.locator("#cases").get_by_role("link", name="<b onclick=alert(1)>bold</b>").click()
    expect(page.locator("#case-title")).to_have_text("<b onclick=alert(1)>bold</b>")


def test_ranks_and_kernels_have_their_figures(page):
    page.get_by_text("sm_90: 1 kernels, 1 with spilled registers").click()
    table = page.locator("#resources table")
    for message in ("200", "98304", "spill bytes", "128 64 8 3"):
        expect(table).to_contain_text(message)
    page.locator("#cases").get_by_role("link", name="plan-w2").click()
    expect(page.locator("#ranks-text")).to_have_text(
        "Most work over mean: 1.010. A rank sends at most 3.00 MB."
    )
    page.locator("#ranks-table summary").click()
    expect(page.locator("#ranks-table tbody tr")).to_have_count(2)
    assert page.locator("#ranks-table tbody tr").all_inner_texts() == ["0\t10\t3.00 MB", "1\t12\t10 B"]


def test_everything_can_be_done_by_keyboard(page):
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the figures")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    for _ in range(8):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "broken":
            break
    expect(page.locator("#cards").get_by_role("link", name="broken")).to_be_focused()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
    assert outline == "3px", "focus is visible"
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="broken")).to_be_focused()
    page.get_by_role("button", name="Dark colours").focus()
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Dark colours", pressed=True)).to_be_focused()
    expect(page.locator("body")).not_to_have_css("background-color", before)


def test_every_chart_has_a_name_and_a_table(page):
    page.get_by_role("link", name="window-forward").first.click()
    charts = page.locator("#case .chart:visible")
    assert charts.count() == 3
    for i in range(charts.count()):
        expect(charts.nth(i)).to_have_role("img")
        assert charts.nth(i).evaluate(
            "(x) => (document.getElementById(x.getAttribute('aria-labelledby')) ?? {}).textContent"
        )
        assert charts.nth(i).locator("canvas").count() > 0
    for table, rows in (("#time-table", 40), ("#ratio-table", 40), ("#roof-table", 6)):
        page.locator(f"{table} summary").click()
        expect(page.locator(f"{table} tbody tr")).to_have_count(rows)
    first = page.locator("#time-table tbody tr").first.inner_text()
    assert "2026-02-09" in first and "driver 560" in first
    for control in page.locator("select, input, button").all():
        assert control.evaluate("(x) => Boolean(x.labels?.length || x.textContent.trim())")


CONTRAST = """() => {
    const style = getComputedStyle(document.documentElement);
    const light = (name) => {
        const hex = style.getPropertyValue(name).trim().slice(1);
        const parts = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
            .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    };
    const ratios = [];
    for (const ink of ["--ink", "--faint", "--link", "--worse", "--better"]) {
        for (const paper of ["--paper", "--panel"]) {
            const [a, b] = [light(ink), light(paper)].sort((x, y) => y - x);
            ratios.push((a + 0.05) / (b + 0.05));
        }
    }
    return ratios;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_it_fits_any_width_and_is_readable_in_both_schemes(scheme, width, browser, address, tmp_path):
    page = opened(browser, address, viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert min(page.evaluate(CONTRAST)) >= 4.5
    for where in ("", "#case=window-forward", "#case=plan-w2"):
        page.goto(address + where)
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        shot = page.screenshot(path=tmp_path / "page.png", full_page=True)
        assert len(shot) > 20_000, "something is drawn"
    assert page.errors == []


def test_planted_steps_are_marked_in_the_page_and_flat_series_are_not(browser, tmp_path):
    points = []
    for seed in range(100):
        points += line(f"step-{seed:02}", 3 * noisy(seed, step=0.03, at=10 + seed))
        points += line(f"flat-{seed:02}", 3 * noisy(1000 + seed))
    path = Path(tmp_path, "steps.html")
    path.write_text(dashboard(History(points, [], [])))
    page = opened(browser, path.as_uri())
    marked = page.evaluate("Object.fromEntries(lines.map((x) => [x.case, x.changes.map((c) => c.at)]))")
    hits = sum(any(abs(at - 10 - seed) <= 3 for at in marked[f"step-{seed:02}"]) for seed in range(100))
    assert hits >= 95
    assert sum(bool(marked[f"flat-{seed:02}"]) for seed in range(100)) <= 2
    page.get_by_role("button", name="Since best").click()
    slower = page.locator("#cases tbody td:nth-child(5) .worse")
    assert slower.count() == 50, "and the overview says so, the largest loss first"
    page.get_by_role("button", name="Next").last.click()
    assert slower.count() >= 45
    page.goto(path.as_uri() + "#case=step-50")
    page.wait_for_timeout(200)
    drawn = page.evaluate("charts['chart-time'].document.get_model_by_name('changes').data.x")
    assert any(abs(x - 59.5) <= 3 for x in drawn)


def test_the_page_decodes_the_measured_times(browser, tmp_path):
    times = [0.001, 1.0, None, 2.5, 900.0]
    path = Path(tmp_path, "few.html")
    path.write_text(dashboard(History(line("c", times, flex=3.0), [], [])))
    page = opened(browser, path.as_uri())
    decoded = page.evaluate(
        "({ ms: lines[0].ms, low: lines[0].low, high: lines[0].high, ratio: lines[0].ratio.flex })"
    )
    assert decoded["ms"][2] is decoded["ratio"][2] is None
    for i, ms in enumerate(times):
        if ms is not None:
            assert decoded["ms"][i] == pytest.approx(ms, rel=2e-4)
            assert decoded["low"][i] == pytest.approx(0.995 * ms, rel=4e-4)
            assert decoded["high"][i] == pytest.approx(1.004 * ms, rel=4e-4)
            assert decoded["ratio"][i] == pytest.approx(3.0 / ms, rel=2e-4)


def test_it_is_quick_with_two_hundred_cases_of_five_hundred_runs(browser, big_page, tmp_path):
    path = Path(tmp_path, "big.html")
    path.write_text(big_page.html)
    page = opened(browser, path.as_uri())
    assert page.evaluate("performance.now()") < 20_000  # about 2 s on an idle core
    took = page.evaluate(
        "() => { const begin = performance.now(); go({ mask: 'window' }); return performance.now() - begin; }"
    )
    assert took < 2_000 and "66 of 200 cases" in page.get_by_role("status").inner_text()
