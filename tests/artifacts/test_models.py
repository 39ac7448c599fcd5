"""What comes out: models that predict, are exported and described anywhere, and that newcomers start from."""

import csv
import hashlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import fedme
from fedme.artifacts import saved_models, unseen_clients
from fedme.artifacts.personal_model import Personal, find
from fedme.core.atomic_files import RunError, sealed
from fedme.core.key import Key
from fedme.datasets.data_errors import DataError
from fedme.networks import described
from fedme.networks.graph_as_data import graph_of
from fedme.results.lineage import Adoption, Lineage, lineages
from fedme_test_people_networks import Branches, Deciding, MyNet, Normed

QUICK = {"rounds": 2, "train": {"epochs": 1}}


def samples(count, seed):
    x = torch.randn(count, 3, generator=Key(seed).torch()) * torch.tensor([5.0, 1.0, 40.0]) + 7
    return x, np.array(["low", "mid", "high"])[((x[:, 0] > 9).long() + (x[:, 2] > 20).long()).numpy()]


def clients(model, count=3):
    return [fedme.Client(f"site {i}", train=samples(40 + 10 * i, i), model=model) for i in range(count)]


def fit(model="dnn-8", method=fedme.FedMe, output=None, **settings):
    return method(**{**QUICK, **settings}).fit(clients(model), public=10, output=output, quiet=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return fit(output=tmp_path_factory.mktemp("runs") / "one", finetune={"epochs": 1})


def test_exports_answer_as_the_model_does(trained, tmp_path):
    import onnx
    import onnxruntime

    x, _ = samples(11, 50)
    model = trained["site 1"]
    expected = model.logits(x)
    path = model.export(tmp_path / "deep" / "m.onnx")
    session = onnxruntime.InferenceSession(path)
    assert np.allclose(session.run(["logits"], {"x": x.numpy()})[0], expected, atol=1e-5)
    facts = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert json.loads(facts["classes"]) == ["high", "low", "mid"]
    program = torch.export.load(model.export(tmp_path / "m.pt2")).module()
    assert torch.allclose(program(x), expected, atol=1e-5)
    weights = model.export(tmp_path / "m.safetensors")
    shutil.copy(weights, tmp_path / "model.safetensors")
    shutil.copy(weights.with_suffix(".json"), tmp_path / "model.json")
    assert torch.equal(Personal(tmp_path, "model").logits(x), expected)
    with pytest.raises(RunError, match="unknown format"):
        model.export(tmp_path / "m.bin")


def test_a_folder_of_a_model_is_enough_on_another_machine(trained, tmp_path):
    """Another process, in another directory, with nothing but the client's folder."""
    shutil.copytree(saved_models.folder_of(trained.folder, "site 2"), tmp_path / "taken")
    x, _ = samples(9, 51)
    with (tmp_path / "x.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["u", "v", "w"], *x.tolist()])
    command = [sys.executable, "-m", "fedme", "predict", "taken", "x.csv", "--finetuned", "--json"]
    answer = json.loads(subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, text=True).stdout)
    expected = trained.model("site 2", "finetuned").predict_proba(x)
    assert np.allclose([list(row["probabilities"].values()) for row in answer], expected, atol=1e-6)
    assert [row["prediction"] for row in answer] == trained.model("site 2", "finetuned").predict(x).tolist()


def test_the_card_says_what_the_model_is(trained):
    card = trained["site 0"].card
    about = trained["site 0"].about
    assert "# Personal model of client site 0" in card
    sizes = about["data"]
    assert sum(sizes.values()) <= 40
    assert f"{sizes['train']} for training, {sizes['val']} for validation, {sizes['test']} for testing" in card
    assert "Lineage: began as the model of" in card
    assert about["metrics"]["test"]["accuracy"] == about["accuracy"]["test"]
    assert about["versions"]["torch"] == torch.__version__
    assert "fine-tuned" in trained.model("site 0", "finetuned").card


def test_lineage_follows_adoptions_of_the_same_round_at_once():
    def row(t, client, lender, adopts, **more):
        return {"round": t, "client": client, "notes": {"lender": lender, "adopts": adopts, "cluster": 1, **more}}

    rows = [
        row(0, "a", "b", True), row(0, "b", "a", True), row(0, "c", "a", False),
        row(1, "c", "a", True), row(1, "a", "b", True, missing=True),
        {"round": 1, "client": "b"},
    ]  # fmt: skip
    found = lineages(rows, ["a", "b", "c"])
    assert found["a"] == Lineage("b", (Adoption(0, "a", "b"),), 1)
    assert found["b"] == Lineage("a", (Adoption(0, "b", "a"),), 1)
    assert found["c"] == Lineage("b", (Adoption(0, "a", "b"), Adoption(1, "c", "a")), 1)


def sequential():
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3))


