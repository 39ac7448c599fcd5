"""Numbers to predict and several labels at once, from samples to reports: Python, files, exports, newcomers."""

import json
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from rich.console import Console
from sklearn.metrics import f1_score, r2_score, roc_auc_score
from torch import nn

import fedme
from fedme import report
from fedme.config.experiment import ConfigError
from fedme.core.atomic_files import RunError
from fedme.core.key import Key
from fedme.core.method import TaskError
from fedme.core.metrics import measure
from fedme.methods import METHODS
from fedme.report.run_data import families
from fedme.results import records, summary, views
from fedme_test_people_networks import MyNet

KINDS = ("regression", "multi-label")
QUICK = {"rounds": 3, "train": {"epochs": 1}}
NAMES = ["fever", "cough"]


def samples(kind, count, seed):
    """Prices of some hundred thousand, or two labels."""
    draw = Key(seed).torch()
    x = torch.randn(count, 3, generator=draw) * torch.tensor([5.0, 1.0, 40.0]) + 7
    clean = (x - 7) / torch.tensor([5.0, 1.0, 40.0])
    if kind == "multi-label":
        return x, (clean[:, :2] + 0.1 * torch.randn(count, 2, generator=draw) > 0.3).long()
    return x, 250_000 + 40_000 * clean[:, 0] - 9_000 * clean[:, 2] + 0.5


def clients(kind, models=("dnn-8", "mlr", "dnn-16")):
    return [fedme.Client(f"site-{i}", train=samples(kind, 40 + 10 * i, i), model=m) for i, m in enumerate(models)]


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory):
    kind = request.param
    output = tmp_path_factory.mktemp("runs") / "one"
    made = fedme.FedMe(**QUICK, clusters=2, finetune={"epochs": 1})
    return kind, made.fit(clients(kind), unlabeled=samples(kind, 30, 9)[0], output=output)


def test_scores_are_those_of_the_predictions_in_their_own_unit(trained):
    kind, result = trained
    x, y = samples(kind, 60, 20)
    model = result["site-1"]
    said, found = model.predict(x), model.evaluate((x, y))
    assert model.task == kind
    if kind == "regression":
        error = said - y.double().numpy()
        assert said.shape == (60,)
        assert found.rmse == pytest.approx(np.sqrt((error**2).mean()), rel=1e-4)
        assert found.mae == pytest.approx(np.abs(error).mean(), rel=1e-4)
        assert found.r2 == pytest.approx(r2_score(y, said), abs=1e-4)
        assert model.score(x, y) == found.r2
        assert found.rmse < 40_000  # it has learned something: the targets deviate by 41 000
        with pytest.raises(RunError, match="a regression model has no probabilities"):
            model.predict_proba(x)
    else:
        chances = model.predict_proba(x)
        assert said.shape == (60, 2)
        assert ((chances > 0.5) == said).all()
        assert found.accuracy == pytest.approx((said == y.numpy()).mean())
        assert found.exact_match == pytest.approx((said == y.numpy()).all(1).mean())
        assert model.score(x, y) == found.exact_match
        assert found.micro_f1 == pytest.approx(f1_score(y, said, average="micro"))
        assert found.macro_f1 == pytest.approx(f1_score(y, said, average="macro", zero_division=0))
        assert found.auroc == pytest.approx(roc_auc_score(y, chances))


def test_recorded_results_are_those_of_the_saved_model(trained):
    kind, result = trained
    key = "rmse" if kind == "regression" else "accuracy"
    rows = {
        r["client"]: r
        for r in records.read(result.folder)
        if (r["model"], r["split"], r["stage"]) == ("personal", "test", "round")
    }
    about = result.model("site-2", "model").about
    assert about["metrics"]["test"][key] == pytest.approx(rows["site-2"][key])
    assert about["task"] == kind
    assert ("accuracy" in rows["site-2"]) == (kind == "multi-label")
    whole = summary.read(result.folder)
    last = next(r for r in whole["results"] if (r["split"], r["stage"], r["selection"]) == ("test", "round", "last round"))
    assert whole["task"] == kind
    assert last[key]["client_mean"] == pytest.approx(np.mean([r[key] for r in rows.values()]))
    power = 2 if kind == "regression" else 1
    pooled = sum(r[key] ** power * r["samples"] for r in rows.values()) / sum(r["samples"] for r in rows.values())
    assert last[key]["pooled"] == pytest.approx(pooled ** (1 / power))


