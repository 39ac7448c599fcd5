"""The operator's folder: where everything of a federation is, and the settings of its server in `federation.toml`."""

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedme.config.experiment import ConfigError, read_toml
from fedme.core.typed import TypedError, build
from fedme.federation.flower import QUIET
from fedme.learning.local_training import require

NAME = "federation.toml"
NODES = "nodes"  # a folder with Flower's answer for every registered key
CONNECTION = "fedme"  # the name of the server in Flower's own configuration
FOLDER = "FEDME_FEDERATION"  # tells Flower's server app where the operator's folder is


@dataclass(frozen=True)
class Settings:
    """The whole file."""

    host: str = "127.0.0.1"  # the address that sites connect to
    port: int = 9443
    listen: str = ""  # where to listen for sites, if that is another address of this machine
    control_port: int = 0  # of Flower's server, for this machine alone; the one after `port` by default
    insecure: bool = False  # no encryption and no authentication: for experiments on one machine only
    min_sites: int = 2  # a run begins when so many sites have said hello ...
    min_replies: int = 1  # ... and a round counts when so many have answered
    timeout: float = 600.0  # seconds until a site that does not answer is left out of the round
    patience: float = 3600.0  # seconds to wait for enough sites or replies before the run gives up

    def __post_init__(self) -> None:
        require(0 < self.port < 65535, "port", f"must be the number of a port, not {self.port}")
        require(0 <= self.control_port < 65536, "control_port", f"must be the number of a port, not {self.control_port}")
        require(self.control_port != self.port, "control_port", "must be another one than port")
        everywhere = self.host in ("", "0.0.0.0", "::")
        require(not everywhere, "host", "must be an address that sites can connect to; `listen` may be every address")
        require(self.min_sites >= 1, "min_sites", f"must be at least 1, not {self.min_sites}")
        require(self.min_replies >= 1, "min_replies", f"must be at least 1, not {self.min_replies}")
        require(self.timeout > 0 and self.patience > 0, "timeout", "and patience must be positive")


@dataclass(frozen=True)
class Federation:
    """The operator's folder, read."""

    folder: Path
    settings: Settings

    @classmethod
    def read(cls, folder: Path) -> "Federation":
        """The federation in a folder."""
        path = folder / NAME
        if not path.exists():
            raise ConfigError(f"{folder}: no federation here (no {NAME}); `fedme deploy init {folder}` makes one")
        try:
            return cls(folder.resolve(), build(Settings, read_toml(path)))
        except TypedError as error:
            raise ConfigError(f"{path}: {error}") from error

    @property
    def address(self) -> str:
        """Where sites connect to."""
        return f"{self.settings.host}:{self.settings.port}"

    @property
    def control(self) -> str:
        """Where Flower's server is. Whoever reaches it can run code on every node: it never leaves this machine."""
        return f"127.0.0.1:{self.settings.control_port or self.settings.port + 1}"

    @property
    def server(self) -> Path:
        """What only the server has: keys, database, registrations."""
        return self.folder / "server"

    @property
    def runs(self) -> Path:
        """Where results are."""
        return self.folder / "runs"

    def keys(self) -> dict[str, Path]:
        """The public key of every site."""
        return {path.parent.name: path for path in sorted(self.folder.glob("sites/*/key.pub"))}

    def nodes(self) -> dict[int, str]:
        """Whose key a node has, from Flower's answers when the keys were registered."""
        found = {}
        for path in self.server.glob(f"{NODES}/*.json"):
            with suppress(ValueError, KeyError):  # Flower refused, or is still writing
                found[int(json.loads(path.read_text())["node-id"])] = path.stem
        return found

    def environment(self) -> dict[str, str]:
        """For Flower's programs at the server."""
        return environment(self.server / "flwr") | {FOLDER: str(self.folder)}

    def superlink(self) -> list[str]:
        """The command of Flower's server."""
        host, port = self.control.split(":")
        where = ["--host", host, "--port", port, "--isolation", "process"]
        lasting = ["--database", str(self.server / "state.db"), "--disable-runtime-dependency-installation"]
        secret = ["--superexec-auth-secret-file", str(self.server / "superexec.secret")]
        if self.settings.insecure:
            return [program("flower-superlink"), "--insecure", *where, *lasting, *secret]
        tls = self._files({"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.crt", "--ssl-keyfile": "server.key"})
        return [program("flower-superlink"), *tls, "--enable-supernode-auth", *where, *lasting, *secret]

    def superexec(self) -> list[str]:
        """The command of what starts the server app, apart from the server, so that neither takes the other down."""
        trust = ["--insecure"] if self.settings.insecure else ["--root-certificates", str(self.server / "ca.crt")]
        secret = ["--superexec-auth-secret-file", str(self.server / "superexec.secret")]
        return [program("flower-superexec"), "--runtime-api-address", self.control, *trust, *secret]

    def gate(self) -> list[str]:
        """The command of what stands between sites and Flower's server."""
        where = ["--host", self.settings.listen or self.settings.host, "--port", str(self.settings.port)]
        files = {"--authority": "ca.crt", "--certificate": "server.crt", "--key": "server.key"}
        tls = [] if self.settings.insecure else self._files(files)
        return [sys.executable, "-m", "fedme.deployment.reverse_proxy", *where, "--server", self.control, *tls]

    def _files(self, options: Mapping[str, str]) -> list[str]:
        return [word for option, file in options.items() for word in (option, str(self.server / file))]

    def register(self, key: Path) -> list[str]:
        """The command that makes a site's public key known to the server."""
        return [program("flwr"), "supernode", "register", str(key), CONNECTION, "--format", "json"]

    def registered(self, name: str) -> Path:
        """Where Flower's answer to that is kept."""
        return self.server / NODES / f"{name}.json"

    def run(self, name: str) -> list[str]:
        """The command that starts the server app for the run in `runs/NAME`."""
        return [program("flwr"), "run", str(self.server / "app"), CONNECTION, "--run-config", f'run="{name}"']


def environment(home: Path, *code: Path) -> dict[str, str]:
    """Flower's programs are quiet, keep what they write in `home`, and look for work often; networks are found in `code`."""
    here = os.pathsep.join(filter(None, [*map(str, code), str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # Flower starts others by name
    own = {"FLWR_HOME": str(home), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2", "OMP_NUM_THREADS": "1"}
    return QUIET | own | {"PATH": programs, "PYTHONPATH": here}


def program(name: str) -> str:
    """One of Flower's programs, beside the Python that runs this."""
    return str(Path(sys.executable).with_name(name))
