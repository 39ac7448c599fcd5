"""Keep programs running: restart any that ends, until the supervisor itself is stopped."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

LAUNCHER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("ends_with_parent.py")))
POLL_INTERVAL = 0.3  # seconds
MAX_DELAY = 15.0  # seconds between two starts of a program that keeps ending
EXPLANATIONS = {  # of the last messages of Flower's programs
    "Failed to activate SuperNode": "the server does not know this site's key, or has another node with it: "
    "a copy of this folder, or for a minute the one before a crash",
    "certificate has expired": "the server's certificate or the authority's, which this site trusts, has expired; "
    "the operator runs `fedme deploy renew` and sends ca.crt",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not signed by the authority that this site trusts",
}


def shell_line(words: Mapping[str, str] | Sequence[str], output: Path | None = None) -> str:
    """An environment, or a command whose output goes to a file, as a line for a shell."""
    if isinstance(words, Mapping):
        return "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in words.items())
    return shlex.join(words) if output is None else f"{shlex.join(words)} > {shlex.quote(str(output))}"


class Supervisor:
    """Keeps programs running. Their output goes to files in `folder`; `log` receives a line when one ends.

    `explain` may know a reason that the program does not; it returns an empty text if not.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        log: Callable[[str], None],
        explain: Callable[[], str] = lambda: "",
    ) -> None:
        self.folder, self.environment, self.log, self.explain = folder, {**os.environ, **environment}, log, explain
        self.commands: dict[str, Callable[[], Sequence[str]]] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.restarts: dict[str, tuple[float, float]] = {}  # the time of the pending restart (0: none), and the next delay
        self.log_start: dict[str, int] = {}  # where in its log file the output of the last start begins
        self.asked_to_end: dict[str, str] = {}  # programs that `restart` has asked, and why
        self.stopped = False

    def start(self, name: str, command: Callable[[], Sequence[str]]) -> None:
        """Start a program and keep it running; `command` is called at every start."""
        self.commands[name] = command
        self._start(name)

    def run_until_stopped(self, on_poll: Callable[[], None] = lambda: None) -> None:
        """Watch the programs until SIGINT or SIGTERM arrives, then end them."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(self, "stopped", True))
        try:
            while not self.stopped:
                self._restart_ended()
                on_poll()
                time.sleep(POLL_INTERVAL)
        finally:
            self.close()

    def close(self) -> None:
        """End the programs, the last one first."""
        for process in reversed(self.processes.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def restart(self, name: str, why: str) -> None:
        """End a program; it is started again like one that ends by itself."""
        if self.processes[name].poll() is None:
            self.asked_to_end[name] = why
            self.processes[name].send_signal(signal.SIGINT)

    def output(self, name: str) -> str:
        """The output of a program since its last start."""
        with (self.folder / f"{name}.log").open("rb") as file:
            file.seek(self.log_start[name])
            return file.read().decode(errors="replace")

    def _start(self, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.folder / f"{name}.log").open("ab") as file:
            self.log_start[name] = file.tell()
            # In a session of its own, Ctrl-C reaches only the supervisor, which ends the programs in order.
            self.processes[name] = subprocess.Popen(
                [*LAUNCHER, str(os.getpid()), *self.commands[name]()],
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                start_new_session=True,
            )

    def _restart_ended(self) -> None:
        now = time.monotonic()
        for name, process in list(self.processes.items()):
            code = process.poll()
            if code is None:
                continue
            restart_at, delay = self.restarts.get(name, (0.0, 1.0))
            if restart_at == 0.0:
                self.restarts[name] = (now + delay, min(2 * delay, MAX_DELAY))
                reason = self.asked_to_end.pop(name, "") or self._reason(name, code)
                self.log(f"{name} ended ({reason}); starting it again in {delay:.0f} s")
            elif now >= restart_at:
                self.restarts[name] = (0.0, delay)
                self._start(name)

    def _reason(self, name: str, code: int) -> str:
        """Why a program ended."""
        return f"signal {-code}" if code < 0 else self.explain() or self._last_error(name) or f"code {code}"

    def _last_error(self, name: str) -> str:
        """The reason in the program's log, empty if there is none."""
        output = self.output(name)
        said = [line.strip() for line in output.splitlines() if " INFO " not in line]  # a logger is called uvicorn.error
        errors = [line for line in said if "rror" in line or "Exit Code" in line or "Failed" in line]
        last = errors[-1][:200] if errors else ""
        return next((explanation for words, explanation in EXPLANATIONS.items() if words in output), last)
