"""Flower's node held to one app, that of the installed FedMe: no code of a server runs at a site.

Flower's node unpacks any bundle that the server names and imports its code; no option prevents this. So FedMe starts the node
with its own programs, which replace functions of Flower that are not public:

* `node`: asks about every new run before anything else happens. A run of any other kind or of any other bundle gets an error
  reply, and its bundle is not even requested; the bundle of an accepted run is built here from the installed version. A
  thread of it starts client apps, nothing else, with this Python interpreter instead of programs on the PATH. (Flower has a
  process for that, which needs as much memory as a node.)
* `client`: unpacks nothing and adds no folder to the import path; the app is the imported `fedme.deployment.site_app`.

This is the only file at a site that uses modules that Flower does not publish. It was written after reading flwr 1.41.0. `READ`
has the SHA-256 of the source of everything relied on: the programs refuse to run with a Flower whose code differs.
"""

import argparse
import dataclasses
import functools
import hashlib
import importlib
import inspect
import linecache
import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flwr
from flwr.app import Error, Message
from flwr.common.constant import ISOLATION_MODE_PROCESS, ErrorCode
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.run import RunNotRunningException

from fedme import __version__
from fedme.deployment.bundle import APP_ID, bundle, bundle_hash

KNOWN_FLOWER = "1.41.0"
READ: dict[str, dict[str, dict[str, str]]] = {  # program: module: object: SHA-256 of its source
    "node": {
        "flwr.supernode.cli.flower_supernode": {
            "SuperNodeLifespanConfig": "b9cb423ca718133c8488430636bda644e734eee36a448933288107bed1e584ce",
            "_parse_supernode_lifespan_config": "4094956c95246dbed45a4a7c77058d1362727b67fa703975bfc4f81a490541aa",
            "flower_supernode": "e263e10452076b0062e28433cca5d75a552a8a32635ac38a0101d7678231ddaf",
        },
        "flwr.supernode.start_client_internal": {
            "start_client_internal": "9e89a6eb68fbec6821e817cd2c09f7894fc7b0f5725c2365b19a7122307f11f3",
            "_pull_and_store_message": "eaf5d0e36dc34e4cf46a490511d077ac55cc8edbbcdbe938c1f6dbcb758628be",
            "_insert_message": "a0c6f4605e993f04cf4774c215b0322db5d80de1b3b564e79af112c909908d21",
            "_push_messages": "00bb86faffdec114db87e7f716af2acd901d12284e44f51f5c2a84704db05f64",
        },
        "flwr.supercore.constant": {
            "TaskType": "83fa24c88e9291ed483e69f26431b05dd0bf14a2fa23383000c2d49dcd0907b4",
        },
        "flwr.supercore.run": {
            "Run": "2f1566491e6beccfc19530ce57bb5dcd5d610d6566acd43a1d97d5d0e5cb2030",
        },
        "flwr.supercore.object_store.object_store_factory": {
            "ObjectStoreFactory": "8737747562399b1a075b52fb6e9b3155c1f86775f2a468c0e2467316401733ad",
        },
        "flwr.supercore.fab": {
            "Fab": "140aff940cdb015e4adbaafb07749cef5d6bc9e65663d1bae9254a57d59fdfee",
        },
        "flwr.supercore.superexec.run_superexec": {
            "run_superexec": "d11f4e7fbc8f0b121804772495484fae8987b2b52af8b2baa70baf40d5929e26",
        },
        "flwr.supercore.superexec.plugin.base_exec_plugin": {
            "BaseExecPlugin": "687ebe55961326e87cf46a6022fe5441cddd4646d40590f54f0b88827bac1718",
        },
        "flwr.supercore.superexec.executor.types": {
            "Executor": "c6d3173df690f03eccb6248d08bfb584b2cb2fb1799923fcd7f3be6ade71c344",
            "ExecutionSpec": "a52aad6399c9a5ec1e3b316148832232119eb26b56b18a38d3c74b3ef353a538",
        },
    },
    "client": {
        "flwr.supernode.runtime.run_clientapp": {
            "run_clientapp": "6ce09559f3a2f5dcafb7d08f4b443585d76b9b53b9cb29ba1ec06a6982163443",
            "pull_task_input": "5607a23e1673ee876930c1b35685b8dfdfd8b3776a436560b0467042e15fc695",
        },
    },
}
DATABASE = "flwr.supercore.object_store.sql_object_store"
RESTART_DELAY = 1.0  # seconds
LONGEST_REST = 3.0  # seconds between two questions for tasks; one whose client app was killed comes back without a message
SHOWN = re.compile(r"[A-Za-z0-9._/+-]{1,80}")  # names and versions from a server that may stand in an error text


