"""Trainings that diverge are noticed while they happen, and clients with identical models are named."""

import math

import pytest
import torch

import fedme
from fedme.core.data import Schema
from fedme.core.key import Key
from fedme.core.method import Report
from fedme.federation.round import Traffic
from fedme.learning.training_settings import Training
from fedme.results import summary
from fedme.running.divergence import DivergenceWatch, guess_loss

TEN = Schema((4,), tuple("0123456789"))


def traffic(**losses):
    return {client: Traffic(report=Report({"own": loss})) for client, loss in losses.items()}


def test_the_loss_of_a_guess():
    assert guess_loss(TEN) == pytest.approx(math.log(10))
    assert guess_loss(Schema((4,), ("a", "b"), task_type="multi-label")) == pytest.approx(2 * math.log(2))
    assert guess_loss(Schema((4,), ("y",), task_type="regression")) == 0.5


def test_a_rising_loss_is_noticed_once_with_what_to_change():
    watch = DivergenceWatch(TEN, Training(lr=0.5, momentum=0.9))
    assert watch.check(0, traffic(a=2.0, b=60.0)) == ""  # large inputs, first round
    assert watch.check(1, traffic(a=2.0, b=50.0)) == ""  # large but falling
    third = traffic(a=30.0, b=20.0)
    said = watch.check(2, third)
    assert said.startswith("round 2: the training of a diverges (loss 30; guessing has 2.3): lower train.lr (now 0.5)")
    assert "train.clip" in said
    assert "train.momentum (now 0.9)" in said
    assert third["a"].report.notes == third["b"].report.notes == {}
    again = traffic(a=3e9, b=math.nan)
    assert "the training of b diverges (loss not finite" in watch.check(3, again)
    assert again["a"].report.notes == {"diverging": "3e+09"}
    assert again["b"].report.notes == {"diverging": "not finite"}
    resumed = DivergenceWatch(TEN, Training())  # without the rounds before: the records are the same
    after = traffic(a=3e9, b=50.0)
    resumed.check(3, after)
    assert after["a"].report.notes == {"diverging": "3e+09"}
    assert after["b"].report.notes == {}


def samples(count, seed, scale=1.0):
    x = scale * torch.randn(count, 3, generator=Key(seed).torch())
    return x, 50.0 + 10 * x[:, 0] / scale


def test_a_regression_that_diverges(capsys, tmp_path):
    clients = [fedme.Client(f"site-{i}", train=samples(60, i), model="dnn-16") for i in range(2)]
    learner = fedme.FedAvg(rounds=5, train={"lr": 2.0, "momentum": 0.9, "epochs": 2})
    learner.fit(clients, output=tmp_path / "run")
    assert "diverges (loss" in capsys.readouterr().err
    lines = summary.trouble(summary.read(tmp_path / "run"))
    assert any("its training diverged in" in line and "lower train.lr" in line for line in lines)


def test_a_training_that_diverged_for_a_while():
    """Its results may be good: the client has adopted another model since."""
    counts = {
        "a": {"rounds": 1, "first": 3, "last": 3, "loss": "149"},
        "b": {"rounds": 2, "first": 8, "last": 9, "loss": "9e+9"},
    }
    first, second = summary.trouble({"rounds": 10, "diverging": counts})
    assert first == (
        "client a: its training diverged in 1 round, first in round 3 (loss 149); but not after round 3; "
        "it may do better if you lower train.lr or set train.clip"
    )
    assert second.endswith(
        "diverged in 2 rounds, first in round 8 (loss 9e+9); its results say nothing: lower train.lr or set train.clip"
    )
    incidents = summary.Incidents()
    for t in (2, 5):
        incidents.add({"client": "a", "round": t, "notes": {"diverging": "9"}})
    assert incidents.diverging["a"] == {"rounds": 2, "first": 2, "last": 5, "loss": "9"}


def test_a_regression_that_learns_is_left_in_peace(capsys, tmp_path):
    clients = [fedme.Client(f"site-{i}", train=samples(60, i), model="dnn-16") for i in range(2)]
    fedme.FedMe(rounds=3, train={"lr": 0.05}).fit(clients, output=tmp_path / "run")
    assert "diverge" not in capsys.readouterr().err
    assert "diverging" not in summary.read(tmp_path / "run")


def test_identical_personal_models_are_said(capsys, tmp_path):
    """Two clients with the same samples and architecture, in Local with one seed for both: only the names differ."""
    clients = [fedme.Client(f"site-{i}", train=samples(40, i)) for i in range(3)]
    result = fedme.FedMe(rounds=8, train={"lr": 1e-9, "epochs": 1}).fit(clients, output=tmp_path / "run")
    said = capsys.readouterr().err
    whole = summary.read(tmp_path / "run")
    weights = {}
    for client in result:
        model = result.model(client, "model")
        flat = torch.cat([value.flatten() for value in model._network.state_dict().values()])
        weights.setdefault(tuple(flat.tolist()), []).append(client)
    same = {clients[0]: clients[1:] for clients in weights.values() if len(clients) > 1}
    assert whole.get("identical", {}) == same
    assert ("these clients ended with identical personal models" in said) == bool(same)


def test_identical_models_are_one_sentence_in_the_order_of_the_clients():
    assert summary.trouble({"identical": {"7": ["8"], "10": ["12", "13"], "0": ["11"]}}) == [
        "Clients with identical personal models: 0, 11; 7, 8; 10, 12, 13."
    ]
    many = {str(i): [f"twin of {i}"] for i in range(500)}
    (said,) = summary.trouble({"identical": many})
    assert said.endswith("9, twin of 9; and 490 more groups.")
