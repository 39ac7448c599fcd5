"""Run the server: keep Flower's programs running, register the sites' keys, and continue runs that ended early."""

import time
from collections.abc import Callable
from pathlib import Path

from fedme.core.atomic_files import locked, write_json
from fedme.deployment.bundle import write_app
from fedme.deployment.expiry import RENEW, Reminder
from fedme.deployment.operator import flower
from fedme.deployment.operator_folder import DATABASE, Federation
from fedme.deployment.resumption import Resumer
from fedme.deployment.supervisor import Supervisor
from fedme.federation.flower.internals import registered_node

REGISTER_INTERVAL = 3.0  # seconds between two searches for new keys


def serve(federation: Federation, log: Callable[[str], None]) -> None:
    """Keep the server running until it is stopped by a signal."""
    with locked(federation.server):
        write_app(federation.server / "app")  # that of the installed version
        federation.write_connection()
        supervisor = Supervisor(federation.server / "log", federation.environment(), log)
        for name, command in federation.programs().items():
            supervisor.start(name, command)
        log(f"sites connect to {federation.address}; Flower's server listens on {federation.control}, for this machine only")
        log(f"the logs are in {federation.server / 'log'}; Ctrl-C stops")
        certificates = [federation.server / name for name in ("server.crt", "ca.crt")]
        duties = (
            Registrar(federation, log),
            Resumer(federation, log),
            NewCertificate(federation, supervisor, log),
            Reminder(certificates, RENEW, log),
        )

        def on_poll() -> None:
            for duty in duties:
                try:
                    duty()
                except OSError as error:  # a full disk does not end the server
                    log(f"{error}; trying again")

        supervisor.run_until_stopped(on_poll)


class NewCertificate:
    """Restarts the programs that use the server's certificate when there is a new one. Runs continue."""

    def __init__(self, federation: Federation, supervisor: Supervisor, log: Callable[[str], None]) -> None:
        self.file, self.supervisor, self.log = federation.server / "server.crt", supervisor, log
        self.used = self._version()

    def __call__(self) -> None:
        if (version := self._version()) != self.used:
            self.used = version
            for name in ("superlink", "proxy"):
                self.supervisor.restart(name, "the server has a new certificate")

    def _version(self) -> int:
        return self.file.stat().st_mtime_ns if self.file.exists() else 0


class Registrar:
    """Registers every public key, including keys that are added or replaced while the server runs."""

    def __init__(self, federation: Federation, log: Callable[[str], None]) -> None:
        self.federation, self.log = federation, log
        self.unusable: set[str] = set()  # sites whose key Flower does not accept
        self.next_time = 0.0

    def __call__(self) -> None:
        if self.federation.settings.insecure or time.monotonic() < self.next_time:
            return
        self.next_time = time.monotonic() + REGISTER_INTERVAL
        registered = set(self.federation.nodes().values())
        for name, key in self.federation.keys().items():
            path = self.federation.registration(name)
            outdated = name not in registered or path.stat().st_mtime_ns < key.stat().st_mtime_ns
            if outdated and name not in self.unusable:
                self._register(name, key, path)

    def _register(self, name: str, key: Path, path: Path) -> None:
        answer = flower(self.federation, self.federation.register(key))
        if "node-id" in answer:
            write_json(path, answer)
            self.log(f"registered {name}")
        elif "already in use" in str(answer) and path.exists():
            path.touch()  # the same key in a newer file
        elif "already in use" in str(answer):
            self._recover(name, key, path)

    def _recover(self, name: str, key: Path, path: Path) -> None:
        """Find the node of a key that was registered just before the server was killed or its disk was full."""
        node = registered_node(self.federation.server / DATABASE, key.read_bytes())
        if node is None or node in self.federation.nodes():
            self.unusable.add(name)
            self.log(f"the key of {name} belongs to a site that was removed, or to another one; give the site a new key pair")
        else:
            write_json(path, {"success": True, "node-id": str(node)})
            self.log(f"registered {name}")
