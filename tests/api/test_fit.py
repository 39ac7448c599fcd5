"""From people's own samples and networks to personal models, in Python: the same runner as the command line."""

import functools
import gc
import sys

import numpy as np
import pandas
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

import fedme
from fedme.config.experiment import ConfigError, load
from fedme.core.atomic_files import RunError, read_tensors
from fedme.core.key import Key
from fedme.core.typed import TypedError
from fedme.datasets.data_errors import DataError
from fedme.execution import dispatcher
from fedme.methods import METHODS
from fedme.results import records
from fedme.running import local_baseline, run
from fedme.running.progress import Display
from fedme_test_people_networks import MyNet, Normed, Reader

SILENT = functools.partial(Display, Console(quiet=True), quiet=True)
QUICK = {"rounds": 2, "train": {"epochs": 1}}


def samples(count, seed):
    x = torch.randn(count, 3, generator=Key(seed).torch()) * torch.tensor([5.0, 1.0, 40.0]) + 7
    return x, (x[:, 0] > 9).long() + (x[:, 2] > 20).long()


def clients(model=None, count=2):
    return [fedme.Client(f"site-{i}", train=samples(40 + 10 * i, i), model=model) for i in range(count)]


def test_ten_lines(capsys):
    (xa, ya), (xb, yb) = samples(60, 1), samples(50, 2)
    x, dataset_b, x_u = xa[:7], TensorDataset(xb, yb), samples(30, 3)[0]
    here = [
        fedme.Client("hospital-a", train=(xa, ya), model=fedme.Arch(MyNet, width=64)),
        fedme.Client("hospital-b", train=dataset_b, model=Normed()),
    ]
    result = fedme.FedMe(**QUICK).fit(here, unlabeled=x_u)
    result.table()
    said = capsys.readouterr()
    assert "local model" in said.out
    assert "hospital-a" in said.out
    assert "training every client on its own samples alone" in said.err
    assert set(result["hospital-a"].predict(x).tolist()) <= {0, 1, 2}
    assert isinstance(result["hospital-a"].module, nn.Module)
    assert list(result) == ["hospital-a", "hospital-b"]
    folder = result.folder
    assert folder.exists()
    del result
    gc.collect()
    assert not folder.exists()


def test_predictions_are_those_of_training():
    """The accuracy that the run recorded is the one that the saved model has on the same rows."""
    x, y = samples(80, 4)
    given = fedme.Client("a", train=(x, y), test=samples(30, 5))
    result = fedme.Local(**QUICK).fit([given], quiet=True)
    found = result["a"].evaluate(samples(30, 5))
    assert found.accuracy == pytest.approx(result.rows()[0]["personal"])
    logits = result["a"].logits(x)
    assert torch.allclose(result["a"].module(x), logits, atol=1e-6)
    assert torch.equal(logits.argmax(1), torch.from_numpy(result["a"].predict(x)))


def test_frames_files_and_tensors_give_the_same_models(tmp_path):
    weights = {}
    for way in ("tensors", "frame", "csv", "toml"):
        here = []
        for i in range(2):
            x, y = samples(40, i)
            names = np.array(["low", "mid", "high"])[y.numpy()]
            frame = pandas.DataFrame(x.numpy(), columns=["u", "v", "w"]).assign(result=names)
            frame.to_csv(tmp_path / f"{i}.csv", index=False)
            train = {"tensors": (x, names), "frame": frame, "csv": tmp_path / f"{i}.csv"}.get(way)
            here.append(fedme.Client(str(i), train=train, model=fedme.Arch(MyNet, width=5), label="result"))
        output = tmp_path / way
        if way == "toml":
            tables = "".join(
                f'[clients.{i}]\ndata = "{i}.csv"\nmodel = {{name = "fedme_test_people_networks:MyNet", width = 5}}\n'
                for i in range(2)
            )
            text = f'rounds = 2\n[train]\nepochs = 1\n[data]\nlabel = "result"\n{tables}'
            (tmp_path / "x.toml").write_text(text)
            experiment, _ = load(tmp_path / "x.toml", [f"output={output}"])
            run.start(experiment, SILENT())
        else:
            fedme.FedMe(**QUICK).fit(here, output=output, quiet=True)
        weights[way] = read_tensors(output / "clients" / "1" / "model.safetensors")[0]
    for way, found in weights.items():
        assert all(torch.equal(value, weights["tensors"][name]) for name, value in found.items()), way


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_fits(name):
    kind = getattr(fedme, METHODS[name].__name__)
    more = {"public_epochs": 1, "private_epochs": 1} if name == "fedmd" else {}
    result = kind(**QUICK, **more).fit(clients(fedme.Arch(MyNet)), samples(20, 3)[0], public=10, quiet=True)
    assert set(result["site-1"].predict(samples(9, 9)[0]).tolist()) <= {0, 1, 2}


