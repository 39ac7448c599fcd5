"""The operator's actions: submit runs, follow them, stop them, remove a site."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedme.config.experiment import Experiment
from fedme.core.atomic_files import RunError, locked
from fedme.deployment import attempts, submitted_runs
from fedme.deployment.bundle import write_app
from fedme.deployment.operator_folder import CONNECTION, NODES, Federation, program

START_TIMEOUT = 300.0  # seconds for Flower to start a server app; machines may be busy
STOP_TIMEOUT = 30.0  # seconds for a stopped run or server to end
ONLINE = "online"  # Flower's word for a connected node
NO_SERVER = "is `fedme deploy server` running?"


def remove(federation: Federation, name: str) -> str:
    """End a site's membership: its key is unregistered, and no run admits it any more. Returns what was done."""
    folder = federation.folder / "sites" / name
    registered = {path.stem for path in federation.server.glob(f"{NODES}/*.json")}
    if name not in {*federation.keys(), *registered}:  # compared as a name: it is never taken for a path
        raise RunError(f"{federation.folder}: no site is called '{name}'; there are {', '.join(federation.keys()) or 'none'}")
    nodes = {site: node for node, site in federation.nodes().items()}
    if name in nodes and not federation.settings.insecure:
        answer = flower(
            federation, [program("flwr"), "supernode", "unregister", str(nodes[name]), CONNECTION, "--format", "json"]
        )
        if not answer.get("success"):
            reason = " ".join(str(answer.get("error-message") or answer.get("error")).split())
            raise RunError(f"the key of {name} is still registered: {reason}; start the server and repeat the command")
    federation.registration(name).unlink(missing_ok=True)
    removed = folder / "key.pub"
    if removed.exists():
        removed.rename(folder / "key.pub.removed")  # the running server would register it again
    return f"removed {name}: its key is refused from now on; models and results that it contributed to remain"


def reachable(federation: Federation) -> bool:
    """Whether something listens where Flower's server should; Flower's commands take most of a minute to find out."""
    host, port = federation.control.split(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5):
            return True
    except OSError:
        return False


def flower(federation: Federation, command: Sequence[str]) -> dict[str, Any]:
    """Run one of Flower's commands and return its JSON answer; {"error": ...} if there is none."""
    if not reachable(federation):
        return {"error": f"unavailable: no server at {federation.control}"}
    done = subprocess.run(command, env={**os.environ, **federation.environment()}, capture_output=True, text=True, check=False)
    table = re.search(r"\{.*\}", done.stdout, re.DOTALL)
    try:
        answer: dict[str, Any] = json.loads(table.group()) if table else {}
    except ValueError:
        answer = {}
    return answer or {"error": " ".join((done.stderr or done.stdout).split())[-300:]}


def wait_for_server(federation: Federation, seconds: float, log: Callable[[str], None]) -> None:
    """Wait until Flower's server accepts connections."""
    deadline, said = time.monotonic() + seconds, False
    while not reachable(federation):
        if time.monotonic() > deadline:
            start = f"`fedme deploy server {federation.folder}`"
            raise RunError(f"no server at {federation.control} within {seconds:.0f} s; start it with {start}")
        if not said:
            log(f"waiting up to {seconds:.0f} s for the server; `fedme deploy server {federation.folder}` starts it")
            said = True
        time.sleep(0.5)


