"""Make the pictures of the documentation again: those of the examples, and the report on the home page.

python website/pictures.py
"""

import os
import re
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python title=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"\]\(pictures/gallery/(\S+)\)")


def examples() -> None:
    """Run the examples and keep the pictures that their page shows."""
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    for name, text in BLOCK.findall(page):
        Path(name).write_text(text, encoding="utf-8")
        runpy.run_path(name)
    target = DOCS / "pictures" / "gallery"
    target.mkdir(exist_ok=True)
    for picture in PICTURE.findall(page):
        shutil.copy(picture, target / picture)


def report() -> None:
    """Photograph the beginning of a report of the demo: tiles, all runs, and the gains."""
    from fedme import cli
    from fedme.report import chromium

    folders = []
    for preset in ("digits-fedme", "digits-local", "digits-fedavg"):
        folders.append(f"runs/{preset}")
        _command(cli.main, "run", preset, f"output={folders[-1]}", "--quiet")
    _command(cli.main, "report", *folders, "--output", "report.html")
    with chromium.launch() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 1500}, color_scheme="light")
        page.goto(Path("report.html").resolve().as_uri())
        page.locator("#summary details[open] > summary").click()  # the table in sentences
        end = page.locator("#gain").bounding_box()
        clip = {"x": 0, "y": 0, "width": 1200, "height": end["y"] + end["height"] + 8}
        page.screenshot(path=DOCS / "pictures" / "report.png", full_page=True, clip=clip)


def _command(main: Callable[[], None], *words: str) -> None:
    sys.argv = ["fedme", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    sys.path.insert(0, folder)
    examples()
    report()
    shutil.rmtree(folder, ignore_errors=True)
