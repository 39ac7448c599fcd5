"""APFL: steps by hand, its limits FedAvg and Local, and alpha."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedme.core.key import Key
from fedme.core.model import Model
from fedme.core.operations import BatchSchedule, Train
from fedme.execution.compiled import library
from fedme.execution.dispatcher import Dispatcher
from fedme.execution.reference import run as run_on_reference
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD, Adam, Mixing
from fedme.learning.training_settings import Training
from fedme.methods.apfl import APFL
from fedme.methods.fedavg import FedAvg
from fedme.methods.local import Local
from fedme_test_support import CLASSES, DENSE, DROPPING, LINEAR, NORMALISED, WIDE, clients, federate, personal, same, task

TWO = Training(epochs=2, batch=1000, lr=0.1)
TRAIN = Training(epochs=2, batch=3, lr=0.1, momentum=0.9, weight_decay=1e-3)


def array(params):
    return np.concatenate([params["0.weight"].numpy(), params["0.bias"].numpy()[:, None]], axis=1)


def gradient(w, split):
    x = np.concatenate([split.inputs().numpy(), np.ones((len(split), 1))], axis=1)
    z = x @ w.T
    e = np.exp(z - z.max(1, keepdims=True))
    return (e / e.sum(1, keepdims=True) - np.eye(CLASSES)[split.y.numpy()]).T @ x / len(x)


def start(*place):
    return array(Model.init(LINEAR, Key(0).at("init", *place), torch.float64).params)


@pytest.mark.parametrize("adapt", ["step", "round", "never"])
def test_two_rounds_of_two_steps_by_hand(adapt):
    data, method = clients(), APFL(TWO, alpha=0.4, adapt=adapt)
    server, engine = federate(method, task(), data, rounds=2)
    shared, own, alphas = start("shared"), {c: start("client", c) for c in data}, dict.fromkeys(data, 0.4)
    for _ in range(2):
        copies = []
        for c, each in data.items():
            w, v, a = shared, own[c], alphas[c]
            for step in range(2):
                g = gradient(a * v + (1 - a) * w, each.train)
                slope = ((v - w) * g).sum() if adapt == "step" or (adapt == "round" and step == 0) else 0.0
                w, v, a = w - 0.1 * gradient(w, each.train), v - 0.1 * a * g, min(1.0, max(0.0, a - 0.1 * slope))
            own[c], alphas[c] = v, a
            copies.append(w)
        shared = np.mean(copies, axis=0)
    assert np.allclose(array(server.model.params), shared, rtol=0, atol=1e-12)
    found = personal(method, server, engine, 2)
    for c, state in engine.states.items():
        assert abs(state.alpha - alphas[c]) < 1e-12
        assert np.allclose(array(state.own.params), own[c], rtol=0, atol=1e-12)
        mixed = alphas[c] * own[c] + (1 - alphas[c]) * shared
        assert np.allclose(array(found[c].params), mixed, rtol=0, atol=1e-12)
    assert len(set(alphas.values())) == (1 if adapt == "never" else 3)
    assert all(0 < a < 1 for a in alphas.values())


@pytest.mark.parametrize("arch", [LINEAR, DENSE, DROPPING, NORMALISED], ids=lambda arch: arch.name)
def test_alpha_zero_is_fedavg_and_one_is_local(arch):
    data, setting = clients((7, 12, 1)), task((arch,) * 3, shared=arch)
    fedavg, local = FedAvg(TRAIN, weighting="uniform"), Local(TRAIN, optimizer_state="reset")
    a, _ = federate(fedavg, setting, data)
    alone = personal(local, *federate(local, setting, data))
    for alpha in (0.0, 1.0, 0.5):
        method = APFL(TRAIN, alpha=alpha, adapt="never")
        server, engine = federate(method, setting, data)
        assert same(server.model, a.model, 1e-12)  # the mixture never touches the shared model
        found = personal(method, server, engine)
        delivered = personal(fedavg, a, federate(fedavg, setting, data, rounds=0)[1])
        assert all(same(found[c], delivered[c], 1e-12) for c in data) is (alpha == 0)
        assert all(same(found[c], alone[c], 1e-12) for c in data) is (alpha == 1)


def test_by_default_it_is_neither_and_alpha_differs_between_clients():
    gentle = Training(epochs=1, batch=3, lr=0.05)
    data, method, local = clients(), APFL(gentle), Local(gentle)
    server, engine = federate(method, task(), data)
    found = personal(method, server, engine)
    alone = personal(local, *federate(local, task(), data))
    assert not any(same(found[c], alone[c], 1e-3) or same(found[c], server.model, 1e-3) for c in data)
    assert len({state.alpha for state in engine.states.values()}) == 3
    assert all(state.alpha != 0.5 for state in engine.states.values())


def test_alpha_stays_between_zero_and_one():
    method = APFL(Training(epochs=9, batch=2, lr=0.8))
    _, engine = federate(method, task(), clients(), rounds=6)
    alphas = [state.alpha for state in engine.states.values()]
    assert all(0 <= alpha <= 1 for alpha in alphas)
    assert any(alpha in (0.0, 1.0) for alpha in alphas)
    with pytest.raises(ValueError, match="alpha: must be between 0 and 1, got 1.5"):
        APFL(alpha=1.5)


RULES = {
    "momentum, decay": SGD(CrossEntropy(), 0.1, 0.9, 0.05),
    "clip, nesterov": SGD(CrossEntropy(), 0.1, 0.9, clip=0.3, nesterov=True),
    "adamw": Adam(CrossEntropy(), 0.02, weight_decay=0.05, decoupled_weight_decay=True),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("adapt", ["step", "round"])
def test_mixtures_of_clients_of_several_architectures_in_one_stack(rule, adapt):
    """Every client has its alpha, whatever the stack: architectures, sizes and numbers of steps differ."""
    optimizer, ops = Mixing(CrossEntropy(), RULES[rule], adapt), []
    archs = (DENSE, WIDE, DENSE, DROPPING, LINEAR)
    for i, (arch, each) in enumerate(zip(archs, clients((7, 12, 5, 9, 3)).values(), strict=True)):
        models = {role: Model.init(arch, Key(i).at(role), torch.float64) for role in ("own", "global")}
        started = optimizer.started(models, 0.1 + 0.2 * i)
        ops.append(Train(models, optimizer, each.train, BatchSchedule(2, 4), Key(i), started))
    wanted = [run_on_reference(op) for op in ops]
    for path in ("auto", "stacked", "workers"):
        execute = Dispatcher(path=path)
        for (found, _), reference, op in zip(execute(ops), wanted, ops, strict=True):
            assert all(same(found.models[role], model, 1e-9) for role, model in reference.models.items())
            assert found.opt["own"].keys() == reference.opt["own"].keys()
            assert all(torch.allclose(found.opt["own"][n], a, atol=1e-9) for n, a in reference.opt["own"].items())
            assert found.losses.keys() == {"own", "global"}
            assert all(abs(found.losses[role] - loss) < 1e-9 for role, loss in reference.losses.items())
            moved = {round(a.item(), 12) for name, a in found.opt["own"].items() if name.endswith(".alpha")}
            assert len(moved) == 1  # one number per client, under the name of every weight
            assert moved != {round(op.opt["own"]["0.weight.alpha"].item(), 12)}
        auto = "stacked" if isinstance(library(), str) else "compiled"  # a string says why there is no compiled code
        expected = {"auto": auto, "stacked": "stacked", "workers": "reference"}[path]
        assert {route for _, route, _ in execute.paths} == {expected}


def test_the_reason_names_the_step_that_is_not_compiled():
    execute, train = Dispatcher(), replace(TRAIN, epochs=1, class_weights="balanced")
    federate(APFL(train), task((NORMALISED,) * 3, shared=NORMALISED), clients(), rounds=1, execute=execute)
    if not isinstance(library(), str):
        assert any("not compiled: a mixture with a proximal term" in line for line in execute.explain())
