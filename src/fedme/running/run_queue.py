"""Several experiments, each in a run directory of its own: what is finished is kept, what was begun goes on.

With several jobs the experiments are shared out among processes, one experiment at a time each. Ctrl-C is the parent's
business: it asks every process once to save and stop.
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
from fedme.config.experiment import ConfigError, load, parse
from fedme.config.identity import digest
from fedme.core.atomic_files import RunError
from fedme.core.method import TaskError
from fedme.core.typed import TypedError
from fedme.datasets.data_errors import DataError, PartitionError
from fedme.federation.flower import EngineError
from fedme.results import summary
from fedme.running import run
from fedme.running.progress import Display
from fedme.running.round_loop import Interrupted

USER_ERRORS = (ConfigError, RunError, TaskError, DataError, PartitionError, TypedError, networks.ArchError, EngineError)
# ^ what a user can mend: told in one line, without a traceback
POLL = 0.5  # seconds between looks at a request to stop


@dataclass(frozen=True)
class Planned:
    """An experiment as plain data, and where it is run."""

    name: str
    folder: Path
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What became of a planned experiment: finished, or why not."""

    planned: Planned
    error: str = ""


def nothing(folder: Path) -> None:
    """Nothing more to do with a finished run."""


@dataclass
class Batch:
    """Experiments to run, and how: `jobs` at a time, `after` is called with every finished directory, where it was run."""

    display: Display
    jobs: int = 1
    after: Callable[[Path], None] = nothing

    def run(self, plans: Sequence[Planned]) -> list[Outcome]:
        """Bring every experiment to its end, in the order given; one that cannot be run does not keep the others."""
        todo = [planned for planned in plans if not finished(planned)]
        if len(todo) < len(plans):
            self.display.note(f"{len(plans) - len(todo)} of {len(plans)} runs are there already")
        jobs = min(self.jobs, len(todo))
        found = {each.planned.folder: each for each in (self._shared_out(todo, jobs) if jobs > 1 else self._one_by_one(todo))}
        return [found.get(planned.folder, Outcome(planned)) for planned in plans]

    def _one_by_one(self, todo: Sequence[Planned]) -> list[Outcome]:
        outcomes = []
        for number, planned in enumerate(todo, 1):
            self.display.note(f"{planned.name} ({number} of {len(todo)})")
            quiet = Quiet(self.display)
            outcomes.append(Outcome(planned, attempt(planned, quiet, self.after)))
            if outcomes[-1].error:
                self.display.note(f"note: {planned.name}: {outcomes[-1].error}", always=True)
        return outcomes

    def _shared_out(self, todo: Sequence[Planned], jobs: int) -> list[Outcome]:
        waiting, outcomes, hands = deque(todo), list[Outcome](), list[Hand]()
        self.display.start("runs", len(todo))
        try:
            with run.stopping() as stop:
                hands += [Hand(self.after) for _ in range(jobs)]
                while waiting or any(hand.planned for hand in hands):
                    stop()
                    for hand in hands:
                        if hand.planned is None and waiting:
                            hand.give(waiting.popleft())
                    for each in wait([hand.line for hand in hands if hand.planned], POLL):
                        hand = next(hand for hand in hands if hand.line is each)
                        if (outcome := hand.hear()) is not None:
                            outcomes.append(outcome)
                            self._tell(outcome)
                    self.display.info = ", ".join(f"{hand.planned.name} {hand.at}" for hand in hands if hand.planned)
                    self.display.tick()
        except (Interrupted, KeyboardInterrupt):
            for hand in hands:
                hand.ask_to_stop()
            raise Interrupted(f"stopped after {len(outcomes)} of {len(todo)} runs; the same command goes on") from None
        finally:
            for hand in hands:
                hand.close()
        return outcomes

    def _tell(self, outcome: Outcome) -> None:
        self.display.advance()
        if outcome.error:
            self.display.note(f"note: {outcome.planned.name}: {outcome.error}", always=True)
        else:
            self.display.note(f"finished {outcome.planned.name}")


