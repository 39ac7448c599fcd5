"""Frozen weights belong to the architecture: they do not travel, are in memory once, and are saved once."""

import dataclasses
import json

import pytest
import torch

import fedme
from fedme.artifacts import saved_models
from fedme.core.key import Key
from fedme.core.method import Round
from fedme.core.model import Arch, Model, WithFrozen, average, frozen_weights
from fedme.core.serialization import pack, unpack
from fedme.methods import METHODS
from fedme.results import records, summary
from fedme.running import checkpoint, run
from fedme_test_adapters import CLASSES, LENGTH, VOCABULARY, Adapted, bert, gpt
from fedme_test_runs import CutAfterOneRound, Killed, Watching, difference, rounds_saved

OTHERS = {"centralized": "sends samples", "local": "sends nothing", "fd": "sends outputs", "fedmd": "sends outputs"}
OTHERS |= {"fedproto": "sends features", "heterofl": "its networks are slices, with slices of frozen weights"}


def made(folder, method):
    learner = fedme.learner(METHODS[method])(rounds=2, train={"batch": 8})
    experiment = learner.experiment(clients(lambda _: Arch(Adapted), tokens=False), unlabeled=6)
    return dataclasses.replace(experiment, settings=dataclasses.replace(experiment.settings, output=str(folder)))


def trained_bytes(arch):
    return sum(4 * p.numel() + len(name) for name, p in Model.init(arch, Key(0)).params.items())


def test_all_models_of_an_architecture_have_the_same_tensors():
    arch = Arch(Adapted, depth=2)
    a, b = Model.init(arch, Key(1)), Model.init(arch, Key(2))
    frozen = frozen_weights(arch, torch.float32)
    assert set(frozen) == {"body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias"}
    assert all(a.buffers[name] is b.buffers[name] is value for name, value in frozen.items())
    assert not torch.equal(a.params["head.weight"], b.params["head.weight"])
    mean = average([a, b])
    assert all(mean.buffers[name] is value for name, value in frozen.items())
    assert mean.nbytes == len(arch.name) + trained_bytes(arch)
    assert a.thawed(frozen).params.keys() > a.params.keys()


def test_messages_leave_them_out_and_readers_have_them():
    arch = Arch(Adapted, depth=1)
    model, tensors = Model.init(arch, Key(1)), {}
    plain = pack(model, tensors)
    assert not any("body" in name for name in tensors)
    again = unpack(Model, json.loads(json.dumps(plain)), tensors, {arch.name: arch})
    assert all(torch.equal(again.buffers[name], model.buffers[name]) for name in model.buffers)
    x = torch.randn(4, 6, generator=Key(3).torch())
    assert torch.equal(again(x), model(x))
    own = Model(arch, model.params, {name: value + 1 for name, value in model.buffers.items()})
    tensors = {}
    plain = pack(own, tensors)
    changed = unpack(Model, plain, tensors, {arch.name: arch})
    assert torch.equal(changed.buffers["body.0.bias"], own.buffers["body.0.bias"]), (
        "others than those of the architecture travel"
    )


def clients(network, count=4, tokens=True):
    draw = Key(5).torch()
    result = []
    for number in range(count):
        y = torch.arange(24) % CLASSES
        x = torch.randint(1, VOCABULARY, (24, LENGTH), generator=draw)
        x[:, 0] = 1 + y
        inputs = x if tokens else torch.randn(24, 6, generator=draw) + y[:, None]
        result.append(fedme.Client(f"site-{number}", train=(inputs, y), model=network(number)))
    return result


def sent(folder):
    return summary.read(folder)["bytes_up"] + summary.read(folder)["bytes_down"]


@pytest.mark.parametrize("method", sorted(METHODS.keys() - OTHERS.keys()))
def test_every_method_sends_only_what_is_trained(method, tmp_path):
    learner = fedme.learner(METHODS[method])(rounds=2, train={"batch": 8, "lr": 0.05})
    folder = tmp_path / "run"
    result = learner.fit(clients(lambda _: Arch(Adapted, depth=3), tokens=False), unlabeled=6, output=folder, quiet=True)
    arch = Arch(Adapted, depth=3)
    frozen = sum(4 * value.numel() for value in frozen_weights(arch, torch.float32).values())
    rows = {(row["round"], row["client"]): row for row in records.read(folder)}
    models = {"fedme": 2, "scaffold": 2, "hypcluster": 3, "apfl": 2, "feddf": 1}.get(method, 1)
    for row in rows.values():
        assert 0 < row["bytes_up"] + row["bytes_down"] < 2 * models * (trained_bytes(arch) + 400)
    assert frozen > 400
    module = result["site-1"].module
    for name, value in frozen_weights(arch, torch.float32).items():
        found = dict(saved_models.read_model(folder / "clients" / "site-1", imports=True)[0].buffers)
        assert torch.equal(found[name], value)
    assert module is not None
    assert len(list((folder / "clients").glob("frozen-*.safetensors"))) == 1
    assert not any("body" in name for name in _saved(folder / "clients" / "site-1" / "model.safetensors"))


