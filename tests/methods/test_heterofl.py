"""HeteroFL: rounds by hand, its limit FedAvg, scalers, and what is no slice."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedme.core.key import Key
from fedme.core.method import TaskError
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, Train
from fedme.execution.dispatcher import Dispatcher
from fedme.execution.reference import run as run_on_reference
from fedme.learning.objectives import CrossEntropy, MaskedCrossEntropy
from fedme.learning.optimizers import SGD
from fedme.learning.robust_aggregation import Defence
from fedme.learning.training_settings import Training
from fedme.learning.width_slices import narrowed, rates, scaled
from fedme.methods.fedavg import FedAvg
from fedme.methods.heterofl import HeteroFL
from fedme_test_support import (
    CLASSES,
    DENSE,
    DROPPING,
    LINEAR,
    NORMALISED,
    WIDE,
    clients,
    dense,
    federate,
    personal,
    same,
    task,
)

ONE = Training(epochs=1, batch=1000, lr=0.1)
TRAIN = Training(epochs=2, batch=3, lr=0.1, momentum=0.9, weight_decay=1e-3)
NARROW = Arch.named("narrow", dense, hidden=2)
THREE = (DENSE, WIDE, NARROW)  # 5, 9 and 2 hidden units


def without(data, missing):
    """Clients without samples of these classes."""
    for client, labels in missing.items():
        train = data[client].train
        keep = ~torch.isin(train.y, torch.tensor(labels))
        data[client] = replace(data[client], train=train.take(keep.nonzero().flatten()))
    return data


def step(w, split, rate, present):
    x, y = split.inputs().numpy(), np.eye(CLASSES)[split.y.numpy()]
    a = (x @ w["0.weight"].T + w["0.bias"]) / rate
    h = np.maximum(a, 0)
    z = (h @ w["2.weight"].T + w["2.bias"]) * present
    e = np.exp(z - z.max(1, keepdims=True))
    dz = (e / e.sum(1, keepdims=True) - y) * present / len(x)
    da = (dz @ w["2.weight"]) * (a > 0) / rate
    grads = {"0.weight": da.T @ x, "0.bias": da.sum(0), "2.weight": dz.T @ h, "2.bias": dz.sum(0)}
    return {name: w[name] - 0.1 * g for name, g in grads.items()}


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("scalers", [True, False])
def test_two_rounds_by_hand(masked, scalers):
    data = without(clients((9, 12, 8)), {"0": [1], "2": [1, 3]})
    server, engine = federate(HeteroFL(ONE, masked=masked, scalers=scalers), task(THREE), data, rounds=2)
    first = Model.init(WIDE, Key(0).at("init", "shared"), torch.float64)
    w = {name: value.numpy() for name, value in first.params.items()}
    widths = {"0": 5, "1": 9, "2": 2}
    for _ in range(2):
        sums = {name: np.zeros_like(value) for name, value in w.items()}
        counts = {name: np.zeros_like(value) for name, value in w.items()}
        for c, each in data.items():
            k = widths[c]
            there = np.isin(np.arange(CLASSES), each.train.y.numpy())
            has = there if masked else np.ones(CLASSES, dtype=bool)
            cut = {
                "0.weight": (slice(k),),
                "0.bias": (slice(k),),
                "2.weight": (slice(None), slice(k)),
                "2.bias": (slice(None),),
            }
            own = step({n: w[n][cut[n]] for n in w}, each.train, k / 9 if scalers else 1.0, has)
            for name, value in own.items():
                ones = np.ones_like(value)
                if name.startswith("2."):
                    ones[~has] = 0
                sums[name][cut[name]] += ones * value
                counts[name][cut[name]] += ones
        w = {name: np.where(counts[name] > 0, sums[name] / np.maximum(counts[name], 1), w[name]) for name in w}
    assert all(np.allclose(server.model.params[name].numpy(), value, rtol=0, atol=1e-12) for name, value in w.items())
    models = personal(HeteroFL(ONE), server, engine, 2)
    assert [models[c].arch for c in "012"] == list(THREE)
    assert np.array_equal(models["2"].params["2.weight"].numpy(), server.model.params["2.weight"][:, :2].numpy())


@pytest.mark.parametrize("arch", [LINEAR, DENSE, DROPPING, NORMALISED], ids=lambda arch: arch.name)
def test_one_width_is_fedavg(arch):
    data, setting = clients((7, 12, 1)), task((arch,) * 3, shared=arch)
    a, _ = federate(FedAvg(TRAIN, weighting="uniform"), setting, data)
    b, _ = federate(HeteroFL(TRAIN, masked=False, static_bn=False), setting, data)
    assert same(a.model, b.model, 1e-12)
    masked, _ = federate(HeteroFL(TRAIN), setting, data)
    assert not same(a.model, masked.model, 1e-3)  # a client of one sample has one class


def normed(hidden=6):
    return nn.Sequential(nn.Linear(3, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def test_static_batch_normalisation_by_hand():
    """No statistics are sent or averaged; every client's are those of its own samples, without its scalers."""
    archs = tuple(Arch.named(f"normed-{hidden}", normed, hidden=hidden) for hidden in (6, 3, 2))
    data, setting = clients((20, 15, 12)), task(archs)
    server, engine = federate(HeteroFL(TRAIN), setting, data)
    assert torch.equal(server.model.buffers["1.running_mean"], torch.zeros(6, dtype=torch.float64))
    assert torch.equal(server.model.buffers["1.running_var"], torch.ones(6, dtype=torch.float64))
    weight, bias = (server.model.params[f"0.{name}"].numpy() for name in ("weight", "bias"))
    found = personal(HeteroFL(TRAIN), server, engine)
    for (c, each), arch in zip(data.items(), archs, strict=True):
        hidden = dict(arch.options)["hidden"]
        outputs = each.train.inputs().numpy() @ weight[:hidden].T + bias[:hidden]
        model = found[c]
        assert model.arch == arch
        assert np.allclose(model.buffers["1.running_mean"].numpy(), outputs.mean(0), rtol=0, atol=1e-12)
        assert np.allclose(model.buffers["1.running_var"].numpy(), outputs.var(0, ddof=1), rtol=0, atol=1e-12)
        assert torch.equal(model.params["3.weight"], server.model.params["3.weight"][:, :hidden])
    averaged, other = federate(HeteroFL(TRAIN, static_bn=False), setting, data)
    assert same(
        Model(archs[0], averaged.model.params, {}), Model(archs[0], server.model.params, {})
    )  # training does not see them
    assert not torch.allclose(averaged.model.buffers["1.running_mean"], server.model.buffers["1.running_mean"], atol=1e-3)
    assert len(other.states) == 3