def submit(federation: Federation, what: Experiment | Path, wait: float, log: Callable[[str], None]) -> Path:
    """Start a run of an experiment, or continue the run in a folder; returns the run's folder.

    If a run of the same experiment is at work already, it is returned. Nothing is left behind if the server does not accept it.
    """
    wait_for_server(federation, wait, log)
    folder = what if isinstance(what, Path) else submitted_runs.same_experiment(federation, what)
    if folder is not None and submitted_runs.running(folder):
        log(f"{folder.name} is running already; following it")
    elif folder is not None and attempts.being_started(folder):
        log(f"{folder.name} is being started already; following it")
    elif folder is not None:
        start_attempt(federation, folder)
    elif isinstance(what, Experiment):
        folder = submitted_runs.create(federation, what)
        try:
            start_attempt(federation, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    assert folder is not None
    return folder


def start_attempt(federation: Federation, folder: Path, patience: float = START_TIMEOUT) -> None:
    """Let Flower start the server app for the run in `folder`; it continues from the last checkpoint.

    A server that is still starting is waited for, for `patience` seconds.
    """
    with attempts.starting(folder):
        with locked(folder):  # fails if a server app is at work
            pass
        if not patience and not reachable(federation):
            raise RunError(f"no server at {federation.control} yet")
        last = attempts.attempt(folder)
        if last is not None and not (runs_of_flower(federation) or {}).get(last.flower_run, "finished").startswith("finished"):
            flower(federation, [program("flwr"), "stop", last.flower_run, CONNECTION, "--format", "json"])
        write_app(federation.server / "app")  # that of the installed version: sites accept no other
        made = attempts.begin(folder, submitted_runs.rounds_done(folder))
        deadline = time.monotonic() + patience
        while "run-id" not in (answer := flower(federation, [*federation.run(folder.name), "--format", "json"])):
            reason = " ".join(str(answer.get("error-message") or answer.get("error")).split())
            if "unavailable" not in reason or time.monotonic() > deadline:  # otherwise the server is still starting
                raise RunError(f"the server at {federation.control} did not accept the run: {reason}")
            time.sleep(1)
        attempts.accept(folder, made, str(answer["run-id"]))


def resume_hint(folder: Path) -> str:
    """How to continue a run."""
    return f"`fedme deploy submit --resume --federation {folder.parent.parent}` continues it"


def follow(federation: Federation, folder: Path, log: Callable[[str], None]) -> None:
    """Repeat the server app's log until the run is done. The server continues a run that ends early."""
    path, idle_since = folder / submitted_runs.LOG, time.monotonic()
    offset = path.stat().st_size if path.exists() else 0
    last, said = attempts.attempt(folder), ""
    while True:
        running = submitted_runs.running(folder)
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                text = file.read()
            lines = text[: text.rfind(b"\n") + 1]  # the last line may be incomplete
            offset += len(lines)
            for line in lines.decode(errors="replace").splitlines():
                log(line)
        attempt, failure = attempts.attempt(folder), attempts.failure(folder)
        if failure is not None and failure.final:
            raise RunError(f"the run ended: {failure.reason}; {resume_hint(folder)}")
        ended = attempts.started(folder) and not running
        if ended and submitted_runs.done(folder) and failure is None:
            return
        supervised = submitted_runs.running(federation.server)
        if running or attempt != last:
            idle_since, last, said = time.monotonic(), attempt, ""
        elif (failure is not None or ended) and not said:
            said = failure.reason if failure is not None else "the server app ended before the run was done"
            log(f"{said}; " + ("the server continues the run" if supervised else NO_SERVER))
        if time.monotonic() - idle_since > START_TIMEOUT and not (supervised and said):
            raise RunError(f"the server app did not start within {START_TIMEOUT:.0f} s; {NO_SERVER}; {resume_hint(folder)}")
        time.sleep(1)


def runs_of_flower(federation: Federation) -> dict[str, str] | None:
    """The status of every run that Flower knows, by Flower's id; None if there is no answer."""
    answer = flower(federation, [program("flwr"), "list", CONNECTION, "--format", "json"])
    return {str(run["run-id"]): str(run["status"]) for run in answer["runs"]} if "runs" in answer else None


def sites_of_flower(federation: Federation) -> dict[str, dict[str, Any]] | None:
    """Whether every site that Flower knows is connected, and since when; None if there is no answer."""
    answer = flower(federation, [program("flwr"), "supernode", "list", CONNECTION, "--format", "json"])
    if "nodes" not in answer:
        return None
    names, sites = federation.nodes(), dict[str, dict[str, Any]]()
    for node in answer["nodes"]:
        since = node["online-at"] if node["status"] == ONLINE else node["offline-at"]
        name = names.get(int(node["node-id"]), f"node {node['node-id']}")
        sites[name] = {"status": str(node["status"]), "since": None if since in ("", "N/A") else str(since).replace(" ", "T")}
    return sites


def stop(federation: Federation, only_run: bool) -> list[str]:
    """Stop the run, and the server unless `only_run`. Returns a message per stopped program."""
    messages = []
    running = [folder for folder in submitted_runs.all_runs(federation) if _goes_on(folder)]
    for folder in running:
        attempts.record_failure(folder, "stopped by the operator", "stopped")
    for run, run_status in (runs_of_flower(federation) or {}).items():
        if not run_status.startswith("finished"):
            flower(federation, [program("flwr"), "stop", run, CONNECTION, "--format", "json"])
    for folder in running:
        stopped = f"stopped {folder.name}; {resume_hint(folder)}"
        messages.append(stopped if _wait_until_free(folder) else f"{folder.name} does not stop")
    if not only_run and submitted_runs.running(federation.server):
        os.kill(int((federation.server / ".lock").read_text()), signal.SIGTERM)
        messages.append("stopped the server" if _wait_until_free(federation.server) else "the server does not stop")
    return messages or ["nothing was running"]


def _goes_on(folder: Path) -> bool:
    """Whether a server app is at work on this run, or the server will start the next one."""
    failure = attempts.failure(folder)
    waiting = not submitted_runs.done(folder) and attempts.attempt(folder) is not None and not (failure and failure.final)
    return submitted_runs.running(folder) or waiting


def _wait_until_free(folder: Path) -> bool:
    """Wait until no process uses the folder; False after a timeout."""
    deadline = time.monotonic() + STOP_TIMEOUT
    while (running := submitted_runs.running(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not running