def _saved(path):
    from fedme.core.atomic_files import read_tensors

    return read_tensors(path)[0]


@pytest.mark.parametrize("method", ["fedavg", "fedme", "fml"])
def test_a_resumed_run_has_them_too(method, tmp_path):
    whole = run.start(made(tmp_path / "whole", method), Watching())
    with pytest.raises(Killed):
        run.start(made(tmp_path / "cut", method), CutAfterOneRound(tmp_path / "cut"))
    assert rounds_saved(tmp_path / "cut") == 1
    run.resume(tmp_path / "cut", Watching(), made(tmp_path / "cut", method))
    assert difference(whole, tmp_path / "cut") == ""
    text = (whole / checkpoint.NAME).read_text()
    assert "adapter.weight" in text
    assert "body" not in text
    assert isinstance(Model.init(Arch(Adapted), Key(0)).buffers, WithFrozen)


@pytest.mark.needs("transformers", "peft")
@pytest.mark.parametrize("method", ["fedavg", "fedme", "fml", "pfml"])
def test_adapters_of_peft_work_as_they_are(method, tmp_path):
    learner = fedme.learner(METHODS[method])(rounds=2, train={"batch": 8, "lr": 0.1})
    network = Arch(bert)
    result = learner.fit(clients(lambda _: network), output=tmp_path / "run", quiet=True)
    model = Model.init(network, Key(0))
    trained, frozen = sum(p.numel() for p in model.params.values()), sum(p.numel() for p in model.buffers.values())
    assert any("lora_A" in name for name in model.params)
    assert frozen > 5 * trained
    exchanged = 4 * 2 * {"fedme": 4}.get(method, 2) * 4 * trained
    assert exchanged <= sent(tmp_path / "run") <= 2 * exchanged
    assert len(result["site-0"].predict(clients(lambda _: network)[0].train[0])) == 24


@pytest.mark.needs("transformers", "peft")
def test_different_networks_with_adapters_exchange_models(tmp_path):
    networks = [Arch(bert), Arch(gpt), Arch(bert, hidden=24), Arch(gpt)]
    result = fedme.FedMe(rounds=2, train={"batch": 8}).fit(clients(lambda n: networks[n]), output=tmp_path / "run", quiet=True)
    assert len(list((tmp_path / "run" / "clients").glob("frozen-*.safetensors"))) >= 1
    for number in range(4):
        assert len(result[f"site-{number}"].predict(torch.ones(2, LENGTH, dtype=torch.int64))) == 2


def test_the_same_accuracy_as_with_weights_that_travel(tmp_path):
    """A frozen body is the same as a trained one with a rate of zero: here, as a method that never changes it."""
    arch, open_arch = Arch(Adapted, depth=2), Arch(Adapted, depth=2, frozen=False)
    closed = Model.init(arch, Key(1))
    opened = Model(open_arch, {**closed.buffers, **closed.params}, {}).frozen(closed.buffers)
    from fedme.core.data import Arrays, Split
    from fedme.core.operations import train
    from fedme.execution.lockstep import run_in_lockstep
    from fedme.execution.reference import one_by_one
    from fedme.learning.objectives import CrossEntropy
    from fedme.learning.training_settings import Training

    draw = Key(9).torch()
    data = Split(Arrays(torch.randn(30, 6, generator=draw), torch.arange(30) % CLASSES), torch.arange(30))
    settings, after = Training(batch=10, lr=0.1), []
    for model in (closed, opened):
        when = Round(0, 1)
        work = train(
            {"own": model}, settings.local_optimizer(CrossEntropy(), when), data, settings.batch_schedule(when), Key(4)
        )
        after.append(run_in_lockstep({"x": work}, one_by_one)["x"].value.models["own"])
    for name in closed.params:
        assert torch.equal(after[0].params[name], after[1].params[name])
    assert isinstance(after[0].buffers, WithFrozen)
