"""Tables in terminals of every width."""

import io

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from fedme.results.tables import print_prose, render

HEADER = ["client", "model", "samples", "personal", "chosen", "local", "local model", "gain", "low", "high", "verdict"]
ROW = ["site-a", "dnn-8", "15", "53.33", "model", "50.00", "people_networks:MyNet(width=64)", "+3.3", "-32", "+33", "better"]


def printed(header, rows, width):
    out = io.StringIO()
    render("title", header, rows, "table", Console(file=out, width=width))
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 80, 140])
def test_no_column_is_lost_in_a_narrow_terminal(width):
    text = printed(HEADER, [ROW], width)
    assert all(name in text for name in HEADER)
    assert all(cell in text for cell in ROW if len(cell) <= 12)
    assert "".join(part for part in text.split() if part in ROW[6]).count("people_") == 1
    assert max(map(len, text.splitlines())) <= width
    assert text.count("client") == {40: 4, 80: 2, 140: 1}[width]


@given(st.lists(st.from_regex(r"[a-z]{1,12}", fullmatch=True), min_size=1, max_size=12, unique=True), st.integers(32, 200))
def test_every_name_is_there(names, width):
    assert set(names) <= set(printed(names, [["1"] * len(names)], width).split())


@pytest.mark.parametrize("width", [60, 72, 80, 81, 100])
def test_names_of_a_few_words_are_not_cut(width):
    rows = [[f"before fine-tuning, {split}", *["100.00"] * 6] for split in ("val", "test")]
    text = printed(["model", "samples", "accuracy %", "balanced %", "macro F1", "AUROC", "loss"], rows, width)
    assert text.count("before fine-tuning, test") == text.count("before fine-tuning, val") >= 1


@pytest.mark.parametrize("terminal", [True, False])
def test_sentences_are_wrapped_between_words_in_a_terminal_only(terminal):
    sentence = (
        "client site-a gained much: `fedme show runs/first --clients` lists them, `fedme report runs/first`" + " draws it" * 9
    )
    out = io.StringIO()
    print_prose([sentence], Console(file=out, width=40, force_terminal=terminal, color_system=None))
    lines = out.getvalue().splitlines()
    assert " ".join(lines) == sentence
    assert any("`fedme show runs/first --clients`" in line for line in lines)  # a command is copied whole
    assert (max(map(len, lines)) <= 40) == terminal


def test_a_command_wider_than_the_terminal_stays_whole():
    out = io.StringIO()
    print_prose(["Next: `fedme report runs/first runs/second` draws them"], Console(file=out, width=20, force_terminal=True))
    assert "`fedme report runs/first runs/second`" in out.getvalue().splitlines()


def test_rows_can_be_told_apart_in_every_part_of_a_table():
    header = ["client", "model", "attack", *(f"number {i}" for i in range(6))]
    rows = [["all clients", model, attack, *"123456"] for model in ("shared", "private") for attack in ("loss", "shadow")]
    lines = [" ".join(line.split()) for line in printed(header, rows, 80).splitlines()]
    assert [line.startswith("client model attack number") for line in lines].count(True) == 2
    assert sum(line.startswith("all clients private shadow") for line in lines) == 2
