"""The dashboard in a browser, from disk: it asks for nothing, sorts, filters, links and fits its window."""

import os
import shutil

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.perf.synthetic_history import ENV, H100, line, tags
from tritoncp.perf.dashboard.page import page as dashboard
from tritoncp.perf.records.history import History

expect.set_options(timeout=30_000)  # milliseconds; a busy machine needs more than 5 s
pytestmark = pytest.mark.browser
MASKS = ("causal", "document", "window")


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        # --no-sandbox: chromium has no sandbox as root; the page is trusted
        path = os.environ.get("CHROMIUM") or shutil.which("chromium")
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> str:
    """Write a page: forty runs, a case slower since a driver, one that fails, one with markup in its name."""
    envs = [
        ENV | {"commit": f"{i:04x}".ljust(40, "0"), "driver": "550" if i < 25 else "560"} for i in range(40)
    ]
    points = []
    for seed, mask in enumerate(MASKS):
        for which in ("forward", "backward"):
            times = 2.0 * np.random.default_rng(seed).lognormal(0, 0.01, 40)
            times[25:] *= 1.08 if mask == "window" else 1.0
            points += line(f"{mask}-{which}", times, envs=envs, tags=tags(mask, which), flex=2.6)
    points += line("slow", [1.0] * 30 + [1.4] * 10, envs=envs, series=H100, tags=tags(dtype="float16"))
    points += line("broken", [1.0] * 39 + [None], envs=envs, tags=tags())
    points += line("<b onclick=alert(1)>bold</b>", [1.0] * 12, tags=tags(model="<i>Llama</i>"))
    path = tmp_path_factory.mktemp("page") / "dashboard.html"
    path.write_text(dashboard(History(points, []), "https://github.com/owner/project"))
    return path.as_uri()


def open_page(browser: Browser, address: str, **options) -> Page:
    page = browser.new_context(**options).new_page()
    page.asked, page.errors = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    return page


@pytest.fixture
def page(browser, address):
    opened = open_page(browser, address, viewport={"width": 1280, "height": 900})
    yield opened
    assert opened.errors == []
    opened.context.close()


def cases(page: Page) -> list[str]:
    """Return the names of the cases in the table, in order."""
    return page.locator("#cases tbody tr:visible td:first-child").all_inner_texts()


def test_the_page_requests_nothing_but_itself(page, address):
    assert [url for url in page.asked if not url.startswith(("data:", "blob:"))] == [address]
    refused = page.evaluate(
        """() => new Promise((done) => {
            addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective));
            fetch("https://example.com").catch(() => 0);
        })"""
    )
    assert refused == "connect-src"
    page.errors.clear()  # the refusal


def test_the_table_sorts_and_filters(page):
    assert cases(page)[:2] == ["broken", "slow"] and len(cases(page)) == 9
    for name, places in (("Case", 0), ("Median, ms", 3)):
        for reverse in (False, True):
            page.locator("#cases").get_by_role("button", name=name).click()
            column = page.locator(f"#cases tbody td:nth-child({places + 1})").all_inner_texts()
            column = [float(text) for text in column if text != "–"] if places else column
            assert column == sorted(column, reverse=reverse)
    page.get_by_label("Mask").select_option("window")
    expect(page.locator("#count")).to_have_text("2 of 9 cases")
    assert set(cases(page)) == {"window-forward", "window-backward"}
    expect(page.locator("#case-title")).to_have_text(cases(page)[0])
    page.get_by_label("Mask").select_option(label="all")
    page.get_by_label("Status").select_option("slower")
    assert set(cases(page)) == {"slow", "window-forward", "window-backward"}
    page.get_by_label("Status").select_option(label="all")
    page.get_by_label("Name, model or shape").fill("llama")
    expect(page.locator("#count")).to_have_text("1 of 9 cases")
    assert cases(page) == ["<b onclick=alert(1)>bold</b>"]


def test_a_case_has_its_address_chart_and_commits(page, browser):
    expect(page.locator("#case-title")).to_have_text("broken")
    expect(page.locator("#case-text")).to_contain_text("wrong: <b>out of tolerance</b>")
    page.locator("#cases").get_by_role("link", name="window-forward").click()
    expect(page.locator("#case-title")).to_have_text("window-forward")
    text = page.locator("#case-text")
    expect(text).to_contain_text("driver 550 → 560")
    assert "/compare/0018" in text.get_by_role("link").first.get_attribute("href")
    drawn = page.evaluate("Array.from(Bokeh.documents[0].get_model_by_name('shown').data.ms)")
    assert len(drawn) == 40 and np.median(drawn[25:]) > 1.06 * np.median(drawn[:25])
    assert page.locator("#case canvas").count() > 0 and page.locator("#case b").count() == 0
    sent = open_page(browser, page.url)
    expect(sent.locator("#case-title")).to_have_text("window-forward")
    sent.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_its_window_and_shows_the_worst_first(scheme, width, browser, address):
    page = open_page(browser, address, viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    first = page.locator("tbody tr").first
    expect(first).to_contain_text("1 fails now")
    assert page.get_by_text("1 slower").first.bounding_box()["y"] < 500
    head = page.locator("#cases th", has_text="Status").first.bounding_box()
    assert head["x"] + head["width"] <= width, "the status is seen without a scroll to the right"
    labels = page.evaluate("Bokeh.documents[0].roots()[0].below[0].ticker.ticks.length")
    assert labels * 90 <= width, "dates and commits on the axis do not run into each other"
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    select = page.get_by_label("Mask").evaluate("(x) => getComputedStyle(x).backgroundColor")
    assert select == paper, "controls are in the colours of the page"
    assert page.errors == []
    page.context.close()
