"""FedPer, FedRep, LG-FedAvg and FedBN: steps computed by hand, limits, and what stays at a client."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedme.core.key import Key
from fedme.core.method import TaskError
from fedme.core.model import Arch, Model
from fedme.execution.dispatcher import Dispatcher
from fedme.learning.partial_model import named, require_some
from fedme.learning.training_settings import Training
from fedme.methods.fedavg import FedAvg
from fedme.methods.fedbn import FedBN
from fedme.methods.fedper import FedPer
from fedme.methods.fedrep import FedRep
from fedme.methods.lgfedavg import LGFedAvg
from fedme.methods.local import Local
from fedme_test_adapters import Adapted
from fedme_test_support import CLASSES, DENSE, DROPPING, LINEAR, NORMALISED, WIDE, clients, federate, personal, same, task

ONE = Training(epochs=1, batch=1000, lr=0.1)  # one step on the whole training part
TRAIN = Training(epochs=2, batch=3, lr=0.1, momentum=0.9, weight_decay=1e-3)
INIT = Key(0).at("init")
BODY, HEAD = ("0.weight", "0.bias"), ("2.weight", "2.bias")


def arrays(model):
    return {name: value.numpy() for name, value in {**model.params, **model.buffers}.items()}


def start(arch, name):
    return arrays(Model.init(arch, INIT.at("shared") if name == "shared" else INIT.at("client", name), torch.float64))


def gradient(w, split):
    """Of the mean cross-entropy of DENSE, written out."""
    x, y = split.inputs().numpy(), np.eye(CLASSES)[split.y.numpy()]
    a = x @ w["0.weight"].T + w["0.bias"]
    h = np.maximum(a, 0)
    z = h @ w["2.weight"].T + w["2.bias"]
    e = np.exp(z - z.max(1, keepdims=True))
    dz = (e / e.sum(1, keepdims=True) - y) / len(x)
    da = (dz @ w["2.weight"]) * (a > 0)
    return {"0.weight": da.T @ x, "0.bias": da.sum(0), "2.weight": dz.T @ h, "2.bias": dz.sum(0)}


def step(w, split, names):
    g = gradient(w, split)
    return {name: value - 0.1 * g[name] if name in names else value for name, value in w.items()}


def mean(copies, names, sizes):
    return {name: sum(n * w[name] for n, w in zip(sizes, copies, strict=True)) / sum(sizes) for name in names}


def close(found, wanted):
    return all(np.allclose(found[name], value, rtol=0, atol=1e-12) for name, value in wanted.items())


DENSE_TASK = task((DENSE,) * 3, shared=DENSE)


@pytest.mark.parametrize(("kind", "travels", "stays"), [(FedPer, BODY, HEAD), (LGFedAvg, HEAD, BODY)])
def test_one_part_is_averaged_by_samples_and_the_other_stays(kind, travels, stays):
    data, method = clients(), kind(ONE)
    server, engine = federate(method, DENSE_TASK, data, rounds=1)
    shared = start(DENSE, "shared")
    copies = []
    for client in data:
        own = start(DENSE, client)
        copies.append(step({name: (shared if name in travels else own)[name] for name in own}, data[client].train, BODY + HEAD))
        kept = {name: value.numpy() for name, value in engine.states[client].own.params.items()}
        assert kept.keys() == set(stays)
        assert close(kept, {name: copies[-1][name] for name in stays})
    merged = mean(copies, travels, (7, 12, 4))
    found = {name.replace("head.", "2."): value.numpy() for name, value in server.params.items()}
    assert found.keys() == set(travels)
    assert close(found, merged)
    for model, copy in zip(personal(method, server, engine, 1).values(), copies, strict=True):
        assert close(arrays(model), {**copy, **merged})


def test_fedrep_two_steps_of_the_head_then_one_of_the_body_with_the_new_head():
    data, method = clients(), FedRep(ONE, head_epochs=2)
    server, engine = federate(method, DENSE_TASK, data, rounds=1)
    shared, copies = start(DENSE, "shared"), []
    for client in data:
        w = {**start(DENSE, client), **{name: shared[name] for name in BODY}}
        for names in (HEAD, HEAD, BODY):
            w = step(w, data[client].train, names)
        assert close({n: v.numpy() for n, v in engine.states[client].own.params.items()}, {name: w[name] for name in HEAD})
        copies.append(w)
    assert close({n: v.numpy() for n, v in server.params.items()}, mean(copies, BODY, (1, 1, 1)))


def test_fedbn_averages_linear_layers_and_keeps_weights_and_statistics_of_batch_normalisation():
    data, method = clients(), FedBN(ONE)
    setting = task((NORMALISED,) * 3, shared=NORMALISED)
    server, engine = federate(method, setting, data, rounds=1)
    assert server.params.keys() == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert not server.buffers
    shared, copies = start(NORMALISED, "shared"), []
    for client, each in data.items():
        own = start(NORMALISED, client)
        w = {name: (own if name.startswith("1.") else shared)[name] for name in own}
        x, y = each.train.inputs().numpy(), np.eye(CLASSES)[each.train.y.numpy()]
        a = x @ w["0.weight"].T + w["0.bias"]
        mu, var = a.mean(0), a.var(0)
        normal = (a - mu) / np.sqrt(var + 1e-5)
        b = normal * w["1.weight"] + w["1.bias"]
        h = np.maximum(b, 0)
        z = h @ w["3.weight"].T + w["3.bias"]
        e = np.exp(z - z.max(1, keepdims=True))
        dz = (e / e.sum(1, keepdims=True) - y) / len(x)
        db = (dz @ w["3.weight"]) * (b > 0)
        dn = db * w["1.weight"]
        da = (dn - dn.mean(0) - normal * (dn * normal).mean(0)) / np.sqrt(var + 1e-5)
        grads = {"0.weight": da.T @ x, "0.bias": da.sum(0), "3.weight": dz.T @ h, "3.bias": dz.sum(0)}
        copies.append({name: w[name] - 0.1 * g for name, g in grads.items()})
        kept = engine.states[client].own
        assert close(
            {n: v.numpy() for n, v in kept.params.items()},
            {"1.weight": w["1.weight"] - 0.1 * (db * normal).sum(0), "1.bias": w["1.bias"] - 0.1 * db.sum(0)},
        )
        assert np.allclose(kept.buffers["1.running_mean"].numpy(), 0.1 * mu)
        assert np.allclose(kept.buffers["1.running_var"].numpy(), 0.9 + 0.1 * a.var(0, ddof=1))
    assert close({n: v.numpy() for n, v in server.params.items()}, mean(copies, server.params, (1, 1, 1)))


# Limits


@pytest.mark.parametrize("arch", [DENSE, DROPPING, NORMALISED], ids=lambda arch: arch.name)
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_fedper_without_personal_layers_is_fedavg(arch, weighting):
    data, setting = clients((7, 12, 1)), task((arch,) * 3, shared=arch)
    a, _ = federate(FedAvg(TRAIN, weighting=weighting), setting, data)
    b, engine = federate(FedPer(TRAIN, personal=(), weighting=weighting), setting, data)
    drops = arch == DROPPING  # roles of other names have other dropout masks
    assert all(torch.equal(b.params[n], p) for n, p in a.model.params.items()) or drops
    assert all(torch.equal(b.buffers[n], p) for n, p in a.model.buffers.items())
    assert b.params.keys() == a.model.params.keys()
    assert all(not state.own.params for state in engine.states.values())


def test_fedper_with_personal_layers_only_is_local():
    data, method, local = clients(), FedPer(TRAIN, personal=("0.", "2.")), Local(TRAIN, optimizer_state="reset")
    a = personal(method, *federate(method, DENSE_TASK, data))
    b = personal(local, *federate(local, DENSE_TASK, data))
    assert all(same(a[c], b[c]) for c in data)


def test_fedrep_without_epochs_of_the_body_keeps_the_body_and_without_those_of_the_head_the_head():
    data, method = clients(), FedRep(TRAIN, body_epochs=0, head_epochs=2)
    server, engine = federate(method, DENSE_TASK, data)
    first = method.init_server(DENSE_TASK, INIT)
    assert all(torch.allclose(server.params[name], p, rtol=0, atol=1e-15) for name, p in first.params.items())
    assert not close({n: v.numpy() for n, v in engine.states["0"].own.params.items()}, {n: start(DENSE, "0")[n] for n in HEAD})
    method = FedRep(TRAIN, head_epochs=0)
    server, engine = federate(method, DENSE_TASK, data)
    assert not any(torch.equal(server.params[name], p) for name, p in first.params.items())
    for client, state in engine.states.items():
        assert close({n: v.numpy() for n, v in state.own.params.items()}, {n: start(DENSE, client)[n] for n in HEAD})
    with pytest.raises(ValueError, match="head_epochs: must be >= 1 if body_epochs is 0"):
        FedRep(head_epochs=0, body_epochs=0)


def test_lg_fedavg_without_shared_layers_is_local_with_any_architectures():
    data, method, local = clients(), LGFedAvg(TRAIN, shared=()), Local(TRAIN, optimizer_state="reset")
    setting = task((DROPPING, NORMALISED, LINEAR))
    a = personal(method, *federate(method, setting, data))
    b = personal(local, *federate(local, setting, data))
    assert all(same(a[c], b[c]) for c in data)


@pytest.mark.parametrize("arch", [LINEAR, DENSE], ids=lambda arch: arch.name)
def test_fedbn_without_batch_normalisation_is_fedavg(arch):
    data, setting = clients((7, 12, 1)), task((arch,) * 3, shared=arch)
    a, _ = federate(FedAvg(TRAIN, weighting="uniform"), setting, data)
    b, _ = federate(FedBN(TRAIN), setting, data)
    assert all(torch.equal(b.params[n], p) for n, p in a.model.params.items())


@pytest.mark.parametrize("kind", [FedPer, FedRep, LGFedAvg, FedBN])
def test_defaults_are_neither_local_nor_fedavg(kind):
    data, setting, method = clients(), task((NORMALISED,) * 3, shared=NORMALISED), kind(TRAIN)
    found = personal(method, *federate(method, setting, data))
    for other in (Local(TRAIN), FedAvg(TRAIN), FedAvg(TRAIN, weighting="uniform")):
        trivial = personal(other, *federate(other, setting, data))
        assert not any(same(found[c], trivial[c], 1e-3) for c in data)
    assert not same(found["0"], found["1"], 1e-3)


# Different bodies, refusals, engines


DEEPER = Arch.named("deeper", lambda: torch.nn.Sequential(*_deeper()))


def _deeper():
    nn = torch.nn
    return nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, CLASSES)


def test_lg_fedavg_shares_one_head_over_different_bodies():
    data, method = clients(), LGFedAvg(TRAIN)
    setting = task((DENSE, DEEPER, DROPPING), resolve=lambda name, classes: {"deeper": DEEPER}[name])
    server, engine = federate(method, setting, data)
    models = personal(method, server, engine)
    assert server.params.keys() == {"head.weight", "head.bias"}
    assert torch.equal(models["0"].params["2.weight"], models["1"].params["4.weight"])
    assert engine.states["1"].own.params.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_what_cannot_be_shared_is_refused_by_name():
    with pytest.raises(TaskError, match=r"client 1 cannot share .*: head.weight has shape \(4, 9\) in wide, expected \(4, 5\)"):
        LGFedAvg(TRAIN).check(task((DENSE, WIDE, DENSE)))
    with pytest.raises(
        TaskError, match=r"method.personal: no weight of dense has a name that 'conv' matches; it has 0.weight, 0.bias, 2"
    ):
        FedPer(TRAIN, personal=("conv",)).check(DENSE_TASK)
    with pytest.raises(TaskError, match=r"method.shared: no weight of dense has a name that 'conv' matches"):
        LGFedAvg(TRAIN, shared=("conv",)).check(DENSE_TASK)
    FedPer(TRAIN, personal=("*.bias",)).check(DENSE_TASK)


def test_a_pattern_may_name_a_module():
    """As peft names its weights: "query.lora_A.default.weight"."""
    chosen = named("*.lora_A", "head")
    assert chosen("layer.0.query.lora_A.default.weight")
    assert chosen("head.bias")
    assert not chosen("layer.0.query.lora_B.default.weight")
    assert not chosen("layer.0.query.lora_AB.weight")


def test_a_pattern_of_frozen_weights_only_is_refused():
    frozen = Arch(Adapted)
    with pytest.raises(TaskError, match=r"that 'body' matches, only frozen ones, .* it has adapter.weight, adapter.bias, head"):
        require_some(frozen, ("body",), "method.shared")


def test_a_pattern_chooses_weights_by_name():
    server, engine = federate(FedPer(TRAIN, personal=("*.bias",)), DENSE_TASK, clients())
    assert server.params.keys() == {"0.weight", "2.weight"}
    assert engine.states["0"].own.params.keys() == {"0.bias", "2.bias"}


@pytest.mark.parametrize("path", ["auto", "stacked", "eager"])
@pytest.mark.parametrize("arch", [DENSE, NORMALISED], ids=lambda arch: arch.name)
def test_frozen_weights_stay_on_every_path(arch, path):
    data, setting = clients(), task((arch,) * 3, shared=arch)
    method = FedRep(replace(TRAIN, clip=0.7), head_epochs=2)
    a, _ = federate(method, setting, data)
    execute = Dispatcher(path=path)
    b, _ = federate(method, setting, data, execute=execute)
    assert all(torch.allclose(a.params[n], b.params[n], rtol=0, atol=1e-9) for n in a.params)
    kept, engine = federate(FedRep(TRAIN, body_epochs=0, head_epochs=2), setting, data, execute=execute)
    first = method.init_server(setting, INIT)
    assert all(torch.allclose(kept.params[n], p, rtol=0, atol=1e-15) for n, p in first.params.items())
    assert len(engine.states) == 3


def test_a_frozen_model_thaws_to_the_same_model():
    model = Model.init(NORMALISED, Key(1), torch.float64)
    frozen = model.frozen(["0.weight", "3.bias"])
    assert frozen.params.keys() == model.params.keys() - {"0.weight", "3.bias"}
    again = frozen.thawed(["0.weight", "3.bias"])
    assert list(again.params) == list(model.params)
    assert list(again.buffers) == list(model.buffers)
    assert same(again, model)
    assert torch.equal(frozen(torch.ones(2, 3, dtype=torch.float64)), model(torch.ones(2, 3, dtype=torch.float64)))
