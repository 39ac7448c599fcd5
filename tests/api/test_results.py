"""What comes out of `fit` as numbers, tables and plots, and what goes in: the habits of other libraries."""

import builtins
import copy
import json
import math

import numpy as np
import pandas
import pytest
import torch
from sklearn.metrics import accuracy_score, r2_score
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset

import fedme
from fedme.api.display import Table
from fedme.config.experiment import ConfigError
from fedme.core.atomic_files import RunError
from fedme.core.key import Key
from fedme.datasets.data_errors import DataError
from fedme.results import records

QUICK = {"rounds": 2, "train": {"epochs": 1}}


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, x):
        return self.outer(self.inner(x).relu())


def samples(count, seed):
    x = torch.randn(count, 3, generator=Key(seed).torch())
    return x, (x[:, 0] + 0.3 * x[:, 1] > 0).long()


def clients(count=3):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [fedme.Client(name, train=samples(40, i), model=Net(4 + i)) for i, name in enumerate("abcdef"[:count])]


@pytest.fixture(scope="module")
def result():
    return fedme.FedMe(**QUICK, finetune={"epochs": 1}).fit(clients(), quiet=True)


@pytest.fixture(scope="module")
def rows(result):
    return list(records.read(result.folder))


def test_the_example_of_the_documentation(tmp_path, monkeypatch):
    """The lines that the specification of this interface ends with, as they are there."""
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install -c constraints.txt -e '.[dev-full]')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fedme.FedMe, "__init__", _few_rounds(fedme.FedMe.__init__))
    sites = [(name, *samples(40, i), 4 + i) for i, name in enumerate("abc")]
    clients = [fedme.Client(name, train=(x, y), model=Net(width)) for name, x, y, width in sites]
    x, y = samples(30, 9)

    r = fedme.FedMe(rounds=30).fit(clients)
    assert "<table>" in r._repr_html_()
    assert 0 <= r.accuracy.mean <= 1
    assert list(r.history.tail().columns)[:3] == ["round", "client", "model"]
    r.to_frame(), r.plot()
    m = r["a"]
    m.predict_proba(x), m.score(x, y), m.export("a.onnx")
    assert (tmp_path / "a.onnx").stat().st_size > 0
    short = {"rounds": 1}
    text = str(fedme.compare([fedme.Local(**short), fedme.FedAvg(**short), fedme.FedMe()], clients, seeds=3).summary())
    assert all(word in text for word in ("±", "gained", "lost", "vs local"))


def _few_rounds(init):
    def shortened(self, **settings):
        init(self, **{**settings, "rounds": 1})

    return shortened


def test_accuracy_is_that_of_the_records(result, rows):
    last = [r for r in rows if (r["round"], r["model"], r["stage"], r["split"]) == (1, "personal", "round", "test")]
    assert dict(result.accuracy) == {r["client"]: r["accuracy"] for r in last}
    assert result.accuracy.mean == float(result.accuracy) == pytest.approx(np.mean([r["accuracy"] for r in last]))
    assert result.accuracy.std == pytest.approx(np.std([r["accuracy"] for r in last], ddof=1))
    assert f"{100 * result.accuracy.mean:.2f} ±" in repr(result.accuracy)
    assert "a " in repr(result.accuracy)
    tuned = [r for r in rows if (r["round"], r["model"], r["stage"], r["split"]) == (1, "personal", "finetuned", "val")]
    assert dict(result.scores("auroc", "val", "finetuned")) == {
        r["client"]: r["auroc"] for r in tuned if r["auroc"] is not None
    }
    with pytest.raises(ValueError, match="no metric 'acuracy'; did you mean 'accuracy'"):
        result.scores("acuracy")


def test_history_has_every_number_of_the_records(result, rows):
    frame = result.history
    assert list(frame.columns) == ["round", "client", "model", "stage", "split", "metric", "value"]
    wanted = frame.query("round == 1 and client == 'b' and stage == 'round' and split == 'test' and metric == 'accuracy'")
    expected = [r["accuracy"] for r in rows if (r["round"], r["client"], r["stage"], r["split"]) == (1, "b", "round", "test")]
    assert wanted["value"].tolist() == expected
    losses = frame.query("stage == 'training' and metric == 'loss'")["value"].tolist()
    assert losses == [r["loss"] for r in rows if r["stage"] == "training"]


def test_a_frame_of_clients(result):
    frame = result.to_frame()
    assert frame["accuracy"].to_dict() == dict(result.accuracy)
    assert frame["arch"].tolist() == [result[client].about["arch"] for client in frame.index]
    assert frame["accuracy_finetuned"].to_dict() == dict(result.scores(stage="finetuned"))
    with_gains = result.to_frame(gains=True)
    verdicts = {v.client: v for v in result.verdicts(quiet=True)}
    assert with_gains["gain"].to_dict() == {client: verdict.main.gain for client, verdict in verdicts.items()}
    html = result._repr_html_()
    assert ">verdict</th>" in html  # known by now
    assert "Result(fedme, 3 clients, 2 rounds, test accuracy" in html


