"""Supervise a site's node. A site rests most of the time, so this process imports neither PyTorch nor Flower.

`fedme deploy node` checks the site and becomes this program: `python -m fedme.deployment.node_supervisor PLAN`.
"""

import json
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedme.core.atomic_files import RunError, locked, write_json
from fedme.deployment import server_clock
from fedme.deployment.expiry import ASK, Reminder
from fedme.deployment.supervisor import Supervisor

CONNECTION_FILE = "connection.json"  # in the site's state
CONNECTED = "SuperNode ID"  # Flower's node logs this when the server has accepted it


@dataclass(frozen=True)
class Plan:
    """What there is to supervise."""

    name: str
    address: str  # of the server
    authority: str  # the certificate that the site trusts; empty without encryption
    state: str
    command: list[str]
    environment: dict[str, str]


def with_free_port(command: list[str]) -> list[str]:
    """The command of Flower's node with a free port on loopback, for its own processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return [*command, "--host", "127.0.0.1", "--port", str(free.getsockname()[1])]


def run(plan: Plan, log: Callable[[str], None]) -> None:
    """Keep the node running until this process is stopped by a signal."""
    state, authority = Path(plan.state), Path(plan.authority) if plan.authority else None
    with locked(state):
        connection = Connection(plan, log)
        supervisor = Supervisor(
            state / "log", plan.environment, connection.lost, lambda: server_clock.explanation(plan.address, authority)
        )
        supervisor.start("node", lambda: with_free_port(plan.command))
        log(f"{plan.name}: connecting to {plan.address}; the log is in {state / 'log'}; Ctrl-C stops")
        remind = Reminder([] if authority is None else [authority], ASK, lambda text: log(f"{plan.name}: {text}"))

        def on_poll() -> None:
            connection.check(supervisor)
            remind()

        supervisor.run_until_stopped(on_poll)


class Connection:
    """Logs when the node connects and ends, and keeps it in a file for `fedme deploy status`."""

    def __init__(self, plan: Plan, log: Callable[[str], None]) -> None:
        self.plan, self.log = plan, log
        self.announced = -1  # the start of the node whose connection was logged
        self.problem: str | None = None
        self._write(None)

    def check(self, supervisor: Supervisor) -> None:
        """Note that the server has accepted the node, once per start."""
        start = supervisor.log_start["node"]
        if self.announced != start and CONNECTED in supervisor.output("node"):
            self.announced = start
            self._write(now())
            self.log(f"{self.plan.name}: connected to {self.plan.address}")

    def lost(self, text: str) -> None:
        """Note that the node has ended."""
        self.problem = f"{now()}: {text}"
        self._write(None)
        self.log(f"{self.plan.name}: {text}")

    def _write(self, since: str | None) -> None:
        with suppress(OSError):  # a full disk does not end a site
            write_json(Path(self.plan.state) / CONNECTION_FILE, {"connected_since": since, "last_problem": self.problem})


def now() -> str:
    """The present time, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def main() -> None:
    """Supervise by the plan in the first argument."""
    try:
        run(Plan(**json.loads(sys.argv[1])), lambda text: print(text, file=sys.stderr, flush=True))
    except RunError as error:  # another process was quicker
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
