"""Sweeps: the points, selection by validation, and that nothing is run twice."""

import json

import pytest
from hypothesis import given, strategies as st

from fedme.config.experiment import ConfigError
from fedme.running import sweep

TINY = ["rounds=1", "data.limit=90", "partition.name=iid", "partition.clients=3", "models.pool=['mlr']", "models.assign=mlr"]


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@given(st.lists(st.text("abc01.=", min_size=1), min_size=1))
def test_values_are_cut_at_commas(values):
    assert sweep.split(",".join(values)) == values


@given(st.text())
def test_any_text_can_be_cut(text):
    assert "".join(",".join(sweep.split(text)).split()) == "".join(text.split())


def test_commas_in_brackets_and_quotes_belong_to_a_value():
    assert sweep.split("['mlr', 'dnn-8'],[\"mlp\"]") == ["['mlr', 'dnn-8']", '["mlp"]']
    assert sweep.split("{a = 1, b = 2},'x,y'") == ["{a = 1, b = 2}", "'x,y'"]


@pytest.mark.parametrize("word", ["train.lr", "=1,2", "train.lr=", "train.lr=1,,2"])
def test_words_without_a_key_and_values_are_refused(word):
    with pytest.raises(ConfigError, match="key=value,value"):
        sweep.swept_key(word)


def settings(points):
    return [point.values for point in points]


def test_every_combination_or_together(tmp_path):
    overs = [sweep.swept_key("train.lr=0.01,0.1"), sweep.swept_key("train.batch=5,10")]
    grid = sweep.points("digits-fedavg", TINY, overs, range(2), tmp_path, together=False)
    assert settings(grid) == [("0.01", "5"), ("0.01", "10"), ("0.1", "5"), ("0.1", "10")]
    assert [run.config["seed"] for run in grid[0].runs] == [0, 1]
    assert (grid[1].runs[0].config["train"]["lr"], grid[1].runs[0].config["train"]["batch"]) == (0.01, 10)
    assert settings(sweep.points("digits-fedavg", TINY, overs, [0], tmp_path, together=True)) == [("0.01", "5"), ("0.1", "10")]
    with pytest.raises(ConfigError, match="same number of values"):
        sweep.points("digits-fedavg", TINY, [overs[0], sweep.swept_key("train.batch=5")], [0], tmp_path, together=True)
    with pytest.raises(ConfigError, match="share the directory"):
        sweep.points("digits-fedavg", TINY, [sweep.swept_key("train.lr=0.1,0.1")], [0], tmp_path, together=False)


def test_the_command_goes_on_and_validation_chooses(fedme, tmp_path):
    words = ["sweep", "digits-fedavg", *TINY, "--over", "train.lr=0.0001,0.5", "--seeds", "2", "-q"]
    code, out, _ = fedme(*words, "--json")
    assert code == 0
    low, high = json.loads(out)
    assert (low["settings"], high["settings"]) == ({"train.lr": "0.0001"}, {"train.lr": "0.5"})
    assert (low["best"], high["best"]) == (False, True)
    assert len(high["validation"]) == len(high["test"]) == 2
    stamps = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("runs/sweep-digits-fedavg/*/metrics.jsonl"))]
    assert len(stamps) == 4
    code, out, _ = fedme(*words)
    assert "best by validation" in out
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("runs/sweep-digits-fedavg/*/metrics.jsonl"))] == stamps


def test_without_validation_nothing_is_chosen(fedme):
    code, out, err = fedme("sweep", "digits-fedavg", *TINY, "data.val=0.0", "--over", "train.lr=0.1,0.5", "-q")
    assert code == 0
    assert "best" not in out
    assert "no settings selected" in err


def test_failures_are_reported_at_the_end(fedme):
    code, out, err = fedme("sweep", "digits-fedavg", *TINY, "--over", "data.unlabeled=10,100000", "-q")
    assert code == 2
    assert "1 of 2 runs failed" in err
    assert "100000" in out
    assert fedme("sweep", "digits-fedavg")[0] == 2
