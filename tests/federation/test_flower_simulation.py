"""Runs on Flower's simulation runtime are bit-identical to runs in one process, and can be stopped and resumed."""

import contextlib
import ipaddress
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedme import Client, FedMe
from fedme.config.experiment import ConfigError, load
from fedme.core.method import TaskError
from fedme.federation.flower import ENVIRONMENT
from fedme.federation.flower.requests import error_text
from fedme.methods import METHODS
from fedme.results import records
from fedme.running import run
from fedme.running.progress import Display
from fedme_test_deployment import free_port, wait_for
from fedme_test_grid import Grid, context

CONFIG = """
rounds = 3
evaluate_every = 2
[method]
name = "fedme"
[data]
name = "digits"
limit = 200
unlabeled = 40
[partition]
name = "dirichlet"
clients = 4
alpha_label = 1.0
[models]
pool = ["mlr", "dnn-16"]
[train]
epochs = 1
momentum = 0.9
[finetune]
epochs = 1
[engine]
path = "reference"
"""
REAL = {
    "fedme": ["method.clusters=2"],
    "fml": ["method=fml", "models.shared=dnn-8", "faults.dropped_in={1 = [0]}", "faults.lost_in={2 = [1]}"],
    "fedavg": ["method=fedavg", "models.shared=dnn-8", "train.cohort=3"],
    "private": ["method=fml", "models.shared=dnn-8", "privacy.epsilon=5"],
}


STARTED: list[subprocess.Popen[bytes]] = []