class UnknownFlowerError(RuntimeError):
    """The installed Flower is not the one that this module was written for."""


def leave_out_database() -> None:
    """Replace a module of Flower that a node imports and does not use: it keeps messages in memory, without SQLAlchemy."""
    absent: Any = types.ModuleType(DATABASE)
    absent.SqlObjectStore = None
    sys.modules[DATABASE] = absent


def require_known_flower(program: str) -> None:
    """Refuse a Flower whose code differs: replacing its functions might then no longer hold anything."""
    read = [(module, name, known) for module, objects in READ[program].items() for name, known in objects.items()]
    if changed := [f"{module}.{name}" for module, name, known in read if source_hash(module, name) != known]:
        raise UnknownFlowerError(
            f"FedMe {__version__} holds the node of flwr {KNOWN_FLOWER} to its own app, but flwr {flwr.__version__} is "
            f"installed and differs in {', '.join(changed)}; run `pip install 'fedme[flower]'`"
        )


def source_hash(module: str, name: str) -> str:
    """The SHA-256 of the source of an object; empty if there is none."""
    try:
        return hashlib.sha256(inspect.getsource(getattr(importlib.import_module(module), name)).encode()).hexdigest()
    except (ImportError, AttributeError, OSError, TypeError):
        return ""


def refusal(run: Any) -> str | None:
    """Why this site does not take part in a run of Flower's; None if it is a run of the installed FedMe."""
    if run.primary_task_type != TaskType.SERVER_APP:
        return f"this site runs client apps of FedMe only, but the server started a run of type {_shown(run.primary_task_type)}"
    if (run.fab_id, run.fab_version, run.fab_hash) != (APP_ID, __version__, bundle_hash()):
        sent = f"{_shown(run.fab_id)} {_shown(run.fab_version)} with SHA-256 {_shown(run.fab_hash)[:16]}"
        return (
            f"this site runs only the app of its own FedMe {__version__}, but the server sent {sent}; install the same version"
        )
    return None


def _shown(text: str) -> str:
    return text if SHOWN.fullmatch(text) else "(unreadable)"


def only_own_app(supernode: Any, received: threading.Event) -> Callable[..., int | None]:
    """Flower's function that receives a message, preceded by the question what run the message belongs to.

    It sets `received` when there is something to do.
    """
    pull = supernode._pull_and_store_message

    @functools.wraps(pull)
    def pull_if_allowed(**given: Any) -> int | None:
        pulled = given["receive"]()
        if pulled is None:
            return None
        message: Message = pulled[0]
        run_id = message.metadata.run_id
        run = given["state"].get_run(run_id)
        if run is None:
            try:
                run = given["get_run"](run_id)
            except RunNotRunningException:
                return None  # the run has ended
            if reason := refusal(run):
                supernode.log(logging.ERROR, "Refused run %s: %s", run_id, reason)
                reply = Message(Error(ErrorCode.INVALID_FAB, reason), reply_to=message)
                supernode._insert_message(reply, given["state"], given["object_store"])
                return run_id
        # The server is not asked again, it could answer differently; and no bundle of its is requested.
        own = Fab(bundle_hash(), bundle(), {})
        replaced = {"receive": lambda: pulled, "get_run": lambda _: run, "get_fab": lambda *_: own, "trusted_entities": None}
        result: int | None = pull(**{**given, **replaced})
        received.set()
        return result

    return pull_if_allowed


