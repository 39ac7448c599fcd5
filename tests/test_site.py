"""The documentation site: built strictly, without a broken link, without a network; and the notebook runs top to bottom."""

import html.parser
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from fedme.config.experiment import presets
from fedme.methods import METHODS
from fedme.report.chromium import Browser, find

ROOT = Path(__file__).parent.parent


class Page(html.parser.HTMLParser):
    """The links, the anchors and what a page fetches."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors, self.fetched = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if found.get("src") or (tag == "link" and found.get("rel") != "canonical" and found.get("href")):
            self.fetched.append(found.get("src") or found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def test_no_link_is_broken(site, pages):
    assert len(pages) > 20
    checked = 0
    for path, page in pages.items():
        for link in page.links + page.fetched:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path.relative_to(site)}: {link}"
            if parts.fragment and target.suffix == ".html":
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.relative_to(site)}: {link}"
            checked += 1
    assert checked > 500


def test_nothing_is_fetched_from_elsewhere(pages):
    assert [each for page in pages.values() for each in page.fetched if urlsplit(each).netloc] == []


def test_every_method_has_equations_deviations_and_settings(site):
    for name in METHODS:
        text = (site / "methods" / f"{name}.html").read_text()
        assert "<math" in text, name
        assert "arithmatex" not in text, name
        assert 'id="deviations-from-the-papers"' in text, name
        assert 'id="settings"' in text, name


def test_the_reference_has_every_setting_command_and_name(site):
    settings = (site / "reference" / "settings.html").read_text()
    assert all(f"method.name = &quot;{name}&quot;" in settings or f'method.name = "{name}"' in settings for name in METHODS)
    assert all(name in settings for name in presets())
    assert "evaluate_every" in settings
    commands = (site / "reference" / "commands.html").read_text()
    assert all(f"fedme {name}" in commands for name in ("run", "resume", "report", "watch", "data show"))
    assert "fedme.artifacts.saved_models.load_model" in (site / "reference" / "python.html").read_text()


@pytest.mark.skipif(find() is None, reason="needs Chromium (apt-get install chromium)")
def test_a_page_opens_without_complaints(site):
    with Browser(1280) as browser:
        browser.open(site / "methods" / "fedme.html")
        assert [each for each in browser.said if "file://" not in each] == []
        assert browser.run("document.querySelectorAll('math').length") > 5


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    """In a kernel of its own; what it prints is what is printed in it."""
    program = (
        "import nbformat, sys; from nbclient import NotebookClient; book = nbformat.read(sys.argv[1], 4); "
        "NotebookClient(book, timeout=600, resources={'metadata': {'path': '.'}}).execute(); "
        "nbformat.write(book, 'done.ipynb')"
    )
    subprocess.run([sys.executable, "-c", program, str(ROOT / "docs" / "tour.ipynb")], cwd=tmp_path, check=True)

    def shape(path):
        """What was printed, with numbers left out: their last digits are this machine's."""
        cells = json.loads(path.read_text())["cells"]
        outputs = [o for cell in cells for o in cell.get("outputs", []) if o.get("name") != "stderr"]
        texts = ["".join(o.get("text", "")) for o in outputs]
        return [re.sub(r"[\d.]+", "#", text).splitlines()[:1] for text in texts]

    assert shape(tmp_path / "done.ipynb") == shape(ROOT / "docs" / "tour.ipynb")
    drawn = [o for cell in json.loads((tmp_path / "done.ipynb").read_text())["cells"] for o in cell.get("outputs", [])]
    assert any("image/png" in o.get("data", {}) for o in drawn)
    assert any("local-only" in "".join(o.get("data", {}).get("text/plain", "")) for o in drawn)
    assert (tmp_path / "report.html").exists()
