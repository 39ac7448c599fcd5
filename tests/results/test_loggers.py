"""TensorBoard and MLflow, with real local stores: what they hold is what the records hold."""

import io
import statistics
from pathlib import Path

import mlflow
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedme.config.experiment import ConfigError, load
from fedme.results import loggers, records
from fedme.running import run
from fedme.running.progress import Display
from fedme_test_runs import do

TINY = [
    "rounds=3",
    "partition.clients=3",
    "data.limit=90",
    "data.unlabeled=0",
    "models.pool=['mlr','dnn-8']",
    "models.assign=mlr",
]


class Unplugged(Display):
    """Pulls the plug when so many rounds are done."""

    def __init__(self, after=None):
        super().__init__(Console(file=io.StringIO()), quiet=True)
        self.after = after

    def advance(self, info=None):
        super().advance(info)
        if self.label == "round" and self.done == self.after:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run that logs to both, was cut off after two rounds (with a checkpoint of the first two) and resumed."""
    home = tmp_path_factory.mktemp("logged")
    experiment, _ = load("digits-fedme", [*TINY, "log=['tensorboard', 'mlflow']", f"output={home / 'run'}"])
    with pytest.raises(KeyboardInterrupt):
        run.start(experiment, Unplugged(after=2))
    stored = mlflow.MlflowClient(tracking_uri=f"sqlite:///{home / 'mlflow.db'}")
    assert stored.get_run((home / "run" / loggers.MLFLOW_RUN).read_text()).info.status == "KILLED"
    run.resume(home / "run", Unplugged())
    return home / "run"


@pytest.fixture(scope="module")
def expected(folder):
    rows = list(records.read(folder))

    def mean(t, model, stage, split, metric="accuracy"):
        wanted = {"round": t, "model": model, "stage": stage, "split": split}
        return statistics.fmean(row[metric] for row in rows if wanted.items() <= row.items())

    return {
        "personal/test/accuracy": [mean(t, "personal", "round", "test") for t in range(3)],
        "personal/val/loss": [mean(t, "personal", "round", "val", "loss") for t in range(3)],
        "own/training/loss": [mean(t, "own", "training", "train", "loss") for t in range(3)],
        "guest/trained/accuracy": [mean(t, "guest", "trained", "val") for t in range(3)],
        "adopted": [
            statistics.fmean(r["notes"]["adopts"] for r in rows if r["round"] == t and r.get("notes")) for t in range(3)
        ],
    }


def test_tensorboard_holds_every_round_once(folder, expected):
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    for name, values in expected.items():
        events = board.Scalars(name)
        assert [event.step for event in events] == [0, 1, 2], name
        assert [event.value for event in events] == pytest.approx(values, rel=1e-6)
    assert "config/text_summary" in board.Tags()["tensors"]


def test_mlflow_holds_the_settings_and_every_round_in_one_run(folder, expected):
    stored = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder.parent / 'mlflow.db'}")
    experiment = stored.get_experiment_by_name("fedme")
    (found,) = stored.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["method.name"] == "fedme"
    assert found.data.params["rounds"] == "3"
    for name, values in expected.items():
        history = {point.step: point.value for point in stored.get_metric_history(found.info.run_id, name)}
        assert history == pytest.approx(dict(enumerate(values)))


def test_logging_changes_nothing_in_the_records(folder, tmp_path):
    experiment, _ = load("digits-fedme", [*TINY, f"output={tmp_path / 'plain'}"])
    run.start(experiment, Unplugged())

    def timeless(each):
        return [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in records.read(each)]

    assert timeless(folder) == timeless(tmp_path / "plain")


def test_what_is_not_installed_is_said_before_anything_is_trained(tmp_path, monkeypatch):
    real = loggers.importlib.import_module

    def without(name, *rest):
        if name == "mlflow":
            raise ImportError("No module named 'mlflow'")
        return real(name, *rest)

    monkeypatch.setattr(loggers.importlib, "import_module", without)
    experiment, _ = load("digits-fedme", [*TINY, "log=mlflow", f"output={tmp_path / 'run'}"])
    with pytest.raises(ConfigError, match=r"log: 'mlflow' is not installed .*pip install 'fedme\[mlflow\]'"):
        run.start(experiment, Unplugged())
    assert not Path(tmp_path / "run").exists()


def test_only_what_is_known_can_be_asked_for():
    with pytest.raises(ConfigError, match="tensorboard"):
        load("digits-fedme", ["log=tensorbord"])
    assert load("digits-fedme", ["log=tensorboard"])[0].settings.log == "tensorboard"


def test_what_a_method_notes_in_numbers_is_logged(tmp_path):
    folder = do(tmp_path / "run", "method=apfl", "models.shared=dnn-8", "rounds=2", "evaluate_every=2")
    rows = [row for row in records.read(folder) if row["round"] == 0]
    alphas = {row["client"]: row["notes"]["alpha"] for row in rows if row.get("notes")}
    assert len(alphas) == 4
    assert loggers.means(rows)["notes/alpha"] == pytest.approx(statistics.fmean(alphas.values()))
    assert not any(name.startswith("notes/") and name != "notes/alpha" for name in loggers.means(rows))