def test_a_gain_is_positive_where_it_is_better(trained, capsys):
    kind, result = trained
    for row in result.rows(quiet=True):
        ours = row["fine-tuned"] if row["chosen"] == "finetuned" else row["personal"]
        if row["chosen"] in ("model", "finetuned"):
            better = ours < row["local"] if kind == "regression" else ours > row["local"]
            assert (row["gain"] > 0) == better
    result.table()
    assert ("RMSE (less is better)" if kind == "regression" else "label accuracy in %") in capsys.readouterr().out


def test_exports_answer_as_the_model_does(trained, tmp_path):
    import onnxruntime

    kind, result = trained
    x, _ = samples(kind, 11, 50)
    model = result["site-0"]
    expected = model.logits(x).float()
    close = {"rtol": 1e-4, "atol": 1e-4}
    path = model.export(tmp_path / "m.onnx")
    name = "values" if kind == "regression" else "logits"
    assert np.allclose(onnxruntime.InferenceSession(path).run([name], {"x": x.numpy()})[0], expected, **close)
    assert torch.allclose(torch.export.load(model.export(tmp_path / "m.pt2")).module()(x), expected, **close)
    assert torch.allclose(model.module(x), expected, **close)


def test_a_newcomer_joins(trained):
    kind, result = trained
    model = result.join(fedme.Client("new", train=samples(kind, 40, 31)))
    assert model.task == kind
    assert len(model.predict(samples(kind, 5, 1)[0])) == 5


def test_the_report_shows_what_counts(trained, tmp_path):
    kind, result = trained
    fedme.Local(**QUICK).fit(clients(kind), output=tmp_path / "local", quiet=True)
    result.verdicts(quiet=True)
    story = report.story(families([result.folder, tmp_path / "local"]))
    title = {"regression": "RMSE", "multi-label": "label accuracy"}[kind]
    first = next(iter(story["curves"]["metrics"].values()))
    assert first == {"title": title, "percent": kind != "regression", "higher": kind != "regression"}
    told = " ".join(line for each in story["summary"]["paragraphs"] for line in each["lines"])
    assert f"Test {title} of the personal models" in told
    mine = story["runs"][0]
    values = mine["results"]["test round"]
    worst = mine["clients"][values.index(max(values) if kind == "regression" else min(values))]
    assert f"The worst clients are {worst} (" in told
    assert "Compared with the best that each client could train alone: " in told
    judged = next(
        comparison for comparison in story["families"][mine["family"]]["gain"]["compared"] if comparison["key"] == "verdict"
    )
    assert {line["client"]: (line["label"], line["value"], line["alone"]) for line in judged["clients"]} == {
        v.client: (v.label, v.value, v.local) for v in result.verdicts(quiet=True)
    }
    assert f"test {title}" in story["summary"]["table"]["header"]
    assert sum(map(sum, mine["labels"]["counts"])) > 0
    result.report(tmp_path / "r.html")


