"""What a site has spent of its privacy: one account per site key, over all runs, servers and data files of the site.

The account is a file of lines that are only appended to, outside the state of the runs. A line is on disk before the result
that it pays for leaves the site. The site's limit holds for the sum of all lines since the account was opened. Only the site
itself can open another account, for new data (`fedme deploy budget --new-data`); the lines of earlier accounts remain.
"""

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from fedme.config.experiment import ConfigError
from fedme.config.settings import PrivacyOptions
from fedme.core.atomic_files import RunError
from fedme.core.data import ClientData
from fedme.core.typed import TypedError, build
from fedme.deployment import append_only
from fedme.deployment.site_settings import Site
from fedme.learning.accountant import Ledger, PrivacyError, added, epsilon
from fedme.running import privacy_budget

TOLERANCE = 1 + 1e-9  # of rounding, where a sum of costs is compared with a limit


@dataclass(frozen=True)
class PrivacyAccount:
    """The account of a site; `limit` is the epsilon that all runs together must not exceed, None if there is no limit."""

    path: Path
    server: str  # the address that costs are noted with
    limit: float | None
    delta: float

    @classmethod
    def of(cls, site: Site) -> "PrivacyAccount":
        """The account of a site's key, with the limit of site.toml, or else of the experiment that the site agreed to."""
        own, agreed, server = site.settings.privacy, site.experiment.settings.privacy, site.settings.server
        name = "insecure" if server.insecure else key_name(site.path(server.key))
        limit = own.epsilon if own.epsilon is not None else agreed.epsilon if agreed is not None else None
        delta = own.delta if own.delta is not None else agreed.delta if agreed is not None else PrivacyOptions.delta
        return cls(site.records / f"privacy-{name}.jsonl", server.address, limit, delta)

    def lines(self) -> list[dict[str, Any]]:
        """The lines of the open account."""
        return _open_account(append_only.lines(self.path))

    def ledger(self, run: str | None = None) -> Ledger:
        """What was spent, by all runs or by one."""
        return self._sum(line for line in self.lines() if run is None or line.get("run") == run)

    def epsilon(self, run: str | None = None) -> float:
        """The epsilon of what was spent, by all runs or by one."""
        return epsilon(self.ledger(run), self.delta)

    def require_room(self, run: str, planned: Ledger) -> None:
        """Refuse a run that would take the account beyond its limit, before the run starts or continues."""
        if self.limit is None:
            return
        lines = self.lines()
        others = self._sum(line for line in lines if line.get("run") != run)
        own = self._sum(line for line in lines if line.get("run") == run)
        needed = max(epsilon(added(others, ledger), self.delta) for ledger in (planned, own))
        if needed > self.limit * TOLERANCE:
            raise PrivacyError(
                f"this run would take the site's privacy account from epsilon {epsilon(added(others, own), self.delta):.3g} to "
                f"{needed:.3g}, beyond its limit of {self.limit:g}; the site can open another account for new data only"
            )

    def charge(self, run: str, round_number: int, work: str, costs: Ledger) -> None:
        """Write down costs before their result leaves the site; raise an error instead if they would exceed the limit."""
        if not costs:
            return
        with append_only.opened(self.path) as file:
            spent = added(self._sum(_open_account(append_only.complete(self.path, file))), costs)
            if self.limit is not None and (total := epsilon(spent, self.delta)) > self.limit * TOLERANCE:
                raise PrivacyError(
                    f"this would take the site's privacy account to epsilon {total:.3g}, beyond its limit of {self.limit:g}; "
                    "nothing was sent"
                )
            entry = {"run": run, "server": self.server, "round": round_number, "work": work}
            append_only.add(file, {"time": _now(), **entry, "costs": [asdict(cost) for cost in costs]})

    def open_another(self, who: str, reason: str) -> None:
        """Begin a new account at epsilon 0, because the site's training samples are new. The lines so far remain."""
        append_only.append(self.path, {"time": _now(), "new_data": reason, "by": who, "closed_at": self.epsilon()})

    def closed(self) -> list[dict[str, Any]]:
        """When and why earlier accounts were closed."""
        return [line for line in append_only.lines(self.path) if "new_data" in line]

    def runs(self) -> list[dict[str, Any]]:
        """What every run of the open account has spent, oldest first."""
        lines = self.lines()
        runs = dict.fromkeys(str(line.get("run")) for line in lines)
        return [
            {
                "run": run,
                "server": str(entries[0].get("server")),
                "first": str(entries[0].get("time")),
                "last": str(entries[-1].get("time")),
                "answers": len(entries),
                "epsilon": epsilon(self._sum(entries), self.delta),
            }
            for run in runs
            if (entries := [line for line in lines if str(line.get("run")) == run])
        ]

    def _sum(self, lines: Iterable[Mapping[str, Any]]) -> Ledger:
        total: Ledger = ()
        try:
            for line in lines:
                total = added(total, build(Ledger, line.get("costs")))
        except (TypedError, ValueError) as error:
            raise RunError(f"{self.path}: damaged: {error}; restore it from a backup") from error
        return total


def key_name(path: Path) -> str:
    """A short name of a site's key: the hash of its public half."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None).public_key()
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path}: not a readable private key: {error}") from error
    public = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return hashlib.sha256(public).hexdigest()[:16]


def require_budget(site: Site, run: str, data: ClientData) -> PrivacyAccount:
    """The site's account, if it has room for the whole run; an error otherwise."""
    if site.settings.privacy.epsilon is not None and site.experiment.settings.privacy is None:
        raise ConfigError(
            f"this site limits what leaves it to epsilon {site.settings.privacy.epsilon:g}, but the experiment has no [privacy]"
        )
    account = PrivacyAccount.of(site)
    if site.experiment.settings.privacy is not None:
        account.require_room(run, privacy_budget.planned_cost(site.experiment, len(data.train)))
    return account


def _open_account(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    last = max((i for i, line in enumerate(lines) if "new_data" in line), default=-1)
    return lines[last + 1 :]


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