def test_by_default_several_widths_are_not_fedavg_of_anything():
    data = clients((20, 20, 20))
    server, engine = federate(HeteroFL(TRAIN), task(THREE), data)
    alone, _ = federate(FedAvg(TRAIN, weighting="uniform"), task((WIDE,) * 3, shared=WIDE), data)
    assert not same(server.model, alone.model, 1e-3)
    first = HeteroFL(TRAIN).init_server(task(THREE), Key(0).at("init")).model
    only_wide = federate(HeteroFL(TRAIN), task(THREE), data, rounds=1, lost=lambda t, client: client != "2")[0].model
    assert torch.equal(only_wide.params["0.weight"][2:], first.params["0.weight"][2:])  # nobody had these
    assert not torch.equal(only_wide.params["0.weight"][:2], first.params["0.weight"][:2])
    assert len(engine.states) == 3


@pytest.mark.parametrize("path", ["auto", "compiled", "stacked", "workers"])
@pytest.mark.parametrize("loss", [CrossEntropy(), MaskedCrossEntropy((True, False, True, True))], ids=["whole", "masked"])
def test_scalers_on_every_path(path, loss):
    """A network that divides in training only: a trace of either mode would be wrong in the other."""
    ops = []
    for client, each in without(clients((9, 12, 8)), {client: [1] for client in "012"}).items():
        model = Model.init(DENSE, Key(3).at(client), torch.float64)
        model = scaled(model, rates(DENSE, WIDE))
        ops.append(Train({"net": model}, SGD(loss, 0.1, 0.9), each.train, BatchSchedule(2, 4), Key(4).at(client)))
    wanted = [run_on_reference(op) for op in ops]
    found = [result for result, _ in Dispatcher(path=path)(ops)]
    plain = [run_on_reference(replace(op, models={"net": Model(DENSE, op.models["net"].params, {})})) for op in ops]
    for a, b, c in zip(wanted, found, plain, strict=True):
        assert same(a.models["net"], b.models["net"], 1e-9)
        unscaled = c.models["net"]
        assert not torch.allclose(a.models["net"].params["0.weight"], unscaled.params["0.weight"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("path", ["auto", "stacked", "workers"])
def test_every_path_agrees_with_different_widths(path):
    data, method = without(clients((9, 12, 8)), {"0": [1]}), HeteroFL(TRAIN)
    a, _ = federate(method, task(THREE), data)
    b, _ = federate(method, task(THREE), data, execute=Dispatcher(path=path))
    assert same(a.model, b.model, 1e-9)


def test_slices_and_rates():
    wide = Model.init(WIDE, Key(1), torch.float64)
    narrow = narrowed(wide, NARROW)
    assert {name: tuple(p.shape) for name, p in narrow.params.items()} == {
        "0.weight": (2, 3),
        "0.bias": (2,),
        "2.weight": (CLASSES, 2),
        "2.bias": (CLASSES,),
    }
    assert rates(NARROW, WIDE) == {"0": 2 / 9}
    assert rates(WIDE, WIDE) == {}
    x = torch.randn(4, 3, dtype=torch.float64, generator=Key(2).torch())
    doubled = narrow.with_params(narrow.params | {name: 2 * narrow.params[name] for name in ("0.weight", "0.bias")})
    assert torch.allclose(scaled(narrow, {"0": 0.5})(x), doubled(x))


@pytest.mark.parametrize("average", ["mean", "median", "trimmed"])
def test_a_robust_mean_is_of_those_who_have_a_number(average):
    defence = Defence(average=average, trim=0.25)
    values = torch.tensor([[1.0, 5.0], [2.0, 0.0], [3.0, 0.0], [900.0, 0.0]])
    known = torch.tensor([[True, True], [True, False], [True, False], [True, False]])
    wanted = {"mean": 226.5, "median": 2.5, "trimmed": 2.5}[average]
    assert defence.middle_of_known(values, known).tolist() == [wanted, 5.0]
    assert torch.equal(defence.middle_of_known(values, torch.ones_like(known)), defence.middle(values))
    assert defence.middle_of_known(values, torch.zeros_like(known)).tolist() == [0.0, 0.0]


def test_what_is_no_slice_is_refused_by_name():
    with pytest.raises(TaskError, match=r"client 0: linear is no slice of the widest network, wide: 2.weight is in wide only"):
        HeteroFL(TRAIN).check(task((LINEAR, WIDE)))
    with pytest.raises(TaskError, match="client 1: normalised is no slice of the widest network, wide"):
        HeteroFL(TRAIN).check(task((WIDE, NORMALISED)))
    open_ = replace(task((WIDE, WIDE), shared=DENSE), open=True)
    with pytest.raises(TaskError, match="client 0: wide is no slice of the widest network, dense"):
        HeteroFL(TRAIN).check(open_)
