"""The page in a real browser: drawn, hovered over, filtered, dark, on a phone, in print, and as pictures."""

import csv
import itertools
import json
import shutil
import sys
import xml.etree.ElementTree as ET

import pytest
import torch

import fedme
from fedme import report
from fedme.core.atomic_files import CHECK, RunError, sealed, write_json
from fedme.core.key import Key
from fedme.report import chart_files, chromium
from fedme.report.run_data import families
from fedme.results import records, verdicts
from fedme.results.statistics import Gain
from fedme.results.verdicts import Verdict
from fedme_test_browser import needs_chromium, new_page, open_file

pytestmark = needs_chromium
CHARTS = ["gain", "clients", "rounds", "bytes", "labels", "exchange", "loans", "lineage", "shares", "clusters"]


def point(page, selector, x=0.5, y=0.5):
    """Move the mouse to a place within an element, given as fractions of its size."""
    page.locator(selector).evaluate("element => element.scrollIntoView({block: 'center'})")
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")  # scrolling hides tips
    box = page.locator(selector).bounding_box()
    place = box["x"] + x * box["width"], box["y"] + y * box["height"]
    page.mouse.move(*place)
    return place


def click(page, selector):
    page.mouse.click(*point(page, selector))


def tip(page):
    return page.evaluate("document.getElementById('tip').hidden ? null : document.getElementById('tip').textContent")


@pytest.mark.parametrize(("width", "options"), [(1280, {}), (390, {"height": 844, "is_mobile": True})])
def test_every_chart_is_drawn_and_nothing_sticks_out(browser, file, width, options):
    page, messages = new_page(browser, width, **options)
    open_file(page, file)
    assert messages == []
    for chart in CHARTS:
        size = page.locator(f"#{chart} figure svg").bounding_box()
        assert 280 <= size["width"] <= width, chart
        assert size["height"] > 100, chart
        assert page.locator(f"#{chart} figure svg .hover").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") == width
    clipped = page.evaluate(
        "[...document.querySelectorAll('figure svg text')].filter(t => { const a = t.getBoundingClientRect(), "
        "b = t.ownerSVGElement.getBoundingClientRect(); return a.left < b.left - 2 || a.right > b.right + 2 "
        "|| a.bottom > b.bottom + 2 }).map(t => t.textContent)"
    )
    assert clipped == []
    page.close()


def test_hovering_tells_the_numbers_that_were_recorded(page, runs):
    point(page, "#rounds .hover", 0.999, 0.5)
    story = report.story(report.families(runs))
    value = story["curves"]["lines"][0]["values"]["test"]["accuracy"]
    assert tip(page).startswith("round 3\n")
    assert f"digits-fedme: personal: {100 * value['mean'][-1]:.2f} % ± {100 * value['std'][-1]:.2f} %" in tip(page)
    point(page, "#clients .hover", 0.5, 0.02)
    accuracy = story["runs"][0]["results"]["test round"]
    assert tip(page).splitlines()[0].endswith(", 1 of 5")
    assert f"{100 * min(accuracy):.1f} %" in tip(page)
    for chart in [chart for chart in CHARTS if chart not in ("rounds", "bytes")]:
        point(page, f"#{chart} .hover", 0.3, 0.4)
        assert tip(page), chart
        assert page.locator(f"#{chart} .outline *").count() >= 1, chart
    point(page, "h1")
    assert tip(page) is None


def test_choosing_a_client_dims_the_others_and_adds_its_line(page):
    lines = page.locator("#rounds polyline").count()
    page.select_option("#client", "3")
    assert page.locator("#clients .client-row:not(.dim)").count() == 1
    assert page.locator("#gain .client-row:not(.dim)").count() == 1
    assert page.locator("#labels .heat.dim").count() > 0
    assert page.locator("#rounds polyline").count() == lines + 1
    assert "client 3 (digits-fedme, seed 0)" in page.locator("#rounds svg").text_content()
    page.select_option("#client", "all")
    assert page.locator(".dim").count() == 0


def test_clicking_a_client_chooses_it_and_again_frees_it(page, runs):
    click(page, "#labels .hover")
    middle = report.story(families(runs))["runs"][0]["labels"]["order"][2]
    assert page.locator("#client").input_value() == str(middle)
    click(page, "#labels .hover")
    assert page.locator("#client").input_value() == "all"


