"""The page in a real browser: drawn, hovered over, filtered, dark, on a phone, in print, and as pictures."""

import itertools
import json
import shutil
import xml.etree.ElementTree as ET

import pytest
import torch

import fedme
from fedme import report
from fedme.core.atomic_files import CHECK, sealed, write_json
from fedme.core.key import Key
from fedme.report import chart_files
from fedme.report.chromium import Browser, find
from fedme.report.run_data import families
from fedme.results import records

pytestmark = pytest.mark.skipif(find() is None, reason="needs Chromium (apt-get install chromium)")
CHARTS = ["rounds", "bytes", "clients", "gain", "labels", "exchange", "loans", "lineage", "shares", "clusters"]


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    target = tmp_path_factory.mktemp("report") / "report.html"
    report.write(runs, target)
    return target


@pytest.fixture(scope="module")
def desktop():
    with Browser(1280) as browser:
        yield browser


@pytest.fixture(scope="module")
def phone():
    with Browser(390, 844, phone=True) as browser:
        yield browser


@pytest.fixture
def shown(desktop, page):
    """The page, freshly opened; afterwards nobody may have complained."""
    desktop.said.clear()
    desktop.open(page)
    yield desktop
    assert desktop.said == []


def box(browser, selector):
    return browser.run(
        f"(() => {{ const r = document.querySelector('{selector}').getBoundingClientRect(); "
        "return {x: r.x, y: r.y, width: r.width, height: r.height} })()"
    )


def point(browser, selector, x, y):
    """Move the mouse to a place within an element, given as shares of its size."""
    browser.run(f"document.querySelector('{selector}').scrollIntoView({{block: 'center'}})")
    browser.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")  # scrolling hides tips
    at = box(browser, selector)
    place = {"x": at["x"] + x * at["width"], "y": at["y"] + y * at["height"]}
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
    return place


def click(browser, selector, x=0.5, y=0.5):
    place = point(browser, selector, x, y)
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)


def tip(browser):
    return browser.run("document.getElementById('tip').hidden ? null : document.getElementById('tip').textContent")


def pick(browser, selector, value):
    browser.run(
        f"(() => {{ const s = document.querySelector('{selector}'); s.value = {json.dumps(value)}; "
        "s.dispatchEvent(new Event('change')) })()"
    )


def test_every_chart_is_drawn_and_nothing_sticks_out(page, desktop, phone):
    for browser, width in ((desktop, 1280), (phone, 390)):
        browser.said.clear()
        browser.open(page)
        assert browser.said == []
        for chart in CHARTS:
            size = box(browser, f"#{chart} figure svg")
            assert 280 <= size["width"] <= width, chart
            assert size["height"] > 100, chart
            assert browser.run(f"document.querySelectorAll('#{chart} figure svg .hover').length") == 1
        assert browser.run("document.documentElement.scrollWidth") == width
        clipped = browser.run(
            "[...document.querySelectorAll('figure svg text')].filter(t => { const a = t.getBoundingClientRect(), "
            "b = t.ownerSVGElement.getBoundingClientRect(); return a.left < b.left - 2 || a.right > b.right + 2 "
            "|| a.bottom > b.bottom + 2 }).map(t => t.textContent)"
        )
        assert clipped == []


def test_hovering_tells_the_numbers_that_were_recorded(shown, runs):
    point(shown, "#rounds .hover", 0.999, 0.5)
    story = report.story(report.families(runs))
    value = story["curves"]["lines"][0]["values"]["test"]["accuracy"]
    assert tip(shown).startswith("round 3\n")
    assert f"digits-fedme: personal: {100 * value['mean'][-1]:.2f} % ± {100 * value['std'][-1]:.2f} %" in tip(shown)
    point(shown, "#clients .hover", 0.01, 0.5)
    accuracy = story["runs"][0]["results"]["test round"]
    assert tip(shown).splitlines()[0].endswith(", 1 of 5")
    assert f"{100 * min(accuracy):.1f} %" in tip(shown)
    for chart in CHARTS[3:]:
        point(shown, f"#{chart} .hover", 0.3, 0.4)
        assert tip(shown), chart
        assert shown.run(f"document.querySelectorAll('#{chart} .outline *').length") >= 1, chart
    point(shown, "h1", 0.5, 0.5)
    assert tip(shown) is None