def test_an_instance_and_a_class_of_ones_own():
    for kind in KINDS:
        width = 1 if kind == "regression" else 2
        here = [
            fedme.Client("a", train=samples(kind, 40, 1), model=fedme.Arch(MyNet, width=8)),
            fedme.Client(
                "b", train=samples(kind, 40, 2), model=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, width))
            ),
        ]
        result = fedme.FML(**QUICK, models={"shared": "mlr"}).fit(here, quiet=True)
        assert len(result["b"].predict(samples(kind, 4, 3)[0])) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_runs(kind):
    methods = {name: getattr(fedme, method.__name__) for name, method in METHODS.items()}
    for name, made in methods.items():
        extra = {"public_epochs": 1, "private_epochs": 1} if name == "fedmd" else {}
        learner, here, public = made(rounds=1, train={"epochs": 1}, **extra), clients(kind), samples(kind, 20, 8)
        if name == "lg-fedavg":
            with pytest.raises(TaskError, match="'lg-fedavg': head.weight has shape .* in mlr, expected"):
                learner.fit(here, public=public, quiet=True)
            here = clients(kind, ("dnn-8", "dnn-16-8", "dnn-8"))  # one width of the last layer, which they share
        if METHODS[name].classes_only:
            with pytest.raises(TaskError, match=f"method '{name}' is for classification"):
                learner.fit(here, public=public, quiet=True)
            continue
        result = learner.fit(here, public=public, quiet=True)
        assert result["site-0"].logits(samples(kind, 5, 1)[0]).isfinite().all(), name