def test_other_runs_metrics_and_rounds_can_be_chosen(page):
    page.select_option("#run", "2")  # Local
    assert page.locator("#exchange svg, #gain svg").count() == 0
    assert "has no exchange" in page.locator("#exchange > p").text_content()
    assert page.locator("#exchange").bounding_box()["height"] < 60  # one line, not an empty card
    page.select_option("#run", "1")
    assert "seed 1" in page.locator("#clients > p").text_content()
    page.select_option("#rounds select[data-key=metric]", "loss")
    assert "loss" in page.locator("#rounds svg").text_content()
    page.select_option("#rounds select[data-key=split]", "val")
    assert "validation loss" in page.locator("#rounds svg").text_content()
    page.locator("#loans input").fill("1")
    assert page.locator("#loans svg").get_attribute("aria-label").startswith("loans of round 1.")


def luminance(colour):
    red, green, blue = (int(part) / 255 for part in colour.strip("rgb()").split(","))
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_can_be_read_in_light_and_dark(page, scheme):
    page.emulate_media(color_scheme=scheme)

    def colour(selector, what):
        return luminance(page.evaluate(f"getComputedStyle(document.querySelector('{selector}'))['{what}']"))

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


def test_the_button_turns_the_theme_over(page):
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    click(page, "#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_print_has_the_charts_and_no_controls(page):
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.querySelector('.chooser')).display") == "none"
    assert page.locator("#gain svg").bounding_box()["height"] > 100
    assert page.pdf()[:5] == b"%PDF-"


def test_every_chart_becomes_three_pictures_and_a_table(file, tmp_path):
    made = chart_files.save_charts(file, tmp_path / "pictures")
    assert sorted(path.name for path in made) == sorted(
        f"{chart}.{kind}" for chart in CHARTS for kind in ("svg", "png", "pdf", "csv")
    )
    for path in made:
        content = path.read_bytes()
        if path.suffix == ".svg":
            root = ET.fromstring(content)
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            assert b"var(" not in content
            assert b"class=" not in content
        elif path.suffix == ".csv":
            assert len(list(csv.reader(content.decode().splitlines()))) > 4
        else:
            assert content.startswith(b"%PDF-" if path.suffix == ".pdf" else b"\x89PNG")
            assert len(content) > 2000


def test_names_are_text_and_never_markup(runs, tmp_path, browser):
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
    page, messages = new_page(browser)
    open_file(page, tmp_path / "evil.html")
    assert messages == []
    assert page.evaluate("window.hacked === undefined && document.querySelectorAll('img').length === 0")
    assert evil in page.evaluate("document.getElementById('client').textContent")
    assert page.locator("figure svg").count() >= 8


def test_streams_between_architectures_are_the_moves_that_were_made(page, runs):
    held = report.story(families(runs))["runs"][0]["lineage"]["held"]
    moves = [set(zip(a, b, strict=True)) for a, b in itertools.pairwise(held)]
    assert page.locator("#shares .stream").count() == sum(map(len, moves))
    point(page, "#shares svg", 0.5, 0.6)
    assert "round" in tip(page)


def test_the_page_says_where_lower_is_better(tmp_path, browser):
    """Regression: the largest error is the worst, and a gain is positive."""
    draw = Key(1).torch()
    x = torch.randn(90, 2, generator=draw)
    y = 5000 + 900 * x[:, 0] + 0.5
    clients = [fedme.Client(f"site-{i}", train=(x[i::3], y[i::3]), model=["mlr", "dnn-8"][i % 2]) for i in range(3)]
    result = fedme.FedMe(rounds=3).fit(clients, output=tmp_path / "run", quiet=True)
    alone = fedme.Local(rounds=3).fit(clients, output=tmp_path / "local", quiet=True)
    folders = [result.folder, alone.folder]
    story = report.story(families(folders))
    report.write(folders, tmp_path / "r.html")
    page, messages = new_page(browser)
    open_file(page, tmp_path / "r.html")
    assert messages == []
    drawn = page.locator("section figure svg").count()
    assert drawn >= 8
    errors = story["runs"][0]["results"]["test round"]
    worst = story["runs"][0]["clients"][errors.index(max(errors))]
    assert page.locator("#clients > p").text_content().split("The worst: ")[1].startswith(worst)
    assert "lower is better" in page.locator("#clients svg").text_content()
    before = {row["client"]: row["personal"] for row in alone.rows(quiet=True)}
    gained = {row["client"]: before[row["client"]] - row["personal"] for row in result.rows(quiet=True)}
    point(page, "#gain .hover", 0.5, 0.9)  # the best stands last
    best = max(gained, key=gained.get)
    assert f"client {best}, 3 of 3: {'+' if gained[best] > 0 else '-'}" in tip(page)
    assert "%" not in page.locator("#rounds svg").text_content()


