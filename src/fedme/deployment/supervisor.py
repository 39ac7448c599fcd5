"""Programs that are kept running: whatever ends is started again, until somebody says stop."""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

LOOK = 0.3  # seconds between two looks
LONGEST = 15.0  # seconds between two starts of a program that does not stay
MEANING = {  # of what Flower's programs say last
    "Failed to activate SuperNode": "the server does not know this site's key yet, or has not noticed yet that it was away",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not signed by the authority that this site trusts",
}


def shown(what: Mapping[str, str] | Sequence[str], into: Path | None = None) -> str:
    """An environment, or a command whose output goes `into` a file, as one would type it."""
    if isinstance(what, Mapping):
        return "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in what.items())
    return shlex.join(what) if into is None else f"{shlex.join(what)} > {shlex.quote(str(into))}"


class Keeper:
    """Keeps some programs running. Their output is in files; `say` hears about starts and ends."""

    def __init__(self, folder: Path, environment: Mapping[str, str], say: Callable[[str], None]) -> None:
        self.folder, self.environment, self.say = folder, {**os.environ, **environment}, say
        self.commands: dict[str, Callable[[], Sequence[str]]] = {}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.next: dict[str, tuple[float, float]] = {}  # when to start it again, and how long it waits the next time
        self.began: dict[str, int] = {}  # where in its log the last start is
        self.stopped = False

    def keep(self, name: str, command: Callable[[], Sequence[str]]) -> None:
        """Run this command from now on."""
        self.commands[name] = command
        self._start(name)

    def until_stopped(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Go on until a signal to end; then end the programs, the last one first."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        try:
            while not self.stopped:
                self._look()
                meanwhile()
                time.sleep(LOOK)
        finally:
            self.close()

    def close(self) -> None:
        """End the programs."""
        for process in reversed(self.running.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in self.running.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True

    def _start(self, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.began[name] = log.tell()
            # A session of its own: Ctrl-C reaches this process, which ends the others in order.
            self.running[name] = subprocess.Popen(
                self.commands[name](),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                start_new_session=True,
            )

    def _look(self) -> None:
        now = time.monotonic()
        for name, process in list(self.running.items()):
            code = process.poll()
            if code is None:
                continue
            at, wait = self.next.get(name, (0.0, 1.0))
            if at == 0.0:
                self.next[name] = (now + wait, min(2 * wait, LONGEST))
                why = f"signal {-code}" if code < 0 else self._last_words(name) or f"code {code}"
                self.say(f"{name} ended ({why}); starting it again in {wait:.0f} s")
            elif now >= at:
                self.next[name] = (0.0, wait)
                self._start(name)

    def said(self, name: str) -> str:
        """What a program has said since it was started."""
        with (self.folder / f"{name}.log").open("rb") as log:
            log.seek(self.began[name])
            return log.read().decode(errors="replace")

    def _last_words(self, name: str) -> str:
        """Why it ended, as its log says."""
        said = self.said(name)
        telling = [line.strip() for line in said.splitlines() if "rror" in line or "Exit Code" in line or "Failed" in line]
        last = telling[-1][:200] if telling else ""
        return next((meaning for words, meaning in MEANING.items() if words in said), last)
