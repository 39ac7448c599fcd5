"""A site's private state on its own disk: one file a version, written atomically; a repeated round finds the one before.

The version is the number of exchanges of the run that the state has seen. It travels with every reply: a site that lost its
state has a lower one than the server remembers.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from fedme.core.atomic_files import RunError, read_tensors, write_json, write_tensors
from fedme.core.method import Round
from fedme.core.model import Arch
from fedme.core.serialization import pack, unpack
from fedme.core.typed import TypedError, build
from fedme.learning.accountant import Ledger

FORMAT = "fedme-private-1"
LEDGER = "privacy.json"
MOST = 16  # entries of a ledger that a server looks at; a method has one for every size of its training parts
KEPT = 2  # versions: the newest, and the one before it for a round that the server repeats


def claimed(ledger: Ledger) -> Ledger:
    """What a site says it has spent, unless it is too much to be looked at."""
    if len(ledger) > MOST:
        raise TypedError("spent", f"has {len(ledger)} entries, more than {MOST}")
    return ledger


class PrivateState:
    """The states of one run at one site."""

    def __init__(self, site_state: Path, run: str) -> None:
        if not re.fullmatch(r"[a-z0-9-]{1,64}", run):
            raise TypedError("run", "is not the name of a run")
        self.folder = site_state / "runs" / run

    def versions(self) -> list[int]:
        """What there is, oldest first."""
        return sorted(int(path.stem.removeprefix("state-")) for path in self.folder.glob("state-*.safetensors"))

    def read(self, kind: Any, archs: Mapping[str, Arch], until: int) -> tuple[int, Any | None]:
        """The newest version that has seen at most `until` exchanges, and its state; 0 and None if there is none."""
        known = [version for version in self.versions() if version <= until]
        if not known:
            return 0, None
        path = self._path(known[-1])
        tensors, about = read_tensors(path)
        try:
            return known[-1], unpack(kind, about["state"], tensors, archs, "state")
        except (TypedError, KeyError) as error:
            raise RunError(f"{path}: damaged: {error}; delete it to go on with the state before") from error

    def write(self, version: int, state: Any) -> None:
        """Keep a new version; those that cannot be asked for any more go."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        tensors: dict[str, Tensor] = {}
        body = pack(state, tensors, "state")
        write_tensors(self._path(version), tensors, {"format": FORMAT, "state": body})
        for old in [v for v in self.versions() if v > version] + [v for v in self.versions() if v <= version][:-KEPT]:
            self._path(old).unlink()

    def spent(self) -> Ledger:
        """What this run has used of the site's privacy."""
        path = self.folder / LEDGER
        if not path.exists():
            return ()
        try:
            return build(Ledger, json.loads(path.read_text(encoding="utf-8")))  # type: ignore[no-any-return]
        except (TypedError, ValueError, OSError) as error:
            raise RunError(f"{path}: damaged: {error}; nothing more is trained in this run") from error

    def spend(self, ledger: Ledger) -> None:
        """Write down what has been used, before anything that it paid for is sent."""
        if ledger:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_json(self.folder / LEDGER, [asdict(each) for each in ledger])

    def _path(self, version: int) -> Path:
        return self.folder / f"state-{version:06d}.safetensors"


def exchanges(phases: tuple[str, ...], when: Round) -> int:
    """How many exchanges there were before this one."""
    return when.t * len(phases) + phases.index(when.phase)
