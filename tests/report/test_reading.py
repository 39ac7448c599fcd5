"""Reading a report: the first screen, the address, sorted tables, the keyboard, numbers as CSV, colours, and accessibility."""

import csv
import io
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from fedme import report
from fedme.report import html
from fedme.report.run_data import families
from fedme_test_browser import needs_axe, needs_chromium, new_page, open_file, serious_defects

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def story(runs):
    return report.story(families(runs))


def fragment(page):
    return page.evaluate("location.hash")


def test_the_first_screen_answers_four_questions_without_a_click(browser, file):
    page, _ = new_page(browser, 1400)
    open_file(page, file)
    titles = page.locator("#tiles h3").all_text_contents()
    assert titles == ["Test accuracy", "Gain over training alone", "Worst client", "Cost: bytes sent"]
    next_steps = page.locator("#next").bounding_box()
    assert next_steps["y"] + next_steps["height"] < 900
    text = page.locator("#tiles").inner_text()
    for words in ("gained", "lost", "not clear", "at the clients", "at the server", "parameters per model"):
        assert words in text, words
    page.close()


def test_the_page_opens_on_the_run_that_has_an_exchange(browser, runs, tmp_path):
    report.write([runs[2], runs[0]], tmp_path / "r.html")
    page, messages = new_page(browser)
    open_file(page, tmp_path / "r.html")
    assert page.locator("#run option:checked").text_content() == "digits-fedme"
    assert page.locator("#exchange figure svg").count() == 1
    assert messages == []
    page.close()


def test_choices_are_in_the_address_and_come_back(browser, page, file):
    assert fragment(page) == ""
    page.select_option("#run", "1")
    page.select_option("#client", "3")
    page.select_option("#rounds select[data-key=metric]", "loss")
    page.locator("#loans input").fill("1")
    page.locator("nav a", has_text="Labels per client").click()
    address = page.url
    assert fragment(page).startswith("#labels&")
    other, messages = new_page(browser)
    other.goto(address)
    assert other.locator("#run").input_value() == "1"
    assert other.locator("#client").input_value() == "3"
    assert other.locator("#rounds select[data-key=metric]").input_value() == "loss"
    assert other.locator("#loans svg").get_attribute("aria-label").startswith("loans of round 1")
    assert 0 <= other.locator("#labels").bounding_box()["y"] < 300
    assert messages == []
    other.close()


@pytest.mark.parametrize(
    "address", ["#%", "#run=none&client=%E0%A4%A&split=x&metric=y&round=z&sort.a=9", "#nothing&against=x&stage=y"]
)
def test_an_address_that_makes_no_sense_opens_the_page(browser, file, address):
    page, messages = new_page(browser)
    page.goto(file.resolve().as_uri() + address)
    assert messages == []
    assert page.locator("#gain figure svg").count() == 1
    page.close()


def test_tables_sort_by_a_click_on_a_heading(browser, page, story):
    page.locator("#clients summary").click()
    column = lambda n: page.locator(f"#clients tbody tr > :nth-child({n})").all_text_contents()  # noqa: E731
    before = column(1)
    heading = page.locator("#clients thead th").nth(1)
    heading.locator("button").click()
    values = [float(text.split()[0]) for text in column(2)]
    assert values == sorted(values, reverse=True)
    assert heading.get_attribute("aria-sort") == "descending"
    assert "sort.clients=1d" in fragment(page)
    heading.locator("button").click()
    values = [float(text.split()[0]) for text in column(2)]
    assert values == sorted(values)
    heading.locator("button").click()
    assert column(1) == before
    bold = page.locator("#summary td.best").all_text_contents()
    assert any("%" in text for text in bold)


