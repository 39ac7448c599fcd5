"""Several experiments, each in its own run directory: finished runs are kept, interrupted runs are continued.

With several jobs, every worker process runs one experiment at a time. Only the parent handles Ctrl-C: it asks every worker
once to save and stop.
"""

import json
import multiprocessing as mp
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rich.console import Console

from fedme import networks
from fedme.config.experiment import ConfigError, parse, read_toml
from fedme.config.identity import changed_files, digest
from fedme.config.named_code import load_saved, named_code
from fedme.core.atomic_files import RunError, locked
from fedme.core.method import TaskError
from fedme.core.typed import TypedError
from fedme.datasets.data_errors import DataError, PartitionError
from fedme.execution.device import JOB
from fedme.federation.flower import EngineError
from fedme.results import run_directory, summary
from fedme.running import run
from fedme.running.progress import Display
from fedme.running.round_loop import Interrupted

USER_ERRORS = (ConfigError, RunError, TaskError, DataError, PartitionError, TypedError, networks.ArchError, EngineError)
# ^ shown in one line, without a traceback
POLL = 0.5  # seconds between checks for a request to stop


@dataclass(frozen=True)
class Planned:
    """An experiment as plain data, and its run directory."""

    name: str
    folder: Path
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The result of a planned experiment: finished, or the error."""

    planned: Planned
    error: str = ""


def do_nothing(folder: Path) -> None:
    """The default for `Batch.after`, which worker processes import by name."""


@dataclass
class Batch:
    """Runs experiments, `jobs` at a time; `after` is called with every finished directory, in the process that ran it."""

    display: Display
    jobs: int = 1
    after: Callable[[Path], None] = do_nothing

    def run(self, plans: Sequence[Planned]) -> list[Outcome]:
        """Run every experiment to its end, in the order given; one that fails does not stop the others."""
        todo = []
        for planned in plans:
            done, files = finished(planned), changed_sources(planned)
            if files or not done:
                todo.append(planned)
            if files:
                earlier = _set_aside(planned.folder)
                again = f"{', '.join(files)} changed since the last run, so it is run again; the earlier run is now {earlier}"
                self.display.note(f"note: {planned.name}: {again}", always=True)
        if len(todo) < len(plans):
            self.display.note(f"{len(plans) - len(todo)} of {len(plans)} runs are finished already")
        jobs = min(self.jobs, len(todo))
        outcomes = self._in_parallel(todo, jobs) if jobs > 1 else self._one_by_one(todo)
        by_folder = {outcome.planned.folder: outcome for outcome in outcomes}
        return [by_folder.get(planned.folder, Outcome(planned)) for planned in plans]

    def _one_by_one(self, todo: Sequence[Planned]) -> list[Outcome]:
        outcomes = []
        for number, planned in enumerate(todo, 1):
            self.display.note(f"{planned.name} ({number} of {len(todo)})")
            outcomes.append(Outcome(planned, attempt(planned, WithoutNotes(self.display), self.after)))
            if outcomes[-1].error:
                self.display.note(f"note: {planned.name}: {outcomes[-1].error}", always=True)
        return outcomes

    def _in_parallel(self, todo: Sequence[Planned], jobs: int) -> list[Outcome]:
        waiting, outcomes, workers = deque(todo), list[Outcome](), list[Worker]()
        self.display.start("runs", len(todo))
        try:
            with run.stopping() as stop:
                workers += [Worker(self.after, number) for number in range(jobs)]
                while waiting or any(worker.planned for worker in workers):
                    stop()
                    for worker in workers:
                        if worker.planned is None and waiting:
                            worker.start(waiting.popleft())
                    for connection in wait([worker.connection for worker in workers if worker.planned], POLL):
                        worker = next(worker for worker in workers if worker.connection is connection)
                        if (outcome := worker.receive()) is not None:
                            outcomes.append(outcome)
                            self._show(outcome)
                    self.display.info = ", ".join(f"{w.planned.name} {w.progress}" for w in workers if w.planned)
                    self.display.tick()
        except (Interrupted, KeyboardInterrupt):
            for worker in workers:
                worker.ask_to_stop()
            raise Interrupted(f"stopped after {len(outcomes)} of {len(todo)} runs; the same command continues") from None
        finally:
            for worker in workers:
                worker.close()
        return outcomes

    def _show(self, outcome: Outcome) -> None:
        self.display.advance()
        if outcome.error:
            self.display.note(f"note: {outcome.planned.name}: {outcome.error}", always=True)
        else:
            self.display.note(f"finished {outcome.planned.name}")


class WithoutNotes(Display):
    """The progress of one of several runs, without its notes; they are in its directory."""

    def __init__(self, display: Display) -> None:
        self.display = display

    def note(self, text: str, always: bool = False) -> None:
        """Not shown."""

    def start(self, label: str, total: int, done: int = 0, by_operation: bool = False) -> None:
        self.display.start(label, total, done, by_operation)

    def advance(self, info: str | None = None) -> None:
        self.display.advance(info)

    def tick(self) -> None:
        self.display.tick()


def finished(planned: Planned) -> bool:
    """Whether the run is finished. Another experiment in its directory is an error."""
    config = planned.folder / summary.CONFIG
    if not config.exists():
        return False
    run_directory.require_readable(planned.folder)
    if identity(load_saved(config, _same_code(planned)).plain()) != identity(planned.config):
        raise RunError(f"{planned.folder}: holds another experiment than {planned.name} is now; move it away or delete it")
    return (planned.folder / summary.NAME).exists()


def _same_code(planned: Planned) -> bool:
    """Whether the run in the directory names no other code than the planned run, which the user asked for."""
    return set(named_code(read_toml(planned.folder / summary.CONFIG))) <= set(named_code(planned.config))


def changed_sources(planned: Planned) -> list[str]:
    """The files of user-defined code that have changed since the run in the directory began."""
    return changed_files(run_directory.recorded_sources(planned.folder), planned.config)


def _set_aside(folder: Path) -> Path:
    """Rename a run directory, so that the experiment can be run again."""
    number = 1
    while (earlier := folder.with_name(f"{folder.name}.old{number}")).exists():
        number += 1
    with locked(folder):
        return folder.rename(earlier)


def identity(config: Mapping[str, Any]) -> str:
    """A fingerprint of all settings that can change results: not the directory, the name, the workers and the memory."""
    engine = {key: value for key, value in config["engine"].items() if key not in ("workers", "memory", "address")}
    return digest({**config, "engine": engine})


def attempt(planned: Planned, display: Display, after: Callable[[Path], None]) -> str:
    """Start or continue a run; returns the message of a user error."""
    try:
        if (planned.folder / summary.CONFIG).exists():
            run.resume(planned.folder, display, imports=_same_code(planned))
        else:
            run.start(parse({**planned.config, "output": str(planned.folder)}, planned.name), display)
        after(planned.folder)
    except USER_ERRORS as error:
        return str(error)
    return ""


class Worker:
    """A process that runs one experiment at a time."""

    def __init__(self, after: Callable[[Path], None], number: int) -> None:
        self.after, self.number = after, number
        self.planned: Planned | None = None
        self.progress = ""
        self._start_process()

    def _start_process(self) -> None:
        context = mp.get_context("spawn")  # torch's threads do not survive a fork
        self.connection, other_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(other_end, self.after, self.number))
        self.process.start()
        other_end.close()

    def start(self, planned: Planned) -> None:
        """Start an experiment."""
        self.planned, self.progress = planned, ""
        _send(self.connection, {"name": planned.name, "folder": str(planned.folder), "config": planned.config})

    def receive(self) -> Outcome | None:
        """Read one message: an outcome if the experiment has ended, or None. A process that died is replaced."""
        assert self.planned is not None
        try:
            message = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join()
            died = f"its process died (exit code {self.process.exitcode})"
            message = {"error": f"{died}; the same command continues from its last checkpoint"}
            self.connection.close()
            self._start_process()
        if "progress" in message:
            self.progress = message["progress"]
            return None
        planned, self.planned = self.planned, None
        return Outcome(planned, message["error"])

    def ask_to_stop(self) -> None:
        """Let the process save its state."""
        if self.planned is not None and self.process.is_alive():
            self.process.terminate()

    def close(self) -> None:
        """End the process: the closed connection makes it stop, and it saves first if it runs an experiment."""
        self.connection.close()
        self.process.join()


class RemoteDisplay(Display):
    """Progress that is sent to the parent."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(Console(stderr=True), quiet=True)
        self.connection = connection

    def note(self, text: str, always: bool = False) -> None:
        """Not sent: notes are in the run directory."""

    def advance(self, info: str | None = None) -> None:
        super().advance(info)
        try:
            _send(self.connection, {"progress": f"{self.done}/{self.total}"})
        except OSError:
            raise Interrupted("the parent process has closed the connection") from None


def _send(connection: Connection, message: Mapping[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _serve(connection: Connection, after: Callable[[Path], None], number: int) -> None:
    os.environ[JOB] = str(number)
    os.setpgid(0, 0)  # Ctrl-C reaches the parent only
    parent = os.getppid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        while os.getppid() == parent:
            if not connection.poll(1.0):
                continue
            task = json.loads(connection.recv_bytes())
            planned = Planned(task["name"], Path(task["folder"]), task["config"])
            _send(connection, {"error": attempt(planned, RemoteDisplay(connection), after)})
    except (EOFError, OSError, Interrupted, KeyboardInterrupt):
        return  # the parent has ended or asked to stop; every finished round is saved
