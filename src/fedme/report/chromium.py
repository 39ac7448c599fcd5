"""Headless Chromium, driven by Playwright. It uses the system's Chromium and never downloads a browser."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedme.core.atomic_files import RunError

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find() -> str | None:
    """The path of the installed Chromium, or None."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


def missing() -> str:
    """What to install before Chromium can be driven; empty if everything is installed."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "saving charts as files needs Playwright: pip install 'fedme[pictures]'"
    return "" if find() else "saving charts as files needs Chromium: install it (Debian, Ubuntu: apt-get install chromium)"


@contextmanager
def launch() -> Iterator["Browser"]:
    """Start Chromium without a window; it ends with the `with` block."""
    if problem := missing():
        raise RunError(problem)
    from playwright.sync_api import Error, sync_playwright

    try:
        # Playwright's default is --no-sandbox: containers often cannot nest one, and only local files are opened.
        with (
            sync_playwright() as playwright,
            playwright.chromium.launch(executable_path=find(), args=["--disable-gpu"]) as browser,
        ):
            yield browser
    except Error as error:
        raise RunError(f"Chromium failed: {error.message.splitlines()[0]}") from error
