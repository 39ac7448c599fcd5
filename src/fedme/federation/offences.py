"""Clients that sent invalid replies, and their quarantine."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fedme.core.data import ClientId
from fedme.learning.robust_aggregation import Defence

FOR_GOOD = 2**31


@dataclass(frozen=True)
class OffenceRecord:
    """A client's invalid replies since its last quarantine, the last reason, and the end of its quarantine."""

    offences: int = 0
    reason: str = ""
    until: int = 0  # the first round after the quarantine

    def words(self) -> str:
        """Why the client is not asked."""
        long = "for good" if self.until == FOR_GOOD else f"until round {self.until}"
        return f"quarantined {long}; last {self.reason}"


def quarantined(offences: Mapping[ClientId, OffenceRecord], t: int) -> dict[ClientId, OffenceRecord]:
    """The clients in quarantine in round `t`."""
    return {client: record for client, record in offences.items() if record.until > t}


def record_offences(
    offences: Mapping[ClientId, OffenceRecord], refused: Iterable[tuple[ClientId, str]], t: int, defence: Defence
) -> dict[ClientId, OffenceRecord]:
    """The offences after round `t`, in which the replies of these clients were rejected."""
    after = dict(offences)
    for client, reason in refused:
        now = OffenceRecord(after.get(client, OffenceRecord()).offences + 1, reason)
        if defence.quarantine is not None and now.offences >= defence.quarantine:
            long = defence.quarantine_rounds
            now = replace(now, offences=0, until=FOR_GOOD if long is None else t + 1 + long)
        after[client] = now
    return after