def test_choosing_a_client_dims_the_others_and_adds_its_line(shown):
    lines = shown.run("document.querySelectorAll('#rounds polyline').length")
    pick(shown, "#client", "3")
    assert shown.run("document.querySelectorAll('#clients circle.own:not(.dim)').length") == 1
    assert shown.run("document.querySelectorAll('#labels circle.bubble.dim').length") > 0
    assert shown.run("document.querySelectorAll('#rounds polyline').length") == lines + 1
    assert "client 3 (digits-fedme, seed 0)" in shown.run("document.querySelector('#rounds svg').textContent")
    pick(shown, "#client", "all")
    assert shown.run("document.querySelectorAll('.dim').length") == 0


def test_clicking_a_client_chooses_it_and_again_frees_it(shown):
    click(shown, "#labels .hover", 0.5, 0.5)
    assert shown.run("document.querySelector('#client').value") == "2"
    click(shown, "#labels .hover", 0.5, 0.5)
    assert shown.run("document.querySelector('#client').value") == "all"


def test_other_runs_metrics_and_rounds_can_be_chosen(shown):
    pick(shown, "#run", "2")  # Local
    assert shown.run("document.querySelectorAll('#exchange svg, #gain svg').length") == 0
    assert "has no exchange" in shown.run("document.querySelector('#exchange > p').textContent")
    pick(shown, "#run", "1")
    assert "seed 1" in shown.run("document.querySelector('#clients > p').textContent")
    pick(shown, "#rounds select[data-key=metric]", "loss")
    assert "loss" in shown.run("document.querySelector('#rounds svg').textContent")
    pick(shown, "#rounds select[data-key=split]", "val")
    assert "validation loss" in shown.run("document.querySelector('#rounds svg').textContent")
    shown.run(
        "(() => { const r = document.querySelector('#loans input'); r.value = 1; r.dispatchEvent(new Event('input')) })()"
    )
    assert shown.run("document.querySelector('#loans svg').getAttribute('aria-label')") == "loans of round 1"


