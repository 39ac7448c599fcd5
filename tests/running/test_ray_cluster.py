"""A Ray cluster of three machines: network namespaces are the machines, one of them is killed in the middle of a round.

The network and the method are in modules that only the driver has: the nodes see an empty folder in their place. On the machine
that will be killed, the network stops in a forward pass of a training and says so: an operation is in flight when it dies.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fedme.execution.ray import ENVIRONMENT
from fedme.results import records
from fedme_test_deployment import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.needs("ray", "flwr")]

PORT = 6399
NETWORK = '''"""A network that only the driver has. On one machine, it stops for ever in the middle of a training."""

import math
import os
import time
from pathlib import Path

import sizes
from torch import Tensor, nn

PLACES = Path("PLACES")  # a folder that all machines see
steps = 0  # of trainings in this process


def stop_here() -> None:
    """Wait to be killed if this is the machine, and enough steps were made for a round and a part of a training."""
    global steps
    steps += 1
    if steps == 700 and os.stat("/proc/self/ns/net").st_ino == int((PLACES / "machine").read_text()):
        (PLACES / "begun").write_text(str(os.getpid()))
        (PLACES / "begun").rename(PLACES / "stopped")
        time.sleep(1e6)


class Net(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(math.prod(shape), sizes.WIDTH), nn.Linear(sizes.WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            stop_here()
        return self.second(self.first(x.flatten(1)).tanh())
'''
METHOD = '''"""A method that only the driver has: FedAvg with another loss."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from fedme.core.operations import train
from fedme.core.method import Report
from fedme.methods.fedavg import FedAvg
from fedme.methods.shared_model import TrainedCopy


@dataclass(frozen=True)
class Smoothed:
    amount: float = 0.1

    def __call__(self, logits, y):
        settings = {"reduction": "none", "label_smoothing": self.amount}
        return {role: functional.cross_entropy(z, y, **settings) for role, z in logits.items()}


@dataclass(frozen=True)
class Smooth(FedAvg):
    """FedAvg with label smoothing."""

    def client_round(self, state, down, data, when, key):
        optimizer, schedule = self.train.local_optimizer(Smoothed(), when), self.train.batch_schedule(when)
        trained = yield from train({"global": down.model}, optimizer, data.train, schedule, key.at("train"))
        return state, TrainedCopy(trained.models["global"], len(data.train)), Report(trained.losses)
'''
CONFIG = """
rounds = 4
[method]
name = "own_method:Smooth"
[data]
name = "digits"
limit = 900
[partition]
name = "iid"
clients = 9
[models]
shared = "own_network:Net"
[train]
epochs = 40
momentum = 0.9
lr = 0.01
[engine]
path = "workers"  # each client by itself: a stack would run on one machine
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines():
    """The names of three namespaces that reach each other; the node in each is ended with all its processes."""
    tag = f"fedme{os.getpid()}"
    names = [f"{tag}-{number}" for number in range(1, 4)]
    hub = f"{tag}-hub"
    try:
        ip("netns", "add", hub)
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for number, name in enumerate(names, 1):
            ip("netns", "add", name)
            ip("link", "add", "net", "netns", name, "type", "veth", "peer", "name", f"port{number}", "netns", hub)
            ip("-n", hub, "link", "set", f"port{number}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.231.0.{number}/24", "dev", "net")
            ip("-n", name, "link", "set", "net", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"needs network namespaces, which this machine does not permit ({error})")
    yield names
    for name in (*names, hub):
        kill(name)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def kill(machine: str) -> list[int]:
    """End all processes of a machine at once, as a power cut does."""
    listed = subprocess.run(["ip", "netns", "pids", machine], check=False, capture_output=True, text=True).stdout.split()
    for pid in listed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    return [int(pid) for pid in listed]


def environment(**more: str) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST"))}
    return plain | ENVIRONMENT | {"RAY_worker_niceness": "0"} | more  # else nodes wait for everything on a busy machine


@pytest.fixture
def places(tmp_path, machines):
    """A folder that all machines see, which says on which of them the network stops."""
    folder = tmp_path / "places"
    folder.mkdir()
    (folder / "machine").write_text(str(Path("/run/netns", machines[2]).stat().st_ino))
    return folder


@pytest.fixture
def project(tmp_path, places):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "own_network.py").write_text(NETWORK.replace('PLACES")', f'{places}")'))
    (folder / "sizes.py").write_text("WIDTH = 24\n")
    (folder / "own_method.py").write_text(METHOD)
    (folder / "experiment.toml").write_text(CONFIG)
    return folder


@pytest.fixture
def nodes(machines, project, tmp_path):
    """A Ray node on every machine, which does not see the project. The names of the machines."""
    program, folders, started = Path(sys.executable).with_name("ray"), [], []
    source = str(Path(__file__).parents[2] / "src")
    for number, machine in enumerate(machines, 1):
        folders.append(tempfile.mkdtemp(prefix="r"))  # short, because socket paths must be
        own = f"10.231.0.{number}"
        role = ["--head", f"--port={PORT}", "--include-dashboard=false"] if number == 1 else [f"--address=10.231.0.1:{PORT}"]
        words = [program, "start", "--block", f"--node-ip-address={own}", "--num-cpus=1", "--object-store-memory=100000000"]
        words += [f"--temp-dir={folders[-1]}", *role]
        hidden = 'mount -t tmpfs none "$0" && cd / && exec "$@"'
        command = ["ip", "netns", "exec", machine, "sh", "-c", hidden, str(project), *map(str, words)]
        started.append(start(command, tmp_path / f"node{number}", environment(PYTHONPATH=source)))
    yield machines
    for machine, node in zip(machines, started, strict=True):
        kill(machine)
        node.wait(60)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def start(command: list[str], log: Path, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Start a node; Ray gives up after half a minute on a busy machine, and then it is tried again."""
    for _ in range(10):
        with log.open("w") as output:
            node = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        wait_for(lambda node=node: "Ray runtime started" in log.read_text() or node.poll() is not None, log.name, 600)
        if node.poll() is None:
            return node
    raise AssertionError(log.read_text())


def outcome(folder: Path) -> tuple[dict[str, bytes], list[dict[str, object]]]:
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("clients/*/*.safetensors"))}
    assert len(files) >= 18
    rows = [{key: value for key, value in row.items() if not key.endswith("seconds")} for row in records.read(folder)]
    return files, rows


def test_a_machine_is_killed_in_the_middle_of_a_round(nodes, project, places):
    command = [sys.executable, "-m", "fedme", "run", "experiment.toml"]
    words = ["engine=ray", f"engine.address=10.231.0.1:{PORT}", "output=there"]
    with (project / "output").open("w") as output:
        running = subprocess.Popen(
            ["ip", "netns", "exec", nodes[0], *command, *words], cwd=project, stdout=output, stderr=output, env=environment()
        )
    try:
        in_flight = places / "stopped"
        wait_for(lambda: in_flight.exists() or running.poll() is not None, "an operation on the third machine", 600)
        assert running.poll() is None, (project / "output").read_text()
        assert (project / "there" / "metrics.jsonl").stat().st_size  # the first round is over
        assert int(in_flight.read_text()) in kill(nodes[2])
        assert running.wait(600) == 0, (project / "output").read_text()
    finally:
        running.kill()
        running.wait()
    said = (project / "output").read_text()
    assert "a Ray process was lost" in said, said
    subprocess.run([*command, "output=here"], cwd=project, env=environment(), check=True, capture_output=True, timeout=600)
    assert outcome(project / "there") == outcome(project / "here")
