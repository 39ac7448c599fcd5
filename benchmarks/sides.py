"""Run one side of a comparison as a process of its own: ours here, every peer in an environment of its own."""

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import protocol

HERE = Path(__file__).resolve().parent
PEERS = ("fedjax", "flower", "pfl", "fluke")
ENVIRONMENT = {  # no messages home, no look for newer versions, no accelerators
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_HOME": str(HERE / ".venvs" / "flower" / "home"),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "JAX_PLATFORMS": "cpu",
}


class Failed(Exception):
    """A side that could not do its work; the message says why."""


@functools.cache
def installed(peer: str) -> Path | Failed:
    """The Python of a peer's environment, which is made if it is not there or its requirements have changed.

    What cannot be installed is not tried again for the next row.
    """
    folder, wanted = HERE / ".venvs" / peer, HERE / "requirements" / f"{peer}.txt"
    python, stamp = folder / "bin" / "python", folder / ".ready"
    fingerprint = hashlib.sha256(wanted.read_bytes()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == fingerprint:
        return python
    print(f"installing {peer} into {folder.relative_to(HERE.parent)} ...", file=sys.stderr, flush=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(wanted)]
    try:
        _run("venv", [sys.executable, "-m", "venv", str(folder)], timeout=300)
        _run("pip", pip, timeout=1200)
    except (Failed, OSError) as error:
        return Failed(f"{peer} cannot be installed: {error}")
    stamp.write_text(fingerprint)
    return python


def run(script: str, job: Mapping[str, Any], peer: str | None = None, timeout: float = 600) -> dict[str, Any]:
    """The answer of a side to a job."""
    python = installed(peer) if peer else Path(sys.executable)
    if isinstance(python, Failed):
        raise python
    output = _run(script, [str(python), str(HERE / script), json.dumps(job)], timeout)
    found = protocol.heard(output)
    if found is None and script != "export.py":
        raise Failed(f"{script} said nothing")
    return found or {}


def _run(name: str, command: list[str], timeout: float) -> str:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | ENVIRONMENT,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise Failed(f"{name} was not done after {timeout:.0f} s") from None
    finally:
        _stop(process)
    if process.returncode:
        lines = [line for line in errors.strip().splitlines() if line.strip()] or ["no message"]
        raise Failed(f"{name} ended with code {process.returncode}: {lines[-1][:300]}")
    return output


def _stop(process: subprocess.Popen[str]) -> None:
    """End a side and whatever it started; all of it is in the process group that was made for it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()
