"""What an operator does: keep the server running, register the sites' keys, submit runs, look, stop."""

import json
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedme.deploy.federation import Federation
from fedme.deploy.keeper import Keeper
from fedme.deploy.server import FAILED, LOG, NODES, TOKEN
from fedme.deploy.site import agreed
from fedme.experiment import records, sinks, summary
from fedme.experiment.config import ConfigError, load, to_toml
from fedme.experiment.files import RunError, locked, write_json, write_text
from fedme.experiment.run import environment

PID = "server.pid"
START = 300.0  # seconds for Flower to start a server app; machines may be busy
CONNECTION = "fedme"  # the name of the server in Flower's own configuration


def serve(federation: Federation, say: Callable[[str], None]) -> None:
    """Keep Flower's server running, and register the keys of all sites."""
    with locked(federation.server):
        write_text(federation.server / PID, f"{os.getpid()}\n")
        keeper = Keeper(federation.server / "log", federation.environment(), say)
        keeper.keep("superlink", federation.superlink)
        keeper.keep("superexec", federation.superexec)
        try:
            say(f"the server is at {federation.address}; its logs are in {federation.server / 'log'}")
            keeper.until_stopped(Registrar(federation, say))
        finally:
            (federation.server / PID).unlink(missing_ok=True)


class Registrar:
    """Registers every public key once, also of sites that are added while the server runs."""

    def __init__(self, federation: Federation, say: Callable[[str], None]) -> None:
        self.federation, self.say = federation, say
        path = federation.server / NODES
        self.nodes: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        self.next = 0.0

    def __call__(self) -> None:
        if self.federation.settings.insecure or time.monotonic() < self.next:
            return
        for name, key in self.federation.keys().items():
            if name not in self.nodes:
                self._register(name, key)
        self.next = time.monotonic() + 3

    def _register(self, name: str, key: Path) -> None:
        answer = flower(self.federation, "supernode", "register", str(key), CONNECTION)
        node = answer.get("node-id")
        if node is None:
            return  # not up yet, or registered before: then it is in the list
        self.nodes[name] = str(node)
        write_json(self.federation.server / NODES, self.nodes)
        self.say(f"registered {name}")


def flower(federation: Federation, *words: str) -> dict[str, Any]:
    """The answer of Flower's command line as plain data; {"error": ...} if there is none."""
    command = [*federation.flwr(*words), "--format", "json"]
    done = subprocess.run(command, env={**os.environ, **federation.environment()}, capture_output=True, text=True, check=False)
    found = re.search(r"\{.*\}", done.stdout, re.DOTALL)
    try:
        answer: dict[str, Any] = json.loads(found.group()) if found else {}
    except ValueError:
        answer = {}
    return answer or {"error": " ".join((done.stderr or done.stdout).split())[-300:]}


def new_run(federation: Federation, file: Path) -> Path:
    """A folder for a new run of this experiment."""
    experiment, _ = load(file)
    if experiment.data_name != "sites":
        raise ConfigError(f"{file}: data.name is '{experiment.data_name}'; a deployment needs 'sites'")
    sinks.require_packages(experiment.settings.log)
    agreed(experiment)  # every architecture of the catalogue can be built
    name, number = experiment.settings.name, 1
    while (federation.runs / name).exists():
        number += 1
        name = f"{experiment.settings.name}-{number}"
    folder = federation.runs / name
    folder.mkdir(parents=True)
    write_text(folder / summary.CONFIG, to_toml(experiment.plain() | {"output": str(folder)}))
    write_json(folder / "environment.json", environment())
    write_json(folder / TOKEN, {"run": secrets.token_hex(8)})
    return folder


def unfinished(federation: Federation) -> Path:
    """The newest run that is not done."""
    found = [path.parent for path in federation.runs.glob(f"*/{TOKEN}") if not (path.parent / summary.NAME).exists()]
    if not found:
        raise RunError(f"{federation.runs}: there is no unfinished run to go on with")
    return max(found, key=lambda folder: (folder / TOKEN).stat().st_mtime)


