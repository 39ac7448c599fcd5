"""SCAFFOLD: two rounds by hand, its limits, and shifted gradients on every path."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedme.core.key import Key
from fedme.core.model import Model
from fedme.core.operations import BatchSchedule, Train
from fedme.execution import compiled
from fedme.execution.dispatcher import Dispatcher
from fedme.execution.reference import run as run_on_reference
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD, Adam
from fedme.learning.robust_aggregation import Defence
from fedme.learning.training_settings import Training
from fedme.methods.fedavg import FedAvg
from fedme.methods.scaffold import SCAFFOLD
from fedme_test_support import CLASSES, DENSE, DROPPING, LINEAR, NORMALISED, clients, federate, same, task

ONE = Training(epochs=1, batch=1000, lr=0.1)
TWO = replace(ONE, epochs=2)
TRAIN = Training(epochs=2, batch=3, lr=0.1)


def array(params):
    return np.concatenate([params["0.weight"].numpy(), params["0.bias"].numpy()[:, None]], axis=1)


def gradient(w, split):
    x = np.concatenate([split.inputs().numpy(), np.ones((len(split), 1))], axis=1)
    z = x @ w.T
    e = np.exp(z - z.max(1, keepdims=True))
    return (e / e.sum(1, keepdims=True) - np.eye(CLASSES)[split.y.numpy()]).T @ x / len(x)


def close(params, wanted):
    return np.allclose(array(params), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("server_lr", "weighting"), [(1.0, "uniform"), (0.5, "samples")])
def test_three_rounds_of_two_steps_by_hand(server_lr, weighting):
    """Client 1 is missing in the second round: it keeps its variate, and the server's moves by what came."""
    data = clients()
    method = SCAFFOLD(TWO, server_lr=server_lr, weighting=weighting)
    server, engine = federate(method, task(), data, lost=lambda t, client: (t, client) == (1, "1"))
    x = array(Model.init(LINEAR, Key(0).at("init", "shared"), torch.float64).params)
    c, own = np.zeros_like(x), {client: np.zeros_like(x) for client in data}
    for t in range(3):
        copies, change = {}, 0.0
        for client, each in data.items():
            if (t, client) == (1, "1"):
                continue
            y = x
            for _ in range(2):
                y = y - 0.1 * (gradient(y, each.train) - own[client] + c)
            new = own[client] - c + (x - y) / (2 * 0.1)
            change = change + new - own[client]
            copies[client], own[client] = y, new
        weights = {client: len(data[client].train) if weighting == "samples" else 1 for client in copies}
        x = x + server_lr * (sum(weights[i] * y for i, y in copies.items()) / sum(weights.values()) - x)
        c = c + change / 3
    assert close(server.model.params, x)
    assert close(server.variate, c)
    assert np.abs(c).max() > 1e-3
    assert all(close(engine.states[client].variate, variate) for client, variate in own.items())


@pytest.mark.parametrize("arch", [LINEAR, DENSE, NORMALISED], ids=lambda arch: arch.name)
def test_one_step_of_everybody_is_fedavg_and_the_first_round_whatever_the_steps(arch):
    data, setting = clients((7, 12, 2)), task((arch,) * 3, shared=arch)
    a, _ = federate(FedAvg(ONE, weighting="uniform"), setting, data)
    b, engine = federate(SCAFFOLD(ONE), setting, data)
    assert same(a.model, b.model, 1e-12)  # the corrections add up to zero
    assert all(max(float(v.abs().max()) for v in state.variate.values()) > 1e-3 for state in engine.states.values())
    a, _ = federate(FedAvg(TRAIN, weighting="uniform"), setting, data, rounds=1)
    b, _ = federate(SCAFFOLD(TRAIN), setting, data, rounds=1)
    assert same(a.model, b.model)  # control variates begin at zero


def test_by_default_it_is_not_fedavg_and_the_servers_variate_is_the_mean():
    data = clients()
    a, _ = federate(FedAvg(TRAIN, weighting="uniform"), task(), data)
    b, engine = federate(SCAFFOLD(TRAIN), task(), data)
    assert not same(a.model, b.model, 1e-3)
    for name, c in b.variate.items():
        mean = torch.stack([state.variate[name] for state in engine.states.values()]).mean(0)
        assert torch.allclose(c, mean, rtol=0, atol=1e-12)


