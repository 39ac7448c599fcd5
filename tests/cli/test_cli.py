import csv
import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from rich.console import Console

from fedme.cli import app
from fedme.config import experiment
from fedme.methods import METHODS

QUICK = ["rounds=2", "partition.clients=3", "partition.name=iid", "data.limit=90", "models.pool=['mlr']", "models.assign=mlr"]


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def runs(fedme):
    for seed in (0, 1):
        code, _, err = fedme("run", "digits-fedavg", *QUICK, f"seed={seed}", f"output=r{seed}", "--quiet")
        assert code == 0
        assert "round" not in err
    return ["r0", "r1"]


def test_run_prints_progress_to_stderr_and_results_to_stdout(fedme):
    code, out, err = fedme("run", "digits-fedavg", *QUICK)
    assert code == 0
    assert "round 2/2" in err
    assert "validation" in err
    assert "run directory: runs/digits-fedavg" in err
    assert "personal" in out
    assert Path("runs/digits-fedavg/summary.json").exists()


def test_overrides_without_a_file_run_the_demo(fedme):
    code, out, _ = fedme("run", *QUICK, "--json", "-q")
    assert code == 0
    assert json.loads(out)["method"] == "fedme"


def test_show_and_compare_in_all_formats(fedme, runs):
    assert "accuracy %" in fedme("show", "r0")[1]
    assert json.loads(fedme("show", "r0", "--json")[1])["seed"] == 0
    clients = json.loads(fedme("show", "r0", "--clients", "--json")[1])
    assert [row["client"] for row in clients] == ["0", "1", "2"]
    assert set(clients[0]) >= {"arch", "val", "test", "test, fine-tuned", "samples"}
    assert "mlr" in fedme("show", "r0", "-c")[1]
    table = fedme("compare", *runs)[1]
    assert "±" in table
    rows = list(csv.DictReader(io.StringIO(fedme("compare", *runs, "--format", "csv")[1])))
    assert {row["model"] for row in rows} == {"global", "personal"}
    assert {row["stage"] for row in rows} == {"round", "finetuned"}
    assert all(row["seeds"] == "2" and 0 < float(row["accuracy_mean"]) < 1 for row in rows)
    assert fedme("compare", *runs, "--format", "markdown")[1].startswith("| run | method |")
    latex = fedme("compare", *runs, "--format", "latex")[1]
    assert "\\begin{tabular}" in latex
    assert "$\\pm$" in latex
    line = json.loads(fedme("compare", *runs, "--json")[1])[0]
    assert f"{100 * sum(line['client_mean']) / 2:.2f} ±" in table
    assert [Path(folder).name for folder in line["folders"]] == runs
    assert fedme("compare", *runs, "--best", "--split", "val")[0] == 0


def test_tables_fit_narrow_terminals(fedme, runs, monkeypatch):
    monkeypatch.setattr("fedme.cli.result_commands.out", Console(width=80))
    for words in (("show", "r0"), ("compare", *runs), ("show", "r0", "-c")):
        lines = fedme(*words)[1].splitlines()
        assert max(map(len, lines)) <= 80
        assert not any(line.strip().startswith(("%", "e ", "l ")) for line in lines)


def test_compare_over_seeds_uses_ddof_one(fedme, runs):
    a, b = json.loads(fedme("compare", *runs, "--json")[1])[0]["client_mean"]
    assert f"± {100 * abs(a - b) / 2**0.5:.2f}" in fedme("compare", *runs)[1]


def test_one_run_is_never_counted_twice(fedme, runs):
    assert "±" not in fedme("compare", "r0", "r0")[1].split("\n", 2)[2]
    fedme("run", "digits-fedavg", *QUICK, "seed=0", "output=again", "-q")
    code, _, err = fedme("compare", "r0", "again")
    assert code == 2
    assert "the same experiment with the same seed" in err


def test_runs_are_told_apart_by_what_differs(fedme, runs):
    fedme("run", "digits-fedavg", *QUICK, "seed=0", "output=slow", "train.lr=0.01", "-q")
    out = fedme("compare", "r0", "slow")[1]
    assert "train.lr=0.1" in out
    assert "train.lr=0.01" in out


def test_an_unfinished_run_can_be_looked_at(fedme, runs):
    Path("r0/summary.json").unlink()
    code, out, _ = fedme("show", "r0")
    assert code == 0
    assert "UNFINISHED: 2 of 2 rounds" in out
    assert "not finished" in fedme("compare", "r0")[2]
    assert "it holds 2: r0, r1" in fedme("show", ".")[2]


def test_a_finished_run_with_an_edited_configuration_is_not_passed_off(fedme, runs):
    path = Path("r0/config.toml")
    path.write_text(path.read_text().replace("rounds = 2", "rounds = 3"))
    code, _, err = fedme("resume", "r0")
    assert code == 2
    assert "another configuration" in err


