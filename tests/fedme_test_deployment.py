"""Real federations for tests: the command line's own processes on loopback."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from flwr.app import Error, Message
from rich.console import Console
from sklearn.datasets import load_digits

from fedme.core.key import Key
from fedme.core.method import Round
from fedme.core.model import Model
from fedme.deployment import provisioning, server_app, site_app
from fedme.deployment.operator_folder import Federation, Settings
from fedme.deployment.site_data import client_data, with_server_data
from fedme.deployment.site_settings import Site, agreed_task, with_members
from fedme.federation.in_process import InProcessEngine
from fedme.federation.round import run_round
from fedme.running.progress import Display
from fedme_test_grid import Grid, context

EXPERIMENT = """
rounds = 2
evaluate_every = 2
[method]
name = "fedme"
[data]
name = "sites"
shape = [1, 8, 8]
classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
scale = 0.0625
unlabeled_file = "unlabeled.npz"
[models]
pool = ["mlr", "dnn-16"]
shared = "dnn-8"
[train]
epochs = 1
momentum = 0.9
"""
PATIENCE = 600.0  # seconds: machines may be busy


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for(condition: Callable[[], Any], what: str, seconds: float = PATIENCE, pause: float = 0.2) -> Any:
    until = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < until, f"timed out waiting for {what}"
        time.sleep(pause)
    return result


class Deployment:
    """A federation in a folder, with some digits per site, and the processes that were started for it."""

    def __init__(self, folder: Path, sites: Sequence[str] = "abc", **settings: Any) -> None:
        self.prepare(folder)
        self.port, self.control = free_port(), free_port()
        asked = {"min_sites": len(sites)} | settings
        made = Settings(port=self.port, control_port=self.control, **asked)
        provisioning.write(self.federation, folder / "experiment.toml", list(sites), made)
        self.write_data(sites)

    def prepare(self, folder: Path) -> None:
        self.folder, self.federation = folder, folder / "federation"
        self.site_folders = self.federation / "sites"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "experiment.toml").write_text(EXPERIMENT)

    def write_data(self, sites: Sequence[str]) -> None:
        self.names = list(sites)
        digits = load_digits()
        images = digits.images.astype("uint8")[:, None]
        np.savez(self.federation / "unlabeled.npz", x=images[-40:])
        for i, name in enumerate(sites):
            rows = slice(60 * (i % 25), 60 * (i % 25 + 1))
            np.savez(self.site(name) / "data.npz", x=images[rows], y=digits.target[rows])
            self.change(self.site(name) / "site.toml", model=("mlr", "dnn-16")[i % 2])

    def hand_over(self) -> None:
        """Move the sites' folders out of the operator's, who keeps the public keys."""
        kept, self.site_folders = self.site_folders, self.folder / "sites"
        kept.rename(self.site_folders)
        for name in self.names:
            (kept / name).mkdir(parents=True)
            shutil.copy(self.site(name) / "key.pub", kept / name)

    def settings(self, **values: Any) -> None:
        self.change(self.federation / "federation.toml", **values)

    def site(self, name: str) -> Path:
        return self.site_folders / name

    def change(self, path: Path, **values: Any) -> None:
        path.write_text(tomli_w.dumps(tomllib.loads(path.read_text()) | values))

    def experiment(self) -> dict[str, Any]:
        return tomllib.loads((self.federation / "experiment.toml").read_text())

    def agree(self, **values: Any) -> None:
        """Change the experiment at the server and at every site."""
        for folder in [self.federation, *map(self.site, self.names)]:
            self.change(folder / "experiment.toml", **values)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "fedme", *words]

    def do(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(self.command(*words), cwd=self.folder, capture_output=True, text=True, timeout=2 * PATIENCE)
        assert done.returncode == code, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with self.output_of(name).open("ab") as output:
            self.processes[name] = subprocess.Popen(self.command(*words), cwd=self.folder, stdout=output, stderr=output)
        return self.processes[name]

    def output_of(self, name: str) -> Path:
        return self.folder / f"{name}.output"

    def server(self) -> None:
        self.start("server", "deploy", "server", "federation")

    def node(self, name: str) -> None:
        self.start(name, "deploy", "node", str(self.site(name) / "site.toml"))

    def connected(self, *names: str) -> None:
        """Wait until sites that were started say that the server has accepted them."""
        for name in names:
            wait_for(lambda name=name: f"{name}: connected to" in self.output_of(name).read_text(), f"site {name}")

    def submit(self, *words: str) -> subprocess.Popen[bytes]:
        return self.start("submit", "deploy", "submit", "--federation", "federation", *words)

    def stop(self, name: str, number: int = signal.SIGTERM) -> None:
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait(60)

    def log(self, run: str = "experiment") -> str:
        path = self.federation / "runs" / run / "server.log"
        return path.read_text() if path.exists() else ""

    def pids(self, program: str, place: str = "") -> list[int]:
        """The processes of this federation that run a program, at a site whose folder is `place`."""
        pids = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                around = command + (path.parent / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if program in command and f"{self.site_folders.parent}/{place}" in around:
                pids.append(int(path.parent.name))
        return pids

    def end(self) -> None:
        for name in reversed(list(self.processes)):
            if self.processes[name].poll() is None:
                self.stop(name)
        for pid in (
            self.pids("flwr-") + self.pids("flower-") + self.pids("flower_site_internals")
        ):  # left behind by kills in a test
            os.kill(pid, signal.SIGKILL)

    def expected(self) -> dict[str, Model]:
        """The personal models of a run in one process with the same sites."""
        sites = {name: Site.read(self.site(name) / "site.toml") for name in sorted(self.names)}
        experiment = next(iter(sites.values())).experiment
        torch.set_num_threads(experiment.settings.engine.threads)  # as the sites do: another number gives other last bits
        base, _ = agreed_task(experiment)
        base = with_server_data(base, self.federation, experiment)
        task = with_members(base, {name: site.member() for name, site in sites.items()})
        data = {name: client_data(site) for name, site in sites.items()}
        root, rounds = Key(experiment.settings.seed), experiment.settings.rounds
        engine = InProcessEngine(experiment.method, task, data, root)
        server = experiment.method.init_server(task, root.at("init"))
        for t in range(rounds):
            server = run_round(experiment.method, task, engine, server, t, rounds, root).server
        deliveries = {name: experiment.method.deliver(task, server, name) for name in sites}
        done = engine.evaluate_models(deliveries, Round(rounds - 1, rounds))
        return {name: evaluation.value.models["personal"] for name, evaluation in done.items()}


class LocalGrid(Grid):
    """A grid that calls the sites' client app directly; `misses(site, message_type, count)` selects messages with no reply."""

    def __init__(
        self, deployment: Deployment, misses: Callable[[str, str, int], bool] = lambda site, message_type, count: False
    ) -> None:
        self.deployment, self.misses = deployment, misses
        self.sites = dict(enumerate(sorted(path.parent.name for path in deployment.federation.glob("sites/*/site.toml")), 1))
        self.gone: set[str] = set()  # not connected
        self.asked: dict[tuple[str, str], int] = {}
        super().__init__(self.sites, self.reply)

    def get_node_ids(self) -> list[int]:
        return [node for node, name in self.sites.items() if name not in self.gone]

    def reply(self, message: Message) -> Message:
        node, message_type = message.metadata.dst_node_id, message.metadata.message_type
        name = self.sites[node]
        count = self.asked[name, message_type] = self.asked.get((name, message_type), -1) + 1
        if self.misses(name, message_type, count):
            return Message(Error(5, "Node Unavailable"), reply_to=message)
        return site_app.app(message, context(node, site=str(self.deployment.site(name) / "site.toml")))

    def run_server(self, folder: Path) -> str:
        """Run the server app for the run in `folder`, and return its log."""
        federation = Federation.read(self.deployment.federation)
        for node, name in self.sites.items():
            federation.registration(name).write_text(json.dumps({"node-id": str(node)}))
        before = len(self.deployment.log(folder.name))
        with (folder / "server.log").open("a") as log, Display(Console(file=log, width=200)) as display:
            server_app.run(federation, folder, self, display)
        return self.deployment.log(folder.name)[before:]