def test_a_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    whole = fedme.FedMe(rounds=3).fit(clients("dnn-8"), output=tmp_path / "whole", quiet=True)
    count = []

    def stop(self):
        count.append(1)
        if len(count) > 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedme.running.progress.Display.tick", stop)
        with pytest.raises(KeyboardInterrupt):
            fedme.FedMe(rounds=3).fit(clients("dnn-8"), output=tmp_path / "cut", quiet=True)
    assert not (tmp_path / "cut" / "summary.json").exists()
    with pytest.raises(RunError, match="holds another run: clients.site-2.model is not set there .* the samples differ"):
        fedme.FedMe(rounds=3).fit(clients("dnn-8", count=3), output=tmp_path / "cut", quiet=True)
    with pytest.raises(DataError, match="were passed in Python; call fit again"):
        run.resume(tmp_path / "cut", SILENT())
    again = fedme.FedMe(rounds=3).fit(clients("dnn-8"), output=tmp_path / "cut", quiet=True)
    x = samples(9, 9)[0]
    assert torch.equal(whole["site-0"].logits(x), again["site-0"].logits(x))
    assert torch.equal(fedme.load_run(tmp_path / "cut")["site-0"].logits(x), again["site-0"].logits(x))


def test_dictionaries_of_symbols_for_a_transformer():
    draw = Key(0).torch()
    here = []
    for i in range(2):
        ids = torch.randint(0, 12, (24, 5), generator=draw)
        inputs = {"input_ids": ids, "attention_mask": (torch.arange(5) < 4).long().expand(24, 5)}
        here.append(fedme.Client(str(i), train=(inputs, (ids[:, 0] > 5).long()), model=fedme.Arch(Reader, width=8)))
    result = fedme.FedMe(**QUICK).fit(here, quiet=True)
    assert result["0"].predict(inputs).shape == (24,)
    assert result["0"].about["arch"] == "fedme_test_people_networks:Reader"


def test_a_network_of_a_function_trains_in_workers_too(monkeypatch):
    monkeypatch.setattr(dispatcher, "WORTHWHILE", 0)

    class Convolution(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 2, 3), nn.Linear(2 * 36, classes)

        def forward(self, x):
            return self.out(self.conv(x).relu().flatten(1))

    images = torch.randint(0, 256, (30, 1, 8, 8), generator=Key(0).torch(), dtype=torch.uint8)
    labels = torch.arange(30) % 2
    given = fedme.Arch(Convolution)
    here = [fedme.Client(name, train=(images, labels), model=given) for name in "ab"]
    result = fedme.FedMe(rounds=1, engine={"workers": 2, "path": "workers"}).fit(here, quiet=True)
    assert "in workers" in (result.folder / "engine.log").read_text()
    assert result["a"].module(images).shape == (30, 2)


def test_a_pool_of_networks_to_choose_from():
    models = {"pool": [fedme.Arch(MyNet, width=3), "mlr"], "assign": "best-local", "selection_rounds": 1}
    result = fedme.FedMe(**QUICK, models=models).fit(clients(), quiet=True)
    assert set(result) == {"site-0", "site-1"}


