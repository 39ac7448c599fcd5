"""Real `fedme` commands in processes of their own that can be killed, without importing everything for each of them.

A server process imports the package once and computes nothing; every command is forked from it (multiprocessing's forkserver).
"""

import multiprocessing as mp
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from fedme_reliability.disk import Disk

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["fedme_reliability.commands", "fedme.cli", "sklearn.datasets", "scipy.sparse"])
LONGEST = 300.0  # seconds until a command counts as hanging


class Fault(NamedTuple):
    """What goes wrong on the disk, at which event."""

    kind: str
    at: int


class Ended(NamedTuple):
    """How a command ended: its exit code (negative: the signal), and all it said."""

    code: int
    said: str


def start(words: list[str], folder: Path, output: Path, fault: Fault | None = None) -> BaseProcess:
    """Begin `fedme WORDS`; what it prints is written to `folder`/said. `fault` concerns the files below `output`."""
    process = CONTEXT.Process(target=_command, args=(words, str(folder), str(output), fault))
    process.start()
    return process


def finish(process: BaseProcess, folder: Path) -> Ended:
    """Wait for a command."""
    process.join(LONGEST)
    if process.exitcode is None:
        process.kill()
        process.join()
        return Ended(-1000, "it hangs")
    code, said = process.exitcode, (folder / "said").read_text(errors="replace")
    process.close()
    return Ended(code, said)


def do(words: list[str], folder: Path, output: Path, fault: Fault | None = None) -> Ended:
    """A whole command."""
    return finish(start(words, folder, output, fault), folder)


def _command(words: list[str], folder: str, output: str, fault: Fault | None) -> None:
    said = os.open(os.path.join(folder, "said"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    from fedme import cli

    sys.argv = ["fedme", *words]
    disk = Disk(Path(output), fault.kind, fault.at, Path(folder), seed=fault.at) if fault else None
    if disk:
        disk.install()
    try:
        cli.main()
    finally:
        if disk:
            Path(folder, "events").write_text(str(disk.count))
