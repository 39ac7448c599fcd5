"""Clients of any name: nothing is lost at the end of a training, and nobody gets another one's models."""

import unicodedata

import pytest
import torch
from hypothesis import given, strategies as st
from rich.console import Console

import fedme
from fedme.artifacts import saved_models
from fedme.artifacts.personal_model import clients_of, find
from fedme.results import views
from fedme.results.tables import render

NAMES = [
    "東京大学医学部附属病院循環器内科第二病棟救急外来受付窓口係御中",
    "x" * 300,
    "x" * 299 + "y",
    "..",
    ".",
    "CON",
    "con.txt",
    "ends with a dot.",
    "Berlin",
    "berlin",
    unicodedata.normalize("NFC", "Zürich"),
    unicodedata.normalize("NFD", "Zürich"),
    "a/b\\c:d*e?f",
    "a~b",
    "-rf",
    "\x1b[31mred\u202e",
    "two\nlines",
    "مستشفى",
    "😀" * 40,
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    def samples(i):
        x = torch.arange(40.0).reshape(20, 2) + i
        return x, (torch.arange(20) % 2).numpy()

    clients = [fedme.Client(name, train=samples(i), model="mlr") for i, name in enumerate(NAMES)]
    folder = tmp_path_factory.mktemp("names") / "run"
    fedme.FedMe(rounds=2, train={"epochs": 1, "lr": 0.001}).fit(clients, output=folder, quiet=True)
    return folder


def test_every_client_has_its_model_under_its_name(run):
    assert sorted(clients_of(run)) == sorted(NAMES)
    folders = {name: find(run, name) for name in NAMES}
    assert len({folder.name.lower() for folder in folders.values()}) >= len(NAMES) - 1  # Berlin, berlin
    assert len(set(folders.values())) == len(NAMES)
    for name, folder in folders.items():
        assert folder.parent == run / "clients"
        assert saved_models.describe(folder)["client"] == name
        assert len(folder.name) <= 120
    assert fedme.load_run(run)[".."] is not None


def test_every_client_is_in_the_table_and_the_report(run, fedme, capsys):
    code, out, _ = fedme("show", run, "--clients")
    assert code == 0
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "\\x1b[31mred\\u202e" in out
    assert fedme("report", run, "--output", run / "report.html")[0] == 0
    page = (run / "report.html").read_text()
    assert "\\\\u202e" in page
    assert "\u202e" not in page
    assert "\x1b" not in page


@given(st.lists(st.text(st.characters(), max_size=400), min_size=2, max_size=4, unique=True))
def test_folders_of_different_names_differ(tmp_path_factory, names):
    run = tmp_path_factory.getbasetemp() / "x"
    folders = [saved_models.folder_of(run, name) for name in names]
    assert len(set(folders)) == len(names)
    for name, folder in zip(names, folders, strict=True):
        assert folder.parent == run / "clients"
        assert 0 < len(folder.name) <= 120
        assert folder.name not in (".", "..")
        assert saved_models.HASHED in folder.name or saved_models.client_of(folder) == name


def test_cells_of_a_table_cannot_move_the_cursor(capsys):
    evil = "\x1b[2J\x1b]0;owned\x07\u202egood\u2066\r\n" + "x" * 20_000_000
    for style in ("table", "markdown", "csv", "latex"):
        render(evil, ["client", evil], [[evil, "1"]], style, Console(width=400))
        shown = capsys.readouterr().out
        assert not {"\x1b", "\x07", "\u202e", "\u2066", "\r"} & set(shown)
        assert len(shown) < 20_000
    assert views.private({"epsilon": {evil: 1.0}, "delta": 1e-5}).isprintable()
