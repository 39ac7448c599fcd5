"""Methods that exchange only the weights whose names are given, also between different networks."""

import dataclasses

import pytest
import torch

import fedme
from fedme.artifacts.saved_models import load_model
from fedme.config.experiment import ConfigError, parse
from fedme.core.key import Key
from fedme.core.method import TaskError
from fedme.core.model import Arch, Model
from fedme.methods import METHODS
from fedme.results import records, summary
from fedme.running import run
from fedme_test_adapters import CLASSES, Adapted, bert
from fedme_test_runs import CutAfterOneRound, Killed, Watching, difference, rounds_saved

SHARED = ["adapter.*", "head."]
BY_NAME = [name for name, method in METHODS.items() if not method.not_by_name]


def clients(depths=(1, 1, 1, 1), frozen=True, network=None):
    draw = Key(5).torch()
    result = []
    for number, depth in enumerate(depths):
        y = torch.arange(24) % CLASSES
        x = torch.randn(24, 6, generator=draw) + y[:, None]
        model = network or Arch(Adapted, depth=depth, frozen=frozen)
        result.append(fedme.Client(f"site-{number}", train=(x, y), model=model))
    return result


def learner(method, **more):
    return fedme.learner(METHODS[method])(rounds=2, train={"batch": 8, "lr": 0.05}, models={"same_start": True}, **more)


def scores(folder):
    return [(r["client"], r["split"], r["accuracy"], r["loss"]) for r in records.read(folder) if r["stage"] == "round"]


def test_which_methods_send_weights_by_name():
    whole = {"fedavg", "fedprox", "fedme", "pfml", "ditto", "mapper", "hypcluster", "pfedme", "apfl", "fedamp"}
    assert set(BY_NAME) == whole
    for name in METHODS.keys() - whole:
        assert METHODS[name].not_by_name
    with pytest.raises(ConfigError, match="method.shared: .* 'scaffold': the control variates"):
        parse({"method": {"name": "scaffold", "shared": ["head."]}})


@pytest.mark.parametrize("method", BY_NAME)
def test_with_a_frozen_body_it_is_the_same_as_sending_everything(method, tmp_path):
    learner(method).fit(clients(), output=tmp_path / "all", quiet=True)
    learner(method, shared=SHARED).fit(clients(), output=tmp_path / "part", quiet=True)
    whole, part = scores(tmp_path / "all"), scores(tmp_path / "part")
    assert [row[:2] for row in whole] == [row[:2] for row in part]
    assert [row[2:] for row in part] == [pytest.approx(row[2:], rel=1e-4) for row in whole]


@pytest.mark.parametrize("method", ["fml", *BY_NAME])
def test_only_the_named_weights_travel(method, tmp_path):
    folder = tmp_path / "run"
    learner(method, shared=["head."]).fit(clients(frozen=False), output=folder, quiet=True)
    head = 4 * (6 * CLASSES + CLASSES)
    for row in {(r["round"], r["client"]): r for r in records.read(folder)}.values():
        assert head <= row["bytes_up"] <= 2 * (head + 200)
        assert head <= row["bytes_down"] <= 2 * (head + 200)


@pytest.mark.parametrize("method", BY_NAME)
def test_networks_may_differ_in_the_rest(method, tmp_path):
    learner(method, shared=SHARED).fit(clients((1, 2, 3, 2), frozen=False), output=tmp_path / "run", quiet=True)
    first, second = (load_model(tmp_path / "run" / "clients" / f"site-{n}", "model", imports=True) for n in (0, 1))
    assert len(second.body) == 2 * len(first.body)
    assert summary.read(tmp_path / "run")["bytes_up"] > 0
    assert not torch.equal(first.get_parameter("body.0.weight"), second.get_parameter("body.0.weight"))
    if method == "fedavg":
        assert torch.equal(first.get_parameter("head.weight"), second.get_parameter("head.weight"))


@pytest.mark.parametrize("method", BY_NAME)
def test_what_a_client_keeps_is_in_the_checkpoint(method, tmp_path):
    def made(folder):
        experiment = learner(method, shared=["head."]).experiment(clients(frozen=False))
        return dataclasses.replace(experiment, settings=dataclasses.replace(experiment.settings, output=str(folder)))

    whole = run.start(made(tmp_path / "whole"), Watching())
    with pytest.raises(Killed):
        run.start(made(tmp_path / "cut"), CutAfterOneRound(tmp_path / "cut"))
    assert rounds_saved(tmp_path / "cut") == 1
    run.resume(tmp_path / "cut", Watching(), made(tmp_path / "cut"))
    assert difference(whole, tmp_path / "cut") == ""


def test_what_cannot_be_shared_is_named(tmp_path):
    with pytest.raises(TaskError, match="no weight of .* 'nothing'"):
        learner("fedme", shared=["nothing"]).fit(clients(), output=tmp_path / "a", quiet=True)
    with pytest.raises(TaskError, match="client site-1 cannot share .*body.2"):
        learner("fedme", shared=["body."]).fit(clients((1, 2), frozen=False), output=tmp_path / "b", quiet=True)


@pytest.mark.needs("transformers", "peft")
def test_adapters_by_the_names_that_peft_gives(tmp_path):
    draw, every = Key(6).torch(), []
    for number in range(3):
        y = torch.arange(18) % CLASSES
        every.append(fedme.Client(f"s{number}", train=(torch.randint(1, 20, (18, 6), generator=draw), y), model=Arch(bert)))
    sent = {}
    for name, patterns in {"all": (), "lora": ["*.lora_A.*", "*.lora_B.*"]}.items():
        learner("fedme", shared=patterns).fit(every, output=tmp_path / name, quiet=True)
        sent[name] = summary.read(tmp_path / name)["bytes_up"]
    params = Model.init(Arch(bert), Key(0)).params
    adapters = sum(4 * p.numel() for name, p in params.items() if "lora" in name)
    assert 3 * 2 * 2 * adapters <= sent["lora"] < sent["all"]
