"""The operator's folder: the files of a federation, and the settings of its server in `federation.toml`."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedme.config.experiment import ConfigError, read_toml
from fedme.core.atomic_files import write_text
from fedme.core.typed import TypedError, build
from fedme.federation.flower import ENVIRONMENT
from fedme.learning.training_settings import require

NAME = "federation.toml"
NODES = "nodes"  # a folder with Flower's answer for every registered key
DATABASE = "state.db"  # of Flower's server
CONNECTION = "fedme"  # the name of the server in Flower's own configuration
SECRET = {"--superexec-auth-secret-file": "superexec.secret"}
FOLDER = "FEDME_FEDERATION"  # the environment variable that tells the server app where the operator's folder is


@dataclass(frozen=True)
class Settings:
    """The contents of `federation.toml`."""

    host: str = "127.0.0.1"  # the address that sites connect to
    port: int = 9443
    listen: str = ""  # the address to listen on for sites, if it differs from host
    control_port: int = 0  # of Flower's server, which only this machine can reach; 0: port + 1
    insecure: bool = False  # no encryption and no authentication: for experiments on one machine only
    min_sites: int = 2  # a run starts when this many sites are connected
    min_replies: int = 1  # a round counts when this many sites have replied
    timeout: float = 600.0  # seconds to wait for a site's reply before the round goes on without it
    patience: float = 3600.0  # seconds to wait for enough sites or replies before the run fails

    def __post_init__(self) -> None:
        require(0 < self.port < 65535, "port", f"must be between 1 and 65534, got {self.port}")
        require(0 <= self.control_port < 65536, "control_port", f"must be between 0 and 65535, got {self.control_port}")
        require(self.control_port != self.port, "control_port", f"must differ from port, got {self.port} for both")
        any_address = self.host in ("", "0.0.0.0", "::")
        require(not any_address, "host", f"must be an address that sites can connect to, got '{self.host}'; see `listen`")
        require(self.min_sites >= 1, "min_sites", f"must be >= 1, got {self.min_sites}")
        require(self.min_replies >= 1, "min_replies", f"must be >= 1, got {self.min_replies}")
        require(self.timeout > 0, "timeout", f"must be > 0, got {self.timeout}")
        require(self.patience > 0, "patience", f"must be > 0, got {self.patience}")


@dataclass(frozen=True)
class Federation:
    """The operator's folder and its settings."""

    folder: Path
    settings: Settings

    @classmethod
    def read(cls, folder: Path) -> "Federation":
        """Read the federation in a folder."""
        path = folder / NAME
        if not path.exists():
            raise ConfigError(f"{folder}: no federation here (no {NAME}); `fedme deploy init {folder}` creates one")
        try:
            return cls(folder.resolve(), build(Settings, read_toml(path)))
        except TypedError as error:
            raise ConfigError(f"{path}: {error}") from error

    @property
    def address(self) -> str:
        """The address that sites connect to."""
        return f"{self.settings.host}:{self.settings.port}"

    @property
    def control(self) -> str:
        """The address of Flower's server. Its clients can run code on every node, so it is always on loopback."""
        return f"127.0.0.1:{self.settings.control_port or self.settings.port + 1}"

    @property
    def server(self) -> Path:
        """The server's private files: keys, database, registrations."""
        return self.folder / "server"

    @property
    def runs(self) -> Path:
        """The folder of results."""
        return self.folder / "runs"

    def keys(self) -> dict[str, Path]:
        """The public key file of every site."""
        return {path.parent.name: path for path in sorted(self.folder.glob("sites/*/key.pub"))}

    def nodes(self) -> dict[int, str]:
        """The site of every node id, from Flower's answers when the keys were registered."""
        names = {}
        for path in self.server.glob(f"{NODES}/*.json"):
            with suppress(ValueError, KeyError):  # Flower refused the key, or the file is incomplete
                names[int(json.loads(path.read_text())["node-id"])] = path.stem
        return names

    def environment(self) -> dict[str, str]:
        """The environment of Flower's programs at the server."""
        return flower_environment(self.server / "flwr") | {FOLDER: str(self.folder)}

    def write_connection(self) -> None:
        """Tell Flower's commands where the server is. The file has absolute paths: a folder that was moved needs a new one."""
        trust = "insecure = true" if self.settings.insecure else f'root-certificates = "{self.server / "ca.crt"}"'
        text = f'[superlink.{CONNECTION}]\naddress = "{self.control}"\n{trust}\n'
        write_text(self.server / "flwr" / "config.toml", text)

    def programs(self) -> dict[str, Callable[[], list[str]]]:
        """The commands of the programs that make up the server, by name."""
        return {"superlink": self.superlink, "superexec": self.superexec, "proxy": self.reverse_proxy}

    def superlink(self) -> list[str]:
        """The command of Flower's server."""
        host, port = self.control.split(":")
        options = ["--host", host, "--port", port, "--isolation", "process", "--database", str(self.server / DATABASE)]
        options += [*self._files(SECRET), "--disable-runtime-dependency-installation"]
        if self.settings.insecure:
            return [program("flower-superlink"), "--insecure", *options]
        tls = self._files({"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.crt", "--ssl-keyfile": "server.key"})
        return [program("flower-superlink"), *tls, "--enable-supernode-auth", *options]

    def superexec(self) -> list[str]:
        """The command that starts server apps; it is a separate program, so that a run survives a crash of the server."""
        trust = ["--insecure"] if self.settings.insecure else self._files({"--root-certificates": "ca.crt"})
        return [program("flower-superexec"), "--runtime-api-address", self.control, *trust, *self._files(SECRET)]

    def reverse_proxy(self) -> list[str]:
        """The command of the reverse proxy between the sites and Flower's server."""
        where = ["--host", self.settings.listen or self.settings.host, "--port", str(self.settings.port)]
        files = {"--authority": "ca.crt", "--certificate": "server.crt", "--key": "server.key"}
        tls = [] if self.settings.insecure else self._files(files)
        to = ["--server", self.control, "--federation", str(self.folder)]
        return [sys.executable, "-m", "fedme.deployment.reverse_proxy", *where, *to, *tls]

    def _files(self, options: Mapping[str, str]) -> list[str]:
        return [word for option, file in options.items() for word in (option, str(self.server / file))]

    def register(self, key: Path) -> list[str]:
        """The command that registers a site's public key."""
        return [program("flwr"), "supernode", "register", str(key), CONNECTION, "--format", "json"]

    def registration(self, name: str) -> Path:
        """The file of Flower's answer to that command."""
        return self.server / NODES / f"{name}.json"

    def run(self, name: str) -> list[str]:
        """The command that starts the server app for the run in `runs/NAME`."""
        return [program("flwr"), "run", str(self.server / "app"), CONNECTION, "--run-config", f'run="{name}"']


def flower_environment(home: Path, *import_paths: Path) -> dict[str, str]:
    """The environment of Flower's programs: they keep their files in `home` and import networks from `import_paths`."""
    python_path = os.pathsep.join(filter(None, [*map(str, import_paths), str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    # Flower starts its other programs by name.
    search_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    settings = {"FLWR_HOME": str(home), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2", "OMP_NUM_THREADS": "1"}
    return ENVIRONMENT | settings | {"PATH": search_path, "PYTHONPATH": python_path}


def program(name: str) -> str:
    """The path of one of Flower's programs, in the same environment as this Python."""
    return str(Path(sys.executable).with_name(name))
