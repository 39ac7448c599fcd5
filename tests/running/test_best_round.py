"""The model of a client's best round is a candidate at its end: kept from evaluations that were made anyway, and resumed."""

import math
from types import SimpleNamespace

import pytest
import torch

import fedme
from fedme.artifacts import model_choice, outputs as model_outputs, saved_models
from fedme.core.key import Key
from fedme.federation.client_work import Evaluation
from fedme.results import records
from fedme.running.best_round import BEST, better, with_best_round
from fedme.running.round_loop import Interrupted, RoundLoop


def evaluation(right, samples=10, test=True):
    """An evaluation whose personal model is right on this many validation samples."""
    targets = torch.zeros(samples, dtype=torch.int64)
    wrong = torch.arange(samples) >= right
    answers = torch.stack((~wrong, wrong), 1).double()
    outputs = {"val/personal": answers, "val/targets": targets}
    outputs |= {"test/personal": -answers, "test/targets": targets} if test else {}
    return Evaluation(None, {"personal": SimpleNamespace(arch=SimpleNamespace(name="net"))}, [], outputs)


def test_the_best_round_by_validation_and_of_equal_rounds_the_latest():
    best = None
    chosen = []
    for t, right in enumerate([4, 7, 7, 6]):
        best = better(best, evaluation(right), t)
        chosen.append(best.round)
    assert chosen == [0, 1, 2, 2]
    assert set(best.outputs) == {"val/best", "test/best"}
    broken = evaluation(10)
    broken.outputs["val/personal"] *= math.nan  # a diverged model is right on nothing
    assert better(best, broken, 4) is best
    last = evaluation(6)
    whole = with_best_round(last, best, 3)
    assert BEST in whole.models
    assert [(score.model, score.split, score.metrics.correct) for score in whole.scores] == [
        (BEST, "val", 7),
        (BEST, "test", 3),
    ]
    assert with_best_round(last, best, 2) is last  # the best round is the last one
    assert with_best_round(last, None, 3) is last


def test_the_test_part_does_not_decide_the_best_round():
    first = better(None, evaluation(7), 0)
    worse = evaluation(6)
    worse.outputs["test/personal"] = -worse.outputs["test/personal"]  # now right on the test part
    assert better(first, worse, 1) is first


def test_there_is_none_without_validation_samples():
    empty = evaluation(7)
    del empty.outputs["val/personal"], empty.outputs["val/targets"]
    assert better(None, empty, 0) is None


def samples(count, seed):
    """The labels of odd clients are the opposite of the others': after a round, the model is that of who trained last."""
    x = torch.randn(count, 3, generator=Key(seed).torch())
    return x, (x[:, 0] > 0).long() ^ (seed % 2)


SETTINGS = {"rounds": 8, "train": {"epochs": 10, "lr": 0.5, "cohort": 1}, "models": {"pool": ["mlr"]}}


def clients():
    return [fedme.Client(f"site-{i}", train=samples(100, i)) for i in range(4)]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return fedme.FedAvg(**SETTINGS).fit(clients(), output=tmp_path_factory.mktemp("runs") / "whole", quiet=True)


def validated(result):
    """The validation accuracy of every client's personal model, by round."""
    found = {}
    for row in records.read(result.folder):
        if (row["model"], row["stage"], row["split"]) == ("personal", "round", "val"):
            found.setdefault(row["client"], {})[row["round"]] = row["accuracy"]
    return found


def test_a_run_keeps_the_model_of_the_best_round(result):
    chosen = []
    for client, by_round in validated(result).items():
        best = max(by_round, key=lambda t: (by_round[t], t))
        answers, targets = model_outputs.of_split(model_outputs.read(result.model(client, "model").folder), "val")
        assert ("best" in answers) == (best != 7)
        if best == 7:
            continue
        assert (answers["best"].argmax(1) == targets).double().mean().item() == pytest.approx(by_round[best])
        choice = model_choice.read(result.model(client, "model").folder)
        assert "best" in choice.candidates
        if choice.name == "best":
            chosen.append(client)
            model = result[client]
            about = saved_models.describe(model.folder, "best")
            assert (about["rounds"], about["accuracy"]["val"]) == (best + 1, pytest.approx(by_round[best]))
            assert "after the best round" in model.card
            tested = model_outputs.of_split(model_outputs.read(model.folder), "test")
            assert about["accuracy"]["test"] == pytest.approx((tested[0]["best"].argmax(1) == tested[1]).double().mean().item())
    assert chosen  # otherwise this test has seen nothing


def test_a_resumed_run_ends_with_the_same_models(result, tmp_path, monkeypatch):
    inner = RoundLoop._train_and_evaluate
    stopped = []

    def interrupted(self, server, t):
        if t == 6 and not stopped:
            stopped.append(t)
            raise Interrupted("stop")
        return inner(self, server, t)

    monkeypatch.setattr(RoundLoop, "_train_and_evaluate", interrupted)
    learner = fedme.FedAvg(**SETTINGS)
    with pytest.raises(Interrupted):
        learner.fit(clients(), output=tmp_path / "again", quiet=True)
    again = learner.fit(clients(), output=tmp_path / "again", quiet=True)
    assert stopped == [6]
    for client in result:
        ours, theirs = (r.model(client, "model").folder for r in (result, again))
        assert (ours / "choice.json").read_bytes() == (theirs / "choice.json").read_bytes()
        assert (ours / "outputs.safetensors").read_bytes() == (theirs / "outputs.safetensors").read_bytes()
        if (ours / "best.safetensors").exists():
            assert (ours / "best.safetensors").read_bytes() == (theirs / "best.safetensors").read_bytes()


def test_rounds_that_were_not_evaluated_are_no_candidates(tmp_path):
    result = fedme.FedAvg(**SETTINGS, evaluate_every=8).fit(clients(), output=tmp_path / "run", quiet=True)
    for client in result:
        assert "val/best" not in model_outputs.read(result.model(client, "model").folder)


def test_without_the_memory_for_a_second_model_there_is_no_best_round(tmp_path):
    result = fedme.FedAvg(**SETTINGS, engine={"memory": 0.0}).fit(clients(), output=tmp_path / "run", quiet=True)
    for client in result:
        assert "val/best" not in model_outputs.read(result.model(client, "model").folder)
