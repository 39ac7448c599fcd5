"""The federation that is attacked: a server and three sites, with TLS and keys, in real processes on loopback."""

import ssl
import tempfile
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import httpx
from flwr.proto.control_pb2 import ListNodesRequest, ListNodesResponse

from fedme.deployment.operator_folder import Federation
from fedme_test_deployment import Deployment, wait_for

SITES = "abc"
T = TypeVar("T")


class Loopback:
    """A federation that starts when an attack first asks for it; attacks that need none do not wait for one."""

    def __init__(self, folder: Path | None = None) -> None:
        self._temporary = None if folder is not None else tempfile.TemporaryDirectory(prefix="fedme-attacks-")
        self.folder = folder if folder is not None else Path(self._temporary.name)  # type: ignore[union-attr]
        self.cleanup = ExitStack()  # what attacks have started; it ends before the federation

    def __enter__(self) -> "Loopback":
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup.close()
        if "deployment" in vars(self):
            self.deployment.end()
        if self._temporary is not None:
            self._temporary.cleanup()

    @cached_property
    def deployment(self) -> Deployment:
        """The running federation: every site is connected."""
        made = Deployment(self.scratch("loopback"), SITES)
        made.server()
        for name in SITES:
            made.node(name)
        self.wait_until_connected(made)
        return made

    def scratch(self, name: str) -> Path:
        """A new folder for files of an attack."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        return folder

    @staticmethod
    def wait_until_connected(deployment: Deployment, sites: str = SITES) -> None:
        """Wait until these sites are connected."""

        def connected() -> bool:
            try:
                nodes = control(deployment, "list-nodes", ListNodesRequest(), ListNodesResponse).nodes_info
            except httpx.TransportError:  # the server is starting
                return False
            names = Federation.read(deployment.federation).nodes()
            return set(sites) <= {names.get(node.node_id, "") for node in nodes if node.status == "online"}

        wait_for(connected, f"sites {', '.join(sites)}", pause=0.5)


def control(deployment: Deployment, action: str, request: Any, answers: type[T]) -> T:
    """Ask Flower's control API, as a person at the server can: quicker than Flower's command, which is a process of its own."""
    here = Federation.read(deployment.federation)
    trust = ssl.create_default_context(cafile=here.server / "ca.crt")
    with httpx.Client(base_url=f"https://{here.control}", verify=trust, timeout=60, trust_env=False) as line:
        headers = {"content-type": "application/protobuf"}
        answer = line.post(f"/v1/control/{action}", content=request.SerializeToString(), headers=headers)
    assert answer.status_code == 200, f"{action}: {answer.status_code} {answer.text}"
    return answers.FromString(answer.content)  # type: ignore[attr-defined,no-any-return]
