"""A site's private state on its own disk: one file per version, written atomically.

The version is the number of exchanges of the run that the state has seen. It travels with every reply, so the server notices a
site that has lost its state. The version before the newest is kept for a round that the server repeats.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedme.core.atomic_files import RunError, read_tensors, write_tensors
from fedme.core.method import Round
from fedme.core.model import Arch
from fedme.core.serialization import pack, unpack
from fedme.core.typed import TypedError
from fedme.learning.accountant import Ledger
from fedme.running.best_round import BestRound

FORMAT = "fedme-private-1"
MAX_LEDGER_ENTRIES = 16  # that a server accepts; a method has one per size of its training parts
VERSIONS_KEPT = 2
BEST = "best-round.safetensors"
RUN = re.compile(r"[a-z0-9-]{1,64}")  # a run's name at the sites


def check_ledger(ledger: Ledger) -> Ledger:
    """Return the ledger that a site sent, or raise a TypedError if it is too long."""
    if len(ledger) > MAX_LEDGER_ENTRIES:
        raise TypedError("spent", f"must have at most {MAX_LEDGER_ENTRIES} entries, got {len(ledger)}")
    return ledger


class PrivateState:
    """The states of one run at one site."""

    def __init__(self, site_state: Path, run: str) -> None:
        if not RUN.fullmatch(run):
            raise TypedError("run", "must be 1 to 64 characters of a-z, 0-9 and '-'")
        self.folder = site_state / "runs" / run

    def versions(self) -> list[int]:
        """The existing versions, oldest first."""
        return sorted(int(path.stem.removeprefix("state-")) for path in self.folder.glob("state-*.safetensors"))

    def read(self, state_type: Any, archs: Mapping[str, Arch], exchanges: int) -> tuple[int, Any | None]:
        """The newest version that has seen at most this many exchanges, and its state; (0, None) if there is none."""
        version = max((version for version in self.versions() if version <= exchanges), default=None)
        if version is None:
            return 0, None
        path = self._path(version)
        tensors, body = read_tensors(path)
        try:
            return version, unpack(state_type, body["state"], tensors, archs, "state")
        except (TypedError, KeyError) as error:
            raise RunError(f"{path}: damaged: {error}; delete it to continue from the version before") from error

    def write(self, version: int, state: Any) -> None:
        """Save a new version, and delete those that the server cannot ask for any more."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        tensors: dict[str, Tensor] = {}
        body = pack(state, tensors, "state")
        write_tensors(self._path(version), tensors, {"format": FORMAT, "state": body})
        versions = self.versions()
        current = [v for v in versions if v <= version][-VERSIONS_KEPT:]
        for old in set(versions) - set(current):
            self._path(old).unlink()

    def read_best(self, archs: Mapping[str, Arch]) -> BestRound | None:
        """The site's model after its best round so far; None if there is none."""
        path = self.folder / BEST
        if not path.exists():
            return None
        tensors, body = read_tensors(path)
        try:
            best: BestRound = unpack(BestRound, body["best"], tensors, archs, "best")
            return best
        except (TypedError, KeyError) as error:
            raise RunError(f"{path}: damaged: {error}; delete it to continue without") from error

    def write_best(self, best: BestRound) -> None:
        """Replace the site's model after its best round."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        tensors: dict[str, Tensor] = {}
        body = pack(best, tensors, "best")
        write_tensors(self.folder / BEST, tensors, {"format": FORMAT, "best": body})

    def _path(self, version: int) -> Path:
        return self.folder / f"state-{version:06d}.safetensors"


def exchanges_before(phases: tuple[str, ...], when: Round) -> int:
    """The number of exchanges of the run before this one."""
    return when.t * len(phases) + phases.index(when.phase)