def test_config_prints_a_file_that_runs(fedme):
    code, out, _ = fedme("config", "digits-fedavg", *QUICK)
    assert code == 0
    Path("own.toml").write_text(out)
    assert fedme("run", "own.toml", "-q", "output=own")[0] == 0
    assert fedme("config", "own.toml")[1] == out


def test_every_command_argument_and_option_is_explained():
    def walk(name, command):
        assert command.help, name
        for param in command.params:
            assert param.help, f"{name}: {param.name}"
        for child, inner in getattr(command, "commands", {}).items():
            walk(f"{name} {child}", inner)

    walk("fedme", typer.main.get_command(app))


def test_version(fedme):
    code, out, errors = fedme("--version")
    assert (code, errors) == (0, "")
    assert re.fullmatch(r"fedme 0\.1\.0\n(no )?compiled code: .+\n", out)


def test_notes_are_said_and_kept_even_when_quiet(fedme):
    code, _, err = fedme(
        "run", "digits-fedme", *QUICK[:-2], "models.selection_rounds=1", "method.name=fedavg", "output=n", "-q"
    )
    assert code == 0
    assert "the shared model is mlr" in err
    assert any("shared model is mlr" in note for note in json.loads(Path("n/environment.json").read_text())["notes"])


def test_explain_engine(fedme):
    code, _, err = fedme("run", "digits-fedavg", *QUICK, "output=e", "--explain-engine", "-q", "engine.path=stacked")
    assert code == 0
    assert "train: 9 operations stacked" in err  # three clients, two rounds and fine-tuning
    assert "train: 9 operations stacked" in Path("e/engine.log").read_text()


@pytest.mark.parametrize("what", ["methods", "datasets", "models", "partitions", "presets", "settings"])
def test_lists(fedme, what):
    code, out, _ = fedme("list", what)
    assert code == 0
    assert out
    rows = json.loads(fedme("list", what, "--json")[1])
    assert all(row["name"] for row in rows)
    if what == "methods":
        assert [row["name"] for row in rows] == list(METHODS)


def test_settings_are_explained(fedme):
    rows = {row["setting"]: row for row in json.loads(fedme("list", "methods", "fedme", "--json")[1])}
    assert rows["tuning"] == {
        "setting": "tuning",
        "default": "true",
        "about": "MT: a client adopts the guest model if it is better",
    }
    assert rows["order"]["about"].startswith("simultaneous | alternating; ")
    assert all(row["about"] for name in METHODS for row in json.loads(fedme("list", "methods", name, "--json")[1]))
    assert fedme("list", "partitions", "dirichlet")[0] == 0
    rows = {row["setting"]: row for row in json.loads(fedme("list", "settings", "train", "--json")[1])}
    assert rows["optimizer"]["about"].startswith("sgd | adam | adamw; ")
    assert rows["lr_schedule"] == {
        "setting": "lr_schedule",
        "default": '"constant"',
        "about": "constant | step | cosine; how the learning rate changes over the rounds",
    }
    assert "did you mean 'train'" in fedme("list", "settings", "trian")[2]
    assert "did you mean 'fedme'" in fedme("list", "methods", "fedmee")[2]


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
    assert "already finished" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "nothing.toml"), "no such file"),
        (("run", "digits-fedavg", "train.lr=quick"), "train.lr: must be a number"),
        (("run", "digits-fedavg", "models.pool=['dnm-64']"), "Did you mean"),
        (("run", "digits-fedavg", "models.pool=['vgg11']"), "vgg11"),
        (("run", "digits-local", "models.assign={0='mlr'}"), "models.assign"),
        (("run", "digits-fedavg", "partition.clients=5000"), "5000"),
        (("run", "digits-local", "data.val=0"), "data.val"),
        (("run", "digits-fedavg", "method.name=fedmd"), "needs labelled public data"),
        (("run", "digits-fedavg", "models.max_parameters={77=5}"), "unknown client"),
        (("show", "nowhere"), "not a run directory"),
        (("resume", "nowhere"), "not a run directory"),
        (("compare", "nowhere"), "not a run directory"),
        (("run", "digits-fedavg", "models.pool=[mlr]"), "needs quotes"),
        (("run", "digits-fedavg", "models.pool=['mlr','mlr']"), "names an architecture twice"),
        (("run", "digits-fedavg", "name=a/b"), "must be usable as a directory name"),
        (("run", "digits-fedavg", "round=5"), "round: unknown key; did you mean 'rounds'?"),
        (("run", "shakespeare-fedme", "rounds=1"), "FEDME_DATA"),
    ],
)
def test_errors_are_one_line_that_helps(fedme, words, message, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDME_DATA", str(tmp_path / "empty"))
    code, out, err = fedme(*words)
    assert code == 2
    assert message in err
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    assert out == ""
    assert not list(Path().glob("runs/*"))


def test_demo_runs_and_compares(fedme, monkeypatch):
    real = experiment.load
    monkeypatch.setattr(
        "fedme.cli.demo_command.load", lambda name: real(name, ["rounds=1", "models.pool=['mlr','dnn-8']", "models.assign=mlr"])
    )
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
    assert code == 0, err
    about = json.loads(Path("own/clients/0/model.json").read_text())
    assert about["arch"] == "nets:net(width=6)"
    code, _, err = fedme("run", "digits-fedavg", *QUICK[:-2], "models.pool=['nets:wrong']", "output=bad", "-q")
    assert code == 2
    assert "must return shape (2, 10)" in err


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def cost(own, guest):\n    return 1", "TypeError"),
        ("def cost(candidate):\n    return candidate.loss", "AttributeError"),
        ("def cost(candidate):\n    return 'small'", "returns a str"),
    ],
)
def test_a_criterion_that_cannot_work_is_refused_at_once(fedme, code, message, monkeypatch):
    Path("mycosts.py").write_text(code)
    monkeypatch.delitem(sys.modules, "mycosts", raising=False)
    status, _, err = fedme("run", "digits-fedme", "method.adopt=mycosts:cost")
    sys.modules.pop("mycosts", None)
    assert status == 2
    assert message in err
    assert "smaller is better" in err


