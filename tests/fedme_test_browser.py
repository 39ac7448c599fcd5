"""Pages in a real browser, with everything they write to the console."""

from pathlib import Path

import pytest

from fedme.report import chromium

AXE = Path(__file__).parents[1] / "node_modules" / "axe-core" / "axe.min.js"

needs_chromium = pytest.mark.skipif(bool(chromium.missing()), reason="needs Chromium and Playwright (apt-get install chromium)")


needs_axe = pytest.mark.skipif(
    not AXE.exists(), reason="needs axe-core (npm install --no-save axe-core, in the repository's folder)"
)


def new_page(browser, width=1280, height=900, **options):
    """A page, and the list that collects its errors and console messages."""
    page = browser.new_page(viewport={"width": width, "height": height}, **options)
    messages = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    return page, messages


def open_file(page, path):
    page.goto(path.resolve().as_uri())


def serious_defects(page):
    """What axe-core finds in an open page, apart from matters of taste: rules, with the first elements that break them."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run().then((result) => result.violations)")
    return [
        (one["id"], [node["html"][:120] for node in one["nodes"]][:3])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
