"""FedProto: rounds by hand, its limit Local, features on every path, and what is refused."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedme.core.key import Key
from fedme.core.method import TaskError
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, Predict, Train
from fedme.execution.compiled import library
from fedme.execution.dispatcher import Dispatcher
from fedme.execution.reference import run as run_on_reference
from fedme.learning.features import feature_width, widened, with_features
from fedme.learning.objectives import TowardsPrototype
from fedme.learning.optimizers import SGD
from fedme.learning.training_settings import Training
from fedme.methods.fedproto import FedProto
from fedme.methods.local import Local
from fedme_oracles import fedproto as oracle
from fedme_test_support import CLASSES, DENSE, DROPPING, LINEAR, NORMALISED, WIDE, clients, federate, personal, same, task

ONE = Training(epochs=1, batch=1000, lr=0.1)
TRAIN = Training(epochs=2, batch=3, lr=0.1, momentum=0.9, weight_decay=1e-3)


class Branched(nn.Module):
    """Two branches, a functional dropout, and a head that is not the last module: nothing that a Sequential is."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(3, 2), nn.Linear(3, 3), nn.Linear(5, CLASSES)
        self.act = nn.Tanh()

    def forward(self, x):
        both = torch.cat([self.act(self.left(x)), self.act(self.right(x))], 1)
        return self.last(nn.functional.dropout(both, 0.3, self.training))


BRANCHED = Arch.named("branched", Branched)
ARCHS = (DENSE, BRANCHED, DROPPING)  # five features each


def hidden(w, x):
    return np.maximum(x @ w["0.weight"].T + w["0.bias"], 0)


def step(w, x, y, prototypes, lam):
    a = x @ w["0.weight"].T + w["0.bias"]
    h = np.maximum(a, 0)
    z = h @ w["2.weight"].T + w["2.bias"]
    e = np.exp(z - z.max(1, keepdims=True))
    dz = (e / e.sum(1, keepdims=True) - np.eye(CLASSES)[y]) / len(x)
    dh = dz @ w["2.weight"]
    for k, label in enumerate(y):
        if label in prototypes:
            dh[k] += lam * 2 * (h[k] - prototypes[label]) / h.shape[1] / len(x)
    da = dh * (a > 0)
    grads = {"0.weight": da.T @ x, "0.bias": da.sum(0), "2.weight": dz.T @ h, "2.bias": dz.sum(0)}
    return {name: w[name] - 0.1 * g for name, g in grads.items()}


@pytest.mark.parametrize("means", ["training", "trained"])
def test_three_rounds_by_hand(means):
    """Client 2 is missing in the second round: classes that only it has keep their prototypes."""
    data, method = clients(), FedProto(ONE, lam=0.8, means=means)
    server, engine = federate(method, task((DENSE,) * 3), data, lost=lambda t, client: (t, client) == (1, "2"))
    w = {}
    for c in data:
        first = Model.init(DENSE, Key(0).at("init", "client", c), torch.float64)
        w[c] = {name: value.numpy() for name, value in first.params.items()}
    prototypes = {}
    for t in range(3):
        sums = {}
        for c, each in data.items():
            if (t, c) == (1, "2"):
                continue
            x, y = each.train.inputs().numpy(), each.train.y.numpy()
            before, w[c] = w[c], step(w[c], x, y, prototypes, 0.8)
            for feature, label in zip(hidden(w[c] if means == "trained" else before, x), y, strict=True):
                total, count = sums.get(label, (0.0, 0))
                sums[label] = total + feature, count + 1
        prototypes = {**prototypes, **{label: total / count for label, (total, count) in sums.items()}}
    for c, state in engine.states.items():
        assert state.model.arch == DENSE
        assert all(np.allclose(state.model.params[n].numpy(), v, rtol=0, atol=1e-12) for n, v in w[c].items())
    assert set(server.known.nonzero().flatten().tolist()) == prototypes.keys()
    for label, prototype in prototypes.items():
        assert np.allclose(server.means[label].numpy(), prototype, rtol=0, atol=1e-12)


def test_without_the_distance_it_is_local_and_by_default_it_is_not():
    data, setting = clients(), task(ARCHS)
    local = Local(TRAIN, optimizer_state="reset")
    alone = personal(local, *federate(local, setting, data))
    none, usual = (personal(m, *federate(m, setting, data)) for m in (FedProto(TRAIN, lam=0.0), FedProto(TRAIN)))
    assert all(same(alone[c], none[c], 1e-12) for c in data)
    assert not any(same(alone[c], usual[c], 1e-3) for c in data)


def test_features_come_closer_to_the_prototypes():
    def distance(lam):
        data, method = clients((30, 30, 30)), FedProto(Training(epochs=3, batch=5, lr=0.05), lam=lam)
        server, engine = federate(method, task((DENSE,) * 3), data, rounds=8)
        found = []
        for c, state in engine.states.items():
            features = run_on_reference(Predict(widened(state.model), data[c].train))[:, CLASSES:]
            found.append((features - server.means[data[c].train.y]).square().mean().item())
        return sum(found)

    assert distance(3.0) < 0.3 * distance(0.0)


