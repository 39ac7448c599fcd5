"""Runs with their operations on Ray: the bits of one process, counted messages, and processes that die."""

import contextlib
import copy
import functools
import importlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from fedme import Client, FedMe
from fedme.config.experiment import ConfigError, load
from fedme.config.identity import source_digests, user_files
from fedme.core.atomic_files import RunError
from fedme.core.key import Key
from fedme.core.model import Model
from fedme.core.operations import BatchSchedule, Evaluate, Train
from fedme.datasets.data_errors import DataError
from fedme.execution import ray as fedme_ray
from fedme.execution.dispatcher import Unit
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD
from fedme.results import records
from fedme.running import ray_run, run
from fedme.running.progress import Display
from fedme.running.round_loop import Interrupted

fedme_ray.keep_ray_private()

from ray import exceptions  # noqa: E402

from fedme.execution.ray import (  # noqa: E402
    EngineError,
    actor as ray_actor,
    actors as ray_actors,
    cluster as ray_cluster,
    executor as ray_executor,
)
from fedme.execution.ray.actor import Opened  # noqa: E402
from fedme.execution.ray.messages import Splits  # noqa: E402
from fedme_test_ray import in_this_process  # noqa: E402
from fedme_test_support import DENSE, clients  # noqa: E402

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


def paths_taken(log: list[str]) -> Counter[str]:
    """How many operations took each path, in which process ever, and the lines that are not about operations."""
    taken: Counter[str] = Counter()
    for line in log:
        found = re.match(r"(\w+): (\d+) operations (.*?)(?: in workers)?(?: \(|$)", line)
        taken[f"{found[1]} {found[3]}" if found else line] += int(found[2]) if found else 1
    return taken


@pytest.mark.parametrize("method", METHODS)
def test_the_bits_of_one_process(method, processes, tmp_path):
    words = METHODS[method]
    here = play(tmp_path / "here", *words)
    there = play(tmp_path / "there", *words, "engine.name=ray", "engine.workers=2")
    same(here, there)
    logs = [(folder / "engine.log").read_text().splitlines() for folder in (here, there)]
    assert logs[1][0].startswith("on Ray: ")
    assert paths_taken(logs[1][1:]) == paths_taken(logs[0])


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
    words = ["method=local", "models.pool=['fedme_test_ray_networks:Deadly']", "engine.path=reference"]
    with pytest.raises(EngineError) as failed:
        play(tmp_path / "there", *words, "engine.name=ray", "engine.workers=2", "partition.clients=2")
    assert "died, 4 times: train on the training samples of client" in str(failed.value)


def test_what_a_network_raises_ends_the_run_in_one_line(processes, tmp_path):
    words = ["method=local", "models.pool=['fedme_test_ray_networks:Refusing']", "engine.path=reference"]
    with pytest.raises(EngineError, match="^ValueError: not today$"):
        play(tmp_path / "there", *words, "engine.name=ray", "engine.workers=2")


@pytest.mark.parametrize("method", ["fedme", "fedavg", "fml"])
def test_calls_and_bytes(method, processes, tmp_path, executors):
    """At most four messages per process and round. What travels is what the method sends, and little more: everything counts.

    The states of clients, which FML has, go to the checkpoint: they come once, after the last round.
    """
    rounds, workers, sizes = (
        4,
        2,
        ["data.limit=1000", "partition.clients=40", "models.pool=['dnn-64','dnn-96','dnn-128','mlr']"],
    )
    words = [*sizes, f"rounds={rounds}", f"checkpoint_every={rounds}", f"evaluate_every={rounds}", "finetune.epochs=0"]
    shared = ["models.shared=dnn-64"] if method != "fedme" else []
    chosen = [*METHODS[method], *words, *shared, *(["train.cohort=40"] if method == "fedavg" else [])]
    folder = play(tmp_path / "there", *chosen, "engine.name=ray", f"engine.workers={workers}")
    (execute,) = executors
    assert execute.traffic.calls == len(processes.sent)
    assert execute.traffic.calls <= 4 * workers * rounds
    rows = {(row["round"], row["client"]): row for row in records.read(folder)}  # several rows of a client say the same
    down, up = (sum(row[name] for row in rows.values()) for name in ("bytes_down", "bytes_up"))
    states = sum(path.stat().st_size for path in folder.glob("weights/*.bin")) if method == "fml" else 0
    assert sum(processes.sent) + execute.traffic.bytes_sent <= 1.1 * down + states
    assert sum(processes.answered) + sum(processes.gets) <= 1.1 * (up + states)


