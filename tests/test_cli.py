import csv
import io
import json
import sys
from pathlib import Path

import pytest

from fedme import cli
from fedme.experiment import config
from fedme.methods import METHODS

QUICK = ["rounds=2", "partition.clients=3", "partition.name=iid", "data.limit=90", "models.pool=['mlr']", "models.assign=mlr"]


@pytest.fixture
def fedme(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["fedme", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return end.value.code or 0, said.out, said.err

    return call


@pytest.fixture
def runs(fedme):
    for seed in (0, 1):
        code, _, err = fedme("run", "digits-fedavg", *QUICK, f"seed={seed}", f"output=r{seed}", "--quiet")
        assert code == 0
        assert err == ""
    return ["r0", "r1"]


def test_run_prints_progress_to_stderr_and_results_to_stdout(fedme):
    code, out, err = fedme("run", "digits-fedavg", *QUICK)
    assert code == 0
    assert "round 2/2" in err
    assert "validation accuracy" in err
    assert "personal" in out
    assert Path("runs/digits-fedavg/summary.json").exists()


def test_overrides_without_a_file_run_the_demo(fedme):
    code, out, _ = fedme("run", *QUICK, "--json", "-q")
    assert code == 0
    assert json.loads(out)["method"] == "fedme"


def test_show_and_compare_in_all_formats(fedme, runs):
    assert "accuracy %" in fedme("show", "r0")[1]
    assert json.loads(fedme("show", "r0", "--json")[1])["seed"] == 0
    table = fedme("compare", *runs)[1]
    assert "±" in table
    rows = list(csv.reader(io.StringIO(fedme("compare", *runs, "--format", "csv")[1])))
    assert rows[0][:3] == ["run", "method", "model"]
    assert {row[2] for row in rows[1:]} == {"personal = global", "personal, fine-tuned"}
    assert all(row[5] == "2" for row in rows[1:])
    assert fedme("compare", *runs, "--format", "markdown")[1].startswith("| run | method |")
    latex = fedme("compare", *runs, "--format", "latex")[1]
    assert "\\begin{tabular}" in latex
    assert "$\\pm$" in latex
    lines = json.loads(fedme("compare", *runs, "--json")[1])
    mean = sum(lines[0]["client_mean"]) / 2
    assert f"{mean:.2f} ±" in table
    assert fedme("compare", *runs, "--best", "--split", "val")[0] == 0


def test_compare_over_seeds_uses_ddof_one(fedme, runs):
    lines = json.loads(fedme("compare", *runs, "--json")[1])
    a, b = lines[0]["client_mean"]
    assert f"± {abs(a - b) / 2**0.5:.2f}" in fedme("compare", *runs)[1]


@pytest.mark.parametrize("what", ["methods", "datasets", "models", "partitions", "presets"])
def test_lists(fedme, what):
    code, out, _ = fedme("list", what)
    assert code == 0
    assert out
    rows = json.loads(fedme("list", what, "--json")[1])
    assert all(row["name"] for row in rows)
    if what == "methods":
        assert [row["name"] for row in rows] == list(METHODS)


def test_data_show(fedme):
    code, out, _ = fedme("data", "show", "digits-fedme", "partition.clients=5", "--first", "2")
    assert code == 0
    assert "digest" in out
    division = json.loads(fedme("data", "show", "digits-fedme", "partition.clients=5", "--json")[1])
    assert sum(sum(c["labels"].values()) for c in division["clients"].values()) == 1797 - 200
    assert sum(c["train"] + c["val"] + c["test"] for c in division["clients"].values()) == 1797 - 200


def test_resume_of_a_finished_run_says_so(fedme, runs):
    code, _, err = fedme("resume", "r0")
    assert code == 0
    assert "finished already" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "nothing.toml"), "no such file"),
        (("run", "digits-fedavg", "train.lr=quick"), "train.lr: must be a number"),
        (("run", "digits-fedavg", "models.pool=['dnm-64']"), "Did you mean"),
        (("run", "digits-fedavg", "models.pool=['vgg11']"), "vgg11"),
        (("run", "digits-local", "models.assign={0='mlr'}"), "models.assign"),
        (("run", "digits-fedavg", "partition.clients=5000"), "5000"),
        (("run", "digits-fedme", "data.val=0"), "data.val"),
        (("run", "digits-fedme", "data.unlabeled=0", "models.assign=mlr"), "needs unlabeled data"),
        (("run", "digits-fedavg", "method.name=fedmd"), "needs labelled public data"),
        (("run", "digits-fedavg", "models.max_parameters={77=5}"), "there is no such client"),
        (("show", "nowhere"), "not a run directory"),
        (("resume", "nowhere"), "not a run directory"),
        (("compare", "nowhere"), "not a run directory"),
        (("list", "method"), "cannot be listed"),
        (("run", "shakespeare-fedme", "rounds=1"), "FEDME_DATA"),
    ],
)
def test_errors_are_one_line_that_helps(fedme, words, said, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDME_DATA", str(tmp_path / "empty"))
    code, out, err = fedme(*words)
    assert code == 2
    assert said in err
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    assert out == ""
    assert not list(Path().glob("runs/*"))


def test_demo_runs_and_compares(fedme, monkeypatch):
    real = config.load
    monkeypatch.setattr(cli, "load", lambda name: real(name, ["rounds=1", "models.pool=['mlr','dnn-8']", "models.assign=mlr"]))
    code, out, _ = fedme("demo", "--quiet")
    assert code == 0
    assert all(name in out for name in ("digits-local", "digits-fedavg", "digits-fedme", "personal, fine-tuned"))


def test_a_network_of_ones_own_is_found_in_the_working_directory(fedme):
    Path("nets.py").write_text(
        "from torch import nn\n"
        "def net(shape, classes, width=4):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.Linear(width, classes))\n"
        "def wrong(width=4):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width))\n"
    )
    spec = "models.pool=[{name = 'nets:net', width = 6}]"
    code, _, err = fedme("run", "digits-fedavg", *QUICK[:-2], spec, "output=own", "-q")
    assert (code, err) == (0, "")
    about = json.loads(Path("own/clients/0/model.json").read_text())
    assert about["arch"] == "nets:net(width=6)"
    code, _, err = fedme("run", "digits-fedavg", *QUICK[:-2], "models.pool=['nets:wrong']", "output=bad", "-q")
    assert code == 2
    assert "expected shape (2, 10)" in err
