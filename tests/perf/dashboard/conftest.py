"""A browser for the tests of the page, and a page of a long history."""

import os
import shutil
import time
from typing import NamedTuple

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.perf.browser_page import opened
from tests.perf.synthetic_history import line, noisy, tags
from tritoncp.perf.dashboard.page import page as dashboard
from tritoncp.perf.records.history import History

expect.set_options(timeout=30_000)  # milliseconds; a busy machine needs more than 5 s


@pytest.fixture(scope="package")
def browser():
    with sync_playwright() as playwright:
        # --no-sandbox: chromium has no sandbox as root; the page is trusted
        path = os.environ.get("CHROMIUM") or shutil.which("chromium")
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, address):
    """Open the page at a module's ``address``, and check afterwards that it logged no error."""
    opened_page = opened(browser, address, viewport={"width": 1280, "height": 900})
    yield opened_page
    assert opened_page.errors == []
    opened_page.context.close()


class BigPage(NamedTuple):
    """A page, and the processor time that it took to make it."""

    html: str
    seconds: float


@pytest.fixture(scope="package")
def big_page() -> BigPage:
    """Make the page of two hundred cases of five hundred runs against three baselines."""
    points = []
    for seed in range(200):
        mask = ("causal", "document", "window")[seed % 3]
        case_line = line(f"case-{seed}", 2.0 * noisy(seed, 500), tags=tags(mask))
        for point, flex, flash in zip(
            case_line, 2.6 * noisy(seed + 1000, 500), 2.2 * noisy(seed + 2000, 500), strict=True
        ):
            point.contenders["flex max-autotune"] = {"ms": float(flex)}
            point.contenders["flash"] = {"ms": float(flash)}
        points += case_line
    begin = time.process_time()
    html = dashboard(History(points, [], []))
    return BigPage(html, time.process_time() - begin)
