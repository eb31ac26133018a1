"""The page opened in a browser, with its requests and errors recorded."""

from playwright.sync_api import Browser, Page


def opened(browser: Browser, address: str, **options) -> Page:
    page = browser.new_context(**options).new_page()
    page.asked, page.errors = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    return page


def names(page: Page) -> list[str]:
    return page.locator("#cases tbody a").all_inner_texts()
