"""Safe settings: bounds that `fedme deploy init` writes, the alarm, and robust averages of too few clients."""

import math
import tomllib

import pytest
from rich.console import Console

from fedme.config.experiment import load
from fedme.core.data import Schema
from fedme.core.metrics import Metrics
from fedme.deployment import provisioning, submitted_runs
from fedme.deployment.operator_folder import Federation, Settings
from fedme.federation.client_work import ModelScore
from fedme.federation.round import Traffic
from fedme.learning.robust_aggregation import Defence
from fedme.results import records, summary
from fedme.running import run
from fedme.running.alarm import alarm
from fedme.running.progress import Display

SMALL = ["rounds=3", "partition.clients=5", "data.limit=250", "models.pool=['dnn-8']", "finetune.epochs=0", "train.batch=16"]
ATTACK = ["attack.clients=['2']", "attack.kind=huge-norm", "attack.strength=1e30"]


class Listening(Display):
    def __init__(self):
        super().__init__(Console(quiet=True), quiet=True)
        self.lines = []

    def note(self, text, always=False):
        self.lines.append(text)


def do(folder, *words):
    display = Listening()
    experiment, _ = load("digits-fedme", [*SMALL, *words, f"output={folder}"])
    return run.start(experiment, display), [line for line in display.lines if line.startswith("ALARM")]


def accuracy(folder):
    wanted = {"model": "personal", "stage": "round", "split": "test", "selection": "last round"}
    return next(row["accuracy"]["client_mean"] for row in summary.read(folder)["results"] if wanted.items() <= row.items())


@pytest.mark.parametrize("method", ["fedavg", "fedme"])
def test_weights_of_1e30_do_no_harm_within_the_bounds_and_raise_the_alarm_without(method, tmp_path):
    bounds = [f"defence.{name}={value}" for name, value in tomllib.loads(provisioning.DEFENCE)["defence"].items()]
    honest, lines = do(tmp_path / "honest", f"method.name={method}")
    assert lines == []
    bounded, lines = do(tmp_path / "bounded", f"method.name={method}", *ATTACK, *bounds)
    attacked, lines = do(tmp_path / "open", f"method.name={method}", *ATTACK)
    assert accuracy(bounded) > accuracy(attacked) + (0.2 if method == "fedavg" else -0.1)
    if method == "fedavg":  # FedMe's borrowers keep their own model if it is better on their validation samples
        assert accuracy(attacked) < accuracy(honest) - 0.2
        assert lines[0].startswith("ALARM: round 0: the mean validation loss of the personal models is ")
        assert "the models that moved furthest: 2 (" in lines[0]
        noted = {row["client"] for row in records.read(attacked) if "alarm" in row.get("notes", {})}
        assert "2" in noted


def test_the_bounds_change_no_bit_without_an_attack(tmp_path):
    bounds = [f"defence.{name}={value}" for name, value in tomllib.loads(provisioning.DEFENCE)["defence"].items()]
    folders = [do(tmp_path / name, *words)[0] for name, words in (("a", []), ("b", bounds))]
    files = [[path.read_bytes() for path in sorted(folder.glob("clients/*/model.safetensors"))] for folder in folders]
    assert len(files[0]) == 5
    assert files[0] == files[1]


def test_init_writes_the_bounds_unless_the_experiment_has_its_own(tmp_path):
    provisioning.write(tmp_path / "one", None, ["a"], Settings())
    for file in (tmp_path / "one" / "experiment.toml", tmp_path / "one" / "sites" / "a" / "experiment.toml"):
        assert load(file, [])[0].settings.defence == Defence(norm=30.0, guest=10.0)
    own = tmp_path / "own.toml"
    own.write_text((tmp_path / "one" / "experiment.toml").read_text().replace("norm = 30.0 ", "norm = 5.0 "))
    provisioning.write(tmp_path / "two", own, ["a"], Settings())
    assert load(tmp_path / "two" / "experiment.toml", [])[0].settings.defence.norm == 5.0
    federation = Federation.read(tmp_path / "one")
    folder = submitted_runs.create(federation, submitted_runs.read(federation, tmp_path / "one" / "experiment.toml"))
    assert folder.parent.stat().st_mode & 0o777 == 0o700