@pytest.mark.parametrize("arch", [DENSE, DROPPING, NORMALISED, BRANCHED], ids=lambda arch: arch.name)
@pytest.mark.parametrize("path", ["auto", "compiled", "stacked", "workers"])
def test_training_with_features_on_every_path(arch, path):
    ops = []
    for client, each in clients((7, 12, 5)).items():
        model = widened(Model.init(arch, Key(5).at(client), torch.float64))
        width = feature_width(arch)
        targets = torch.randn(CLASSES, width, generator=Key(6).at(client).torch(), dtype=torch.float64)
        loss = TowardsPrototype(targets, torch.tensor([True, False, True, True]), 0.9)
        ops.append(Train({"own": model}, SGD(loss, 0.1, 0.9), each.train, BatchSchedule(2, 4), Key(7).at(client)))
    wanted = [run_on_reference(op) for op in ops]
    execute = Dispatcher(path=path)
    for op, reference, (found, _) in zip(ops, wanted, execute(ops), strict=True):
        assert same(found.models["own"], reference.models["own"], 1e-9)
        assert abs(found.losses["own"] - reference.losses["own"]) < 1e-9
        predicted, _ = execute([Predict(found.models["own"], op.data)])[0]
        assert torch.allclose(predicted, run_on_reference(Predict(found.models["own"], op.data)), rtol=0, atol=1e-9)
    if path == "auto" and not isinstance(library(), str):  # a string says why there is no compiled code
        assert {route for _, route, _ in execute.paths} == {"compiled"}


@pytest.mark.parametrize("arch", [DENSE, BRANCHED, NORMALISED, LINEAR], ids=lambda arch: arch.name)
def test_a_network_with_features_is_the_network_and_its_features(arch):
    model, x = Model.init(arch, Key(1), torch.float64), torch.randn(4, 3, dtype=torch.float64, generator=Key(2).torch())
    outputs = widened(model)(x)
    assert torch.equal(outputs[:, :CLASSES], model(x))
    head = [m for m in model.module().modules() if isinstance(m, nn.Linear)][-1]
    assert torch.allclose(head(outputs[:, CLASSES:]), model(x))
    assert with_features(arch) == with_features(pickle.loads(pickle.dumps(arch))) or arch is BRANCHED
    again = pickle.loads(pickle.dumps(with_features(DENSE)))
    assert (again, hash(again)) == (with_features(DENSE), hash(with_features(DENSE)))


@pytest.mark.parametrize("unknown", [[], [2]])
def test_prediction_by_the_nearest_prototype(unknown):
    """The oracle's rule, for heads that are nothing but weights; only the prediction differs from that by the head."""
    data, setting = clients((20, 15, 25)), task(ARCHS)
    data = {
        c: replace(each, train=each.train.take((~torch.isin(each.train.y, torch.tensor(unknown))).nonzero().flatten()))
        for c, each in data.items()
    }
    head, nearest = (FedProto(TRAIN, predict=rule) for rule in ("head", "prototype"))
    server, engine = federate(nearest, setting, data)
    by_head = federate(head, setting, data)[1]
    assert server.known.tolist() == [label not in unknown for label in range(CLASSES)]
    for c, model in personal(nearest, server, engine).items():
        assert same(engine.states[c].model, by_head.states[c].model)
        assert model.arch == engine.states[c].model.arch
        features = run_on_reference(Predict(widened(engine.states[c].model), data[c].test))[:, CLASSES:]
        answers = run_on_reference(Predict(model, data[c].test))
        assert torch.equal(answers.argmax(1), oracle.nearest_prototype(features, server.means, server.known))
        distances = torch.cdist(features, server.means).square()
        chances = (-distances).masked_fill(~server.known, -torch.inf).softmax(1)
        assert torch.allclose(answers.softmax(1), chances, rtol=0, atol=1e-12)
    first = federate(nearest, setting, data, rounds=0)
    assert not same(personal(nearest, server, engine)["0"], personal(head, server, by_head)["0"], 1e-3)
    assert not first[0].known.any()  # nobody has sent anything: the head is what there is
    assert personal(nearest, *first, 1)["0"].params.keys() == personal(head, *first, 1)["0"].params.keys()


def no_bias():
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, CLASSES, bias=False))


def test_a_head_without_a_bias_predicts_by_itself_only():
    setting = task((DENSE, Arch.named("no-bias", no_bias), DENSE))
    FedProto(TRAIN).check(setting)
    with pytest.raises(
        TaskError, match="client 1: the last layer of no-bias has no bias, which prediction by the nearest prot"
    ):
        FedProto(TRAIN, predict="prototype").check(setting)


def test_what_has_no_common_features_is_refused_by_name():
    with pytest.raises(TaskError, match="client 1 cannot share prototypes: wide has 9 features, .* expected 5 as in dense"):
        FedProto(TRAIN).check(task((DENSE, WIDE, DENSE)))
    with pytest.raises(TaskError, match="linear has no layer before its last one, so its features would be the samples"):
        FedProto(TRAIN).check(task())


def test_clients_without_a_class_and_cohorts():
    data = clients((9, 9, 9))
    only = {c: each.train.take((each.train.y != int(c)).nonzero().flatten()) for c, each in data.items()}
    data = {c: replace(each, train=only[c]) for c, each in data.items()}
    server, _ = federate(FedProto(replace(TRAIN, cohort=2)), task((DENSE,) * 3), data, rounds=3)
    assert server.means.isfinite().all()
    assert server.known.sum() >= 3
