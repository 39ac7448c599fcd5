"""Two thousand clients: few files, every model found by name, commands that stay readable, and nothing that grows faster."""

import dataclasses
import json
import os
from types import SimpleNamespace

import pytest
import torch

import fedme
from fedme import networks, report
from fedme.artifacts import model_choice, model_pack, personal_model, saved_models, unseen_clients
from fedme.config.experiment import Supplied, load, parse
from fedme.core.atomic_files import RunError
from fedme.core.data import Arrays, Schema
from fedme.core.key import Key
from fedme.datasets import splits
from fedme.datasets.dataset import Dataset
from fedme.report import run_data
from fedme.report.run_data import MOST_SHOWN
from fedme.results import records, summary
from fedme.running import assembly, run
from fedme_test_runs import Killed, Watching

FEATURES, CLASSES, SAMPLES = 6, 3, 12
CLIENTS = 2000


def federation(clients):
    draw = Key(0).torch()
    centres = 2 * torch.randn(CLASSES, FEATURES, generator=draw)
    labels = torch.randint(0, CLASSES, (clients * SAMPLES,), generator=draw)
    x = centres[labels] + torch.randn(len(labels), FEATURES, generator=draw)
    rows = torch.arange(len(labels))
    owners = {f"c{number}": (mine, rows[:0]) for number, mine in enumerate(rows.split(SAMPLES))}
    schema = Schema((FEATURES,), tuple(str(c) for c in range(CLASSES)))
    return Dataset("made up", Arrays(x, labels), schema, rows, rows[:0], owners)


def experiment(clients, output, method="fedme", **more):
    raw = {"method": {"name": method}, "models": {"pool": ["mlr", "dnn-4"]}, "train": {"cohort": 60, "batch": 6}, "rounds": 2}
    raw |= {"data": {"name": "synthetic"}, "partition": {"name": "natural"}, "evaluate_every": 2, "output": str(output)}
    return dataclasses.replace(parse(raw | more), supplied=Supplied(federation(clients), {}))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many") / "run"
    run.start(experiment(CLIENTS, folder), Watching())
    return folder


def test_a_few_files_hold_the_models_of_all(many):
    files = [path for path in many.rglob("*") if path.is_file()]
    assert len(files) < 20
    assert len(personal_model.clients_of(many)) == CLIENTS


def test_more_clients_take_no_more_writes_to_the_disk(tmp_path, monkeypatch):
    """Every `fsync` takes milliseconds on a disk."""
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(handle) or sync(handle))
    counts = []
    for clients in (model_pack.PACKED_FROM, 3 * model_pack.PACKED_FROM):
        synced.clear()
        run.start(experiment(clients, tmp_path / str(clients), rounds=1, evaluate_every=1), Watching())
        counts.append(len(synced))
    assert counts[0] == counts[1] < 60