def test_weights_that_several_processes_need_are_put_once(processes, tmp_path, executors):
    words = [*METHODS["fedavg"], "models.shared=dnn-128", "train.cohort=8", "finetune.epochs=0", "evaluate_every=3", "rounds=3"]
    play(tmp_path / "there", *words, "engine.name=ray", "engine.workers=2")
    (execute,) = executors
    assert execute.traffic.bytes_sent > 6 * 4 * 64 * 128  # the model of every round, to two processes
    assert sum(processes.puts) < 0.6 * execute.traffic.bytes_sent


def test_operations_are_dealt_by_effort_and_to_the_process_that_has_their_weights():
    split = clients()["1"].train
    model = Model.init(DENSE, Key(1))
    train = Train({"own": model}, SGD(CrossEntropy(), 0.1), split, BatchSchedule(), Key(2))

    class Process:
        def __init__(self, name, *has):
            self.name, self.has = name, has

    first, second = Process("first", 7), Process("second")
    execute = ray_executor.RayExecutor.__new__(ray_executor.RayExecutor)
    execute.actors = SimpleNamespace(ready=lambda: [first, second])

    def dealt(op, efforts, needs):
        units = [Unit([index], effort, own_program=False) for index, effort in enumerate(efforts)]
        work = ray_executor.Work([op] * len(units), units, needs, {}, {})
        return {actor.name: sorted(units) for actor, units in execute._deal(work, range(len(units))).items()}

    efforts = [8.0, 1.0, 5.0, 1.0, 1.0]
    loads = {name: sum(efforts[unit] for unit in units) for name, units in dealt(train, efforts, [[]] * 5).items()}
    assert loads == {"first": 8.0, "second": 8.0}
    assert dealt(train, [1.0, 1.0, 1.0, 1.0], [[7], [7], [], []]) == {"first": [0, 1], "second": [2, 3]}
    assert dealt(train, [1.0] * 4, [[7]] * 4) == {"first": [0, 1], "second": [2, 3]}, "one does not get all the work"
    assert dealt(Evaluate(model, split), [1.0] * 4, [[7]] * 4) == {"first": [0, 1, 2, 3], "second": []}