def test_the_first_column_stays_when_a_table_scrolls_on_a_phone(browser, file):
    page, _ = new_page(browser, 390, is_mobile=True)
    open_file(page, file)
    table = page.locator("#summary .scroll")
    first = table.locator("tbody th").nth(0)
    before = first.bounding_box()["x"]
    table.evaluate("element => { element.scrollLeft = 200 }")
    assert first.bounding_box()["x"] == pytest.approx(before, abs=1)
    page.close()


def test_a_chart_is_read_with_the_keyboard(page):
    page.locator("#clients figure svg").focus()
    page.keyboard.press("ArrowDown")
    bubble = page.locator("#tip")
    assert ", 1 of 5" in bubble.text_content()
    page.keyboard.press("ArrowDown")
    assert ", 2 of 5" in bubble.text_content()
    page.keyboard.press("Enter")
    chosen = page.locator("#client").input_value()
    assert chosen != "all"
    assert page.evaluate("document.activeElement.closest('section').id") == "clients"  # the reader stays where she is
    page.keyboard.press("Escape")
    assert page.locator("#client").input_value() == "all"


def numbers(page, view):
    text = page.evaluate(f"csv(views.find((view) => view.id === '{view}').csv())")
    return list(csv.DictReader(io.StringIO(text)))


def test_the_csv_of_a_chart_has_its_numbers(page, story):
    run = story["runs"][0]
    by_client = {row["client"]: row for row in numbers(page, "clients")}
    for client, value, samples in zip(run["clients"], run["results"]["test round"], run["samples"], strict=True):
        assert float(by_client[client]["digits-fedme, seed 0"]) == value
        assert int(by_client[client]["test samples"]) == samples
    gains = {row["client"]: row for row in numbers(page, "gain")}
    for client in story["families"][0]["gain"]["compared"][0]["clients"]:
        assert float(gains[client["client"]]["gain"]) == client["gain"]
    labels = {row["client"]: row for row in numbers(page, "labels")}
    assert [int(labels["3"][f"label {name}"]) for name in run["labels"]["classes"]] == run["labels"]["counts"][3]
    assert sum(int(row["loans"]) for row in numbers(page, "exchange")) == 20
    assert len(numbers(page, "loans")) == 20
    assert sum(int(row["adopted"]) for row in numbers(page, "lineage")) == sum(map(sum, run["exchange"]["adopted"]))
    assert [sum(int(row[name]) for name in run["lineage"]["names"]) for row in numbers(page, "shares")] == [5] * 5
    assert len(numbers(page, "clusters")) == 4
    curve = [row for row in numbers(page, "rounds") if row["line"] == "digits-fedme: personal"]
    assert [float(row["test accuracy"]) for row in curve] == story["curves"]["lines"][0]["values"]["test"]["accuracy"]["mean"]
    assert numbers(page, "bytes") == numbers(page, "rounds")


def test_csv_is_downloaded_and_quotes_what_it_must(page, tmp_path):
    with page.expect_download() as waiting:
        page.locator("#gain .downloads button", has_text="CSV").click()
    assert waiting.value.suggested_filename.endswith("-gain.csv")
    assert Path(waiting.value.path()).read_text().startswith("client,gain,")
    with page.expect_download() as waiting:
        page.locator("#summary .downloads button").click()
    assert Path(waiting.value.path()).read_text().startswith("run,model,test accuracy,")
    hard = [["a,b", 'say "x"', "=1+1", -0.5, None, "-3"], ["two\nlines", "", "+a", 1, 2, 3]]
    text = page.evaluate("rows => csv(rows)", hard)
    assert list(csv.reader(io.StringIO(text))) == [
        ["a,b", 'say "x"', "'=1+1", "-0.5", "", "-3"],
        ["two\nlines", "", "'+a", "1", "2", "3"],
    ]


def test_numbers_are_rounded_as_python_rounds_them(page):
    """Regression: 31.25 was 31.2 in the text and 31.3 in a chart."""
    values = [k / 800 for k in range(801)] + [k / 7 for k in range(8)] + [-0.3125, 0.00125, 0.15, 0.25]
    for digits in (0, 1, 2):
        found = page.evaluate("([values, digits]) => values.map((value) => fixed(100 * value, digits))", [values, digits])
        assert found == [f"{100 * value:.{digits}f}" for value in values]


