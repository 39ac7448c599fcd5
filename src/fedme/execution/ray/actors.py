"""The actors of a run as the driver sees them: which are there, what each of them has, and what replaces one that died."""

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import exceptions

from fedme.core.foreign_text import one_line
from fedme.execution.ray import EngineError
from fedme.execution.ray.actor import Identity, Opened, OperationActor
from fedme.execution.ray.messages import Failure, Number

# An actor or its node died, or what only it had is gone.
LOST = (
    exceptions.RayActorError,
    exceptions.ObjectLostError,
    exceptions.NodeDiedError,
    exceptions.WorkerCrashedError,
    exceptions.OutOfMemoryError,
)
POLL_INTERVAL = 0.2  # seconds between two calls of `poll` while the driver waits
TOGETHER = 60.0  # seconds that the first actors wait for the others
PATIENCE = 600.0  # seconds without any actor until the run fails
STARTS = 3  # failed starts in succession until the run fails


class Actor:
    """One actor, and the weights that it has, those used longest ago first."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.has: OrderedDict[Number, int] = OrderedDict()  # bytes by number
        self.bytes = 0
        self.forget: list[Number] = []  # to be said with the next message

    def add(self, number: Number, size: int) -> None:
        """Note that it has weights, and that they are used now."""
        if number in self.has:
            self.has.move_to_end(number)
        else:
            self.has[number] = size
            self.bytes += size

    def drop(self, number: Number) -> None:
        """Note that it may forget weights."""
        if number in self.has:
            self.bytes -= self.has.pop(number)
            self.forget.append(number)


class Actors:
    """Up to `count` actors. `options` are Ray's, `expected` is what every one of them must be equal to."""

    def __init__(
        self,
        count: int,
        open_data: Callable[[], Opened],
        options: dict[str, Any],
        expected: Identity,
        poll: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        self.alive: list[Actor] = []
        self.count, self.expected, self.poll, self.note = count, expected, poll, note
        self._class = ray.remote(**options)(OperationActor)
        self._open_data = ray.put(open_data)
        self._opening: dict[Any, Actor] = {}  # by the reference to the answer
        self._failed = 0
        for _ in range(count):
            self._start()
        begin, since = time.monotonic(), None
        while self._opening and (since is None or time.monotonic() - since < TOGETHER):
            self.admit(POLL_INTERVAL)
            since = since or (time.monotonic() if self.alive else None)
            if begin and since is None and time.monotonic() - begin > TOGETHER:
                note("no process has started on the Ray cluster yet; the run begins when there is room for one")
                begin = 0.0

    def admit(self, seconds: float = 0.0) -> None:
        """Take those into account that have opened the data in the meantime, after waiting for one at most so long."""
        self.poll()
        if not self._opening:
            return
        done, _ = ray.wait(list(self._opening), num_returns=1, timeout=seconds)
        for reference in done:
            actor = self._opening.pop(reference)
            try:
                answer = ray.get(reference)
            except exceptions.RayError as error:
                self._failed += 1
                if self._failed >= STARTS * self.count or not isinstance(error, LOST):
                    raise EngineError(
                        f"a process of the Ray cluster cannot start: {cause(error)}; every node needs FedMe "
                        f"{self.expected.fedme}, as this machine has it"
                    ) from error
                self._start()
                continue
            self._failed = 0
            if isinstance(answer, Failure):
                raise EngineError(f"a process of the Ray cluster cannot prepare the experiment: {answer.reason}")
            if difference := self.expected.difference(answer):
                raise EngineError(f"the nodes of the Ray cluster must have what this machine has: {difference}")
            self.alive.append(actor)

    def ready(self) -> Sequence[Actor]:
        """The actors that are there, after waiting for one if there is none."""
        self.admit()
        since = time.monotonic()
        while not self.alive:
            if time.monotonic() - since > PATIENCE:
                raise EngineError(f"all processes of the Ray cluster are lost, and none came back within {PATIENCE:.0f} s")
            self.admit(POLL_INTERVAL)
        return self.alive

    def lost(self, actor: Actor, error: Exception) -> None:
        """Go on without an actor, and ask for another one."""
        if actor in self.alive:
            self.alive.remove(actor)
            self.note(f"a Ray process was lost: {cause(error)}; others repeat its operations")
            self._end(actor)
            self._start()

    def close(self) -> None:
        """End all actors."""
        for actor in [*self.alive, *self._opening.values()]:
            self._end(actor)
        self.alive, self._opening = [], {}

    def _start(self) -> None:
        actor = Actor(self._class.remote(self._open_data))
        self._opening[actor.handle.open.remote()] = actor

    def _end(self, actor: Actor) -> None:
        with contextlib.suppress(exceptions.RayError, ValueError):
            ray.kill(actor.handle)


def cause(error: Exception) -> str:
    """Ray's error on one line, without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.strip().startswith("File ")]
    raised = isinstance(error, exceptions.RayTaskError) or "creation task" in str(error)
    last = lines[-1] if raised else " ".join(lines[:3])
    return one_line(last or type(error).__name__, 300)
