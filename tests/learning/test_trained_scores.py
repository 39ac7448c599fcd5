"""What clients have trained is evaluated before the server aggregates, for every method."""

import pytest

from fedme.core.key import Key
from fedme.core.operations import Evaluate
from fedme.execution import reference
from fedme.federation.in_process import InProcessEngine
from fedme.federation.round import run_round
from fedme.learning.training_settings import Training
from fedme.methods import METHODS
from fedme.methods.fedavg import FedAvg
from fedme_test_support import DENSE, clients, split, task

TRAIN = Training(epochs=1, batch=4, lr=0.1)


def played(method, rounds=1, every=1):
    """The reports of every round."""
    setting, root = task((DENSE,) * 3, shared=DENSE, public=8, unlabeled=split(6, Key(2))), Key(0)
    engine = InProcessEngine(method, setting, clients(public=8), root, score_trained_every=every)
    method.check(setting)
    server, reports = method.init_server(setting, root.at("init")), []
    for t in range(rounds):
        result = run_round(method, setting, engine, server, t, rounds, root)
        server = result.server
        reports.append({client: traffic.report for client, traffic in result.traffic.items()})
    return engine, reports


@pytest.mark.parametrize("name", [name for name in METHODS if name != "centralized"])
def test_every_method_reports_what_it_trained(name):
    more = {"public_epochs": 1} if name == "fedmd" else {}
    _, (reports,) = played(METHODS[name](train=TRAIN, **more))
    assert set(reports) == {"0", "1", "2"}
    for report in reports.values():
        assert report.scores
        assert all(score.samples == 6 for score in report.scores.values())


def test_the_score_is_that_of_the_copy_before_the_mean():
    sent = {}

    class Watched(FedAvg):
        def aggregate(self, server, replies, when, key):
            sent.update({client: reply.model for client, reply in replies.items()})
            return super().aggregate(server, replies, when, key)

    engine, (reports,) = played(Watched(train=TRAIN))
    for client, model in sent.items():
        expected = reference.run(Evaluate(model, engine.clients[client].val))
        assert reports[client].scores["global"] == expected


def test_only_evaluated_rounds_are_scored():
    _, reports = played(FedAvg(train=TRAIN), rounds=5, every=2)
    assert [bool(report["0"].scores) for report in reports] == [False, True, False, True, True]
    _, reports = played(FedAvg(train=TRAIN), rounds=2, every=None)
    assert not any(report["0"].scores for report in reports)