def test_a_robust_average_of_few_is_refused(tmp_path, fedme):
    words = ["digits-fedavg", *SMALL, "partition.clients=4", "defence.average=median", f"output={tmp_path / 'run'}"]
    code, _, err = fedme("run", *words)
    assert code == 2
    assert "defence.average: 'median' needs at least 5 clients in a round, got 4" in " ".join(err.split())
    words = ["digits-fedavg", *SMALL, "defence.average=trimmed", f"output={tmp_path / 'trimmed'}"]
    code, _, err = fedme("run", *words)  # 0.1 of five values: none would be discarded
    assert code == 2
    assert "'trimmed' with trim = 0.1 needs at least 10 clients in a round, got 5" in " ".join(err.split())
    words = ["digits-fedavg", *SMALL, "partition.clients=8", "train.cohort=4", "defence.average=median"]
    code, _, err = fedme("run", *words, f"output={tmp_path / 'cohort'}")
    assert code == 2
    assert "needs at least 5 clients in a round, got 4" in " ".join(err.split())
    assert not list(tmp_path.glob("*/metrics.jsonl"))


def test_methods_that_do_not_average_need_no_number_of_clients(tmp_path):
    folder, _ = do(tmp_path / "run", "method.name=local", "partition.clients=2", "defence.average=median", "rounds=1")
    assert summary.read(folder)


def test_fedme_refuses_robust_averages(tmp_path, fedme):
    words = ["digits-fedme", *SMALL, "partition.clients=8", "defence.average=median", f"output={tmp_path / 'run'}"]
    code, _, err = fedme("run", *words)
    assert code == 2
    assert "'median' needs at least 5 copies of a model, but method 'fedme' averages two on average" in " ".join(err.split())
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_round_with_too_few_replies_for_a_robust_average_does_not_count(tmp_path):
    display = Listening()
    words = ["method.name=fedavg", "defence.average=median", "faults.dropped_in={'2'=[1]}", f"output={tmp_path / 'run'}"]
    experiment, _ = load("digits-fedme", [*SMALL, *words])
    folder = run.start(experiment, display)
    assert any("round 1 does not count: 4 of 5 needed replies came" in line for line in display.lines)
    missing = {row["round"] for row in records.read(folder) if row.get("notes", {}).get("missing")}
    assert missing == {1}


def test_a_bound_that_is_too_small_is_said_once(tmp_path):
    display = Listening()
    experiment, _ = load("digits-fedme", [*SMALL, "defence.norm=0.01", f"output={tmp_path / 'run'}"])
    run.start(experiment, display)
    assert sum("defence.norm = 0.01 has scaled back 5 of 5 replies" in line for line in display.lines) == 1


def test_when_there_is_an_alarm():
    def scores(*losses):
        metrics = [Metrics(10, 5, 2, loss=loss, accuracy=0.5) for loss in losses]
        return {str(i): [ModelScore("personal", "mlr", "round", "val", found)] for i, found in enumerate(metrics)}

    schema = Schema(shape=(1,), classes=("x", "y"))
    moved = {
        "0": Traffic(moved=0.1),
        "1": Traffic(moved=math.inf),
        "2": Traffic(),
        "3": Traffic(moved=7.0),
        "4": Traffic(moved=1.0),
    }
    assert alarm(scores(0.6, 0.7), moved, schema) is None
    assert alarm(scores(0.6, 3.0), moved, schema) is None  # sure of wrong answers: no attack is needed for that
    assert alarm({}, moved, schema) is None
    raised = alarm(scores(0.6, 9.0), moved, schema)
    assert list(raised.furthest) == ["1", "3", "4"]
    assert "is 4.8, more than 3 times that of a guess (0.693)" in raised.reason
    assert "not finite" in alarm(scores(0.1, math.nan), moved, schema).reason
    assert "no model was sent" in alarm(scores(math.inf), {}, schema).text(3)
    labels = Schema(shape=(1,), classes=tuple("uvwxyz"), task_type="multi-label")  # the losses of labels are added up
    assert alarm(scores(6.0, 6.0), moved, labels) is None


def test_an_attack_within_the_bounds_raises_the_alarm(tmp_path):
    """The bounds are no promise: a change of norm 30 ruins this small network."""
    bounds = [f"defence.{name}={value}" for name, value in tomllib.loads(provisioning.DEFENCE)["defence"].items()]
    attack = ["attack.clients=['2']", "attack.kind=huge-norm", "attack.strength=1000"]
    attacked, lines = do(tmp_path / "run", "method.name=fedavg", *attack, *bounds)
    assert accuracy(attacked) < 0.2
    assert "the models that moved furthest: 2 (" in lines[0]
