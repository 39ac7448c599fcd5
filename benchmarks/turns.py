"""Sides that play their rounds in turns: each is a process that plays a round when it is told to.

A machine that changes its speed then favours neither side. Sides that wait do not compute.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import protocol
import sides


def serve(play: Callable[[], None], answer: Callable[[], dict[str, Any]]) -> None:
    """Obey the commands on standard input: "round" plays a round and tells its seconds, "answer" tells how it went."""
    _tell({"ready": True})
    for line in sys.stdin:
        if line.strip() == "round":
            began = time.perf_counter()
            play()
            _tell({"seconds": time.perf_counter() - began})
        else:
            _tell(answer())


def _tell(said: Mapping[str, Any]) -> None:
    print(protocol.MARK + json.dumps(said), flush=True)


@contextlib.contextmanager
def started(script: str, job: Mapping[str, Any], timeout: float = 600) -> Iterator["Side"]:
    """A side in a process of its own, which is ended with whatever it started."""
    command = [sys.executable, str(sides.HERE / script), json.dumps(job)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | sides.ENVIRONMENT,
            start_new_session=True,
        )
        side = Side(script, process, errors, timeout)
        try:
            yield side
        finally:
            side.end()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # type: ignore[union-attr]


@dataclass
class Side:
    """A process that plays a round when it is told to; `timeout` is in seconds, for every round."""

    script: str
    process: subprocess.Popen[str]
    errors: IO[str]
    timeout: float

    def ready(self) -> None:
        """Wait until the side has read its data."""
        self._heard()

    def round(self) -> float:
        """Let the side play one round; its seconds."""
        return float(self._asked("round")["seconds"])

    def answer(self) -> dict[str, Any]:
        """How it went so far."""
        return self._asked("answer")

    def end(self) -> None:
        """End the processes of the side."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def _asked(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            print(command, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise sides.Failed(self._why()) from None
        return self._heard()

    def _heard(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        watchdog = threading.Timer(self.timeout, self.end)
        watchdog.start()
        try:
            for line in self.process.stdout:
                if (said := protocol.heard(line)) is not None:
                    return said
        finally:
            watchdog.cancel()
        raise sides.Failed(self._why())

    def _why(self) -> str:
        code = self.process.wait()
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()] or ["no message"]
        return f"{self.script} ended with code {code}: {lines[-1][:300]}"


def play(players: Mapping[str, Side], warm: int, rounds: int) -> dict[str, list[float]]:
    """The seconds of `rounds` rounds of every side, after `warm` rounds that do not count. Who begins changes every turn."""
    seconds: dict[str, list[float]] = {name: [] for name in players}
    for turn in range(warm + rounds):
        order = list(players) if turn % 2 else list(reversed(players))
        for name in order:
            spent = players[name].round()
            if turn >= warm:
                seconds[name].append(spent)
    return seconds
