"""Runs with their operations on Ray: the bits of one process, counted messages, and processes that die."""

from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from fedme.config.experiment import load
from fedme.execution import ray as fedme_ray
from fedme.results import records
from fedme.running import run
from fedme.running.progress import Display

fedme_ray.keep_ray_private()

from fedme.execution.ray import EngineError, executor as ray_executor  # noqa: E402
from fedme_test_ray import in_this_process  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

CONFIG = """
rounds = 3
[method]
name = "fedme"
[data]
name = "digits"
limit = 400
unlabeled = 40
[partition]
name = "dirichlet"
clients = 8
alpha_label = 1.0
[models]
pool = ["mlr", "dnn-16", "cnn-small"]
[train]
epochs = 1
momentum = 0.9
[finetune]
epochs = 1
"""
METHODS = {
    "fedme": ["method.clusters=2"],
    "fml": ["method=fml", "models.shared=dnn-8", "checkpoint_every=2"],
    "fedavg": ["method=fedavg", "models.shared=dnn-8", "train.cohort=5"],
    "fedmd": ["method=fedmd", "data.public=20", "method.public_epochs=1", "data.unlabeled=0"],
    "centralized": ["method=centralized", "models.shared=dnn-8"],
    "private": ["method=fml", "models.shared=dnn-8", "privacy.epsilon=5"],
    "batch-norm": ["method=fedavg", "models.shared=fedme_test_user_networks:Normed"],
    "stacked": ["method=fedavg", "models.shared=dnn-8", "engine.path=stacked"],
    "eager": ["method=fedme", "engine.path=workers"],
}


@pytest.fixture
def processes(monkeypatch):
    return in_this_process(monkeypatch)


@pytest.fixture
def executors(monkeypatch):
    """The executors of the runs of a test."""
    made = []
    begin = ray_executor.RayExecutor.__init__

    def noted(self, *arguments):
        begin(self, *arguments)
        made.append(self)

    monkeypatch.setattr(ray_executor.RayExecutor, "__init__", noted)
    return made


def play(folder: Path, *words: str) -> Path:
    (folder.parent / "experiment.toml").write_text(CONFIG)
    experiment, _ = load(folder.parent / "experiment.toml", [f"output={folder}", *words])
    run.start(experiment, Display(Console(quiet=True), quiet=True))
    return folder


def weights(folder: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("clients/*/*.safetensors"))}
    assert len(files) >= 16
    return files


def numbers(folder: Path) -> list[dict[str, object]]:
    return [{key: value for key, value in row.items() if not key.endswith("seconds")} for row in records.read(folder)]


def same(here: Path, there: Path) -> None:
    assert weights(there) == weights(here)
    assert numbers(there) == numbers(here)


@pytest.mark.parametrize("method", METHODS)
def test_the_bits_of_one_process(method, processes, tmp_path):
    words = METHODS[method]
    here = play(tmp_path / "here", *words)
    there = play(tmp_path / "there", *words, "engine.name=ray", "engine.workers=2")
    same(here, there)
    ways = [{line.split(" (")[0] for line in (folder / "engine.log").read_text().splitlines()} for folder in (here, there)]
    said = {line for line in ways[1] if line.startswith("on Ray: ")}
    assert len(said) == 1
    if method != "eager":  # worker processes are named
        assert ways[1] - said == ways[0]


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_processes_gives_the_same_bits(workers, processes, tmp_path):
    same(play(tmp_path / "here"), play(tmp_path / "there", "engine.name=ray", f"engine.workers={workers}"))


def test_a_process_that_dies_costs_only_its_operations(processes, tmp_path, monkeypatch, executors):
    """Every third message kills its process, after the work was done or before."""
    sent = Counter()
    begin = ray_executor.RayExecutor._send

    def killing(self, *arguments):
        pending = begin(self, *arguments)
        sent["steps"] += 1
        if sent["steps"] % 3 == 0 and sent["killed"] < 3:
            sent["killed"] += 1
            processes.kill(next(iter(pending.values()))[0].handle)
        return pending

    here = play(tmp_path / "here")
    monkeypatch.setattr(ray_executor.RayExecutor, "_send", killing)
    same(here, play(tmp_path / "there", "engine.name=ray", "engine.workers=2"))
    assert sent["killed"] == 3


def test_weights_that_died_with_their_process_are_computed_again(processes, tmp_path, monkeypatch, executors):
    """The process dies after it has answered and before anybody has read what it trained."""
    killed = Counter()
    begin = ray_executor.RayExecutor._values

    def killing(self, answer, actor, *arguments):
        values = begin(self, answer, actor, *arguments)
        if answer.packages and killed["times"] < 2:
            killed["times"] += 1
            processes.kill(actor.handle)
        return values

    here = play(tmp_path / "here")
    monkeypatch.setattr(ray_executor.RayExecutor, "_values", killing)
    same(here, play(tmp_path / "there", "engine.name=ray", "engine.workers=2"))
    assert killed["times"] == 2


def test_operations_that_kill_every_process_are_named(processes, tmp_path):
    words = ["method=local", "models.pool=['fedme_test_ray_networks:Deadly']"]
    with pytest.raises(EngineError) as failed:
        play(tmp_path / "there", *words, "engine.name=ray", "engine.workers=2", "partition.clients=2")
    assert "died, 4 times: train on the training samples of client" in str(failed.value)


def test_what_a_network_raises_ends_the_run_in_one_line(processes, tmp_path):
    words = ["method=local", "models.pool=['fedme_test_ray_networks:Refusing']"]
    with pytest.raises(EngineError, match="^ValueError: not today$"):
        play(tmp_path / "there", *words, "engine.name=ray", "engine.workers=2")


@pytest.mark.parametrize("method", ["fedme", "fedavg"])
def test_calls_and_bytes(method, processes, tmp_path, executors):
    """At most four messages per process and round; the weights that travel are those that the method sends."""
    rounds, workers = 4, 2
    words = [f"rounds={rounds}", "finetune.epochs=0", "data.limit=1000", "partition.clients=40", "engine.workers=2"]
    folder = play(tmp_path / "there", *METHODS[method], "train.cohort=none", *words, "engine.name=ray")
    (execute,) = executors
    calls = execute.traffic.calls
    assert calls <= 4 * workers * rounds
    rows = list(records.read(folder))
    down, up = (sum(row[name] for row in rows if row["round"] >= 0) for name in ("bytes_down", "bytes_up"))
    assert execute.traffic.bytes_sent <= 1.1 * down
    assert execute.traffic.bytes_fetched <= 1.1 * up