def fedme(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    with (folder / "output").open("w") as output:
        STARTED.append(subprocess.Popen([sys.executable, "-m", "fedme", *words], cwd=folder, stdout=output, stderr=output))
    return STARTED[-1]


@pytest.fixture(autouse=True)
def no_process_outlives_its_test():
    """A test that fails must not leave a run behind, which would slow down and fail later tests."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.terminate()  # nothing, if it has ended
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def weights(folder: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("clients/*/*.safetensors"))}
    assert (
        len(files) >= 12
    )  # of four clients: before and after fine-tuning, and their outputs; a server's model that was chosen
    return files


def numbers(folder: Path) -> list[dict[str, object]]:
    return [{key: value for key, value in row.items() if not key.endswith("seconds")} for row in records.read(folder)]


SLOW = [pytest.param(name, marks=pytest.mark.deploy) for name in ("fedavg", "private")]


@pytest.mark.parametrize("method", ["fedme", "fml", *SLOW])
def test_the_same_models_as_in_one_process(method, tmp_path):
    (tmp_path / "experiment.toml").write_text(CONFIG)
    there = fedme(tmp_path, "run", "experiment.toml", "engine=flower", "engine.workers=2", "output=there", *REAL[method])
    experiment, _ = load(tmp_path / "experiment.toml", [f"output={tmp_path / 'here'}", *REAL[method]])
    run.start(experiment, Display(Console(quiet=True), quiet=True))
    assert there.wait(180) == 0, (tmp_path / "output").read_text()
    assert weights(tmp_path / "there") == weights(tmp_path / "here")
    assert numbers(tmp_path / "there") == numbers(tmp_path / "here")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_models_of_one_process(method, tmp_path, monkeypatch):
    """Messages are serialised as with Ray, but without its processes, which are slow to start."""

    def immediately(server, client, nodes, backend_config):
        server(Grid(range(nodes), lambda message: client(message, context())), context())

    monkeypatch.setattr("flwr.simulation.run_simulation", immediately)
    monkeypatch.setattr("fedme.federation.flower.simulation.joined", lambda *_: contextlib.nullcontext())
    (tmp_path / "experiment.toml").write_text(CONFIG)
    words = ["method.name=" + method, "models.shared=dnn-8", "data.public=20"]
    words += ["method.public_epochs=1"] if method == "fedmd" else []
    words += ["models.pool=['dnn-8','dnn-16-8']"] if method in ("lg-fedavg", "fedproto") else []
    words += ["models.pool=['dnn-8','dnn-16']"] if method == "heterofl" else []
    for place, engine in (("here", []), ("there", ["engine=flower"])):
        experiment, _ = load(tmp_path / "experiment.toml", [f"output={tmp_path / place}", *words, *engine])
        run.start(experiment, Display(Console(quiet=True), quiet=True))
    assert weights(tmp_path / "there") == weights(tmp_path / "here")
    assert numbers(tmp_path / "there") == numbers(tmp_path / "here")


@pytest.mark.deploy
def test_a_run_that_was_interrupted_goes_on(tmp_path):
    (tmp_path / "experiment.toml").write_text(CONFIG)
    words = ["experiment.toml", "method=fml", "models.shared=dnn-8", "rounds=60"]
    first = fedme(tmp_path, "run", *words, "engine=flower", "output=there")
    until = time.monotonic() + 120
    while not any(path.stat().st_size for path in tmp_path.glob("there/metrics.jsonl")) and time.monotonic() < until:
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGINT)
    assert first.wait(60) == 130
    assert "`fedme resume there` continues" in (tmp_path / "output").read_text()
    written = (tmp_path / "there" / "metrics.jsonl").stat().st_size
    second = fedme(tmp_path, "resume", "there")
    while (tmp_path / "there" / "metrics.jsonl").stat().st_size <= written and time.monotonic() < until + 120:
        time.sleep(0.1)
    os.kill(second.pid, signal.SIGKILL)
    assert second.wait(60) == -signal.SIGKILL
    assert not (tmp_path / "there" / "summary.json").exists()
    assert fedme(tmp_path, "resume", "there").wait(180) == 0
    experiment, _ = load(tmp_path / words[0], [f"output={tmp_path / 'here'}", *words[1:]])
    run.start(experiment, Display(Console(quiet=True), quiet=True))
    assert weights(tmp_path / "there") == weights(tmp_path / "here")
    assert numbers(tmp_path / "there") == numbers(tmp_path / "here")


@pytest.mark.deploy
def test_on_a_cluster_that_is_there_already(tmp_path):
    port, program = free_port(), Path(sys.executable).with_name("ray")
    words = ["start", "--head", "--block", f"--port={port}", "--num-cpus=2", "--include-dashboard=false"]
    # Its own folder, so that other runs on this machine do not find the cluster; short, because socket paths must be.
    place = tempfile.mkdtemp(prefix="ray")
    words += [f"--temp-dir={place}"]
    with (tmp_path / "ray").open("w") as output:
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
        head = subprocess.Popen([program, *words], stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        wait_for(lambda: "Ray runtime started" in (tmp_path / "ray").read_text(), "Ray", 120)
        (tmp_path / "experiment.toml").write_text(CONFIG)
        method = ["method=pfml", "models.shared=dnn-8"]
        there = ["engine=flower", f"engine.address=127.0.0.1:{port}", "output=there"]
        assert fedme(tmp_path, "run", "experiment.toml", *there, *method).wait(240) == 0, (tmp_path / "output").read_text()
        assert head.poll() is None  # the run must not end the cluster
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(60)
        shutil.rmtree(place, ignore_errors=True)
    experiment, _ = load(tmp_path / "experiment.toml", [f"output={tmp_path / 'here'}", *method])
    run.start(experiment, Display(Console(quiet=True), quiet=True))
    assert weights(tmp_path / "there") == weights(tmp_path / "here")
    assert numbers(tmp_path / "there") == numbers(tmp_path / "here")


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="needs a virtual environment")
def test_an_interpreter_whose_path_has_a_space(tmp_path, monkeypatch):
    (tmp_path / "experiment.toml").write_text(CONFIG)
    (tmp_path / "an environment").symlink_to(sys.prefix)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "an environment" / "bin" / "python"))
    done = fedme(tmp_path, "run", "experiment.toml", "engine=flower", "engine.workers=2", "output=there", "rounds=1")
    assert done.wait(180) == 0, (tmp_path / "output").read_text()


def test_a_client_that_fails_stops_the_run_by_name(tmp_path):
    (tmp_path / "experiment.toml").write_text(CONFIG)
    failed = fedme(tmp_path, "run", "experiment.toml", "engine=flower", "data.val=0")
    assert failed.wait(120) == 2
    text = (tmp_path / "output").read_text()
    assert "error: client 0, round 0: client 0 has no validation data" in text
    assert "Traceback" not in text


def test_samples_of_a_program_stay_in_it(tmp_path):
    clients = [Client("a", train=(np.zeros((8, 2)), [0, 1] * 4)), Client("b", train=(np.ones((8, 2)), [0, 1] * 4))]
    with pytest.raises(ConfigError, match="engine.name: 'flower' needs data in files"):
        FedMe(rounds=1, engine={"name": "flower"}).fit(clients, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_address_is_for_ray(tmp_path):
    with pytest.raises(ConfigError, match="engine.address: is for Ray clusters"):
        load("digits-fedme", ["engine.address=auto"])
    assert load("digits-fedme", ["engine=flower", "engine.address=auto"])[0].settings.engine.address == "auto"


def test_what_flower_says_in_one_line():
    error = TaskError("no data: set `val`\nin [data]")
    assert error_text(2, f"{type(error)}:<'{error}'>") == "TaskError: no data: set `val` in [data]"
    wrapped = "<class 'flwr.ClientAppException'>:<'\nException ClientAppException occurred. Message: no data'>"
    assert error_text(2, wrapped) == "no data"
    assert error_text(5, "Node Unavailable") == "Node Unavailable"
    assert error_text(7, None) == "error 7"


def listening(pids):
    """The addresses on which these processes listen, from the kernel."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(os.readlink(link))
            except OSError:
                continue
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, state, inode = line.split()[1], line.split()[3], line.split()[9]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                raw = bytes.fromhex(local.split(":")[0])
                words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                address = ipaddress.ip_address(b"".join(words))
                found.append(getattr(address, "ipv4_mapped", None) or address)
    return found


def descendants(pid):
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, _, rest = status.read_text().partition(" (")
        except OSError:
            continue
        parents[int(number)] = int(rest.rpartition(") ")[2].split()[1])
    family, size = {pid}, 0
    while len(family) > size:
        size = len(family)
        family |= {child for child, parent in parents.items() if parent in family}
    return family


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["flower", "ray"])
def test_ray_listens_on_loopback_and_asks_for_a_secret(engine, tmp_path):
    """Without that, whoever reaches this machine can run code in the processes of a simulation."""
    (tmp_path / "experiment.toml").write_text(CONFIG)
    words = ["experiment.toml", "method=fml", "models.shared=dnn-8", "rounds=2000", f"engine={engine}", "output=there"]
    running = fedme(tmp_path, "run", *words)
    try:
        wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob("there/metrics.jsonl")), "a round", 180)
        family = descendants(running.pid)
        programs = {Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].rpartition(b"/")[2]: pid for pid in family}
        assert b"gcs_server" in programs
        assert b"raylet" in programs
        addresses = listening(family)
        assert len(addresses) > 2
        assert all(address.is_loopback for address in addresses), addresses
        environment = Path(f"/proc/{programs[b'gcs_server']}/environ").read_bytes().split(b"\0")
        settings = dict(entry.partition(b"=")[::2] for entry in environment if b"=" in entry)
        assert settings[b"RAY_AUTH_MODE"] == b"token"
        assert len(settings[b"RAY_AUTH_TOKEN"]) == 64
    finally:
        os.kill(running.pid, signal.SIGINT)
        running.wait(60)
    log = (tmp_path / "output").read_text() + "".join(path.read_text() for path in tmp_path.glob("there/*.log"))
    assert settings[b"RAY_AUTH_TOKEN"].decode() not in log