def test_an_instance_starts_from_its_own_weights():
    module = Normed()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    result = fedme.Local(rounds=1, train={"lr": 1e-12}).fit(clients(module), quiet=True)
    after = result["site-0"].module.network
    assert torch.allclose(after.net[0].weight, before["net.0.weight"], atol=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())  # the user's own is untouched


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: fedme.FedMe(round=3), r"FedMe\(round=...\): no such setting; did you mean 'rounds'"),
        (lambda: fedme.FedMe(rounds=0), "rounds: must be >= 1, got 0"),
        (lambda: fedme.FedMe(train={"lrr": 1}), "train.lrr: unknown key; did you mean 'lr'"),
        (lambda: fedme.FedMe().fit([*clients(), *clients()]), "client site-0: two clients have this name"),
        (lambda: fedme.FedMe().fit(clients(nn.Linear(3, 2))), r"client site-0: .* 3 classes.*got \(2, 2\)"),
        (lambda: fedme.FedMe().fit(clients(nn.Linear(4, 3))), "client site-0: .*fails on two samples of shape"),
        (lambda: fedme.FedMe().fit(clients(fedme.Arch(MyNet, widht=3))), "client site-0: 'widht' is not an option"),
        (lambda: fedme.FedMe().fit(clients(7)), "must be fedme.Arch"),
        (lambda: fedme.FedMe().fit([fedme.Client("a", train=None)]), "client a: there are no samples"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_is_trained(build, message):
    with pytest.raises((ConfigError, TypedError), match=message):
        build()


def test_what_is_not_used_is_said(capsys):
    fedme.FedMe(**QUICK, clusters=2).fit(clients("mlr"))
    assert "without unlabeled data all models are in one cluster" in capsys.readouterr().err


def test_tables_of_clients_in_a_file_are_checked(tmp_path):
    def refused(text, message):
        (tmp_path / "x.toml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            load(tmp_path / "x.toml")

    refused('[data]\nname = "clients"\n', "clients: no clients; add a table")
    refused('[data]\nname = "digits"\n[clients.a]\ndata = "a.csv"\n', "data.name is 'digits'")
    refused("[clients.a]\n", "clients.a.data: is missing")
    refused('[partition]\nname = "iid"\n[clients.a]\ndata = "a.csv"\n', "partition.name: 'iid' divides a common data set")
    refused('[clients.a]\ndata = "a.csv"\nlabl = "y"\n', "clients.a.labl: unknown key; did you mean 'label'")
    (tmp_path / "x.toml").write_text('[clients.a]\ndata = "a.csv"\n')
    assert load(tmp_path / "x.toml")[0].settings.clients["a"].data == str(tmp_path / "a.csv")


def test_a_report_is_written_by_the_package_of_reports(tmp_path, monkeypatch):
    result = fedme.Local(rounds=1).fit(clients("mlr"), output=tmp_path / "run", quiet=True)
    monkeypatch.setitem(sys.modules, "fedme.report", None)
    with pytest.raises(RunError, match="has no reports"):
        result.report(tmp_path / "report.html")


def test_clients_with_different_tasks_share_a_part_of_the_network():
    x, y = samples(60, 1)
    here = [
        fedme.Client("a", train=(x, y), model="dnn-8"),
        fedme.Client("b", train=(x, np.where(x[:, 1] > 7, "wide", "narrow")), model="dnn-8"),
    ]
    groups = {"a": [[0], [1], [2]], "b": [[3], [4]]}  # classes in order: 0, 1, 2, narrow, wide
    result = fedme.FML(**QUICK, shared="1.", data={"groups": groups}).fit(here, quiet=True)
    assert result["a"].classes == ("0", "1", "2")
    assert result["b"].classes == ("narrow", "wide")
    assert set(result["b"].predict(x)) <= {"narrow", "wide"}


def test_whoever_trains_alone_misses_no_round_because_others_cannot_reach_it():
    result = fedme.FedAvg(**QUICK, faults={"dropout": {"site-1": 1.0}, "quorum": 1}).fit(clients(), quiet=True)
    assert result.experiment.settings.faults.simulates
    rounds = local_baseline.rounds_of_clients(result.folder, result.experiment, result)
    assert set(rounds.values()) == {QUICK["rounds"]}  # the client that no round reached trains as long as the others
    assert {verdict.client for verdict in result.verdicts(quiet=True)} == set(result)
    assert {row["notes"]["missing"] for row in records.read(result.folder) if row["client"] == "site-1" and "notes" in row} == {
        "dropped out"
    }


def test_what_a_newcomer_to_the_library_gets_wrong(capsys):
    (x, y), quick = samples(30, 1), {"rounds": 1, "train": {"epochs": 1}}
    for call, message in [
        (lambda: fedme.FedMe(round=3), r"FedMe\(round=...\): no such setting; did you mean 'rounds'"),
        (lambda: fedme.FedMe(**quick).fit([(x, y)]), r"give a list of fedme.Client\(name"),
        (lambda: fedme.FedMe(**quick).fit({"a": (x, y)}), r"give a list of fedme.Client\(name"),
        (lambda: fedme.FedMe(**quick).fit([]), "clients: there are none"),
        (lambda: fedme.FedMe(**quick).fit([fedme.Client("a", train=(x, y), model=max)]), "client a: model: must be fedme.Arch"),
        (
            lambda: fedme.FedMe(**quick).fit([fedme.Client("a", train=(x, y), model=nn.Linear(4, 3))]),
            "client a: .*it must accept these inputs",
        ),
        (
            lambda: fedme.FedMe(**quick).fit([fedme.Client("a", train=(x, y), model=nn.Linear(3, 9))]),
            "client a: .*change the last layer",
        ),
        (lambda: fedme.FedMD(**quick).fit([fedme.Client("a", train=(x, y))]), r"in Python: fit\(public=...\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    fedme.Local(**quick).fit([fedme.Client("a", train=(x, torch.eye(3)[y]))])
    assert "every sample has exactly one label" in capsys.readouterr().err
    fedme.Local(**quick).fit([fedme.Client("a", train=(x, 0 * y))])
    assert "only one class, 0: there is nothing to learn" in capsys.readouterr().err


def test_integers_as_features_are_refused_with_the_remedy():
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 9, (30, 4)), draw.random(30) > 0.5
    clients = [fedme.Client(name, train=(x, y), model="mlr") for name in "ab"]
    with pytest.raises(ValueError, match=r"inputs are symbols \(integers\).*data.scale = 'standard'"):
        fedme.Local(rounds=1).fit(clients, quiet=True)
    result = fedme.Local(rounds=1, data={"scale": "standard"}).fit(clients, quiet=True)
    assert set(result["a"].predict(x).tolist()) <= {0, 1}


def made_of(hidden, classes=3):
    return torch.nn.Sequential(torch.nn.Linear(3, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, classes))


def test_a_partial_function_makes_a_network(tmp_path):
    """Two of one name are two networks; `functools.partial` has no name of its own."""
    small, large = (fedme.Arch.named("mine", functools.partial(made_of, hidden)) for hidden in (4, 6))
    sites = [fedme.Client(f"site-{i}", train=samples(40, i), model=arch) for i, arch in enumerate((small, large, small))]
    result = fedme.Local(**QUICK).fit(sites, output=tmp_path / "run", quiet=True)
    widths = [len(next(result[f"site-{i}"].module.parameters())) for i in range(3)]
    assert widths == [4, 6, 4]
    again = fedme.load_run(tmp_path / "run")
    x = samples(9, 9)[0]
    assert again["site-1"].predict(x).tolist() == result["site-1"].predict(x).tolist()
