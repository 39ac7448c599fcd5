"""Runs of networks with batch normalisation: saved models, resumed runs, execution paths, unseen clients, and the setting."""

import dataclasses
import json

import pytest
import torch

from fedme.api.client import Client
from fedme.artifacts import saved_models, unseen_clients
from fedme.config.experiment import load
from fedme.config.identity import digest
from fedme.core.data import ClientData
from fedme.core.operations import EstimateStatistics
from fedme.core.running_statistics import running_statistics
from fedme.execution import reference
from fedme.execution.dispatcher import Dispatcher
from fedme.results import records
from fedme.running import assembly, run
from fedme_test_runs import Killed, Watching, do, identical, models, timeless
from fedme_test_support import same

NORMED = [
    "models.pool=['fedme_test_user_networks:Normed']",
    "models.shared=fedme_test_user_networks:Normed",
    "data.unlabeled=0",
]


def saved(folder, client, name="model", group=saved_models.CLIENTS):
    return saved_models.read_model(saved_models.folder_of(folder, client, group), name, imports=True)[0]


def data_of(folder) -> dict[str, ClientData]:
    return dict(assembly.gather(load(folder / "config.toml")[0]).clients)


def with_update_bn(experiment, update_bn):
    models = dataclasses.replace(experiment.settings.models, update_bn=update_bn)
    return dataclasses.replace(experiment, settings=dataclasses.replace(experiment.settings, models=models))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return do(tmp_path_factory.mktemp("normed") / "fedme", *NORMED, "finetune.epochs=1", "finetune.when=always")


def test_saved_models_have_the_statistics_of_their_client_and_score_as_recorded(finished):
    own = 0
    for client, data in data_of(finished).items():
        for name, stage in (("model", "round"), ("finetuned", "finetuned")):
            model = saved(finished, client, name)
            assert running_statistics(model.arch)
            own += same(model, reference.run(EstimateStatistics(model, data.train)), 1e-6)
            row = next(
                r
                for r in records.read(finished)
                if (r["round"], r["client"], r["model"], r["split"], r["stage"]) == (2, client, "personal", "test", stage)
            )
            module = saved_models.load_model(saved_models.folder_of(finished, client), name, imports=True)
            loss = torch.nn.functional.cross_entropy(module(data.test.inputs()), data.test.y).item()
            assert row["loss"] == pytest.approx(loss, abs=1e-5)
    assert own >= 2  # the others were better with averaged statistics


@pytest.mark.parametrize("fuse", [9, 40])
def test_a_resumed_run_is_the_uninterrupted_one(finished, tmp_path, fuse):
    folder = tmp_path / "killed"
    with pytest.raises(Killed):
        do(folder, *NORMED, "finetune.epochs=1", "finetune.when=always", fuse=fuse)
    run.resume(folder, Watching(), imports=True)
    assert identical(finished, folder)


def test_workers_give_the_results_of_one_process(finished, tmp_path):
    words = [*NORMED, "finetune.epochs=1", "finetune.when=always"]
    assert "estimatestatistics" in (finished / "engine.log").read_text()
    alone = do(tmp_path / "alone", *words, "engine.path=reference")
    workers = do(tmp_path / "workers", *words, "engine.path=workers", "engine.workers=2")
    assert "estimatestatistics: " in (workers / "engine.log").read_text()
    assert timeless(alone) == timeless(workers)
    first, second = models(alone), models(workers)
    assert all(torch.equal(first[name], value) for name, value in second.items())


def test_offers_to_unseen_clients_have_the_statistics_of_the_server(finished):
    experiment, _ = load(finished / "config.toml")
    offers = unseen_clients.load_offers(finished, experiment, imports=True)
    assert len(offers) == 4
    for offer in offers:
        own = saved(finished, offer.name)
        assert all(torch.equal(offer.model.params[n], p) for n, p in own.params.items())
        data = data_of(finished)[offer.name].train
        assert not same(offer.model, reference.run(EstimateStatistics(own, data)), 1e-6)
        assert offer.about["metrics"] == saved_models.describe(saved_models.folder_of(finished, offer.name))["metrics"]
        assert offer.lineage is not None


@pytest.mark.parametrize("update_bn", [True, False])
def test_unseen_clients_get_statistics_of_their_own_samples(finished, update_bn):
    experiment, _ = load(finished / "config.toml")
    experiment = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, val=0.0))
    chosen, name = with_update_bn(experiment, update_bn), f"new {update_bn}"
    data = data_of(finished)["0"].train
    piece = Client(name, train=(data.source.x[data.rows], data.y)).piece()
    joined = unseen_clients.join(finished, chosen, name, piece, epochs=1, imports=True)
    offers = {offer.name: offer for offer in unseen_clients.load_offers(finished, chosen, imports=True)}
    schema = saved_models.schema_of(offers[joined.taken].about)
    own = unseen_clients._data(schema, name, piece, chosen).train
    for file in ("model", "finetuned"):
        model = saved(finished, name, file, saved_models.UNSEEN)
        assert same(model, reference.run(EstimateStatistics(model, own)), 1e-6) == update_bn
    assert same(saved(finished, name, "model", saved_models.UNSEEN), offers[joined.taken].model) != update_bn


def test_the_setting_turns_it_off(tmp_path):
    folder = do(tmp_path / "off", *NORMED, "models.update_bn=false")
    assert "estimatestatistics" not in (folder / "engine.log").read_text()
    experiment, _ = load(folder / "config.toml")
    for offer in unseen_clients.load_offers(folder, experiment, imports=True):
        assert same(offer.model, saved(folder, offer.name))
    assert not (folder / "shared" / "0").exists()
    config = load("digits-fedme", ["models.update_bn=false"])[0].plain()
    assert digest(config) != digest(load("digits-fedme")[0].plain())


def test_results_from_before_this_key_stay_valid():
    plain = load("digits-fedme")[0].plain()
    before = json.loads(json.dumps(plain))
    assert before["models"].pop("update_bn") is True
    assert digest(before) == digest(plain)
    assert digest({**plain, "models": "odd"}) != digest(plain)


def test_architectures_are_compared_with_statistics_of_the_client():
    names = "['mlr', 'fedme_test_user_networks:Normed']"
    words = ["rounds=1", f"models.pool={names}", "models.assign=best-local", "models.selection_rounds=1"]
    experiment, _ = load("digits-local", [*words, "data.limit=100", "partition.clients=2", "engine.threads=1"])
    for update_bn in (True, False):
        chosen = with_update_bn(experiment, update_bn)
        execute = Dispatcher(path="reference")
        assembly.prepare(chosen, assembly.gather(chosen), execute)
        assert any("estimatestatistics: 2 " in line for line in execute.explain()) == update_bn


def test_the_processes_of_flower_know_the_setting():
    from fedme.running.flower_run import _actor

    for value in ("true", "false"):
        experiment, _ = load("digits-fedavg", ["data.limit=60", "partition.clients=2", f"models.update_bn={value}"])
        prepared = assembly.prepare(experiment, assembly.gather(experiment), reference.one_by_one)
        assert _actor(experiment, prepared).engine.update_bn == (value == "true")
