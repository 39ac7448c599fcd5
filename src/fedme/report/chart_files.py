"""Save every chart of a report as SVG, PNG and PDF, and its numbers as CSV, by the report's own page in Chromium."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fedme.report import chromium

WIDTH = 760  # of a chart in CSS pixels: about 18 cm on paper, with text of 9 points
SCALE = 3  # PNG pixels per CSS pixel: about 290 per printed inch


def save_charts(report: Path, folder: Path) -> list[Path]:
    """Save all charts that a report shows when it is opened, and return the files."""
    # Playwright's synchronous API refuses to run beside an asyncio loop, as in a notebook; a new thread has none.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_save_charts, report, folder).result()


def _save_charts(report: Path, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with chromium.launch() as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, device_scale_factor=SCALE)
        page.goto(report.resolve().as_uri())
        charts = page.evaluate("pictures()")
        page.goto("about:blank")
        for chart in charts:
            width, height = round(chart["width"]), round(chart["height"])
            page.set_viewport_size({"width": width, "height": height})
            page.set_content(f"<!doctype html><style>body{{margin:0}}svg{{display:block}}</style>{chart['svg']}")
            contents = {
                "svg": chart["svg"].encode(),
                "csv": chart["csv"].encode(),
                "png": page.screenshot(),
                "pdf": page.pdf(width=f"{width}px", height=f"{height}px", print_background=True, page_ranges="1"),
            }
            for suffix, content in contents.items():
                files.append(folder / f"{chart['name']}.{suffix}")
                files[-1].write_bytes(content)
    return files