def test_the_same_from_tensors_frames_and_files(tmp_path):
    """Values that a text file holds exactly, so that all ways see the same numbers."""
    for kind in KINDS:
        made = {}
        for seed in (1, 2):
            x, y = samples(kind, 30, seed)
            x, y = x.round(decimals=2).double(), y.double().round(decimals=2) if kind == "regression" else y
            frame = pandas.DataFrame(x.numpy(), columns=["u", "v", "w"])
            names = NAMES if kind == "multi-label" else ["price"]
            for i, name in enumerate(names):
                frame[name] = (y[:, i] if kind == "multi-label" else y).numpy()
            path = tmp_path / f"{kind}{seed}.csv"
            frame.to_csv(path, index=False)
            label = names if kind == "multi-label" else names[0]
            made[seed] = {"tensors": ((x, y), None), "frame": (frame, label), "file": (path, label)}
        found = {}
        for way in ("tensors", "frame", "file"):
            here = [fedme.Client(str(seed), train=made[seed][way][0], label=made[seed][way][1], model="mlr") for seed in made]
            model = fedme.FedMe(**QUICK).fit(here, quiet=True)["1"]
            found[way] = model.module
            assert model.task == kind
            assert model.classes == ((("0", "1") if kind == "multi-label" else ("y",)) if way == "tensors" else tuple(names))
        weights = [[p.tolist() for p in module.parameters()] for module in found.values()]
        assert weights[0] == weights[1] == weights[2], kind


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Sites of three columns, two labels and a price, and an experiment for each."""
    monkeypatch.chdir(tmp_path)
    for name, seed in (("a", 1), ("b", 2), ("new", 3)):
        x, y = samples("multi-label", 40, seed)
        table = pandas.DataFrame(x.numpy(), columns=["u", "v", "w"])
        table[NAMES], table["price"] = y.numpy(), samples("regression", 40, seed)[1].numpy()
        table.to_csv(f"{name}.csv", index=False)
    tables = '[clients.a]\ndata = "a.csv"\nmodel = "dnn-8"\n[clients.b]\ndata = "b.csv"\nmodel = "mlr"\n'
    Path("price.toml").write_text('rounds = 2\n[data]\nlabel = "price"\nignore = ["fever", "cough"]\n' + tables)
    Path("ill.toml").write_text('rounds = 2\n[data]\nlabel = ["fever", "cough"]\nignore = ["price"]\n' + tables)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", ["price", "ill"])
def test_from_a_file_of_an_experiment(fedme, name):
    price = name == "price"
    assert fedme("data", "show", f"{name}.toml")[0] == 0
    code, _, err = fedme("run", f"{name}.toml", "output=run")
    assert code == 0
    assert ("regression of price" if price else "multi-label of fever, cough") in err
    assert fedme("predict", "run", "new.csv", "--client", "a")[1].splitlines()[0] == (
        "fever,cough,price" if price else "price,fever,cough,p(fever),p(cough)"  # columns that are no inputs are copied
    )
    told = json.loads(fedme("predict", "run", "new.csv", "--client", "a", "--json")[1])[0]
    assert set(told["prediction"]) == ({"price"} if price else {"fever", "cough"})
    found = json.loads(fedme("evaluate", "run", "new.csv", "--client", "a", "--json")[1])
    assert ("rmse" in found, "exact_match" in found) == (price, not price)
    assert fedme("join", "run", "--data", "new.csv")[0] == 0
    for command in (("show", "run"), ("show", "run", "--clients"), ("compare", "run"), ("watch", "run", "--once")):
        code, out, _ = fedme(*command)
        assert code == 0
        assert ("RMSE" if price else "label accuracy") in out, command
    assert fedme("report", "run")[0] == 0


@pytest.mark.usefixtures("files")
def test_the_smaller_error_is_the_better_one(fedme):
    words = ("--over", "train.lr=0.0001,0.1", "--json", "--output", "runs/sweep")
    rows = json.loads(fedme("sweep", "price.toml", *words)[1])
    assert [row["best"] for row in rows] == [False, True]
    assert rows[1]["validation"] < rows[0]["validation"]
    for name in ("price", "ill"):
        fedme("run", f"{name}.toml", f"output=runs/{name}")
    for command in ("compare", "report"):
        code, _, err = fedme(command, "runs/price", "runs/ill")
        assert code == 2
        assert "runs of different tasks cannot be compared" in err


def test_what_does_not_fit_is_refused():
    x, y = samples("regression", 20, 1)

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 1)

        def forward(self, x):
            return self.inner(x).squeeze(-1)

    with pytest.raises(ConfigError, match="client a: .*two samples by 1 targets.*do not squeeze the output"):
        fedme.Local(**QUICK).fit([fedme.Client("a", train=(x, y), model=Flat())])
    with pytest.raises(ValueError, match="adopt = 'accuracy' has no meaning"):
        fedme.FedMe(**QUICK, adopt="accuracy").fit([fedme.Client("a", train=(x, y)), fedme.Client("b", train=(x, y))])
    with pytest.raises(ValueError, match="data.groups is for classification"):
        fedme.Local(**QUICK, data={"groups": {"a": [[0]]}}).fit([fedme.Client("a", train=(x, y))])


def test_whole_numbers_are_classes_unless_told():
    x, y = samples("regression", 40, 1)
    whole = (y / 10_000).round().long()
    classes = fedme.Local(**QUICK).fit([fedme.Client("a", train=(x, whole))], quiet=True)["a"]
    assert classes.task == "classification"
    numbers = fedme.Local(**QUICK, data={"task": "regression"}).fit([fedme.Client("a", train=(x, whole))], quiet=True)["a"]
    assert numbers.task == "regression"


def test_measures_without_meaning_are_not_there():
    y = torch.zeros(3, 2, dtype=torch.bool)
    none = measure(torch.full((3, 2), -1.0), y)
    assert (none.accuracy, none.micro_f1, none.macro_f1, none.auroc) == (1.0, None, None, None)
    same = measure(torch.zeros(3, 1), torch.ones(3, 1), (10.0,))
    assert (same.rmse, same.r2) == (10.0, None)
    assert measure(torch.zeros(0, 1), torch.zeros(0, 1)).rmse is None


def test_models_that_diverged_are_told_and_not_hidden(tmp_path, capsys):
    """Numbers that are not finite have no mean: every table and the report say so instead of failing."""
    made = fedme.Local(rounds=2, train={"epochs": 5, "lr": 1e12}, name="wild")
    result = made.fit(clients("regression", ("mlr", "mlr")), output=tmp_path / "run", quiet=True)
    last = next(r for r in summary.read(result.folder)["results"] if r["split"] == "test")
    assert last["rmse"]["pooled"] is None
    lines = summary.compare([result.folder])
    for style in ("table", "csv"):
        views.comparison(lines, style, Console(width=140))
    assert "wild" in capsys.readouterr().out
    result.table(quiet=True)
    result.report(tmp_path / "r.html")
