"""`fedme reproduce`, run for real at smoke scale."""

import csv
import io
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedme.config.experiment import parse
from fedme.reproduction import catalogue, comparison_tables, figures, findings, measured, results_page
from fedme.reproduction.planned_runs import RunFolders, experiment
from fedme.results import summary
from fedme.running.run_queue import identity

RESULTS = catalogue.results()


def made(fedme, root, name, *words):
    code, out, err = fedme("reproduce", name, "--scale", "smoke", "--runs", root, "--quiet", "--json", *words)
    assert code == 0, err
    return json.loads(out)[0]


@pytest.mark.needs("matplotlib")
def test_every_result_at_smoke_scale(fedme, smoke):
    code, out, err = fedme("reproduce", "all", "--scale", "smoke", "--runs", smoke, "--quiet", "--json", "--jobs", "1")
    assert code == 0, err
    sheets = json.loads(out)
    assert [sheet["name"] for sheet in sheets] == list(RESULTS)
    for sheet in sheets:
        check(sheet, RESULTS[sheet["name"]], smoke / "tables")


def check(sheet, result, tables):
    """Right rows, right columns, a number in every place, files in every format."""
    if result.rows:
        assert [(row[""], row["column"]) for row in sheet["rows"]] == [(cell.row, cell.column) for cell in result.cells]
        assert {row["column"] for row in sheet["rows"]} == {column.name for column in result.columns}
    else:
        curves = [(panel.title, series.name) for panel in result.panels for series in panel.series]
        assert [(row["panel"], row["curve"]) for row in sheet["rows"]] == curves
    ours = "ours %" if result.rows and result.unit == "%" else "ours"
    assert all(re.fullmatch(r"\d+(\.\d+)?", row[ours]) for row in sheet["rows"]), sheet["rows"]
    assert "shows that it runs, nothing else" in sheet["notes"][0]
    drawn = {"png", "pdf"} if result.panels or result.plot else set()
    suffixes = {path.suffix[1:] for path in tables.glob(f"{result.name}-smoke.*")}
    assert suffixes == {"md", "csv", "tex"} | drawn
    table = list(csv.reader(io.StringIO((tables / f"{result.name}-smoke.csv").read_text())))
    assert len(table) == 1 + len(sheet["rows"])


