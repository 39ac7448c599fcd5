"""The documentation site: built strictly, without a broken link, without a network; and the notebook runs top to bottom."""

import html.parser
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import fedme
import fedme_test_user_method
from fedme.config.experiment import presets
from fedme.methods import METHODS
from fedme.report import chromium
from fedme_test_browser import needs_axe, needs_chromium, new_page, open_file, serious_defects

ROOT = Path(__file__).parent.parent


class Page(html.parser.HTMLParser):
    """The links, the anchors and what a page fetches."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors, self.fetched = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values[key] for key in ("id", "name") if values.get(key)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if values.get("src") or (tag == "link" and values.get("rel") != "canonical" and values.get("href")):
            self.fetched.append(values.get("src") or values["href"])


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
    assert [link for page in pages.values() for link in page.fetched if urlsplit(link).netloc] == []


def test_every_method_has_equations_deviations_and_settings(site):
    for name in METHODS:
        text = (site / "methods" / f"{name}.html").read_text()
        assert "<math" in text, name
        assert "arithmatex" not in text, name
        assert 'id="deviations-from-the-paper"' in text, name
        assert 'id="settings"' in text, name


def test_the_chooser_names_every_method_once_per_question_and_says_what_the_methods_say(site):
    text = (site / "methods" / "index.html").read_text().split("Which one fits?", 1)[1]
    questions = text.split("<h3")[1:]
    assert len(questions) == 6
    for question in questions:
        assert sorted(re.findall(r'<a href="([\w-]+)\.html">', question)) == sorted(METHODS)
    rows = [row for question in questions for row in re.findall(r"<tr>(.*?)</tr>", question, re.DOTALL)]

    def methods_of(words):
        return {name for row in rows if words in row for name in re.findall(r'href="([\w-]+)\.html"', row)}

    assert methods_of("needs labelled public samples") == {"fedmd"}
    assert methods_of("needs unlabeled samples at the server") == {"feddf"}
    assert methods_of("is refused") == {"fd", "fedproto", "heterofl"}
    assert methods_of("may differ in architecture") == {name for name, kind in METHODS.items() if kind.own_architectures}
    assert methods_of("classification only") == {"fd", "fedproto", "feddf", "heterofl"}


def test_the_reference_has_every_setting_command_and_name(site):
    settings = (site / "reference" / "settings.html").read_text()
    assert all(f"method.name = &quot;{name}&quot;" in settings or f'method.name = "{name}"' in settings for name in METHODS)
    assert all(name in settings for name in presets())
    assert "evaluate_every" in settings
    commands = (site / "reference" / "commands.html").read_text()
    assert all(f"fedme {name}" in commands for name in ("run", "resume", "report", "watch", "data show"))
    python = (site / "reference" / "python.html").read_text()
    methods = (site / "reference" / "methods.html").read_text()
    learners = {method.__name__ for method in METHODS.values()}
    for name in fedme.__all__:
        assert f'id="fedme.{name}"' in (methods if name in learners else python), name
    assert "fedme.api" not in re.sub(r'(id|href|title)="[^"]*"', "", python + methods)  # public paths only
    assert 'id="fedme.Learner.fit"' in python


def test_the_navigation_begins_with_the_papers_methods(site):
    text = (site / "methods" / "local.html").read_text().split('aria-label="Navigation"', 1)[1]
    listed = list(dict.fromkeys(re.findall(r'href="([\w-]+)\.html" class="md-nav__link"', text)))
    assert [name for name in listed if name in METHODS][:2] == ["fedme", "fml"]


def test_a_new_method_has_a_page_without_further_work(monkeypatch):
    """Of the docstring of its module and of what it says about itself."""
    monkeypatch.syspath_prepend(str(ROOT / "website"))
    pages = importlib.import_module("method_pages")
    page = pages.page(fedme_test_user_method.Soup)
    assert page.startswith("# ")
    for title in ("How it works", "Example", "Deviations from the paper", "Settings"):
        assert f"## {title}\n" in page
    assert "Clients share" in page
    equations = pages.page(METHODS["ditto"], "# Title\n\nIntroduction.\n\n## Equations\n\nA and B.")
    assert "A and B." in equations
    assert "Introduction." not in equations
    assert "How it works" not in equations
    assert "[arXiv:2012.04221](https://arxiv.org/abs/2012.04221)" in equations


@needs_chromium
def test_a_page_opens_without_complaints(site):
    with chromium.launch() as browser:
        page, messages = new_page(browser)
        open_file(page, site / "methods" / "fedme.html")
        assert [message for message in messages if "file://" not in message] == []
        assert page.locator("math").count() > 5


@needs_chromium
def test_search_works_in_a_page_opened_as_a_file(site):
    with chromium.launch() as browser:
        page, _ = new_page(browser)
        open_file(page, site / "index.html")
        page.locator("input[name=query]").click()
        page.keyboard.type("Moreau envelopes")
        result = page.locator(".md-search-result__link").first
        result.wait_for(timeout=20_000)
        assert "methods/pfedme.html" in result.get_attribute("href")


@needs_chromium
@pytest.mark.parametrize("name", ["index", "tour", "tutorial-compare", "methods/heterofl", "reference/methods", "reproduction"])
def test_nothing_is_wider_than_a_telephone(site, name):
    with chromium.launch() as browser:
        page, _ = new_page(browser, width=390, height=844)
        open_file(page, site / f"{name}.html")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


@needs_chromium
@needs_axe
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
def test_axe_finds_no_serious_defect(site, width, scheme):
    names = (
        "index",
        "tutorial-sites",
        "gallery",
        "tour",
        "site-tables",
        "methods/index",
        "methods/fedme",
        "reference/settings",
    )
    with chromium.launch() as browser:
        for name in names:
            page, _ = new_page(browser, width, color_scheme=scheme)
            open_file(page, site / f"{name}.html")
            assert serious_defects(page) == [], name
            page.close()


def test_no_page_is_endless(site):
    """A page of the reproduction once had 66,000 pixels."""
    assert max(len((site / f"{name}.html").read_text()) for name in ("reproduction", "reproduction/fedme")) < 400_000


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
        """The first line of every output, with numbers left out: their last digits are this machine's."""
        lines = []
        for cell in json.loads(path.read_text())["cells"]:
            outputs = [o for o in cell.get("outputs", []) if o.get("name") != "stderr"]
            texts = ["".join(o.get("text") or o["data"].get("text/plain", "")) for o in outputs if o["output_type"] != "stream"]
            stream = "".join("".join(o["text"]) for o in outputs if o["output_type"] == "stream")  # it may come in pieces
            firsts = [next((line for line in text.splitlines() if line.strip()), "") for text in [stream, *texts]]
            lines.append([" ".join(re.sub(r"[\d.]+", "#", re.sub(r"\x1b\[\d*m|0x\w+", "", line)).split()) for line in firsts])
        return lines

    assert shape(tmp_path / "done.ipynb") == shape(ROOT / "docs" / "tour.ipynb")
    drawn = [o for cell in json.loads((tmp_path / "done.ipynb").read_text())["cells"] for o in cell.get("outputs", [])]
    assert any("image/png" in o.get("data", {}) for o in drawn)
    assert any("could train alone" in "".join(o.get("data", {}).get("text/plain", "")) for o in drawn)
    assert (tmp_path / "report.html").exists()