def test_every_model_is_found_by_name_and_scores_as_recorded(many):
    data = assembly.gather(experiment(CLIENTS, many)).clients
    rows = [r for r in records.read(many) if (r["model"], r["stage"], r["split"]) == ("personal", "round", "test")]
    for row in rows[:: CLIENTS // 50]:
        folder = personal_model.find(many, row["client"])
        module, about = saved_models.read(folder)
        test = data[row["client"]].test
        accuracy = (module(test.inputs()).argmax(-1) == test.y).double().mean().item()
        assert accuracy == pytest.approx(row["accuracy"]) == about["accuracy"]["test"]
        assert (about["arch"], about["client"]) == (row["arch"], row["client"])
        model = personal_model.Personal(folder)
        assert model.choice is not None
        assert model.name == model_choice.chosen(folder)
        assert f"of client {row['client']}" in model.card
        assert model.details().confusion is not None
    with pytest.raises(RunError, match="unknown client 'c9999'"):
        personal_model.find(many, "c9999")


def test_a_packed_model_is_used_like_any_other(many, tmp_path):
    module = saved_models.load_model(many / "clients" / "c7")
    exported = personal_model.Personal(many / "clients" / "c7", "model").export(tmp_path / "model.safetensors")
    again = saved_models.load_model(tmp_path, "model")
    x = torch.randn(3, FEATURES, generator=Key(1).torch())
    assert exported.exists()
    assert torch.equal(again(x), personal_model.Personal(many / "clients" / "c7", "model").module(x))
    assert module(x).shape == (3, CLASSES)


def test_a_client_joins_later(many):
    x = torch.randn(30, FEATURES, generator=Key(2).torch())
    samples = fedme.Client("late", train=(x, [str(i % CLASSES) for i in range(30)])).piece()
    joined = unseen_clients.join(many, experiment(CLIENTS, many), "late", samples, compare=False)
    assert joined.offers > 1
    assert personal_model.find(many, "late").parent.name == saved_models.UNSEEN
    with pytest.raises(RunError, match="already has a client"):
        unseen_clients.join(many, experiment(CLIENTS, many), "c7", samples, compare=False)


def test_commands_stay_readable(many, tmp_path, fedme):
    assert fedme("show", many)[0] == 0
    code, out, _ = fedme("show", many, "--clients")
    assert code == 0
    assert "2,000 clients" in out
    assert len(out.splitlines()) < 400
    assert len(fedme("show", many, "--clients", "--format", "csv")[1].splitlines()) == CLIENTS + 1
    assert fedme("watch", many, "--once")[0] == 0
    report.write([many], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 5e6
    families = report.families([many])
    story = report.story(families)
    assert len(story["runs"][0]["clients"]) == MOST_SHOWN
    assert "2,000 clients" in json.dumps(story["summary"])
    scores = summary.read(many)["results"]
    mean = next(r for r in scores if (r["model"], r["split"], r["selection"]) == ("personal", "test", "last round"))
    line = next(line for line in story["curves"]["lines"] if line["model"].startswith("personal"))
    assert line["values"]["test"]["accuracy"]["mean"][-1] == pytest.approx(mean["accuracy"]["client_mean"], abs=1e-6)


def test_a_page_of_a_long_run_shows_fewer_clients(many, monkeypatch):
    """Every client and round takes a few bytes of the page."""
    rounds = [range(10), range(200), range(500), range(100_000)]
    assert [run_data.most_shown(SimpleNamespace(rounds=some)) for some in rounds] == [1000, 1000, 400, 100]
    monkeypatch.setattr(run_data, "MOST_MOMENTS", 300)
    story = report.story(report.families([many]))
    assert len(story["runs"][0]["clients"]) == 150
    assert len(story["runs"][0]["lineage"]["began"][-1]) == 150
    assert "Of 2,000 clients, 150 are shown one by one" in json.dumps(story["summary"])


def test_a_shared_model_is_saved_once(tmp_path):
    folder = run.start(experiment(300, tmp_path / "avg", "fedavg"), Watching())
    index = json.loads((folder / "clients" / model_pack.INDEX).read_text())
    places = {tuple(entry["models"]["model"]["weights"]) for entry in index["clients"].values()}
    assert len(index["clients"]) == 300
    assert len(places) == 1


def test_no_models_are_saved_if_none_are_wanted(tmp_path, fedme):
    folder = run.start(experiment(300, tmp_path / "none", save="none"), Watching())
    assert not (folder / "clients").exists()
    assert not (folder / "shared").exists()
    assert (folder / summary.NAME).exists()
    code, _, err = fedme("export", folder, "--client", "c1", "--to", "onnx", "--output", tmp_path / "x.onnx")
    assert code == 2
    assert 'save = "none"' in err


def test_killed_at_its_end_it_resumes_to_the_same_files(tmp_path, monkeypatch):
    whole = run.start(experiment(250, tmp_path / "whole"), Watching())

    def cut(self):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(model_pack.PackWriter, "close", cut)
        with pytest.raises(Killed):
            run.start(experiment(250, tmp_path / "cut"), Watching())
    assert not model_pack.names(tmp_path / "cut" / "clients")
    run.resume(tmp_path / "cut", Watching(), experiment(250, tmp_path / "cut"))
    for path in sorted((whole / "clients").iterdir()):
        assert path.read_bytes() == (tmp_path / "cut" / "clients" / path.name).read_bytes(), path.name


def test_damage_is_noticed(tmp_path):
    folder = run.start(experiment(220, tmp_path / "run"), Watching())
    client, shard = folder / "clients" / "c3", folder / "clients" / "shard-00000.safetensors"
    index = folder / "clients" / model_pack.INDEX
    whole, text = shard.read_bytes(), index.read_text()
    shard.write_bytes(whole[:-64] + bytes(byte ^ 255 for byte in whole[-64:]))
    broken = 0
    for name in list(model_pack.names(folder / "clients")):
        try:
            saved_models.weights_of(folder / "clients" / name)
        except RunError as error:
            broken += "checksum" in str(error)
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunError, match="damaged"):
        saved_models.read(client)
    shard.unlink()
    with pytest.raises(RunError, match="no such file"):
        saved_models.read(client)
    shard.write_bytes(whole)
    assert saved_models.read(client)
    assert broken >= 1 or model_pack.outputs(client)
    index.write_text(text.replace('"c3"', '"c3x"', 1))
    with pytest.raises(RunError, match="checksum"):
        saved_models.read(client)


def test_preparing_resolves_a_network_once(monkeypatch, tmp_path):
    calls = []
    arch = networks.arch
    monkeypatch.setattr(assembly.networks, "arch", lambda *a, **k: calls.append(1) or arch(*a, **k))
    counts = []
    for clients in (40, 400):
        calls.clear()
        asked = experiment(clients, tmp_path)
        assembly.prepare(asked, assembly.gather(asked), assembly.one_by_one)
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_rows_are_held_out_as_before():
    """The slow obvious way: class by class, the last rows of each."""
    draw = Key(3).torch()
    for _ in range(200):
        classes = torch.randint(0, 5, (int(torch.randint(1, 40, (1,), generator=draw)),), generator=draw)
        count = int(torch.randint(0, len(classes) + 1, (1,), generator=draw))
        held_out = splits._rows_held_out(classes, count)
        assert int(held_out.sum()) == count
        for label in classes.unique():
            mine = held_out[classes == label]
            assert torch.equal(mine, mine.sort().values), "the last rows of a class are held out"
            expected = count * len(mine) / len(classes)
            assert abs(int(mine.sum()) - expected) <= 1 + 1e-9 or len(mine) == 1


def test_a_small_run_keeps_folders_of_files(tmp_path):
    folder = run.start(experiment(5, tmp_path / "few", train={"batch": 6}), Watching())
    assert (folder / "clients" / "c0" / "model.safetensors").exists()
    assert not (folder / "clients" / model_pack.INDEX).exists()
    assert fedme.load_model(folder / "clients" / "c0")
    assert load(folder / "config.toml")[0].settings.save == "all"