@pytest.mark.parametrize(("make", "note"), [(sequential, ""), (Normed, "its saved graph is used")])
def test_an_instance_is_used_without_its_code(make, note, tmp_path):
    """Predict, evaluate, export, join and load again, from the folder alone."""
    import onnxruntime

    result = fit(make(), output=tmp_path / "run", rounds=1, method=fedme.FedAvg)
    x, y = samples(20, 52)
    expected = result.model("site 1", "model").logits(x)
    reloaded = Personal(find(tmp_path / "run", "site 1"), "model")
    assert note in reloaded.note
    assert bool(note) == bool(reloaded.note)
    assert torch.allclose(reloaded.logits(x), expected, atol=1e-5)
    assert torch.allclose(reloaded.module(x), expected, atol=1e-5)
    assert reloaded.evaluate((x, y)).accuracy == result.model("site 1", "model").evaluate((x, y)).accuracy
    session = onnxruntime.InferenceSession(reloaded.export(tmp_path / "m.onnx"))
    assert np.allclose(session.run(["logits"], {"x": x.numpy()})[0], expected, atol=1e-5)
    reloaded.export(tmp_path / "taken" / "model.safetensors")
    assert torch.allclose(Personal(tmp_path / "taken", "model").logits(x), expected, atol=1e-5)
    assert not list((tmp_path / "run").rglob("*.onnx"))

    with (tmp_path / "x.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["u", "v", "w", "label"], *([*row, name] for row, name in zip(x.tolist(), y, strict=True))])
    command = [sys.executable, "-m", "fedme", "join", "run", "--data", "x.csv", "--label", "label", "--json", "--quiet"]
    joined = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert joined.returncode == 0, joined.stderr
    assert json.loads(joined.stdout)["started_from"] == "global"
    again = Personal(find(tmp_path / "run", "newcomer"), "finetuned")
    assert again.logits(x).shape == (20, 3)


def test_clients_with_equal_networks_are_traced_once(tmp_path, monkeypatch):
    traced = []
    monkeypatch.setattr(described, "_graphs", {})
    monkeypatch.setattr(described, "graph_of", lambda module, inputs: traced.append(1) or graph_of(module, inputs))
    members = [fedme.Client(f"site {i}", train=samples(40, i), model=Normed()) for i in range(4)]
    members.append(fedme.Client("wide", train=samples(40, 9), model=Branches(width=5)))
    result = fedme.Local(**QUICK).fit(members, output=tmp_path / "run", quiet=True)
    assert len(traced) == 2
    x, _ = samples(20, 52)
    for client in result:
        assert torch.allclose(Personal(find(tmp_path / "run", client)).logits(x), result[client].logits(x), atol=1e-5)


def test_clients_that_differ_in_an_attribute_do_not_share_a_graph(tmp_path):
    members = [fedme.Client(f"site {i}", train=samples(40, i), model=Branches(sign=(-1) ** i)) for i in range(2)]
    result = fedme.Local(**QUICK).fit(members, output=tmp_path / "run", quiet=True)
    x, _ = samples(20, 52)
    for client in result:
        assert torch.allclose(Personal(find(tmp_path / "run", client)).logits(x), result[client].logits(x), atol=1e-5)


def test_a_frozen_layer_stays_frozen(tmp_path):
    network = sequential()
    network[0].requires_grad_(False)
    fit(network, output=tmp_path / "run", rounds=1)
    model, _ = saved_models.read_model(find(tmp_path / "run", "site 0"))
    assert "0.weight" not in model.params
    assert torch.equal(model.buffers["0.weight"], network[0].weight)


def test_a_network_that_cannot_be_saved_as_data_says_so(tmp_path, capsys):
    members = [fedme.Client(f"site {i}", train=samples(40, i), model=Deciding()) for i in range(2)]
    result = fedme.Local(**QUICK).fit(members, output=tmp_path / "run")
    assert "only its weights are saved" in " ".join(capsys.readouterr().err.split())
    assert set(result["site 0"].predict(samples(5, 1)[0])) <= {"low", "mid", "high"}  # its code is in this process
    with pytest.raises(RunError, match=r"only its weights were saved: .*load the\s+weights into your network"):
        Personal(find(tmp_path / "run", "site 0"), "model")


def test_changed_descriptions_of_networks_are_refused(tmp_path):
    def change(folder, **entries):
        about = saved_models.describe(folder)
        (folder / "model.json").write_text(json.dumps(sealed(about | entries)))

    fit(sequential(), output=tmp_path / "run", rounds=1)
    folder = find(tmp_path / "run", "site 0")
    for network, message in [
        ({"layers": [["0", "Linear", {"in_features": 10**9, "out_features": 10**9}]], "frozen": []}, "the weights do not fit"),
        ({"layers": [["0", "system", {}]], "frozen": []}, "'system' is not a standard layer"),
        ({"layers": [], "frozen": ["x"]}, "no weight 'x'"),
        ({"layers": []}, "must have 'layers' and 'frozen'"),
        ([1], "must have 'layers' and 'frozen'"),
    ]:  # fmt: skip
        change(folder, network=network)
        with pytest.raises(RunError, match=message):
            Personal(folder, "model")
    fit(Normed(), output=tmp_path / "graph", rounds=1)
    folder = find(tmp_path / "graph", "site 0")
    path = folder / "model.graph.json"
    graph = path.read_text()
    path.write_text(graph.replace("relu", "sigmoid"))
    with pytest.raises(RunError, match="its checksum is wrong"):
        Personal(folder, "model")
    path.unlink()
    with pytest.raises(RunError, match="graph of its network cannot be read"):
        Personal(folder, "model")
    for text, message in [("[" * 100_000, "cannot be read"), ("{", "cannot be read"), ("{}", "a graph must have")]:
        path.write_text(text)
        change(folder, network={"graph": hashlib.sha256(text.encode()).hexdigest()})
        with pytest.raises(RunError, match=message):
            Personal(folder, "model")


def test_a_network_with_an_import_path_is_only_imported_if_asked(tmp_path):
    fit(fedme.Arch(MyNet, width=4), output=tmp_path / "run")
    folder = find(tmp_path / "run", "site 0")
    with pytest.raises(RunError, match="imports a user-defined network"):
        Personal(folder, "model")
    assert isinstance(Personal(folder, "model", imports=True)._network, MyNet)
    assert isinstance(fedme.load_model(folder, imports=True), MyNet)


def test_what_does_not_fit_a_model_is_refused(trained, tmp_path):
    model = trained["site 0"]
    for call, message in [
        (lambda: model.predict(torch.zeros(2, 4)), r"samples must have shape \(3,\), got \(4,\)"),
        (lambda: model.predict(torch.full((2, 3), torch.nan)), "is NaN"),
        (lambda: model.evaluate((torch.zeros(2, 3), ["low", "lo"])), "unknown class 'lo'; .*'low'.*no other classes"),
    ]:  # fmt: skip
        with pytest.raises(DataError, match=message):
            call()
    with pytest.raises(KeyError, match="no client 'nobody'"):
        trained["nobody"]
    with pytest.raises(RunError, match="unknown client 'site'; did you mean 'site"):
        find(trained.folder, "site")
    with pytest.raises(RunError, match="give the name of a client"):
        find(trained.folder, None)
    (tmp_path / "model.json").write_text('{"format": "other"}')
    with pytest.raises(RunError, match="this version reads fedme-model-1"):
        Personal(tmp_path, "model")


NEW = fedme.Client("new", train=samples(40, 60))


@pytest.mark.parametrize(
    ("method", "start"),
    [
        (fedme.FedMe, "site"), (fedme.HypCluster, "cluster"), (fedme.FedAvg, "global"), (fedme.FedProx, "global"),
        (fedme.FML, "global"), (fedme.PFML, "global"), (fedme.PFedMe, "global"), (fedme.Mapper, "global"),
        (fedme.Centralized, "global"),
    ],
)  # fmt: skip
def test_a_newcomer_starts_from_what_its_method_shares(method, start):
    result = fit(method=method)
    chosen = result.join(NEW)
    assert chosen.name == chosen.choice.name
    tuned = result.model("new", "finetuned")
    assert tuned.about["started_from"].startswith(start)
    assert "new" in result
    before = result.model("new", "model")
    x, _ = samples(9, 61)
    taken = {offer.name: offer.model for offer in unseen_clients.load_offers(result.folder, result.experiment)}[
        tuned.about["started_from"]
    ]
    assert torch.equal(before.logits(x), taken.module()(before.preparation.scale.scaling()(x)).detach())
    assert not torch.equal(before.logits(x), tuned.logits(x))
    assert tuned.about["data"] == {"train": 24, "val": 6, "test": 10}
    with pytest.raises(RunError, match="already has a client called 'site 0'"):
        result.join(fedme.Client("site 0", train=samples(40, 60)))


def test_the_model_that_fits_the_newcomer_best_is_taken():
    val = samples(30, 62)
    result = fit(rounds=1)
    result.join(fedme.Client("new", train=samples(40, 60), val=val), epochs=0)
    losses = {name: result.model(name, "model").evaluate(val).loss for name in result if name != "new"}
    about = result.model("new", "model").about
    assert about["started_from"] == min(losses, key=losses.get)
    assert about["metrics"]["val"]["loss"] == pytest.approx(min(losses.values()))
    assert about["lineage"]["adoptions"][-1] == {"round": 0, "by": "new", "lender": about["started_from"]}
    x, _ = samples(5, 1)
    assert torch.equal(
        result.model("new", "model").logits(x), result.model("new", "finetuned").logits(x)
    )  # no epochs of fine-tuning


def test_one_model_a_cluster_is_faster():
    result = fedme.FedMe(**QUICK, clusters=2).fit(clients("dnn-8", count=4), unlabeled=20, quiet=True)
    everything = unseen_clients.load_offers(result.folder, result.experiment)
    few = unseen_clients.load_offers(result.folder, result.experiment, per_cluster=True)
    clusters = {offer.about["lineage"]["cluster"] for offer in everything}
    assert len(everything) == 4
    assert sorted(offer.about["lineage"]["cluster"] for offer in few) == sorted(clusters)
    for offer in few:
        rivals = [o for o in everything if o.about["lineage"]["cluster"] == offer.about["lineage"]["cluster"]]
        assert offer.about["metrics"]["val"]["loss"] == min(o.about["metrics"]["val"]["loss"] for o in rivals)


def test_all_models_of_a_server_are_offered_one_a_cluster_or_not():
    result = fit(method=fedme.HypCluster, clusters=2)
    assert len(unseen_clients.load_offers(result.folder, result.experiment, per_cluster=True)) == 2


@pytest.mark.parametrize(("method", "reason"), [(fedme.Local, "share nothing"), (fedme.FedMD, "share outputs on public data")])
def test_methods_without_a_model_to_give_refuse_newcomers(method, reason):
    more = {"public_epochs": 1, "private_epochs": 1} if method is fedme.FedMD else {}
    result = fit(method=method, **more)
    with pytest.raises(RunError, match=reason):
        result.join(NEW)
