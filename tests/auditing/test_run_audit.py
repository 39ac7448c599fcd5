"""The audit of real runs: a model that has learnt its samples by heart is found out, one that was trained privately is not."""

import json

import pytest

from fedme.auditing.run_audit import EVERYBODY, NAME
from fedme_test_runs import do, identical

HEART = [
    "data.test=0.5",
    "data.limit=160",
    "partition.clients=4",
    "models.pool=['dnn-64']",
    "models.shared=dnn-64",
    "train.epochs=20",
    "train.batch=5",
    "train.lr=0.3",
    "finetune.epochs=0",
    "rounds=2",
]


def whole(rows, **wanted):
    return [row for row in rows if row["client"] == EVERYBODY and wanted.items() <= row.items()]


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory):
    return do(tmp_path_factory.mktemp("audit") / "run", *HEART, "method=fedavg")


def test_what_was_learnt_by_heart_is_found_out(fedavg, fedme, tmp_path):
    before = {path.name: path.read_bytes() for path in fedavg.iterdir() if path.is_file()}
    code, out, err = fedme("audit", fedavg, "--json", "--shadows", "4")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert {(row["client"], row["seen by"], row["attack"]) for row in rows} == {
        (client, by, attack)
        for client in ("0", "1", "2", "3", EVERYBODY)
        for by in ("server", "clients")
        for attack in ("loss", "calibrated")
    }
    for row in whole(rows, **{"seen by": "server"}):
        assert row["auc_low"] > 0.5
    for client in "0123":
        mine = next(row for row in rows if row["client"] == client)
        assert 0 < mine["members"] < 30
        assert mine["arch"] == "dnn-64"
    assert json.loads((fedavg / NAME).read_text())["rows"] == rows
    after = {path.name: path.read_bytes() for path in fedavg.iterdir() if path.is_file() and path.name not in (NAME, ".lock")}
    assert {name: before[name] for name in after} == after  # a look changes nothing
    _, again, _ = fedme("audit", fedavg, "--json", "--shadows", "4")
    assert again == out
    _, table, _ = fedme("audit", fedavg, "--shadows", "2", "--clients", "--quiet")
    assert table.count("calibrated") == 10


def test_the_report_shows_it(fedavg, fedme):
    assert fedme("audit", fedavg, "--shadows", "2", "--quiet")[0] == 0
    assert fedme("report", fedavg)[0] == 0
    page = (fedavg / "report.html").read_text()
    assert "Audit: from what the server sees (model)" in page


def test_privately_trained_models_tell_less(fedavg, tmp_path, fedme):
    private = do(tmp_path / "private", *HEART, "method=fedavg", "privacy.epsilon=2")

    def auc(folder):
        out = fedme("audit", folder, "--json", "--shadows", "4")[1]
        return {row["attack"]: row["auc"] for row in whole(json.loads(out)["rows"], **{"seen by": "server"})}

    open_, closed = auc(fedavg), auc(private)
    assert all(closed[attack] < open_[attack] for attack in open_)


@pytest.mark.parametrize(
    ("method", "models"),
    [("fedme", {"own", "guest"}), ("fml", {"part"}), ("hypcluster", {"model"}), ("pfedme", {"model"}), ("mapper", {"model"})],
)
def test_what_the_server_sees_of_each_method(tmp_path, fedme, method, models):
    folder = do(tmp_path / "run", f"method={method}", "rounds=1", "finetune.epochs=0", "models.shared=mlr")
    code, out, err = fedme("audit", folder, "--json", "--shadows", "2")
    assert code == 0, err
    assert {row["model"] for row in whole(json.loads(out)["rows"], **{"seen by": "server"})} == models


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["method=local"], "share nothing"),
        (["method=centralized"], "give away the samples themselves"),
        (["method=fedmd"], "share outputs on public samples"),
        (["method=fml", "method.shared=1.", "models.shared=dnn-8"], "share no whole model"),
    ],
)
def test_methods_that_share_no_model_say_so(tmp_path, fedme, words, why):
    folder = do(tmp_path / "run", *words, "rounds=1", "finetune.epochs=0")
    code, _, err = fedme("audit", folder)
    assert code == 2
    assert why in " ".join(err.split())
    assert not (folder / NAME).exists()


def test_what_is_not_a_finished_run_is_refused(tmp_path, fedme):
    assert "not a run directory" in fedme("audit", tmp_path)[2]


def test_an_audited_run_is_still_the_same_run(fedavg, tmp_path):
    assert identical(fedavg, do(tmp_path / "again", *HEART, "method=fedavg"))
