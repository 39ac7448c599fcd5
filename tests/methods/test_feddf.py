"""FedDF: a round by hand, its limit FedAvg per architecture, and the server's training."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedme.core.key import Key
from fedme.core.method import Member, Round, TaskError
from fedme.core.model import Model
from fedme.core.operations import Train
from fedme.execution.dispatcher import Dispatcher
from fedme.learning.robust_aggregation import Defence
from fedme.learning.training_settings import Training
from fedme.methods.fedavg import FedAvg
from fedme.methods.feddf import FedDF
from fedme.methods.shared_model import TrainedCopy
from fedme_test_support import (
    CLASSES,
    DENSE,
    DROPPING,
    LINEAR,
    WIDE,
    clients,
    federate,
    personal,
    same,
    split,
    task,
)

ONE = Training(epochs=1, batch=1000, lr=0.1)
TRAIN = Training(epochs=2, batch=3, lr=0.1, momentum=0.9, weight_decay=1e-3)
UNLABELED = split(10, Key(9))
ARCHS = (DENSE, WIDE, DENSE, DROPPING, WIDE)


def array(params):
    return np.concatenate([params["0.weight"].numpy(), params["0.bias"].numpy()[:, None]], axis=1)


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def with_ones(split):
    return np.concatenate([split.inputs().numpy(), np.ones((len(split), 1))], axis=1)


def test_two_rounds_by_hand():
    """Softmax regression: the gradient of the divergence is (student - teacher)^T x / n, and Adam's steps are written out."""
    data, method = clients(), FedDF(ONE, distil_epochs=2, distil_batch=1000, distil_lr=0.05)
    server, _ = federate(method, task(unlabeled=UNLABELED), data, rounds=2)
    w = array(Model.init(LINEAR, Key(0).at("init", "shared"), torch.float64).params)
    d = with_ones(UNLABELED)
    for _ in range(2):
        copies = []
        for each in data.values():
            x, y = with_ones(each.train), np.eye(CLASSES)[each.train.y.numpy()]
            copies.append(w - 0.1 * (softmax(x @ w.T) - y).T @ x / len(x))
        teacher = softmax(np.mean([d @ copy.T for copy in copies], axis=0))
        w = sum(len(each.train) * copy for each, copy in zip(data.values(), copies, strict=True)) / 23
        mean, square = 0.0, 0.0
        for step in (1, 2):
            g = (softmax(d @ w.T) - teacher).T @ d / len(d)
            mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
            w = w - 0.05 * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
    assert np.allclose(array(server.models["linear"].params), w, rtol=0, atol=1e-10)


def test_without_epochs_of_the_server_it_is_fedavg_of_every_architecture():
    data, setting = clients((7, 12, 4, 5, 6)), task(ARCHS, unlabeled=UNLABELED)
    found, _ = federate(FedDF(TRAIN, distil_epochs=0), setting, data)
    for arch in (DENSE, WIDE, DROPPING):
        those = [c for c, member in setting.members.items() if member.arch == arch]
        alone = replace(task((arch,) * 5, shared=arch), members={c: setting.members[c] for c in those})
        wanted, _ = federate(FedAvg(TRAIN), alone, {c: data[c] for c in those})
        assert same(found.models[arch.name], wanted.model)
    taught, _ = federate(FedDF(TRAIN), setting, data)  # its defaults
    assert not any(same(found.models[name], model, 1e-3) for name, model in taught.models.items())


def test_students_come_closer_to_their_teachers():
    data, setting = clients((30,) * 5), task(ARCHS, unlabeled=split(200, Key(9)))

    def spread(epochs):
        server, _ = federate(FedDF(TRAIN, distil_epochs=epochs, distil_batch=20, distil_lr=0.01), setting, data, rounds=2)
        answers = torch.stack([model(setting.unlabeled.inputs()).softmax(-1) for model in server.models.values()])
        return answers.var(0).mean()

    assert spread(5) < 0.7 * spread(0)