def test_every_process_asks_for_one_device(processes, tmp_path, monkeypatch):
    """The one that it is given is a processor here, which is treated like a device."""
    words = ["engine.path=reference", "engine.threads=2", "rounds=1"]
    here = play(tmp_path / "here", *words)
    monkeypatch.setattr(ray_run, "given", lambda device: "cpu:0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    there = play(tmp_path / "there", *words, "engine.name=ray", "engine.workers=2", "engine.device=cuda:1")
    same(here, there)
    assert [(options["num_cpus"], options["num_gpus"]) for options in processes.options] == [(2, 1)]
    play(tmp_path / "without", *words, "engine.name=ray", "engine.workers=1")
    assert processes.options[-1]["num_gpus"] == 0


NETWORK = """
import math
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 12), nn.Tanh(), nn.Linear(12, classes))

    def forward(self, x):
        return self.net(x)
"""
METHOD = """
from dataclasses import dataclass
from fedme.core.method import Report
from fedme.core.operations import train
from fedme.methods.fedavg import FedAvg
from fedme.methods.shared_model import TrainedCopy

@dataclass(frozen=True)
class Doubled:
    factor: float = 2.0

    def __call__(self, logits, y):
        from torch.nn.functional import cross_entropy
        return {role: self.factor * cross_entropy(z, y, reduction="none") for role, z in logits.items()}

@dataclass(frozen=True)
class Twice(FedAvg):
    def client_round(self, state, down, data, when, key):
        optimizer, schedule = self.train.local_optimizer(Doubled(), when), self.train.batch_schedule(when)
        trained = yield from train({"global": down.model}, optimizer, data.train, schedule, key.at("train"))
        return state, TrainedCopy(trained.models["global"], len(data.train)), Report(trained.losses)
"""


def test_real_processes(tmp_path, monkeypatch):
    """A private Ray on loopback starts and ends with the run; network and method are the user's."""
    (tmp_path / "experiment.toml").write_text(CONFIG)
    (tmp_path / "my_network.py").write_text(NETWORK)
    (tmp_path / "my_method.py").write_text(METHOD)
    words = ["method=my_method:Twice", "models.shared=my_network:Net"]
    command = [
        sys.executable,
        "-m",
        "fedme",
        "run",
        "experiment.toml",
        "engine=ray",
        "engine.workers=2",
        "output=there",
        *words,
    ]
    with (tmp_path / "output").open("w") as output:
        there = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output)
    try:
        assert there.wait(600) == 0, (tmp_path / "output").read_text()
    finally:
        there.kill()
        there.wait()
    monkeypatch.syspath_prepend(tmp_path)
    same(play(tmp_path / "here", *words), tmp_path / "there")
    assert (tmp_path / "there" / "engine.log").read_text().startswith("on Ray: ")