def test_requirements_are_checked_before_architectures_are_chosen(fedme):
    code, _, err = fedme("run", "digits-fedme", "method.name=fedmd")
    assert code == 2
    assert "needs labelled public data" in err
    assert "choosing" not in err


def test_fedme_without_unlabeled_data_works_with_one_cluster_and_says_so(fedme):
    code, _, err = fedme("run", "digits-fedme", *QUICK, "data.unlabeled=0", "method.clusters=2", "output=one", "-q")
    assert code == 0
    assert "all models are in one cluster" in err
    notes = [json.loads(line).get("notes", {}) for line in Path("one/metrics.jsonl").read_text().splitlines()]
    assert {note["cluster"] for note in notes if "cluster" in note} == {0}


@pytest.fixture
def models(fedme, tmp_path):
    for name, seed in (("a", 1), ("b", 2), ("new", 3)):
        x = np.random.default_rng(seed).normal(size=(40, 3))
        np.savez(tmp_path / f"{name}.npz", x=x, kind=np.where(x[:, 0] > 0, "up", "down"))
    tables = "".join(f'[clients.{name}]\ndata = "{name}.npz"\n' for name in "ab")
    Path("own.toml").write_text(f'rounds = 2\n[data]\nlabel = "kind"\n{tables}')
    assert fedme("run", "own.toml", "output=run", "-q")[0] == 0
    return "run"


def test_saved_models_are_used_from_the_command_line(fedme, models):
    np.savez("inputs.npz", x=np.load("new.npz")["x"])
    code, out, _ = fedme("predict", models, "inputs.npz", "--client", "a")
    assert code == 0
    assert fedme("predict", models, "new.npz", "--client", "a")[1] == out  # labels may be there
    assert out.splitlines()[0] == "prediction,p(down),p(up)"
    assert len(out.splitlines()) == 41
    code, text, _ = fedme("predict", f"{models}/clients/a", "inputs.npz", "--output", "p.csv")
    assert (code, text, Path("p.csv").read_text()) == (0, "", out)
    code, out, _ = fedme("evaluate", models, "new.npz", "-c", "a", "--json")
    assert code == 0
    assert json.loads(out)["samples"] == 40
    code, out, _ = fedme("export", models, "-c", "b", "--to", "safetensors")
    assert (code, out.strip()) == (0, "b.safetensors")
    assert Path("b.json").exists()
    code, out, _ = fedme("export", models, "-c", "b", "-o", "out/c.safetensors")  # the suffix names the format
    assert (code, out.strip()) == (0, "out/c.safetensors")
    code, out, _ = fedme("join", models, "--data", "new.npz", "--name", "n", "--json")
    assert code == 0
    assert json.loads(out)["started_from"] in ("a", "b")
    assert fedme("predict", models, "inputs.npz", "-c", "n", "--finetuned")[0] == 0


