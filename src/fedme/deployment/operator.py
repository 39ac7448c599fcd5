"""What an operator does: keep the server running, register the sites' keys, submit runs, look, stop."""

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
from fedme.deployment.supervisor import Keeper
from fedme.results import records, summary

START = 300.0  # seconds for Flower to start a server app; machines may be busy
END = 30.0  # seconds for something that was stopped to end


def serve(federation: Federation, say: Callable[[str], None]) -> None:
    """Keep Flower's server running, and register the keys of all sites."""
    with locked(federation.server):
        keeper = Keeper(federation.server / "log", federation.environment(), say)
        keeper.keep("superlink", federation.superlink)
        keeper.keep("superexec", federation.superexec)
        keeper.keep("gate", federation.gate)
        say(f"sites connect to {federation.address}; Flower's server is at {federation.control}, for this machine alone")
        say(f"the logs are in {federation.server / 'log'}; Ctrl-C stops")
        keeper.until_stopped(Registrar(federation, say))


class Registrar:
    """Registers every public key, also of sites that are added, or get another one, while the server runs."""

    def __init__(self, federation: Federation, say: Callable[[str], None]) -> None:
        self.federation, self.say = federation, say
        self.lost: set[str] = set()
        self.next = 0.0

    def __call__(self) -> None:
        if self.federation.settings.insecure or time.monotonic() < self.next:
            return
        known = set(self.federation.nodes().values())
        for name, key in self.federation.keys().items():
            path = self.federation.registered(name)
            old = name not in known or path.stat().st_mtime_ns < key.stat().st_mtime_ns
            if old and name not in self.lost:
                self._register(name, key, path)
        self.next = time.monotonic() + 3

    def _register(self, name: str, key: Path, path: Path) -> None:
        answer = flower(self.federation, self.federation.register(key))
        if "node-id" in answer:
            write_json(path, answer)
            self.say(f"registered {name}")
        elif "already in use" in str(answer) and path.exists():
            path.touch()  # the same key in a newer file
        elif "already in use" in str(answer):
            self.lost.add(name)
            self.say(f"Flower knows the key of {name}, but {path} is lost: give the site another key pair")


def flower(federation: Federation, command: Sequence[str]) -> dict[str, Any]:
    """The answer of Flower's command line as plain data; {"error": ...} if there is none."""
    done = subprocess.run(command, env={**os.environ, **federation.environment()}, capture_output=True, text=True, check=False)
    found = re.search(r"\{.*\}", done.stdout, re.DOTALL)
    try:
        answer: dict[str, Any] = json.loads(found.group()) if found else {}
    except ValueError:
        answer = {}
    return answer or {"error": " ".join((done.stderr or done.stdout).split())[-300:]}


def submit(federation: Federation, folder: Path) -> None:
    """Let Flower start the server app for the run in `folder`."""
    with locked(folder):  # nobody is at it
        (folder / submitted_runs.FAILED).unlink(missing_ok=True)
    until = time.monotonic() + START
    while "run-id" not in (answer := flower(federation, [*federation.run(folder.name), "--format", "json"])):
        reason = " ".join(str(answer.get("error-message") or answer.get("error")).split())
        if "unavailable" not in reason or time.monotonic() > until:  # a server that is still starting is waited for
            raise RunError(f"the server at {federation.control} did not take the run: {reason}; {again(folder)}")
        time.sleep(1)


def again(folder: Path) -> str:
    """How to go on."""
    return f"`fedme deploy submit --resume --federation {folder.parent.parent}` goes on"


def follow(folder: Path, say: Callable[[str], None]) -> None:
    """Repeat what the server app says, until the run is done."""
    log, began = folder / submitted_runs.LOG, time.monotonic()
    said = log.stat().st_size if log.exists() else 0
    started = False
    while True:
        at_work = submitted_runs.running(folder)
        if log.exists():
            with log.open("rb") as file:
                file.seek(said)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            said += len(whole)
            started = started or bool(whole)
            for line in whole.decode(errors="replace").splitlines():
                say(line)
        started = started or at_work
        if (folder / submitted_runs.FAILED).exists():
            raise RunError(f"the run ended: {(folder / submitted_runs.FAILED).read_text().strip()}; {again(folder)}")
        if started and not at_work:
            if submitted_runs.done(folder):
                return
            raise RunError(f"the server app ended before the run was done; {again(folder)}")
        if not started and time.monotonic() - began > START:
            raise RunError(f"the server app did not start; is `fedme deploy server` running? {again(folder)}")
        time.sleep(1)


def status(federation: Federation) -> dict[str, Any]:
    """The server, the sites and the runs."""
    answer = flower(federation, [program("flwr"), "supernode", "list", CONNECTION, "--format", "json"])
    names, known = federation.nodes(), answer.get("nodes", [])
    sites = dict.fromkeys(federation.keys(), "not registered")
    for node in known:
        sites[names.get(int(node["node-id"]), f"node {node['node-id']}")] = str(node["status"])
    found = {}
    for folder in submitted_runs.every(federation):
        rounds = [row["round"] + 1 for row in records.read(folder)] if (folder / records.NAME).exists() else []
        word = "running" if submitted_runs.running(folder) else "done" if submitted_runs.done(folder) else "stopped"
        about = {"status": word, "rounds": max(rounds, default=0), "of": load(folder / summary.CONFIG)[0].settings.rounds}
        found[folder.name] = about | {"without_model": submitted_runs.without_model(folder)}
    up = "nodes" in answer
    if not up:
        sites = dict.fromkeys(sites, "unknown: the server is down")
    return {"server": "up" if up else "down", "address": federation.address, "sites": sites, "runs": found}


def stop(federation: Federation, only_run: bool) -> list[str]:
    """Stop what runs: the run, and the server unless only the run is meant. What was said."""
    said = []
    at_work = [folder for folder in submitted_runs.every(federation) if submitted_runs.running(folder)]
    for folder in at_work:
        write_text(folder / submitted_runs.FAILED, "somebody stopped it\n")
    for run in flower(federation, [program("flwr"), "list", CONNECTION, "--format", "json"]).get("runs", []):
        if not str(run["status"]).startswith("finished"):
            flower(federation, [program("flwr"), "stop", str(run["run-id"]), CONNECTION, "--format", "json"])
    for folder in at_work:
        ended = _wait(lambda folder=folder: not submitted_runs.running(folder))  # type: ignore[misc]
        said.append(f"stopped {folder.name}; {again(folder)}" if ended else f"{folder.name} does not stop")
    if not only_run and submitted_runs.running(federation.server):
        os.kill(int((federation.server / ".lock").read_text()), signal.SIGTERM)
        said.append(
            "stopped the server" if _wait(lambda: not submitted_runs.running(federation.server)) else "the server does not stop"
        )
    return said or ["nothing was running"]


def _wait(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + END
    while not (met := condition()) and time.monotonic() < until:
        time.sleep(0.2)
    return met