def actors_of(mark: str) -> list[int]:
    """The processes of Ray that execute operations and have this in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            if (folder / "cmdline").read_bytes().startswith(b"ray::") and mark.encode() in (folder / "environ").read_bytes():
                found.append((int(folder.name), (folder / "cmdline").read_bytes()))
    return [process for process, words in found if b"OperationActor" in words]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc")
def test_a_process_is_killed_and_the_run_stopped_and_continued_on_another_cluster(tmp_path):
    (tmp_path / "experiment.toml").write_text(CONFIG)
    words = ["rounds=60", "evaluate_every=10"]
    here = play(tmp_path / "here", *words)
    environment = {**os.environ, "FEDME_TEST": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    program = [sys.executable, "-m", "fedme"]
    command = [*program, "run", "experiment.toml", "engine=ray", "engine.workers=2", "output=there", *words]
    with (tmp_path / "output").open("w") as output:
        there = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=output)
        try:
            until(lambda: rounds_of(tmp_path / "there") >= 1)
            actors = actors_of(str(tmp_path))
            assert len(actors) == 2
            os.kill(actors[0], signal.SIGKILL)
            played = rounds_of(tmp_path / "there")
            until(lambda: rounds_of(tmp_path / "there") >= played + 5)
            there.send_signal(signal.SIGINT)
            assert there.wait(60) != 0
        finally:
            there.kill()
            there.wait()
    assert "rounds; `fedme resume" in (tmp_path / "output").read_text()
    assert played + 5 <= rounds_of(tmp_path / "there") < 60
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env=environment, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    try:
        address = cluster.stdout.readline().strip()
        command = [*program, "resume", "there", f"engine.address={address}", "engine.workers=1"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    finally:
        cluster.communicate("end\n", timeout=60)
    assert done.returncode == 0, done.stderr
    same(here, tmp_path / "there")


def until(true):
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def rounds_of(folder: Path) -> int:
    with contextlib.suppress(RunError, ValueError):  # there is no run yet, or no round
        return 1 + max(row["round"] for row in records.read(folder))
    return 0


CLUSTER = """
import ray, sys
cluster = ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
print(cluster.address_info["gcs_address"], flush=True)
sys.stdin.readline()
"""


def test_what_all_processes_of_ray_get(monkeypatch, tmp_path):
    given = {}
    monkeypatch.setattr(ray_cluster.ray, "init", lambda **options: given.update(options))
    monkeypatch.setattr(ray_cluster.ray, "shutdown", lambda: None)
    monkeypatch.setenv("FEDME_DATA", str(tmp_path))
    monkeypatch.setenv("FEDME_AVX2", "1")
    for address in (None, "10.0.0.1:6379"):
        with ray_cluster.joined(address, 2):
            passed = given["runtime_env"]["env_vars"]
            assert passed["FEDME_DATA"] == str(tmp_path)
            assert passed["FEDME_AVX2"] == "1", "all compute with the same vectors"


def test_modules_of_ones_own_are_found(tmp_path, monkeypatch):
    """Those that the configuration names, and those that were loaded from beside them; nothing that is installed."""
    (tmp_path / "own_nets").mkdir()
    (tmp_path / "own_nets" / "__init__.py").write_text("import beside\nfrom torch import nn\nclass Net(nn.Linear): pass\n")
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "unused.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    config = {"method": {"name": "fedavg"}, "models": {"pool": ["own_nets:Net", "mlr"], "shared": "torch.nn:Linear"}}
    assert user_files(config) == [tmp_path / "beside.py", tmp_path / "own_nets"]
    assert user_files({"method": {"name": "fedavg"}, "models": {"pool": ["mlr"]}}) == []


def test_modules_of_a_folder_and_functions_deep_in_a_table_are_found(tmp_path, monkeypatch):
    """A folder of modules needs no `__init__.py`."""
    (tmp_path / "own_folder").mkdir()
    (tmp_path / "own_folder" / "deep_nets.py").write_text("from torch import nn\nclass Net(nn.Linear): pass\n")
    (tmp_path / "own_costs.py").write_text("def cost(candidate): return 0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("own_costs")
    models = {"shared": "own_folder.deep_nets:Net"}
    assert user_files({"method": {"name": "fedavg"}, "models": models}) == [tmp_path / "own_costs.py", tmp_path / "own_folder"]
    adopt = {"name": "fedme", "adopt_by": {"3": "own_costs:cost"}}
    assert list(source_digests({"method": adopt})) == ["own_costs"]


def test_a_cluster_that_is_not_there_is_noticed_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    start = time.monotonic()
    with (
        pytest.raises(EngineError, match=f"'127.0.0.1:{port}' cannot be joined: nothing answers there"),
        ray_cluster.joined(f"127.0.0.1:{port}", 1),
    ):
        pass
    assert time.monotonic() - start < 30
    with pytest.raises(ConfigError, match=r"engine\.address: must be host:port of a Ray cluster, or auto, got 'ray://h:1'"):
        load("digits-fedavg", ["engine=ray", "engine.address=ray://h:1"])


def test_a_cluster_that_cannot_be_joined_may_ask_for_a_token(monkeypatch):
    def refusing(**options):
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray_cluster.ray, "init", refusing)
    with pytest.raises(EngineError, match=r"Failed to connect to Ray cluster; if it asks for a token, set RAY_AUTH_MODE=token"):
        ray_cluster.join("auto")


def test_why_an_actor_cannot_be_made_is_the_last_line_of_its_error():
    """As Ray says it of a node that has an older FedMe."""
    first = "The actor died because of an error raised in its creation task, \x1b[36mray::OperationActor\x1b[39m"
    text = f"{first}\n  File x\nNo module named 'fedme.running.ray_run'"
    assert ray_actors.cause(exceptions.RayError(text)) == "No module named 'fedme.running.ray_run'"


def test_nodes_that_differ_are_refused(processes, tmp_path, monkeypatch):
    real = ray_actor.Identity.of.__func__

    def other(cls, splits):
        mine = real(cls, splits)
        return mine if processes.current is None else replace(mine, torch="1.0", samples="others")

    monkeypatch.setattr(ray_actor.Identity, "of", classmethod(other))
    with pytest.raises(EngineError, match="must have what this machine has: torch is 1.0, expected .*; other samples"):
        play(tmp_path / "there", "engine.name=ray", "engine.workers=2")


def test_a_node_without_the_data_says_so(processes, tmp_path, monkeypatch):
    def failing(config):
        raise DataError("/data/mnist: no such folder")

    monkeypatch.setattr(ray_run, "open_data", failing)
    with pytest.raises(EngineError, match="cannot prepare the experiment: .*DataError: /data/mnist: no such folder"):
        play(tmp_path / "there", "engine.name=ray", "engine.workers=2")


def test_a_process_that_fits_nowhere_is_an_error(processes, tmp_path, monkeypatch):
    """It would be waited for without end."""
    monkeypatch.setattr(ray_cluster, "places", lambda needs: 0)
    words = ["engine.name=ray", "engine.threads=2"]
    with pytest.raises(EngineError, match="no machine of the Ray cluster has 2 CPU, which a process needs"):
        play(tmp_path / "there", *words)
    with pytest.raises(EngineError, match="no machine"):
        play(tmp_path / "again", *words, "engine.address=10.0.0.1:6379")


def test_a_private_ray_has_the_processors_that_its_processes_need(processes, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(ray_cluster, "joined", lambda _, cpus, *__: asked.append(cpus) or contextlib.nullcontext())
    play(tmp_path / "there", "engine.name=ray", "engine.workers=2", "engine.threads=3", "rounds=1")
    assert asked == [6]


def test_a_cluster_without_room_is_noted_and_waited_for(processes, tmp_path, monkeypatch):
    """Nothing is ready when it is first asked for."""
    ready, answers, notes = processes.wait, iter(range(3)), []
    monkeypatch.setattr(ray_actors, "TOGETHER", -1.0)
    monkeypatch.setattr(processes, "wait", lambda r, **how: ([], r) if next(answers, None) is not None else ready(r, **how))
    splits = Splits({})
    opened = Opened({}, SimpleNamespace())
    expected = ray_actor.Identity.of(splits)
    actors = ray_actors.Actors(1, functools.partial(copy.copy, opened), {}, expected, lambda: None, notes.append)
    assert len(actors.alive) == 1
    assert notes == ["no process has started on the Ray cluster yet; the run begins when there is room for one"]


def test_a_run_stops_and_goes_on(processes, tmp_path, monkeypatch, executors):
    """Ctrl-C in the middle of a round saves what is finished, also what only the processes have."""
    words = ["method=fml", "models.shared=dnn-8", "checkpoint_every=3"]
    here = play(tmp_path / "here", *words)
    steps = Counter()
    begin = ray_executor.RayExecutor._send

    def stopping(self, *arguments):
        steps["sent"] += 1
        if steps["sent"] == 4:
            raise Interrupted("now")
        return begin(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(ray_executor.RayExecutor, "_send", stopping)
        with pytest.raises(Interrupted, match="stopped after 1 of 3 rounds"):
            play(tmp_path / "there", *words, "engine.name=ray", "engine.workers=2")
    assert run.resume(tmp_path / "there", Display(Console(quiet=True), quiet=True))
    same(here, tmp_path / "there")


def test_samples_of_a_program_stay_in_it(tmp_path):
    clients = [Client("a", train=(np.zeros((8, 2)), [0, 1] * 4)), Client("b", train=(np.ones((8, 2)), [0, 1] * 4))]
    with pytest.raises(ConfigError, match="engine.name: 'ray' needs data in files"):
        FedMe(rounds=1, engine={"name": "ray"}).fit(clients, output=tmp_path / "run")


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    commands = [
        line for block in re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) for line in block.splitlines()
    ]
    assert commands
    for line in commands:
        program, *words = shlex.split(line)
        assert program == "fedme"
        subprocess.run([sys.executable, "-m", "fedme", *words], cwd=tmp_path, check=True, capture_output=True, timeout=600)
