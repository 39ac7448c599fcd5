"""Runs whose clients fail: through the command line, resumed to the same bits, every loss a row."""

import json

import pytest

from fedme.config.experiment import ConfigError, load
from fedme.config.identity import digest
from fedme.methods import METHODS
from fedme.results import records
from fedme.running import run
from fedme_test_runs import TINY, Killed, Watching, do, identical
from fedme_test_support import SITES

FAILING = ["faults.dropout=0.3", "faults.lost=0.2", "faults.deadline=2.0", "faults.spread=0.6", "faults.quorum=2"]
SCHEDULE = ["faults.join={3 = 1}", "faults.leave={0 = 2}"]


def losses(folder):
    rows = [row for row in records.read(folder) if "missing" in row.get("notes", {})]
    return {(row["round"], row["client"]): row["notes"]["missing"] for row in rows}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_completes_and_resumes_to_the_same_bits_when_clients_fail(name, tmp_path):
    words = [f"method.name={name}", "rounds=4", "evaluate_every=4", *FAILING, *SCHEDULE]
    words += ["method.public_epochs=1", "method.private_epochs=1"] if name == "fedmd" else []
    whole = do(tmp_path / "whole", *words)
    with pytest.raises(Killed):
        do(tmp_path / "cut", *words, fuse=25 if name in ("mapper", "fedmd") else 3 if name == "centralized" else 9)
    run.resume(tmp_path / "cut", Watching())
    assert identical(whole, tmp_path / "cut")
    assert sorted(path.parent.name for path in whole.glob("clients/*/model.safetensors")) == ["0", "1", "2", "3"]
    assert name == "centralized" or {why.split(":")[0] for why in losses(whole).values()} >= {
        "joins in round 1",
        "left in round 2",
    }
    assert all(isinstance(why, str) for why in losses(whole).values())


def test_a_round_below_the_quorum_is_told_and_the_run_goes_on(fedme, tmp_path):
    words = ["method.name=fedavg", "models.shared=mlr", "faults.dropped_in={0 = [1], 1 = [1], 2 = [1]}", "faults.quorum=0.5"]
    code, out, err = fedme("run", "digits-fedme", *TINY, *words, f"output={tmp_path / 'run'}", "--quiet")
    assert code == 0
    assert "Missing replies: 3 (dropped out), 1 (the round does not count)." in out
    assert "round 1 does not count: 1 of 2 needed replies came, after asking 3 times; the server keeps its state" in err
    assert losses(tmp_path / "run") == {
        (1, "0"): "dropped out",
        (1, "1"): "dropped out",
        (1, "2"): "dropped out",
        (1, "3"): "the round does not count: 1 of 2 needed replies came, after asking 3 times",
    }
    rows = [row for row in records.read(tmp_path / "run") if (row["model"], row["stage"]) == ("global", "round")]
    scores = [[(row["client"], row["split"], row["loss"]) for row in rows if row["round"] == t] for t in range(3)]
    assert scores[0] == scores[1] != scores[2], "the global model of round 0 is still there after round 1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["faults.dropout=2"], "faults.dropout: must be between 0 and 1"),
        (["faults.dropuot=0.3"], "faults.dropuot: unknown key; did you mean 'dropout'?"),
        (["faults.dropped_in={1 = 3}"], "faults.dropped_in.1: must be a list, got 3"),
        (["faults.quorum=5", "train.cohort=4"], "faults.quorum: must be <= train.cohort, which is 4, got 5"),
        (["faults.quorum=9"], "faults.quorum is 9, but there are only 4 clients"),
        (["faults.leave={x = 1}"], "faults.leave names x, but there is no such client"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words, message, fedme, tmp_path):
    code, _, err = fedme("run", "digits-fedme", *TINY, *words, f"output={tmp_path / 'run'}")
    assert code == 2
    assert message in " ".join(err.split())
    assert not (tmp_path / "run").exists()


def test_results_from_before_this_table_stay_valid():
    plain = load("digits-fedme")[0].plain()
    old = {key: value for key, value in plain.items() if key != "faults"}
    assert "faults" in plain
    assert digest(old) == digest(plain)
    assert digest(load("digits-fedme", ["faults.dropout=0.1"])[0].plain()) != digest(plain)
    assert json.loads(json.dumps(plain["faults"])) == plain["faults"]


def test_a_deployment_has_no_simulated_failures(tmp_path):
    from fedme.deployment.site_settings import agreed_task

    agreed_task(load("digits-fedme", [*SITES, "faults.quorum=2"])[0])
    with pytest.raises(ConfigError, match="faults: a deployment does not simulate failures"):
        agreed_task(load("digits-fedme", [*SITES, "faults.dropout=0.3"])[0])
