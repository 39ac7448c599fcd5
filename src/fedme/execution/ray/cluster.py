"""Start a private Ray on this machine, or join the cluster at an address, for as long as a run takes."""

import contextlib
import logging
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from fedme.execution.compiled_library import NARROW
from fedme.execution.ray import EngineError

ANSWER = 10.0  # seconds that a machine has to answer at all: Ray itself goes on for minutes
STARTS = 3  # attempts to start Ray, which gives up after half a minute: on a busy machine that may not be enough


@contextlib.contextmanager
def joined(address: str | None, processes: int, modules: Sequence[Path] = (), gpus: int = 0) -> Iterator[None]:
    """Ray while the block runs: the cluster at `address`, else `processes` new processes of this machine, which end with it.

    Other machines get the source files of `modules`. All processes get the directory of data sets, FEDME_DATA, and
    compute with the same vectors. A Ray that this program has started itself is used as it is.
    """
    if ray.is_initialized():
        yield
        return
    environment: dict[str, Any] = {"env_vars": {}}
    if folder := os.environ.get("FEDME_DATA"):
        environment["env_vars"]["FEDME_DATA"] = str(Path(folder).expanduser().absolute())
    if NARROW in os.environ:
        environment["env_vars"][NARROW] = os.environ[NARROW]
    if address:
        if modules:  # Ray fails with an empty list
            environment["py_modules"] = [str(module) for module in modules]
    else:
        environment["env_vars"]["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        if (interpreter := shlex.quote(sys.executable)) != sys.executable:
            # Ray gives the path of the interpreter to a shell, which would divide it at a space.
            environment["py_executable"] = interpreter
    with _own_signals():
        if address:
            join(address, runtime_env=environment)
        else:
            _start(num_cpus=processes, **({"num_gpus": gpus} if gpus else {}), runtime_env=environment)
    try:
        yield
    finally:
        ray.shutdown()


def join(address: str, **options: Any) -> None:
    """Join the cluster at an address; `options` are those of `ray.init`."""
    place = f"the Ray cluster at '{address}' cannot be joined"
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWER).close()
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise EngineError(f"{place}: nothing answers there ({reason})") from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # Ray raises many kinds
        ray.shutdown()
        token = (
            isinstance(error, ConnectionError) and "; if it asks for a token, set RAY_AUTH_MODE=token and its token here too"
        )
        raise EngineError(f"{place}: {str(error).strip()}{token or ''}") from error


def _start(**options: Any) -> None:
    """Start new Ray processes of this machine, even if a cluster is already running on it."""
    for attempts_left in reversed(range(STARTS)):
        try:
            ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **options)
            break
        except Exception as error:  # Ray raises many kinds
            ray.shutdown()
            if not attempts_left:
                raise EngineError(f"Ray cannot be started: {str(error).strip()}") from error


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handlers of signals: Ray sets its own for SIGTERM, which would end a run without saving it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def places(needs: Mapping[str, float]) -> int:
    """How many processes with these needs ("CPU", "GPU") fit on the nodes of the cluster."""
    free = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(min(int(node.get(name, 0.0) / needed) for name, needed in needs.items()) for node in free)
