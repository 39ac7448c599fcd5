"""Metrics and callbacks of a program: in the records, the tables, the report, TensorBoard and MLflow."""

import json
import re

import pytest
import torch

import fedme
from fedme.config.experiment import ConfigError
from fedme.core.atomic_files import RunError
from fedme.core.key import Key
from fedme.results import loggers, records, summary, views
from fedme.results.tables import wide


def samples(count, seed):
    x = torch.randn(count, 3, generator=Key(seed).torch())
    return x, (x[:, 0] > 0).long()


def clients():
    return [fedme.Client(name, train=samples(40, i), model="dnn-8") for i, name in enumerate("ab")]


def mean_margin(outputs, targets):
    return (outputs.gather(1, targets[:, None])[:, 0] - outputs.mean(1)).mean()


class Watcher(fedme.Callback):
    def __init__(self):
        self.events = []

    def on_client(self, event):
        self.events.append(("client", event.round, event.client))
        return {"sent": event.bytes_up}

    def on_evaluation(self, event):
        self.events.append(("evaluation", event.round, event.client))
        norm = sum(p.detach().square().sum().item() for p in event.model.module().parameters()) ** 0.5
        return {"norm": norm, "half": event.scores["test"].accuracy / 2}

    def on_round(self, event):
        self.events.append(("round", event.round, len(event.rows)))
        return {"rows": len(event.rows)}


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    folder, watcher = tmp_path_factory.mktemp("watched") / "run", Watcher()
    settings = {"rounds": 2, "train": {"epochs": 1}, "finetune": {"epochs": 1}, "log": ["tensorboard", "mlflow"]}
    result = fedme.FedAvg(**settings).fit(
        clients(), output=folder, quiet=True, metrics={"margin": mean_margin}, callbacks=[watcher]
    )
    return result, watcher


def test_callbacks_are_called_in_order(watched):
    words = [event[:2] for event in watched[1].events]
    expected = [pair for t in range(2) for pair in [("client", t)] * 2 + [("evaluation", t)] * 2 + [("round", t)]]
    assert words == expected


def test_the_numbers_are_in_the_records(watched):
    result, _ = watched
    rows = list(records.read(result.folder))
    for row in rows:
        assert row["callbacks"]["sent"] == row["bytes_up"]
        assert row["callbacks"]["rows"] == sum(r["round"] == row["round"] for r in rows)
        if (row["model"], row["stage"], row["split"]) == ("personal", "round", "test"):
            assert row["callbacks"]["half"] == row["accuracy"] / 2
            assert isinstance(row["own"]["margin"], float)
    tuned = [r for r in rows if (r["stage"], r["round"]) == ("finetuned", 1)]
    assert all("margin" in r["own"] for r in tuned)


def test_a_metric_is_computed_from_the_outputs_that_are_saved(watched):
    from fedme.artifacts import outputs as model_outputs, personal_model

    result, _ = watched
    stored = model_outputs.read(personal_model.find(result.folder, "a"))
    expected = float(mean_margin(stored["test/model"], stored["test/targets"]))
    assert result.scores("margin")["a"] == pytest.approx(expected)
    frame = result.history.query("client == 'a' and stage == 'round' and split == 'test' and metric == 'margin'")
    assert frame["value"].iloc[-1] == pytest.approx(expected)
    assert result.to_frame().loc["a", "margin"] == pytest.approx(expected)


def test_they_are_shown_in_tables_and_the_report(watched, tmp_path, capsys):
    result, _ = watched
    views.results(result.folder, "table", wide(), everything=True)
    views.clients(result.folder, "csv", wide())
    said = capsys.readouterr().out
    assert all(name in said for name in ("margin", "norm", "rows"))
    from fedme.report import story
    from fedme.report.run_data import families

    curves = story(families([result.folder]))["curves"]
    assert {"margin", "norm", "half", "rows", "sent"} <= curves["metrics"].keys()
    line = next(line for line in curves["lines"] if line["model"].startswith("personal") and line["rounds"] == [0, 1])
    assert line["values"]["test"]["margin"]["mean"][-1] == pytest.approx(result.scores("margin").mean, abs=1e-5)
    assert "margin" in result.report(tmp_path / "r.html").read_text()


def test_they_are_in_tensorboard_and_mlflow(watched):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow (pip install -c constraints.txt -e '.[dev-full]')")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result, _ = watched
    board = accumulator.EventAccumulator(str(result.folder / "tensorboard")).Reload()
    expected = result.scores("margin").mean
    assert board.Scalars("personal/test/margin")[-1].value == pytest.approx(expected, rel=1e-5)
    assert "callbacks/norm" in board.Tags()["scalars"]
    store = mlflow.MlflowClient(tracking_uri=f"sqlite:///{result.folder.parent / 'mlflow.db'}")
    logged = store.get_run((result.folder / loggers.MLFLOW_RUN).read_text()).data.metrics
    assert logged["personal/test/margin"] == pytest.approx(expected)
    assert logged["callbacks/rows"] == sum(row["round"] == 1 for row in records.read(result.folder))


def test_they_change_nothing_else(watched):
    plain = fedme.FedAvg(rounds=2, train={"epochs": 1}, finetune={"epochs": 1}).fit(clients(), quiet=True)
    x, _ = samples(9, 9)
    assert torch.equal(plain["a"].logits(x), watched[0]["a"].logits(x))


@pytest.mark.parametrize(
    ("metrics", "callbacks", "message"),
    [
        ({"accuracy": mean_margin}, [], "'accuracy' is the name of a built-in metric"),
        ({"my metric": mean_margin}, [], "must begin with a letter"),
        ({"m": 3}, [], "must be a function of outputs and targets"),
        ({"m": lambda outputs, targets: outputs}, [], "metric 'm', client a, val samples: must be a number, got Tensor"),
        ({"m": lambda outputs, targets: 1 / 0}, [], "metric 'm', client a, val samples: ZeroDivisionError"),
        ({}, [3], "must be objects of classes that inherit from fedme.Callback"),
        (
            {},
            [type("Bad", (fedme.Callback,), {"on_round": lambda self, event: 5})()],
            "Bad.on_round: must return numbers by name",
        ),
    ],
)
def test_what_is_wrong_is_named(metrics, callbacks, message):
    with pytest.raises((ConfigError, RunError), match=re.escape(message)):
        fedme.FedAvg(rounds=1).fit(clients(), quiet=True, metrics=metrics, callbacks=callbacks)


def test_missing_numbers_are_in_no_mean_of_the_summary(tmp_path):
    class Sometimes(fedme.Callback):
        def on_evaluation(self, event):
            return {"norm": 2.0 if event.client == "a" else float("nan"), "never": None}

    result = fedme.FedAvg(rounds=1).fit(clients(), output=tmp_path / "run", quiet=True, callbacks=[Sometimes()])
    shown = summary.read(result.folder)
    assert shown == summary.summarise(records.read(result.folder), summary.config_of(result.folder))
    assert {each["norm"]["client_mean"] for each in shown["results"]} == {2.0}
    assert {each["never"]["clients"] for each in shown["results"]} == {0}


def test_infinite_values_are_missing():
    result = fedme.Local(rounds=1).fit(clients(), quiet=True, metrics={"m": lambda outputs, targets: float("inf")})
    assert len(result.scores("m")) == 0
    line = (result.folder / records.NAME).read_text().splitlines()[-1]
    assert json.loads(line)["own"] == {"m": None}