def luminance(colour):
    red, green, blue = (int(part) / 255 for part in colour.strip("rgb()").split(","))
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_can_be_read_in_light_and_dark(shown, scheme):
    shown.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def colour(selector, what):
        return luminance(shown.run(f"getComputedStyle(document.querySelector('{selector}'))['{what}']"))

    back = colour("#rounds", "backgroundColor")
    assert (back < 0.2) == (scheme == "dark")
    wanted = {
        ("#rounds h2", "color"): 4.5,
        ("#rounds > p", "color"): 4.5,
        ("#rounds svg text", "fill"): 4.5,
        ("#rounds svg text.soft", "fill"): 4.5,
        ("nav a", "color"): 4.5,
        ("#rounds polyline", "stroke"): 3,
    }
    for (selector, what), least in wanted.items():
        bright, dark = sorted((colour(selector, what), back), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= least, (selector, scheme)
    shown.call("Emulation.setEmulatedMedia", features=[])


def test_the_button_turns_the_theme_over(shown):
    before = shown.run("getComputedStyle(document.body).backgroundColor")
    click(shown, "#theme")
    assert shown.run("getComputedStyle(document.body).backgroundColor") != before


def test_print_has_the_charts_and_no_controls(shown):
    shown.call("Emulation.setEmulatedMedia", media="print")
    assert shown.run("getComputedStyle(document.querySelector('.chooser')).display") == "none"
    assert box(shown, "#gain svg")["height"] > 100
    shown.call("Emulation.setEmulatedMedia", media="")
    assert shown.pdf()[:5] == b"%PDF-"


def test_every_chart_becomes_three_pictures(page, tmp_path):
    made = chart_files.take(page, tmp_path / "pictures")
    assert sorted(path.name for path in made) == sorted(f"{chart}.{kind}" for chart in CHARTS for kind in ("svg", "png", "pdf"))
    for path in made:
        content = path.read_bytes()
        if path.suffix == ".svg":
            root = ET.fromstring(content)
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            assert b"var(" not in content
            assert b"class=" not in content
        else:
            assert content.startswith(b"%PDF-" if path.suffix == ".pdf" else b"\x89PNG")
            assert len(content) > 2000


def test_names_are_text_and_never_markup(runs, tmp_path, desktop):
    evil = "</script><img src=x onerror=window.hacked=1>"
    folder = shutil.copytree(runs[0], tmp_path / "evil")
    for name in (records.NAME, "labels.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(
            text.replace('"client": "0"', f'"client": {json.dumps(evil)}')
            .replace('"lender": "0"', f'"lender": {json.dumps(evil)}')
            .replace('    "0": {\n      "train"', f'    {json.dumps(evil)}: {{\n      "train"')
        )
    labels = json.loads((folder / "labels.json").read_text())
    write_json(folder / "labels.json", sealed({key: value for key, value in labels.items() if key != CHECK}))
    report.write([folder], tmp_path / "evil.html")
    desktop.said.clear()
    desktop.open(tmp_path / "evil.html")
    assert desktop.said == []
    assert desktop.run("window.hacked === undefined && document.querySelectorAll('img').length === 0")
    assert evil in desktop.run("document.getElementById('client').textContent")
    assert desktop.run("document.querySelectorAll('figure svg').length") >= 8


def test_streams_between_architectures_are_the_moves_that_were_made(shown, runs):
    held = report.story(families(runs))["runs"][0]["lineage"]["held"]
    moves = [set(zip(a, b, strict=True)) for a, b in itertools.pairwise(held)]
    assert shown.run("document.querySelectorAll('#shares .stream').length") == sum(map(len, moves))
    point(shown, "#shares svg", 0.5, 0.6)
    assert "round" in tip(shown)


def test_where_less_is_better_the_page_says_so(tmp_path, desktop):
    """Numbers to predict: the largest error is the worst, and a gain is positive."""
    draw = Key(1).torch()
    x = torch.randn(90, 2, generator=draw)
    y = 5000 + 900 * x[:, 0] + 0.5
    clients = [fedme.Client(f"site-{i}", train=(x[i::3], y[i::3]), model=["mlr", "dnn-8"][i % 2]) for i in range(3)]
    result = fedme.FedMe(rounds=3).fit(clients, output=tmp_path / "run", quiet=True)
    folders = [result.folder, result.local(quiet=True).folder]
    story = report.story(families(folders))
    report.write(folders, tmp_path / "r.html")
    desktop.said.clear()
    desktop.open(tmp_path / "r.html")
    assert desktop.said == []
    drawn = desktop.run("[...document.querySelectorAll('section figure svg')].length")
    assert drawn >= 8
    errors = story["runs"][0]["results"]["test round"]
    worst = story["runs"][0]["clients"][errors.index(max(errors))]
    assert desktop.run("document.querySelector('#clients > p').textContent").split("The worst: ")[1].startswith(worst)
    assert "less is better" in desktop.run("document.querySelector('#clients svg').textContent")
    gained = {row["client"]: row["gain"] for row in result.rows(quiet=True)}
    point(desktop, "#gain svg", 0.9, 0.5)
    best = max(gained, key=gained.get)
    assert f"client {best}: {'+' if gained[best] > 0 else ''}" in tip(desktop)
    assert "%" not in desktop.run("document.querySelector('#rounds svg').textContent")