def test_a_missing_program_or_package_is_named_with_its_remedy(file, tmp_path, monkeypatch):
    monkeypatch.setattr(chromium, "PROGRAMS", ())
    with pytest.raises(RunError, match="apt-get install chromium"):
        chart_files.save_charts(file, tmp_path)
    monkeypatch.setitem(sys.modules, "playwright", None)
    with pytest.raises(RunError, match=r"pip install 'fedme\[pictures\]'"):
        chart_files.save_charts(file, tmp_path)


@pytest.mark.parametrize("count", [2, 1000])
def test_verdicts_of_two_and_of_a_thousand_clients(browser, tmp_path, count):
    draw = Key(0).torch()
    clients = [fedme.Client(f"c{i}", train=(torch.randn(6, 2, generator=draw), torch.arange(6) % 2)) for i in range(count)]
    result = fedme.FedAvg(rounds=1, train={"epochs": 1}).fit(clients, output=tmp_path / "run", quiet=True)
    hurts, helps, unknown = ((-0.4, -0.6, -0.2, 1e-9), (0.3, 0.1, 0.5, 1e-6), (0.0, -0.2, 0.2, 1.0))
    judged = []
    for i, client in enumerate(result):
        gain = Gain(20, *(hurts if i == 0 else helps if i == 1 else unknown), 50)
        judged.append(Verdict(client, "classification", "model", "mlr", "mlr", 20, 0.7, 0.7, 0.5, {"accuracy": gain}))
    verdicts.write(result.folder, judged)
    report.write([result.folder], tmp_path / "report.html")
    page, messages = new_page(browser)
    open_file(page, tmp_path / "report.html")
    assert messages == []
    assert page.locator("#gain .interval").count() == (2 if count == 2 else 20)  # the ten worst and the ten best
    bars = page.locator("#gain .bin").evaluate_all(
        "bars => bars.map((bar) => bar.getBoundingClientRect()).map((box) => [box.height, box.x + box.width / 2])"
    )
    assert (len(bars) > 0) == (count > 2)
    if bars:  # clients without a gain are in a bar around the line at 0
        zero = page.locator("#gain line.axis[y1='0']").bounding_box()
        assert max(bars)[1] == pytest.approx(zero["x"] + zero["width"] / 2, abs=1)
    assert "clearly worse" in page.locator("#gain > p").text_content()
    assert page.locator("#gain .alarms li").count() == 1
    assert page.locator("#gain .alarms li").text_content().startswith("ALARM: client c0: joining hurts")
    chart = page.locator("#gain figure svg")
    assert "gained (1)" in chart.text_content()
    assert "lost (1)" in chart.text_content()
    assert page.locator(".counts").text_content() == f"1 gained1 lost{count - 2:,} not clear"
    page.evaluate("dispatchEvent(new Event('beforeprint'))")  # a table of many clients is not printed
    assert page.locator("#gain details[open]").count() == page.locator("#clients details[open]").count() == (count == 2)
    page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = false")
    page.locator("#gain summary").click()
    page.locator("#gain tbody tr").nth(count - 1).wait_for()  # it is drawn when it is opened
    assert page.locator("#gain tbody tr").count() == count
    assert "do not join" in page.locator("#gain tbody tr").nth(0).text_content()  # the largest loss first
    point(page, "#gain .hover", 0.5, 0.1 if count == 2 else 0.28)
    assert "client c0, 1 of " in tip(page)
    assert "-40.0 points, lost" in tip(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 1280
    page.close()