def simulated(red_green_blue):
    """A colour in CIELAB as people with normal, protanopic, deuteranopic and tritanopic vision see it (Machado et al. 2009)."""
    matrices = (
        np.eye(3),
        np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
        np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
        np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
    )
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    for matrix in matrices:
        xyz = to_xyz @ np.clip(matrix @ linear(red_green_blue), 0, 1) / np.array([0.95047, 1, 1.08883])
        f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        yield np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def linear(code):
    c = np.array([int(code[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def luminance(code):
    return float(np.array([0.2126, 0.7152, 0.0722]) @ linear(code))


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_of_one_meaning_differ_for_everybody_and_no_colour_has_two_meanings(theme):
    css = (html.FOLDER / "page.css").read_text()
    colours = {name: re.findall("#[0-9a-f]{6}", value) for name, value in re.findall(r"--(\w+): ([^;]+);", css)}
    code = {name: (codes[0], codes[-1])[theme] for name, codes in colours.items() if codes}
    palettes = [
        [name for name in code if re.fullmatch(kind, name)]
        for kind in (r"run\d", "gained|lost|unclear", r"arch\d", r"cluster\d")
    ]
    assert [len(palette) for palette in palettes] == [5, 3, 9, 8]
    assert len({code[name] for palette in palettes for name in palette}) == 25
    for palette in palettes:
        for a, b in itertools.combinations(palette, 2):
            for one, other in zip(simulated(code[a]), simulated(code[b]), strict=True):
                assert np.linalg.norm(one - other) > 10, (a, b)
    for name in [*palettes[0], *palettes[1]]:  # lines and dots on a card
        bright, dark = sorted((luminance(code[name]), luminance(code["card"])), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= 3, name


def test_an_axis_has_at_least_three_values(page):
    draw = np.random.default_rng(0)
    for low, size, count in zip(draw.normal(0, 50, 200), 10 ** draw.uniform(-3, 3, 200), draw.uniform(1, 12, 200), strict=True):
        for integers in (False, True):
            high = low + size
            values = page.evaluate("([...given]) => ticks(...given)", [low, high, count, integers])
            assert values == sorted(values)
            assert all(low - 1e-6 * size <= value <= high + 1e-6 * size for value in values)
            assert len(values) <= 3 * count + 8
            if integers:
                assert all(abs(value - round(value)) < 1e-6 for value in values)
                assert len(values) >= min(3, math.floor(high) - math.ceil(low) + 1)
            else:
                assert len(values) >= 3
    assert page.evaluate("ticks(-0.37, 0.47, 3)") == pytest.approx([-0.2, 0, 0.2, 0.4])
    assert page.evaluate("ticks(0, 8, 3.2, true)") == [0, 2, 4, 6, 8]


def test_a_number_and_its_unit_stay_on_one_line(page):
    assert page.evaluate("prose('72.2 % of 3.1 MB in 2 s, `5 %`')[0]") == "72.2\u00a0% of 3.1\u00a0MB in 2\u00a0s, "


def test_marks_and_dashes_stand_beside_colours(page):
    shapes = page.evaluate("Array.from({ length: 5 }, (_, k) => runMark(k))")
    assert len(set(shapes)) == 5
    assert page.evaluate("new Set(Object.values(SIDES).map(([, shape]) => shape)).size") == 3


@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_axe_finds_no_serious_defect(browser, file, width, scheme):
    page, _ = new_page(browser, width, color_scheme=scheme)
    open_file(page, file)
    page.evaluate("for (const fold of document.querySelectorAll('details')) { fold.fill?.(); fold.open = true }")
    serious = serious_defects(page)
    assert serious == [], json.dumps(serious, indent=1)
    page.close()