@pytest.mark.parametrize("path", ["auto", "compiled", "stacked", "workers"])
def test_every_path_agrees_with_different_architectures(path):
    data = clients((7, 12, 4, 5, 6))
    setting, method = (
        task((DENSE, WIDE, LINEAR, DROPPING, WIDE), unlabeled=UNLABELED),
        FedDF(TRAIN, distil_epochs=2, distil_batch=4),
    )
    a, _ = federate(method, setting, data)
    b, _ = federate(method, setting, data, execute=Dispatcher(path=path))
    assert all(same(a.models[name], model, 1e-9) for name, model in b.models.items())


def test_an_architecture_without_a_reply_is_taught_too_and_nobody_is_taught_by_nobody():
    data, setting, method = clients(), task((DENSE, WIDE, DENSE), unlabeled=UNLABELED), FedDF(TRAIN)
    first = method.init_server(setting, Key(0).at("init"))
    server, _ = federate(method, setting, data, rounds=1, lost=lambda t, client: client == "1")
    assert not same(server.models["wide"], first.models["wide"], 1e-6)
    server, _ = federate(method, setting, data, rounds=1, lost=lambda t, client: True)
    assert all(same(server.models[name], model) for name, model in first.models.items())


def test_teachers_are_robust_and_outputs_that_are_not_finite_do_not_teach():
    data, setting = clients((5,) * 5), task((LINEAR,) * 5, unlabeled=UNLABELED)
    _, engine = federate(FedDF(ONE), setting, data, rounds=0)
    model = Model.init(LINEAR, Key(1), torch.float64)
    huge = model.with_params({name: p * 1e308 for name, p in model.params.items()})

    def teachers(replies, defence=Defence()):
        seen = []

        def execute(ops):
            seen.extend(op.data.y for op in ops if isinstance(op, Train))
            return engine_execute(ops)

        engine_execute, engine.execute = engine.execute, execute
        method = FedDF(ONE, defence=defence)
        server = method.init_server(setting, Key(0))
        engine.run_on_server(method.refine(setting, server, replies, Round(0, 1), Key(0)))
        engine.execute = engine_execute
        return seen

    good = {str(i): TrainedCopy(model.with_params({n: p * i for n, p in model.params.items()}), 3) for i in range(4)}
    logits = model(UNLABELED.inputs())
    bad = {**good, "4": TrainedCopy(huge, 3)}
    assert torch.allclose(teachers(bad)[0], 1.5 * logits)
    assert not teachers({"4": TrainedCopy(huge, 3)})
    far = {**good, "4": TrainedCopy(model.with_params({n: p * 1e6 for n, p in model.params.items()}), 3)}
    assert torch.allclose(teachers(far, Defence(average="median"))[0], 2.0 * logits)


def test_an_architecture_that_joins_later_has_one_start_for_all_its_clients():
    setting, method = task((DENSE, DENSE), unlabeled=UNLABELED), FedDF(TRAIN)
    server = method.init_server(setting, Key(0).at("init"))
    later = {**setting.members, **{c: Member(c, WIDE, tuple("abcd")) for c in ("2", "3")}}
    grown, data = replace(setting, members=later), clients((7, 12, 4, 5))
    assert same(method.deliver(grown, server, "2").model, method.deliver(grown, server, "3").model)
    assert federate(method, grown, data)[0].models.keys() == {"dense", "wide"}


def test_what_it_needs_is_said():
    with pytest.raises(TaskError, match="method 'feddf' needs unlabeled samples at the server: set data.unlabeled"):
        FedDF(TRAIN).check(task())
    FedDF(TRAIN, distil_epochs=0).check(task())
    models = personal(FedDF(TRAIN), *federate(FedDF(TRAIN), task(unlabeled=UNLABELED), clients()))
    assert same(models["0"], models["1"])  # one architecture: one model