def test_what_is_wrong_with_a_model_or_its_samples_is_one_line(fedme, models):
    for words, message in [
        (("predict", models, "a.npz"), "give the name of a client (--client); there are a, b"),
        (("predict", models, "no.npz", "-c", "a"), "no such file"),
        (("evaluate", models, "new.npz", "-c", "z"), "unknown client 'z'"),
        (
            ("export", models, "-c", "a"),
            "no format is given; pass --to, or an --output with the suffix of a format: onnx (.onnx)",
        ),
        (("export", models, "-c", "a", "-o", "a.bin"), "a.bin: no format has this suffix"),
        (("join", models, "--data", "new.npz", "--name", "a"), "already has a client called 'a'"),
        (("join", ".", "--data", "new.npz"), "not a run directory"),
        (("predict", ".", "new.npz", "-c", "a"), "no saved models"),
    ]:
        code, _, err = fedme(*words)
        assert code == 2
        assert message in err.replace("\n", " ")


def test_does_joining_help(fedme, runs):
    assert "Does joining help? `fedme verdict r0`" in fedme("show", "r0")[1]
    code, out, err = fedme("verdict", "r0")
    assert code == 0, err
    assert "training every client on its own samples alone" in err
    assert "Compared with the best that each client could train alone: " in out
    assert "Compared with the best" in fedme("show", "r0")[1]
    code, out, err = fedme("verdict", *runs, "--json")
    assert code == 0, err
    verdict = json.loads(out)
    assert {client["seeds"] for client in verdict["clients"]} == {2}
    assert set(verdict["overall"]) >= {"better", "worse", "open", "mean", "low", "high", "words"}
    rows = list(csv.DictReader(io.StringIO(fedme("verdict", "r1", "--format", "csv")[1])))
    assert [row["client"] for row in rows] == ["0", "1", "2"]
    assert {row["verdict"] for row in rows} <= {"join", "do not join", "cannot tell"}
    code, _, err = fedme("run", "digits-local", *QUICK, "output=r2", "-q")
    code, _, err = fedme("verdict", "r0", "r2")
    assert (code, "differ in more than their seed" in err) == (2, True)


def test_details_and_subgroups(fedme):
    draw = np.random.default_rng(0)
    for name in ("a", "b"):
        rows = ["age,sex,ill"]
        for _ in range(80):
            age, sex = draw.integers(20, 80), draw.choice(["f", "m"])
            rows.append(f"{age},{sex},{'yes' if age + 10 * (sex == 'm') > 50 else 'no'}")
        Path(f"{name}.csv").write_text("\n".join(rows) + "\n")
    lines = ["rounds = 2", "[data]", 'label = "ill"', "[method]", 'name = "fedavg"']
    lines += [line for name in ("a", "b") for line in (f"[clients.{name}]", f'data = "{name}.csv"')]
    # The column sex is no input of the model.
    for name in ("a", "b"):
        text = Path(f"{name}.csv").read_text().splitlines()
        Path(f"{name}-train.csv").write_text("\n".join(f"{r.split(',')[0]},{r.split(',')[2]}" for r in text) + "\n")
    Path("e.toml").write_text("\n".join(lines).replace(".csv", "-train.csv") + "\n")
    code, _, err = fedme("run", "e.toml", "output=r", "-q")
    assert code == 0, err
    code, out, err = fedme("evaluate", "r", "a.csv", "-c", "a", "--by", "sex", "--json", "--own")
    assert code == 0, err
    groups = json.loads(out)
    assert set(groups) == {"f", "m"}
    whole = json.loads(fedme("evaluate", "r", "a.csv", "-c", "a", "--json", "--own")[1])
    assert sum(group["correct"] for group in groups.values()) == whole["correct"]
    assert "sex" in fedme("evaluate", "r", "a.csv", "-c", "a", "--by", "sex")[1]
    assert "there is no column 'sexx'" in fedme("evaluate", "r", "a.csv", "-c", "a", "--by", "sexx")[2]
    assert "subgroups need at most 20" in fedme("evaluate", "r", "a.csv", "-c", "a", "--by", "age")[2]
    details = json.loads(fedme("evaluate", "r", "a.csv", "-c", "a", "--details", "--json", "--own")[1])
    assert sum(map(sum, details["confusion"])) == 80
    assert details["confusion"][0][0] + details["confusion"][1][1] == whole["correct"]
    out = fedme("evaluate", "r", "-c", "a", "--details", "--own")[1]  # on its own test part
    assert "sensitivity %" in out
    assert "Brier score" in out
    own = json.loads(fedme("evaluate", "r", "-c", "a", "--json", "--own")[1])
    assert own["samples"] == 20
    assert "there is no column 'sex'" in fedme("evaluate", "r", "-c", "a", "--by", "sex")[2]  # its file does not have it
    err = " ".join(fedme("evaluate", "r/clients/a", "--by", "sex")[2].split())
    assert "this is no run directory, so it does not say which samples are the test part; give a file" in err
