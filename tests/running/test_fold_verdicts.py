"""Verdicts over folds: every sample is tested once, finished folds are kept, and an interruption loses no finished one."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

import fedme
from fedme.artifacts import outputs as model_outputs, saved_models
from fedme.cli import app
from fedme.core.atomic_files import RunError
from fedme.core.key import Key
from fedme.results import verdicts
from fedme.running import fold_verdicts, run
from fedme.running.round_loop import Interrupted


def samples(count, seed):
    x = torch.randn(count, 2, generator=Key(seed).torch())
    return x, (x[:, 0] * x[:, 1] > 0).long()


def clients():
    given = [fedme.Client(f"site-{i}", train=samples(90, i)) for i in range(2)]
    return [*given, fedme.Client("tiny", train=samples(2, 9))]  # fewer samples than folds


POOL = {"pool": ["mlr", "dnn-16"], "assign": "mlr"}
SETTINGS = {"rounds": 4, "train": {"epochs": 5, "lr": 0.1, "momentum": 0.9}, "models": POOL}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    made = fedme.FedAvg(**SETTINGS).fit(clients(), output=tmp_path_factory.mktemp("runs") / "one", quiet=True)
    made.verdicts(quiet=True, folds=3)
    return made


def test_every_sample_is_tested_once(result):
    judged = {v.client: v for v in result.verdicts(quiet=True, folds=3)}
    assert {client: v.samples for client, v in judged.items()} == {"site-0": 90, "site-1": 90, "tiny": 2}
    assert {client: v.folds for client, v in judged.items()} == {"site-0": 3, "site-1": 3, "tiny": 2}
    folders = [result.folder / fold_verdicts.FOLDER / f"{number}-of-3" for number in (1, 2, 3)]
    tested = [model_outputs.read(saved_models.folder_of(folder, "site-0"))["test/targets"] for folder in folders]
    assert torch.cat(tested).sort().values.tolist() == samples(90, 0)[1].sort().values.tolist()
    gains = [v.main.gain for folder in folders for v in verdicts.read(folder) if v.client == "site-0"]
    assert judged["site-0"].main.gain == pytest.approx(sum(gains) / 3)
    assert judged["tiny"].decision == "cannot tell"


def test_a_repeat_trains_nothing(result, monkeypatch):
    monkeypatch.setattr(run, "start_or_resume", lambda *given: pytest.fail("a fold was trained again"))
    before = result.verdicts(quiet=True, folds=3)
    assert before == verdicts.read(result.folder, verdicts.FOLDS) == verdicts.strongest(result.folder)
    assert verdicts.read(result.folder) is None  # the verdict on the test parts is another one
    rows = result.rows(quiet=True, folds=3)
    assert [row["gain"] for row in rows] == [v.main.gain for v in before]
    assert [(row["samples"], row["federated"]) for row in rows] == [(v.samples, v.value) for v in before]
    assert "personal" not in rows[0]  # which would be the score on the run's own test part
    assert all(-1 <= v.main.low <= v.main.high <= 1 for v in before)


def test_an_interruption_keeps_finished_folds(result, tmp_path, monkeypatch):
    shutil.copytree(result.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / fold_verdicts.FOLDER / "3-of-3")
    again = fedme.api.result.Result(tmp_path / "run", result.experiment)
    inner, asked = run.start_or_resume, []

    def stopped(folder, *others):
        asked.append(folder.name)
        raise Interrupted("stopped after 1 of 4 rounds")

    monkeypatch.setattr(run, "start_or_resume", stopped)
    with pytest.raises(Interrupted, match=r"2 of 3 folds are finished, and `fedme verdict .*--folds 3` continues"):
        again.verdicts(quiet=True, folds=3)
    assert asked == ["3-of-3"]
    monkeypatch.setattr(run, "start_or_resume", inner)
    assert again.verdicts(quiet=True, folds=3) == result.verdicts(quiet=True, folds=3)


def test_what_is_refused(result, tmp_path):
    with pytest.raises(RunError, match="folds must be >= 2, got 1"):
        result.verdicts(quiet=True, folds=1)
    fold = fedme.FedAvg(**SETTINGS | {"rounds": 1}, data={"fold": "1/3"}).fit(clients(), output=tmp_path / "run", quiet=True)
    with pytest.raises(RunError, match=r"is a fold itself \(1/3\)"):
        fold.verdicts(quiet=True, folds=3)


def test_the_command(tmp_path):
    table = samples(40, 3)
    for name in ("a", "b"):
        lines = [f"{x[0]:.4f},{x[1]:.4f},{'yes' if y else 'no'}" for x, y in zip(*table, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["u,v,label", *lines]) + "\n")
    (tmp_path / "experiment.toml").write_text(
        "rounds = 2\n[data]\nlabel = 'label'\n[method]\nname = 'fedavg'\n"
        + "".join(f"[clients.{name}]\ndata = '{tmp_path / name}.csv'\n" for name in ("a", "b"))
    )
    runner, folder = CliRunner(), str(tmp_path / "run")
    assert runner.invoke(app, ["run", str(tmp_path / "experiment.toml"), f"output={folder}", "--quiet"]).exit_code == 0
    answer = runner.invoke(app, ["verdict", folder, "--folds", "2", "--margin", "90", "--json", "--quiet"])
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert [(v["client"], v["samples"], v["folds"]) for v in found["clients"]] == [("a", 40, 2), ("b", 40, 2)]
    assert all(v["margin"] == 0.9 and isinstance(v["equivalent"], bool) for v in found["clients"])
    assert found["overall"]["margin"] == 0.9
    shown = runner.invoke(app, ["show", folder])
    assert "Compared with the best that each client could train alone" in shown.stdout
    twice = runner.invoke(app, ["verdict", folder, folder, "--folds", "2"])
    assert twice.exit_code != 0
