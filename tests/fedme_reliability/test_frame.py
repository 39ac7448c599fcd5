import json
import sys
import types

import pytest
from rich.console import Console

from fedme_reliability import frame
from fedme_reliability.frame import Row


def part(monkeypatch, name, rows):
    """A part of a test's own, as if it were a module of the package."""
    module = types.ModuleType(f"fedme_reliability.{name}")
    module.rows = rows
    monkeypatch.setitem(sys.modules, f"fedme_reliability.{name}", module)


@pytest.mark.needs("flwr")
def test_every_listed_part_is_a_module_with_rows():
    assert all(callable(frame.importlib.import_module(f"fedme_reliability.{name}").rows) for name in frame.PARTS)
    assert len(set(frame.PARTS)) == len(frame.PARTS)


def test_a_row_holds_only_if_it_always_held():
    assert Row("a", 3, 3).kept
    assert not Row("a", 3, 2).kept
    assert not Row("a", 0, 0).kept, "nothing was tried"


def test_the_table_is_written_and_what_failed_is_named(monkeypatch, tmp_path):
    part(monkeypatch, "good", lambda display, quick: iter([Row("holds", 3, 3, "a | b"), Row("holds sometimes", 2, 1)]))
    table = frame.results(["good"], True, Console(quiet=True), tmp_path / "out")
    assert [row["what"] for row in frame.failed(table)] == ["holds sometimes"]
    assert json.loads((tmp_path / "out" / "reliability.json").read_text()) == table
    text = (tmp_path / "out" / "reliability.md").read_text()
    assert "| good | holds | 3 | 3 | a \\| b |" in text
    assert "| good | holds sometimes | 2 | **1** |  |" in text


def test_a_part_that_breaks_is_a_failure_and_the_others_go_on(monkeypatch, capsys):
    def breaks(display, quick):
        yield Row("before", 1, 1)
        raise ValueError("no luck")

    part(monkeypatch, "breaks", breaks)
    part(monkeypatch, "idle", lambda display, quick: iter([]))
    part(monkeypatch, "good", lambda display, quick: iter([Row("holds", 1, 1)]))
    table = frame.results(["breaks", "idle", "good"], True, Console(quiet=True))
    assert [(row["part"], row["kept"]) for row in table["rows"]] == [
        ("breaks", True),
        ("breaks", False),
        ("idle", False),
        ("good", True),
    ]
    assert "ValueError: no luck" in table["rows"][1]["detail"]


def test_an_empty_table_has_not_held():
    assert frame.failed(frame.results([], True, Console(quiet=True)))


@pytest.mark.parametrize("words", [["nonsense"], ["--quick", "nonsense"]])
def test_a_part_nobody_knows_is_refused(monkeypatch, words, capsys):
    from fedme_reliability.__main__ import main

    monkeypatch.setattr(sys, "argv", ["reliability", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "no part is called nonsense" in capsys.readouterr().err
