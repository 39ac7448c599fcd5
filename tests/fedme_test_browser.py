"""Pages in a real browser, with everything they write to the console."""

import pytest

from fedme.report import chromium

needs_chromium = pytest.mark.skipif(bool(chromium.missing()), reason="needs Chromium and Playwright (apt-get install chromium)")


def new_page(browser, width=1280, height=900, **options):
    """A page, and the list that collects its errors and console messages."""
    page = browser.new_page(viewport={"width": width, "height": height}, **options)
    messages = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    return page, messages


def open_file(page, path):
    page.goto(path.resolve().as_uri())
