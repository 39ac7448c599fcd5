"""The operator's actions: run the server, register the sites' keys, submit runs, show their status, stop them."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedme.config.experiment import load
from fedme.core.atomic_files import RunError, locked, write_json, write_text
from fedme.deployment import submitted_runs
from fedme.deployment.operator_folder import CONNECTION, Federation, program
from fedme.deployment.supervisor import Supervisor
from fedme.results import records, summary

START_TIMEOUT = 300.0  # seconds for Flower to start a server app; machines may be busy
STOP_TIMEOUT = 30.0  # seconds for a stopped run or server to end
REGISTER_INTERVAL = 3.0  # seconds between two searches for new keys


def serve(federation: Federation, log: Callable[[str], None]) -> None:
    """Keep Flower's server running, and register the keys of all sites."""
    with locked(federation.server):
        supervisor = Supervisor(federation.server / "log", federation.environment(), log)
        for name, command in federation.programs().items():
            supervisor.start(name, command)
        log(f"sites connect to {federation.address}; Flower's server listens on {federation.control}, for this machine only")
        log(f"the logs are in {federation.server / 'log'}; Ctrl-C stops")
        supervisor.run_until_stopped(Registrar(federation, log))


class Registrar:
    """Registers every public key, including keys that are added or replaced while the server runs."""

    def __init__(self, federation: Federation, log: Callable[[str], None]) -> None:
        self.federation, self.log = federation, log
        self.unusable: set[str] = set()  # sites whose key Flower knows under a lost node id
        self.next_time = 0.0

    def __call__(self) -> None:
        if self.federation.settings.insecure or time.monotonic() < self.next_time:
            return
        registered = set(self.federation.nodes().values())
        for name, key in self.federation.keys().items():
            path = self.federation.registration(name)
            outdated = name not in registered or path.stat().st_mtime_ns < key.stat().st_mtime_ns
            if outdated and name not in self.unusable:
                self._register(name, key, path)
        self.next_time = time.monotonic() + REGISTER_INTERVAL

    def _register(self, name: str, key: Path, path: Path) -> None:
        answer = flower(self.federation, self.federation.register(key))
        if "node-id" in answer:
            write_json(path, answer)
            self.log(f"registered {name}")
        elif "already in use" in str(answer) and path.exists():
            path.touch()  # the same key in a newer file
        elif "already in use" in str(answer):
            self.unusable.add(name)
            self.log(f"the key of {name} is registered, but {path} is missing; give the site a new key pair")


def flower(federation: Federation, command: Sequence[str]) -> dict[str, Any]:
    """Run one of Flower's commands and return its JSON answer; {"error": ...} if there is none."""
    done = subprocess.run(command, env={**os.environ, **federation.environment()}, capture_output=True, text=True, check=False)
    table = re.search(r"\{.*\}", done.stdout, re.DOTALL)
    try:
        answer: dict[str, Any] = json.loads(table.group()) if table else {}
    except ValueError:
        answer = {}
    return answer or {"error": " ".join((done.stderr or done.stdout).split())[-300:]}


def submit(federation: Federation, folder: Path) -> None:
    """Let Flower start the server app for the run in `folder`."""
    with locked(folder):  # fails if a server app is at work
        (folder / submitted_runs.FAILED).unlink(missing_ok=True)
    deadline = time.monotonic() + START_TIMEOUT
    while "run-id" not in (answer := flower(federation, [*federation.run(folder.name), "--format", "json"])):
        reason = " ".join(str(answer.get("error-message") or answer.get("error")).split())
        if "unavailable" not in reason or time.monotonic() > deadline:  # otherwise the server is still starting
            raise RunError(f"the server at {federation.control} did not accept the run: {reason}; {resume_hint(folder)}")
        time.sleep(1)


def resume_hint(folder: Path) -> str:
    """How to continue a run."""
    return f"`fedme deploy submit --resume --federation {folder.parent.parent}` continues it"


def follow(folder: Path, log: Callable[[str], None]) -> None:
    """Repeat the server app's log until the run is done."""
    path, start = folder / submitted_runs.LOG, time.monotonic()
    offset = path.stat().st_size if path.exists() else 0
    started = False
    while True:
        running = submitted_runs.running(folder)
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                text = file.read()
            lines = text[: text.rfind(b"\n") + 1]  # the last line may be incomplete
            offset += len(lines)
            started = started or bool(lines)
            for line in lines.decode(errors="replace").splitlines():
                log(line)
        started = started or running
        if (folder / submitted_runs.FAILED).exists():
            raise RunError(f"the run ended: {(folder / submitted_runs.FAILED).read_text().strip()}; {resume_hint(folder)}")
        if started and not running:
            if submitted_runs.done(folder):
                return
            raise RunError(f"the server app ended before the run was done; {resume_hint(folder)}")
        if not started and time.monotonic() - start > START_TIMEOUT:
            raise RunError(f"the server app did not start; is `fedme deploy server` running? {resume_hint(folder)}")
        time.sleep(1)


def status(federation: Federation) -> dict[str, Any]:
    """The status of the server, the sites and the runs."""
    answer = flower(federation, [program("flwr"), "supernode", "list", CONNECTION, "--format", "json"])
    names = federation.nodes()
    sites = dict.fromkeys(federation.keys(), "not registered")
    for node in answer.get("nodes", []):
        sites[names.get(int(node["node-id"]), f"node {node['node-id']}")] = str(node["status"])
    runs = {}
    for folder in submitted_runs.all_runs(federation):
        rounds = [row["round"] + 1 for row in records.read(folder)] if (folder / records.NAME).exists() else []
        runs[folder.name] = {
            "status": "running" if submitted_runs.running(folder) else "done" if submitted_runs.done(folder) else "stopped",
            "rounds": max(rounds, default=0),
            "of": load(folder / summary.CONFIG)[0].settings.rounds,
            "without_model": submitted_runs.without_model(folder),
        }
    if "nodes" not in answer:
        sites = dict.fromkeys(sites, "unknown: the server is down")
    return {"server": "up" if "nodes" in answer else "down", "address": federation.address, "sites": sites, "runs": runs}


def stop(federation: Federation, only_run: bool) -> list[str]:
    """Stop the run, and the server unless `only_run`. Returns a message per stopped program."""
    messages = []
    running = [folder for folder in submitted_runs.all_runs(federation) if submitted_runs.running(folder)]
    for folder in running:
        write_text(folder / submitted_runs.FAILED, "stopped by the operator\n")
    for run in flower(federation, [program("flwr"), "list", CONNECTION, "--format", "json"]).get("runs", []):
        if not str(run["status"]).startswith("finished"):
            flower(federation, [program("flwr"), "stop", str(run["run-id"]), CONNECTION, "--format", "json"])
    for folder in running:
        stopped = f"stopped {folder.name}; {resume_hint(folder)}"
        messages.append(stopped if _wait_until_free(folder) else f"{folder.name} does not stop")
    if not only_run and submitted_runs.running(federation.server):
        os.kill(int((federation.server / ".lock").read_text()), signal.SIGTERM)
        messages.append("stopped the server" if _wait_until_free(federation.server) else "the server does not stop")
    return messages or ["nothing was running"]


def _wait_until_free(folder: Path) -> bool:
    """Wait until no process uses the folder; False after a timeout."""
    deadline = time.monotonic() + STOP_TIMEOUT
    while (running := submitted_runs.running(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not running