def node() -> None:
    """Run Flower's node with the options of `flower-supernode`."""
    home = Path(os.environ["FLWR_HOME"])
    shutil.rmtree(home / "apps", ignore_errors=True)  # what another version or an earlier server left
    secret = secrets.token_bytes(32)  # without it no other program of this machine can ask the node for work
    received = threading.Event()
    program: Any = importlib.import_module("flwr.supernode.cli.flower_supernode")
    supernode: Any = importlib.import_module("flwr.supernode.start_client_internal")
    parse, start = program._parse_supernode_lifespan_config, supernode.start_client_internal

    def parse_held() -> Any:
        held = {"isolation": ISOLATION_MODE_PROCESS, "superexec_auth_secret": secret, "runtime_dependency_install": False}
        return dataclasses.replace(parse(), **held)

    def start_with_executor(**options: Any) -> None:
        threading.Thread(target=_execute, args=(options["runtime_api_address"], secret, received), daemon=True).start()
        start(**options)

    program._parse_supernode_lifespan_config = parse_held
    program.start_client_internal = start_with_executor
    supernode._pull_and_store_message = only_own_app(supernode, received)
    program.flower_supernode()


def end_with_any_thread() -> None:
    """End the process if one of its threads fails: without its heartbeat, a node would not be asked again. It starts anew."""

    def end(failed: threading.ExceptHookArgs) -> None:
        try:
            threading.__excepthook__(failed)
        finally:
            os._exit(1)

    threading.excepthook = end


class ClientAppExecutor:
    """Starts client apps as processes of this interpreter. Flower would ask for tasks all the time: it waits for messages."""

    def __init__(self, received: threading.Event) -> None:
        self.received = received
        self.processes: list[subprocess.Popen[bytes]] = []

    def get_eligible_capacity(self, *_: Any, **__: Any) -> tuple[set[TaskType], set[str]]:
        """Client apps are the only tasks to ask for."""
        return {TaskType.CLIENT_APP}, set()

    def wait_for_capacity(self, *_: Any, **__: Any) -> None:
        """There is no limit."""

    def launch(self, spec: Any) -> Any:
        """Start a client app."""
        from flwr.supercore.superexec.executor import LaunchResult

        if spec.task_type is not TaskType.CLIENT_APP:
            return LaunchResult.failed(f"this site runs client apps only; {spec.task_type} is refused")
        self.processes.append(_start_program(["client", "--runtime-api-address", spec.runtime_api_address], spec.token))
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Forget the processes that have ended, and wait for a message; called before every question for a task."""
        self.received.wait(LONGEST_REST)
        self.received.clear()
        self.processes = [process for process in self.processes if process.poll() is None]

    def close(self) -> None:
        """Client apps end with their parent."""


def _start_program(words: list[str], secret: str) -> subprocess.Popen[bytes]:
    """Start a program of this module. Its secret goes through a pipe: other users can read command lines."""
    command = [sys.executable, "-m", "fedme.deployment.flower_site_internals", *words, "--parent-pid", str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(secret.encode())
    return process


def _execute(address: str, secret: bytes, received: threading.Event) -> None:
    """Start a client app for every message that the node has received, until the node ends."""
    superexec: Any = importlib.import_module("flwr.supercore.superexec.run_superexec")
    superexec.get_executor = lambda *_, **__: ClientAppExecutor(received)
    superexec.register_signal_handlers = lambda **_: None  # the node has its own
    while True:  # without this thread, a node answers nothing
        try:
            superexec.run_superexec(address, insecure=True, superexec_auth_secret=secret)
        except Exception as error:
            superexec.log(logging.ERROR, "%r; trying again", error)
        time.sleep(RESTART_DELAY)


def client() -> None:
    """Answer one message with the installed client app."""

    def load(*_: str) -> Any:
        # Imported after the first heartbeat, which must not wait for PyTorch: the node would start another process.
        from fedme.deployment import site_app

        return site_app.app

    options = _options()
    clientapp: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    clientapp.install_from_fab = lambda *_, **__: None
    clientapp.get_load_client_app_fn = lambda **_: load
    clientapp.run_clientapp(options.runtime_api_address, sys.stdin.read(), insecure=True, parent_pid=options.parent_pid)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fedme.deployment.flower_site_internals")
    parser.add_argument("--runtime-api-address", required=True)
    parser.add_argument("--parent-pid", required=True, type=int)
    return parser.parse_args()


def main() -> None:
    """Run the program that the first argument names."""
    name = sys.argv.pop(1)
    leave_out_database()
    require_known_flower(name)
    linecache.clearcache()  # the sources that were compared
    if name == "node":  # a client app that has lost a thread may still answer
        end_with_any_thread()
    {"node": node, "client": client}[name]()


if __name__ == "__main__":
    main()
