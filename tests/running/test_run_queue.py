"""Several runs: kept, continued, shared out among processes, and none keeps the others."""

import json

import pytest
from rich.console import Console

from fedme.config.experiment import load
from fedme.core.atomic_files import RunError
from fedme.results import summary
from fedme.running.progress import Display
from fedme.running.round_loop import Interrupted
from fedme.running.run_queue import Batch, Planned, finished, identity

TINY = ["rounds=3", "data.limit=90", "partition.name=iid", "partition.clients=3", "models.pool=['mlr']", "models.assign=mlr"]


def planned(root, name, *words):
    return Planned(name, root / name, load("digits-fedavg", [*TINY, *words])[0].plain())


def quiet():
    return Display(Console(stderr=True), quiet=True)


def numbers(folder):
    result = summary.read(folder)
    return [each["accuracy"] for each in result["results"]]


def test_runs_are_kept(tmp_path):
    plans = [planned(tmp_path, "a"), planned(tmp_path, "b", "seed=1")]
    seen = []
    assert [each.error for each in Batch(quiet(), after=seen.append).run(plans)] == ["", ""]
    assert seen == [plan.folder for plan in plans]
    assert all(finished(plan) for plan in plans)
    before = (plans[0].folder / "metrics.jsonl").stat().st_mtime_ns
    Batch(quiet(), after=seen.append).run(plans)
    assert len(seen) == 2
    assert (plans[0].folder / "metrics.jsonl").stat().st_mtime_ns == before


def test_what_cannot_change_results_does_not_count():
    config = load("digits-fedavg", TINY)[0].plain()
    same = load(
        "digits-fedavg", [*TINY, "name=other", "output=x", "checkpoint_every=2", "engine.workers=1", "engine.memory=1.0"]
    )[0].plain()
    assert identity(config) == identity(same)
    for word in ("seed=1", "rounds=4", "train.lr=0.2", "engine.dtype=float64", "evaluate_every=3"):
        assert identity(load("digits-fedavg", [*TINY, word])[0].plain()) != identity(config), word


def test_another_experiment_in_the_place_is_refused(tmp_path):
    Batch(quiet()).run([planned(tmp_path, "a")])
    with pytest.raises(RunError, match="holds another experiment"):
        Batch(quiet()).run([planned(tmp_path, "a", "train.lr=0.2")])


def test_one_that_cannot_run_does_not_keep_the_others(tmp_path, capsys):
    bad = planned(tmp_path, "bad", "data.limit=100000", "data.unlabeled=100000")
    outcomes = Batch(quiet()).run([bad, planned(tmp_path, "good")])
    assert "unlabeled" in outcomes[0].error
    assert not outcomes[1].error
    assert "bad" in capsys.readouterr().err


def test_an_interrupted_run_goes_on_with_the_same_numbers(tmp_path):
    class Stopping(Display):
        def advance(self, info=None):
            super().advance(info)
            if self.done == 2:
                raise Interrupted("enough")

    plan, whole = planned(tmp_path, "a"), planned(tmp_path, "whole")
    with pytest.raises(Interrupted):
        Batch(Stopping(Console(stderr=True), quiet=True)).run([plan])
    assert not finished(plan)
    Batch(quiet()).run([plan, whole])
    assert numbers(plan.folder) == numbers(whole.folder)


@pytest.mark.slow
def test_processes_give_the_same_numbers(tmp_path):
    alone = [planned(tmp_path / "alone", str(seed), f"seed={seed}") for seed in range(3)]
    shared = [planned(tmp_path / "shared", str(seed), f"seed={seed}") for seed in range(3)]
    bad = planned(tmp_path / "shared", "bad", "data.unlabeled=100000")
    Batch(quiet()).run(alone)
    outcomes = Batch(quiet(), jobs=2).run([*shared, bad])
    assert [bool(each.error) for each in outcomes] == [False, False, False, True]
    assert [numbers(plan.folder) for plan in shared] == [numbers(plan.folder) for plan in alone]
    assert json.loads((shared[0].folder / summary.NAME).read_text())["seed"] == 0