def submit(federation: Federation, folder: Path) -> str:
    """Let Flower start the server app for the run in `folder`; Flower's number of the run."""
    with locked(folder):  # nobody is at it
        (folder / FAILED).unlink(missing_ok=True)
    words = ["run", str(federation.server / "app"), CONNECTION, "--run-config", f'run="{folder.name}"']
    until = time.monotonic() + START
    while (number := (answer := flower(federation, *words)).get("run-id")) is None:
        reason = " ".join(str(answer.get("error-message") or answer.get("error")).split())
        if "unavailable" not in reason or time.monotonic() > until:  # a server that is still starting is waited for
            raise RunError(f"the server at {federation.address} did not take the run: {reason}")
        time.sleep(1)
    about = json.loads((folder / TOKEN).read_text())
    write_json(folder / TOKEN, about | {"flower": [*about.get("flower", []), str(number)]})
    return str(number)


def follow(folder: Path, say: Callable[[str], None]) -> None:
    """Repeat what the server app says, until the run is done."""
    log, said, began = folder / LOG, 0, time.monotonic()
    if log.exists():
        said = log.stat().st_size
    started = False
    while True:
        started = started or running(folder)
        done = (folder / summary.NAME).exists()
        gone = started and not running(folder)
        if log.exists():
            with log.open("rb") as file:
                file.seek(said)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            said += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                say(line)
        if done and not running(folder):
            return
        again = f"`fedme deploy submit --resume --federation {folder.parent.parent}` goes on"
        if (folder / FAILED).exists():
            raise RunError(f"the run failed: {(folder / FAILED).read_text().strip()}; {again}")
        if gone:
            raise RunError(f"the server app ended before the run was done; {again}")
        if not started and time.monotonic() - began > START:
            raise RunError(f"the server app did not start; is `fedme deploy server` running? {again}")
        time.sleep(1)


def running(folder: Path) -> bool:
    """Whether a server app is at work on this run."""
    try:
        with locked(folder):
            return False
    except RunError:
        return True


def status(federation: Federation) -> dict[str, Any]:
    """The server, the sites and the runs."""
    answer = flower(federation, "supernode", "list", CONNECTION)
    up = "error" not in answer
    path = federation.server / NODES
    names = {str(node): name for name, node in (json.loads(path.read_text()) if path.exists() else {}).items()}
    there = {str(node.get("node-id")): str(node.get("status")) for node in answer.get("nodes", [])}
    sites = {names.get(node, f"node {node}"): state for node, state in there.items()}
    sites = dict.fromkeys(federation.keys(), "not registered") | sites
    runs = {}
    for folder in sorted(path.parent for path in federation.runs.glob(f"*/{TOKEN}")):
        rounds = [row["round"] + 1 for row in records.read(folder)] if (folder / records.NAME).exists() else []
        word = "done" if (folder / summary.NAME).exists() else "running" if running(folder) else "stopped"
        runs[folder.name] = {
            "status": word,
            "rounds": max(rounds, default=0),
            "of": load(folder / summary.CONFIG)[0].settings.rounds,
        }
    return {"server": "up" if up else "down", "address": federation.address, "sites": sites, "runs": runs}


def stop(federation: Federation, only_run: bool) -> list[str]:
    """Stop what runs: the run, and the server unless only the run is meant. What was said."""
    said = []
    for path in federation.runs.glob(f"*/{TOKEN}"):
        if running(path.parent):
            for number in json.loads(path.read_text()).get("flower", [])[-1:]:
                flower(federation, "stop", number, CONNECTION)
                said.append(f"stopped {path.parent.name}; `fedme deploy submit --resume` goes on")
    pid = federation.server / PID
    if not only_run and pid.exists():
        os.kill(int(pid.read_text()), signal.SIGTERM)
        until = time.monotonic() + 30
        while pid.exists() and time.monotonic() < until:
            time.sleep(0.2)
        said.append("stopped the server")
    return said or ["nothing was running"]