def test_plots(result):
    pyplot = pytest.importorskip(
        "matplotlib.pyplot", reason="needs matplotlib (pip install -c constraints.txt -e '.[dev-full]')"
    )
    axes = result.plot()
    means = (
        result.history.query("stage == 'round' and split == 'test' and metric == 'accuracy'").groupby("round")["value"].mean()
    )
    drawn = next(line for line in axes.lines if line.get_label() == "mean of 3 clients")
    assert np.allclose(drawn.get_ydata(), 100 * means)
    assert len(axes.lines) == 4  # three clients
    assert axes.get_ylabel() == "test accuracy %"
    _, given = pyplot.subplots()
    assert result.plot("loss", "val", ax=given) is given
    pyplot.close("all")


def test_a_summary_is_that_of_the_command(result):
    text = str(result.summary())
    assert text.splitlines()[0].startswith("fedme: fedme, seed 0, 3 clients")
    assert f"{100 * result.accuracy.mean:.2f}" in text
    assert "<table>" in result.summary()._repr_html_()


@pytest.mark.parametrize(("package", "use"), [("pandas", "history"), ("pandas", "to_frame"), ("matplotlib", "plot")])
def test_what_to_install_is_said(result, monkeypatch, package, use):
    real = builtins.__import__

    def missing(name, *rest):
        if name.partition(".")[0] == package:
            raise ImportError(f"No module named '{name}'")
        return real(name, *rest)

    monkeypatch.setattr("importlib.import_module", lambda name: missing(name))
    with pytest.raises(ImportError, match=rf"needs {package}: pip install 'fedme\[\w+\]'"):
        getattr(result, use)()


def test_names_in_tables_of_notebooks_are_harmless():
    client = fedme.Client("<script>alert(1)</script>", train=samples(20, 0), model="mlr")
    result = fedme.Local(**QUICK).fit([client], quiet=True)
    html = result._repr_html_() + result.accuracy._repr_html_() + result.summary()._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_representations_are_short(result):
    x, y = samples(40, 0)
    assert repr(fedme.Client("a", train=(x, y), model=Net(4))) == "Client('a', train: 40 samples, model: Net)"
    assert repr(fedme.Client("a", train="a.csv", model="mlr")) == "Client('a', train: a.csv, model: mlr)"
    frame = pandas.DataFrame({"x": [1.0], "y": [0]})
    assert repr(fedme.Client("a", train=frame)) == "Client('a', train: 1 samples (DataFrame))"
    assert repr(result).startswith("Result(fedme, 3 clients, 2 rounds, test accuracy ")
    assert repr(result["a"]).startswith("Personal('a', ")
    assert len(repr(result["a"])) < 140
    assert "None" not in repr(result["a"].evaluate((x, y)))
    assert repr(fedme.FedMe(rounds=3, clusters=2)) == "FedMe(rounds=3, clusters=2)"
    assert "clusters" in fedme.FedMe()._repr_html_()


def test_models_answer_like_those_of_scikit_learn(result):
    x, y = samples(50, 7)
    model = result["a"]
    chances = model.predict_proba(x)
    assert isinstance(chances, np.ndarray)
    assert chances.shape == (50, 2)
    assert np.allclose(chances.sum(1), 1)
    assert np.array_equal(chances.argmax(1), model.predict(x))
    assert model.score(x, y) == accuracy_score(y, model.predict(x))


def test_the_score_of_regression_is_r2():
    x, _ = samples(60, 0)
    y = x @ torch.tensor([1.0, -2.0, 0.5])
    result = fedme.Local(**QUICK).fit([fedme.Client("a", train=(x, y), model="mlr")], quiet=True)
    assert result["a"].score(x, y) == pytest.approx(r2_score(y, result["a"].predict(x)), abs=1e-5)
    with pytest.raises(AttributeError, match=r"has no accuracy; use result.scores\('rmse'\)"):
        _ = result.accuracy
    assert "rmse" in repr(result.scores()).lower()


