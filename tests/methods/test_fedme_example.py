"""The running example of section 4.3 of the FedMe paper: five clients, two rounds, exchange, clusters and losses as printed.

Models are single numbers. "Training" at client i adds i/10 to its own model and i/100 to its guest, so every average can be
written down; validation losses are given, so that the choices are the paper's.
"""

import pytest
import torch

from fedme.core.data import ClientData
from fedme.core.key import Key
from fedme.core.method import Member, Plan, Round, Task
from fedme.core.model import Model
from fedme.core.operations import Evaluate, Score, Train, Trained
from fedme.execution.lockstep import run_in_lockstep
from fedme.methods.fedme import clustering, fedme
from fedme.methods.fedme.fedme import FedMe, Server
from fedme_test_support import LINEAR, clients, same, task

CLIENTS = ["1", "2", "3", "4", "5"]
EXCHANGE = [
    {"1": "3", "2": "4", "3": "1", "4": "5", "5": "2"},
    {"1": "3", "2": "4", "3": "1", "4": "2", "5": "4"},
]
CLUSTERS = [dict.fromkeys(CLIENTS, 0), {"1": 0, "3": 0, "2": 1, "4": 1, "5": 1}]
CHOICES = [["3", "2", "3", "4", "2"], ["1", "4", "3", "4", "4"]]


def number(model):
    return model.params["w"].item()


def model(value):
    return Model(LINEAR, {"w": torch.tensor(float(value), dtype=torch.float64)}, {})


@pytest.fixture
def setting():
    data = {c: ClientData(c, d.train, d.val, d.test) for c, d in zip(CLIENTS, clients((3,) * 5).values(), strict=True)}
    plain = task()
    members = {c: Member(c, LINEAR, tuple("abcd")) for c in CLIENTS}
    return data, Task(plain.schema, members, LINEAR, plain.resolve, data["1"].test)


def test_running_example(monkeypatch, setting):
    data, task_ = setting
    method = FedMe(clusters={0: 1, 1: 2})
    server = Server({c: model(int(c)) for c in CLIENTS})
    asked = []
    monkeypatch.setattr(clustering, "similar", lambda outputs, count, key: [CLUSTERS[1][c] for c in CLIENTS])

    for t in range(2):

        def lend(clusters, fits, key, t=t):
            asked.append(dict(clusters))
            return EXCHANGE[t]

        def execute(operations, t=t):
            return [(perform(op, t), 0.0) for op in operations]

        def perform(op, t):
            if isinstance(op, Train):
                i = int(next(c for c in CLIENTS if data[c].train is op.data))
                return Trained(
                    {"own": model(number(op.models["own"]) + i / 10), "guest": model(number(op.models["guest"]) + i / 100)},
                    {},
                    {},
                )
            if isinstance(op, Evaluate):
                return scores(op, t)
            return torch.zeros(5, 4)  # outputs on the unlabeled data; the clusters are given

        turns = {}

        def scores(op, t, turns=turns):
            c = next(c for c in CLIENTS if data[c].val is op.data)
            seen = turns.setdefault(c, [])
            seen.append(op)
            guest_wins = CHOICES[t][int(c) - 1] != c
            is_guest = len(seen) == 2
            return Score(6, 0.1 if is_guest == guest_wins else 0.2, 0.5)

        monkeypatch.setattr(fedme, "lenders", lend)
        when, before = Round(t, 2), {c: number(m) for c, m in server.models.items()}
        downs = run_in_lockstep({"s": method.dispatch(task_, server, Plan.all(CLIENTS), when, Key(0))}, execute)["s"].value
        assert {c: (number(d.own), number(d.guest)) for c, d in downs.items()} == {
            c: (before[c], before[EXCHANGE[t][c]]) for c in CLIENTS
        }
        work = {c: method.client_round(None, downs[c], data[c], when, Key(0)) for c in CLIENTS}
        ups = {c: done.value[1] for c, done in run_in_lockstep(work, execute).items()}
        assert [up.lender if up.adopts else c for c, up in ups.items()] == CHOICES[t]
        server = method.aggregate(server, ups, when, Key(0))

        averages = {}
        for j in CLIENTS:  # Eq. 8: the owner's copy and those of everybody who borrowed it, each with the same weight
            copies = [before[j] + int(j) / 10] + [before[j] + int(i) / 100 for i in CLIENTS if EXCHANGE[t][i] == j]
            averages[j] = sum(copies) / len(copies)
        expected = [averages[a] for a in CHOICES[t]]
        assert [number(server.models[c]) for c in CLIENTS] == pytest.approx(expected, abs=1e-12)
        if t == 0:  # the first round, written out
            assert expected == pytest.approx([3.155, 2.125, 3.155, 4.21, 2.125])
    assert asked == CLUSTERS


def test_a_round_with_missing_clients(monkeypatch, setting):
    """Copies that came back are averaged; without any a model stays; an absent client keeps its slot."""
    _, _ = setting
    server = Server({c: model(int(c)) for c in CLIENTS})
    up = fedme.Up
    replies = {  # clients 3 and 5 are missing; exchange as in the first round of the example
        "1": up(model(1.1), model(3.01), "3", adopts=True),
        "2": up(model(2.2), model(4.02), "4", adopts=False),
        "4": up(model(4.4), model(5.04), "5", adopts=True),
    }
    after = FedMe().aggregate(server, replies, Round(0, 1), Key(0)).models
    assert number(after["1"]) == pytest.approx(3.01)  # adopted 3, of which only client 1's copy came back
    assert number(after["2"]) == pytest.approx(2.2)  # client 5 borrowed it, but is missing
    assert number(after["3"]) == pytest.approx(3.01)  # absent: keeps its slot, which client 1 trained
    assert number(after["4"]) == pytest.approx(5.04)  # adopted 5
    assert number(after["5"]) == pytest.approx(5.04)
    alone = FedMe().aggregate(server, {"1": up(model(1.1), None, None, adopts=False)}, Round(0, 1), Key(0)).models
    assert [number(alone[c]) for c in CLIENTS] == pytest.approx([1.1, 2, 3, 4, 5])
    assert FedMe().aggregate(server, {}, Round(0, 1), Key(0)).models == server.models


def test_models_are_drawn_when_they_are_first_needed(setting):
    _, task_ = setting
    method = FedMe()
    server = method.init_server(task_, Key(7))
    assert not server.models
    first = method.deliver(task_, server, "2").own
    assert same(first, Model.init(LINEAR, Key(7).at("client", "2"), task_.dtype))
    up = fedme.Up(None, model(3.0), "3", adopts=True)  # diverged, and prefers the guest
    after = method.aggregate(server, {"2": up}, Round(0, 1), Key(0))
    assert after.models.keys() == {"2", "3"}
    assert number(after.models["2"]) == 3.0
    assert same(method.deliver(task_, after, "1").own, method.deliver(task_, server, "1").own)