class Quiet(Display):
    """The progress of one run of several: its rounds are shown, its notes are not; they are in its directory."""

    def __init__(self, display: Display) -> None:
        self.display = display

    def note(self, text: str, always: bool = False) -> None:
        """Nothing."""

    def start(self, label: str, total: int, done: int = 0, by_operation: bool = False) -> None:
        self.display.start(label, total, done, by_operation)

    def advance(self, info: str | None = None) -> None:
        self.display.advance(info)

    def tick(self) -> None:
        self.display.tick()


def finished(planned: Planned) -> bool:
    """Whether the run is there and whole. Another experiment in its place is an error."""
    there = planned.folder / summary.CONFIG
    if not there.exists():
        return False
    if identity(load(there)[0].plain()) != identity(planned.config):
        raise RunError(f"{planned.folder}: holds another experiment than {planned.name} is now; move it away or delete it")
    return (planned.folder / summary.NAME).exists()


def identity(config: Mapping[str, Any]) -> str:
    """A fingerprint of everything that can change results: not where, under which name, with how many workers and memory."""
    engine = {key: value for key, value in config["engine"].items() if key not in ("workers", "memory", "address")}
    return digest({**config, "engine": engine})


def attempt(planned: Planned, display: Display, after: Callable[[Path], None]) -> str:
    """Start or continue a run; what went wrong, if a user can mend it."""
    try:
        if (planned.folder / summary.CONFIG).exists():
            run.resume(planned.folder, display)
        else:
            run.start(parse({**planned.config, "output": str(planned.folder)}, planned.name), display)
        after(planned.folder)
    except USER_ERRORS as error:
        return str(error)
    return ""


class Hand:
    """A process that runs one experiment at a time, and the line to it."""

    def __init__(self, after: Callable[[Path], None]) -> None:
        self.after = after
        self.planned: Planned | None = None
        self.at = ""
        self._begin()

    def _begin(self) -> None:
        context = mp.get_context("spawn")  # torch's threads do not survive a fork
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.after))
        self.process.start()
        theirs.close()

    def give(self, planned: Planned) -> None:
        """Have an experiment run."""
        self.planned, self.at = planned, ""
        self.line.send_bytes(_encoded({"name": planned.name, "folder": str(planned.folder), "config": planned.config}))

    def hear(self) -> Outcome | None:
        """Take one message; an outcome if the experiment has come to an end. A process that died is replaced."""
        assert self.planned is not None
        try:
            said = json.loads(self.line.recv_bytes())
        except (EOFError, OSError):
            self.process.join()
            said = {"error": f"its process died ({self.process.exitcode}); the same command goes on from its last checkpoint"}
            self.line.close()
            self._begin()
        if "at" in said:
            self.at = said["at"]
            return None
        planned, self.planned = self.planned, None
        return Outcome(planned, said["error"])

    def ask_to_stop(self) -> None:
        """Let the process save what it has."""
        if self.planned is not None and self.process.is_alive():
            self.process.terminate()

    def close(self) -> None:
        """End the process: it sees that nobody listens any more, and saves first if it is at work."""
        self.line.close()
        self.process.join()


class Telling(Display):
    """Progress that is sent to the parent."""

    def __init__(self, line: Connection) -> None:
        super().__init__(Console(stderr=True), quiet=True)
        self.line = line

    def note(self, text: str, always: bool = False) -> None:
        """Nothing: notes are in the run's directory."""

    def advance(self, info: str | None = None) -> None:
        super().advance(info)
        try:
            self.line.send_bytes(_encoded({"at": f"{self.done}/{self.total}"}))
        except OSError:
            raise Interrupted("nobody listens any more") from None


def _encoded(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode()


def _serve(line: Connection, after: Callable[[Path], None]) -> None:
    os.setpgid(0, 0)  # Ctrl-C reaches the parent only
    parent = os.getppid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        while os.getppid() == parent:
            if not line.poll(1.0):
                continue
            task = json.loads(line.recv_bytes())
            planned = Planned(task["name"], Path(task["folder"]), task["config"])
            line.send_bytes(_encoded({"error": attempt(planned, Telling(line), after)}))
    except (EOFError, OSError, Interrupted, KeyboardInterrupt):
        return  # the parent is gone, or asked to stop: everything finished is saved
