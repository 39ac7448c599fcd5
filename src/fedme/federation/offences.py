"""Who has sent what could not be used, how often, and who is not asked any more because of it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fedme.core.data import ClientId
from fedme.learning.robust_aggregation import Defence

FOR_GOOD = 2**31


@dataclass(frozen=True)
class OffenceRecord:
    """What is remembered of a client: offences since it was last let in, the last one, and until when it is kept out."""

    offences: int = 0
    reason: str = ""
    until: int = 0  # it is asked again in this round

    def words(self) -> str:
        """Why it is not asked."""
        long = "for good" if self.until == FOR_GOOD else f"until round {self.until}"
        return f"quarantined {long}; last {self.reason}"


def quarantined(offences: Mapping[ClientId, OffenceRecord], t: int) -> dict[ClientId, OffenceRecord]:
    """The clients in quarantine in round `t`."""
    return {client: record for client, record in offences.items() if record.until > t}


def record_offences(
    offences: Mapping[ClientId, OffenceRecord], refused: Iterable[tuple[ClientId, str]], t: int, defence: Defence
) -> dict[ClientId, OffenceRecord]:
    """What is remembered after round `t`, in which the messages of these clients were refused."""
    after = dict(offences)
    for client, reason in refused:
        now = OffenceRecord(after.get(client, OffenceRecord()).offences + 1, reason)
        if defence.quarantine is not None and now.offences >= defence.quarantine:
            long = defence.quarantine_rounds
            now = replace(now, offences=0, until=FOR_GOOD if long is None else t + 1 + long)
        after[client] = now
    return after