@pytest.mark.parametrize("way", ["loader", "shuffled", "subset", "frame"])
def test_samples_of_other_libraries_give_the_same_models(way):
    x, y = samples(40, 0)
    data = TensorDataset(x, y)
    given = {
        "loader": DataLoader(data, batch_size=7),
        "shuffled": DataLoader(data, batch_size=7, shuffle=True),
        "subset": DataLoader(data, sampler=SubsetRandomSampler(range(40))),
        "frame": (pandas.DataFrame(x.numpy()), pandas.Series(y.numpy())),
    }[way]
    expected = fedme.Local(**QUICK).fit([fedme.Client("a", train=(x, y), model="mlr")], quiet=True)
    found = fedme.Local(**QUICK).fit([fedme.Client("a", train=given, model="mlr")], quiet=True)
    assert np.array_equal(expected["a"].predict_proba(x), found["a"].predict_proba(x))
    if way != "frame":
        assert np.array_equal(found["a"].predict(given)[:5], found["a"].predict(x)[:5])


def test_loaders_that_change_samples_are_refused():
    data = TensorDataset(*samples(20, 0))
    for loader, message in [
        (DataLoader(data, sampler=RandomSampler(data, replacement=True)), "may repeat samples; give its data set"),
        (DataLoader(data, collate_fn=lambda batch: batch), "its own collate_fn changes samples"),
    ]:
        with pytest.raises(DataError, match=message):
            fedme.Local().fit([fedme.Client("a", train=loader)], quiet=True)


def test_settings_can_be_changed_or_an_error_says_why_not():
    learner = fedme.FedMe(rounds=3, clusters=2)
    assert (learner.rounds, learner.seed, learner.clusters, learner.train.lr) == (3, 0, 2, 0.1)
    learner.rounds = 1
    learner.train = {"epochs": 1, "lr": 0.05}
    learner.clusters = 1
    result = learner.fit(clients(), quiet=True)
    assert (result.experiment.settings.rounds, result.experiment.settings.train.lr) == (1, 0.05)
    assert max(result.history["round"]) == 0
    with pytest.raises(AttributeError):
        learner.train.lr = 1.0
    with pytest.raises(TypeError):
        learner.data["val"] = 0.3
    with pytest.raises(AttributeError, match=r"FedMe has no setting 'round'; did you mean 'rounds'"):
        learner.round = 5
    with pytest.raises(AttributeError, match=r"it is in a table: train=\{'lr': ...\}"):
        learner.lr = 0.5
    with pytest.raises(ConfigError, match="rounds: must be >= 1"):
        learner.rounds = 0
    assert learner.rounds == 1  # a refused value changes nothing
    other = copy.deepcopy(learner).set_params(seed=4)
    assert (learner.seed, other.seed) == (0, 4)
    assert other.get_params()["train"] == {"epochs": 1, "lr": 0.05}


def test_errors_are_there_once():
    with pytest.raises(ConfigError) as error:
        fedme.FedMe(train={"lrr": 1})
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__
    with pytest.raises(ConfigError, match="models.pool: unknown architecture 'cnn-9'"):
        fedme.FedMe(models={"pool": ["cnn-9"]})


def test_a_table_in_a_notebook_has_its_text_too(monkeypatch, capsys):
    """A notebook asks for text and HTML; the text must not appear on the page by itself."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    table = Table("methods", ("method", "accuracy"), [("fedme", "93.1")], ["A sentence."])
    assert repr(table).startswith("methods\n")
    assert "93.1" in repr(table)
    assert repr(table).endswith("A sentence.")
    assert capsys.readouterr().out == ""


def test_quiet_is_quiet(capfd):
    result = fedme.FedMe(**QUICK, clusters=2).fit(clients(), quiet=True)
    result.verdicts(quiet=True)
    assert capfd.readouterr() == ("", "")
    notes = json.loads((result.folder / "environment.json").read_text())["notes"]
    assert any("all models are in one cluster" in note for note in notes)  # kept all the same


def test_another_run_is_named_by_its_differences(tmp_path):
    folder = tmp_path / "run"
    fedme.FedMe(**QUICK).fit(clients(), output=folder, quiet=True)
    for learner, sites, message in [
        (fedme.FedMe(**QUICK, seed=1), clients(), "seed is 0 there and 1 here"),
        (fedme.FedMe(rounds=2, train={"epochs": 1, "lr": 0.2}), clients(), "train.lr is 0.1 there and 0.2 here"),
        (fedme.FedMe(rounds=1, train={"epochs": 1}), clients(), "rounds is 2 there and 1 here"),
        (
            fedme.FedMe(**QUICK),
            [fedme.Client(c.id, train=samples(40, 50), model=c.model) for c in clients()],
            "the samples differ",
        ),
    ]:
        with pytest.raises(RunError, match=message) as error:
            learner.fit(sites, output=folder, quiet=True)
        assert "holds another run" in str(error.value)


def test_scores_of_nobody():
    empty = fedme.api.measurements.Scores(fedme.core.metrics.MEASURES["classification"][0], "test", {}, {})
    assert math.isnan(empty.mean)
    assert "-" in repr(empty)