def test_corrections_undo_the_drift_of_clients():
    """With many local steps FedAvg does not reach the minimum of the mean loss; SCAFFOLD does (the paper's figure 2)."""
    data, train = clients((20, 20, 20)), Training(epochs=20, batch=1000, lr=0.2)

    def slope(method):
        server, _ = federate(method, task(), data, rounds=200)
        w = array(server.model.params)
        return np.abs(np.mean([gradient(w, each.train) for each in data.values()], axis=0)).max()

    assert slope(SCAFFOLD(train)) < 0.1 * slope(FedAvg(train, weighting="uniform"))


def test_a_robust_average_is_of_the_variates_too():
    data = clients((5,) * 5)
    robust, _ = federate(SCAFFOLD(ONE, defence=Defence(average="median")), task((LINEAR,) * 5), data, rounds=1)
    x = array(Model.init(LINEAR, Key(0).at("init", "shared"), torch.float64).params)
    gradients = [gradient(x, each.train) for each in data.values()]
    assert close(robust.variate, np.median(gradients, axis=0))
    assert close(robust.model.params, x - 0.1 * np.median(gradients, axis=0))


RULES = {
    "sgd": SGD(CrossEntropy(), 0.1, shift=True),
    "momentum, decay": SGD(CrossEntropy(), 0.1, 0.9, 0.05, shift=True),
    "nesterov": SGD(CrossEntropy(), 0.1, 0.9, nesterov=True, shift=True),
    "clip": SGD(CrossEntropy(), 0.1, clip=0.3, shift=True),
    "adam": Adam(CrossEntropy(), 0.02, weight_decay=0.05, shift=True),
    "adamw": Adam(CrossEntropy(), 0.02, weight_decay=0.05, decoupled_weight_decay=True, shift=True),
}


@pytest.mark.parametrize("arch", [LINEAR, DENSE, DROPPING, NORMALISED], ids=lambda arch: arch.name)
@pytest.mark.parametrize("rule", RULES)
def test_a_shifted_gradient_on_every_path(rule, arch):
    ops = []
    for client, each in clients((7, 12, 5)).items():
        key = Key(5).at(client)
        model, shift = Model.init(arch, key, torch.float64), Model.init(arch, key.at("shift"), torch.float64)
        shift = Model(arch, shift.params, {})
        ops.append(Train({"net": model}, RULES[rule], each.train, BatchSchedule(2, 4), key, frozen={"net": shift}))
    wanted = [run_on_reference(op).models["net"] for op in ops]
    unshifted = [run_on_reference(replace(op, optimizer=replace(op.optimizer, shift=False))).models["net"] for op in ops]
    assert not any(same(a, b, 1e-2) for a, b in zip(wanted, unshifted, strict=True))
    for path in ("auto", "compiled", "stacked", "workers"):
        execute = Dispatcher(path=path)
        found = [result.models["net"] for result, _ in execute(ops)]
        assert all(same(a, b, 1e-9) for a, b in zip(wanted, found, strict=True)), path
        if path == "auto" and rule != "clip" and not isinstance(compiled.library(), str):
            assert {route for _, route, _ in execute.paths} == {"compiled"}


def test_two_steps_of_a_shifted_gradient_by_hand():
    data = clients((6,))["0"].train
    model, shift = (Model.init(LINEAR, Key(k), torch.float64) for k in (1, 2))
    op = Train({"net": model}, RULES["momentum, decay"], data, BatchSchedule(2, 1000), Key(0), frozen={"net": shift})
    w, v = array(model.params), 0.0
    for _ in range(2):
        v = 0.9 * v + gradient(w, data) + array(shift.params) + 0.05 * w
        w = w - 0.1 * v
    assert close(run_on_reference(op).models["net"].params, w)


def test_the_same_number_of_steps_with_poisson_sampling():
    method = SCAFFOLD(Training(epochs=2, batch=4, last_batch="drop"))
    schedule = method._schedule(11, None)
    assert schedule.count(11) == replace(schedule, poisson=True).count(11) == 4