def test_list_shows_every_result_and_its_cost(fedme):
    code, out, _ = fedme("reproduce", "--list", "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["name"] for row in rows] == list(RESULTS)
    costs = {row["name"]: (row["full"], row["smoke"]) for row in rows}
    assert costs["fedme-table7"] == ("months", "a minute")


def test_rates_are_searched_by_validation(fedme, tmp_path):
    words = ("reproduce", "--rates", "femnist/hypcluster", "--scale", "smoke", "--runs", tmp_path, "--quiet", "--json")
    code, out, err = fedme(*words)
    assert code == 0, err
    (row,) = json.loads(out)
    assert (row["run"], row["model"], row["in use"]) == ("femnist/hypcluster", "fine-tuned", "0.0316")
    rates = ("0.01", "0.0316", "0.1", "0.316")
    best = max(float(row[rate]) for rate in rates)
    assert float(row[row["best"]]) == best
    folder = tmp_path / "rates" / "smoke" / "femnist-hypcluster-lr0.1"
    lines = {(r["stage"], r["split"]): r["accuracy"]["client_mean"] for r in summary.read(folder)["results"]}
    assert float(row["0.1"]) == pytest.approx(100 * lines["finetuned", "val"], abs=0.01)
    assert fedme(*words)[1] == out  # nothing is run twice, and nothing changes
    code, _, err = fedme("reproduce", "--rates", "femnist/hypclusters")
    assert (code, "did you mean 'femnist/hypcluster'?" in err) == (2, True)


def test_only_some_cells(fedme, tmp_path):
    sheet = made(fedme, tmp_path, "pfml-table3", "--only", "PM/MLR, lambda 20", "--seeds", "2")
    assert [row[""] for row in sheet["rows"]] == ["PM"]
    assert sheet["rows"][0]["seeds"] == "2"
    assert "±" in sheet["rows"][0]["ours %"]
    assert sorted(path.name for path in (tmp_path / "smoke").iterdir()) == [f"pfml-synthetic-mlr-pfml-u5-s{s}" for s in (0, 1)]
    code, _, err = fedme("reproduce", "pfml-table3", "--scale", "smoke", "--runs", tmp_path, "--only", "PM/nothing")
    assert code == 2
    assert "'MLR, lambda 20'" in err.replace("\n", " ")


def test_rows_may_have_a_slash_of_their_own(fedme, smoke):
    sheet = made(fedme, smoke, "fedme-table7", "--only", "FedAvg w/ fine-tuning/IID")
    assert [(row[""], row["column"]) for row in sheet["rows"]] == [("FedAvg w/ fine-tuning", "IID")]
    assert len(made(fedme, smoke, "fedme-table7", "--only", "FedAvg w/o fine-tuning/", "--no-runs")["rows"]) == 4
    assert len(made(fedme, smoke, "pfml-table3", "--only", "PM", "--no-runs")["rows"]) == 4


def test_only_some_curves(fedme, tmp_path):
    sheet = made(fedme, tmp_path, "fml-figure6", "--only", "alone/ten classes, LeNet5")
    assert [(row["curve"], row["panel"]) for row in sheet["rows"]] == [("alone", "ten classes, LeNet5")]
    assert [path.name for path in (tmp_path / "smoke").iterdir()] == ["fml-cifar10-tasks-local-s0"]
    told = findings.gather(RunFolders(tmp_path, "smoke"))
    whole = comparison_tables.sheet(RESULTS["fml-figure6"], told)
    # The run answers for the other client's curve too: the command names both, and nothing else.
    words = "--only 'alone/ten classes, LeNet5' --only 'alone/the other task, CNN1'"
    assert comparison_tables.commands(whole) == [f"fedme reproduce fml-figure6 --scale smoke --seeds 1 {words}"]
    code, _, err = fedme("reproduce", "fml-figure6", "--scale", "smoke", "--runs", tmp_path, "--only", "a/b")
    assert code == 2
    assert "its curves are 'FML', 'alone', its panels 'ten classes, LeNet5'," in err.replace("\n", " ")


def test_without_matplotlib_everything_else_is_there(fedme, smoke, monkeypatch):
    monkeypatch.setattr(figures, "possible", lambda: False)
    code, out, err = fedme("reproduce", "fml-figure6", "--scale", "smoke", "--runs", smoke, "--quiet")
    assert code == 0
    assert "LeNet5" in out
    assert "fedme[plots]" in err
    assert fedme("reproduce", "--page", smoke / "page.md", "--runs", smoke, "--quiet")[0] == 0  # nothing finished to draw


def test_a_wrong_name_is_an_error_that_helps(fedme, tmp_path):
    code, _, err = fedme("reproduce", "pfml-tabel3")
    assert code == 2
    assert "did you mean 'pfml-table3'" in err
    assert fedme("reproduce")[0] == 2


def test_what_is_finished_is_not_run_again(fedme, tmp_path):
    made(fedme, tmp_path, "pfml-table3")
    spot = RunFolders(tmp_path, "smoke")
    folder = spot.folder("pfml-synthetic-mixed/lam20", 0)
    before = (folder / "metrics.jsonl").stat().st_mtime_ns
    again = made(fedme, tmp_path, "pfml-table3")
    assert (folder / "metrics.jsonl").stat().st_mtime_ns == before
    assert made(fedme, tmp_path, "pfml-table3", "--no-runs") == again


def test_another_experiment_in_its_place_is_refused(fedme, tmp_path):
    made(fedme, tmp_path, "pfml-table3", "--only", "/MLR, lambda 20")
    config = RunFolders(tmp_path, "smoke").folder("pfml-synthetic-mlr/pfml-u5", 0) / summary.CONFIG
    config.write_text(config.read_text().replace("lr = 0.01", "lr = 0.02"))
    code, _, err = fedme("reproduce", "pfml-table3", "--scale", "smoke", "--runs", tmp_path, "--quiet")
    assert code == 2
    assert "holds another experiment" in err


def test_results_of_other_settings_do_not_count(fedme, tmp_path):
    made(fedme, tmp_path, "pfml-table3", "--only", "/MLR, lambda 20")
    spot = RunFolders(tmp_path, "smoke")
    path = spot.folder("pfml-synthetic-mlr/pfml-u5", 0) / measured.NAME
    assert list(findings.gather(spot).runs["pfml-synthetic-mlr/pfml-u5"]) == [0]
    path.write_text(path.read_text().replace('"lam": 20.0', '"lam": 21.0'))
    assert "pfml-synthetic-mlr/pfml-u5" not in findings.gather(spot).runs


def test_data_that_is_missing_keeps_only_its_own_cells(fedme, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDME_DATA", str(tmp_path / "nowhere"))
    words = ("--scale", "small", "--runs", tmp_path, "--quiet", "--only", "model 1/FEMNIST")
    code, out, err = fedme("reproduce", "fedme-table5", *words)
    assert code == 1
    assert "not run: femnist/fedme-model-1, seed 0: femnist" in err.replace("\n", " ")
    assert "74.80" in out


@pytest.mark.slow
def test_a_killed_run_goes_on(fedme, tmp_path):
    words = [sys.executable, "-m", "fedme", "reproduce", "pfml-table1", "--scale", "smoke", "--jobs", "2", "--quiet"]
    process = subprocess.Popen([*words, "--runs", tmp_path / "killed"], start_new_session=True, stdout=subprocess.DEVNULL)
    finished = tmp_path / "killed" / "smoke"
    deadline = time.monotonic() + 120
    while not list(finished.glob("*/summary.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert list(finished.glob("*/summary.json"))
    ended(process.pid)
    assert made(fedme, tmp_path / "killed", "pfml-table1") == made(fedme, tmp_path / "whole", "pfml-table1")


def ended(session):
    """Wait until every process of a session has noticed that the first one is gone, and has ended too."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        stats = [path.read_text().rpartition(")")[2].split() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
        if not any(int(stat[3]) == session and stat[0] != "Z" for stat in stats):
            return
        time.sleep(0.1)
    pytest.fail("processes of a killed command are still there")


@pytest.mark.slow
def test_interrupted_politely(tmp_path):
    words = [sys.executable, "-m", "fedme", "reproduce", "pfml-table1", "--scale", "smoke", "--jobs", "2", "--quiet"]
    process = subprocess.Popen([*words, "--runs", tmp_path], start_new_session=True, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "smoke").glob("*/summary.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (0, 130)
    if process.returncode == 130:
        assert "the same command continues" in err
        assert "Traceback" not in err


@pytest.mark.needs("matplotlib")
def test_the_page_and_its_archive(fedme, tmp_path, smoke, monkeypatch):
    made(fedme, smoke, "pfml-table3")
    monkeypatch.setattr(results_page, "SCALES", ("smoke",))
    target = tmp_path / "docs" / "reproduction.md"
    target.parent.mkdir()
    code, _, _ = fedme("reproduce", "--page", target, "--runs", smoke, "--quiet")
    assert code == 0
    folder = tmp_path / "docs" / "reproduction"
    pages = {path: path.read_text() for path in (target, *folder.glob("*.md"))}
    assert sorted(path.stem for path in pages) == sorted(["plan", "reproduction", *catalogue.PAPERS])
    assert all(f"(reproduction/{paper}.md)" in pages[target] for paper in catalogue.PAPERS)
    assert "## Table 3" in pages[folder / "pfml.md"]
    assert "```\nfedme reproduce pfml-table3 --scale smoke --seeds 1\n```" in pages[folder / "pfml.md"]
    assert (folder / "pfml-table3-smoke.tex").exists()
    for path in pages:
        path.unlink()
    assert fedme("reproduce", "--page", target, "--runs", tmp_path / "no-runs-here", "--quiet")[0] == 0
    assert {path: path.read_text() for path in pages} == pages  # from the archive alone
    words = ["reproduce", "pfml-table3", "--scale", "smoke", "--seeds", "1", "--runs", tmp_path / "nor-here", "--quiet"]
    for path in pages:
        path.unlink()
    code, out, _ = fedme(*words, "--page", target, "--json")  # the command of the page
    assert code == 0
    assert len(json.loads(out)[0]["rows"]) == 8
    assert not list((tmp_path / "nor-here").glob("smoke/*"))
    assert {path: path.read_text() for path in pages} == pages
    rows = json.loads(fedme(*words, "--no-runs", "--json")[1])[0]["rows"]  # without the archive
    assert not any(row["ours %"] for row in rows)


def test_a_damaged_archive_says_where(tmp_path):
    path = tmp_path / "full.jsonl"
    path.write_text('{"run": "a/b", "seed": 0, "config": 7}\n')
    with pytest.raises(findings.RunError, match="line 1"):
        findings.read_archive(path)


@pytest.mark.parametrize("scale", ["full", "small"])
def test_the_published_archive_is_of_the_present_settings(scale):
    """Runs of other settings would be left out of the published tables. A change of defaults or presets shows here."""
    archive = Path(__file__).parents[2] / "docs/reproduction" / f"{scale}.jsonl"
    archived = findings.read_archive(archive)
    assert archived
    for (name, seed), run in archived.items():
        assert identity(parse(run.config).plain()) == identity(experiment(name, scale, seed)), name
