"""Where a personal model comes from: who began it, and who adopted it when. Read from what clients noted each round."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedme.core.data import ClientId


@dataclass(frozen=True)
class Adoption:
    """A client took over another one's model after this round (from 0)."""

    round: int
    by: ClientId
    lender: ClientId


@dataclass(frozen=True)
class Lineage:
    """The client whose model it was at first, and the adoptions since; the cluster of the last round, if there was one."""

    origin: ClientId
    adoptions: tuple[Adoption, ...] = ()
    cluster: int | None = None


def lineages(rows: Iterable[Mapping[str, Any]], clients: Iterable[ClientId]) -> dict[ClientId, Lineage]:
    """The ancestry of every client's model, from the rows of a run."""
    found = {client: Lineage(client) for client in clients}
    rounds: dict[int, dict[ClientId, Mapping[str, Any]]] = {}
    for row in rows:
        notes = row.get("notes")
        if notes and not notes.get("missing"):
            rounds.setdefault(row["round"], {})[row["client"]] = notes
    for t in sorted(rounds):
        before = dict(found)  # all clients of a round adopt at the same time
        for client, notes in rounds[t].items():
            if client not in found:
                continue
            model, lender = before[client], notes.get("lender")
            if notes.get("adopts") and lender in before:
                model = Lineage(before[lender].origin, (*before[lender].adoptions, Adoption(t, client, lender)))
            found[client] = Lineage(model.origin, model.adoptions, notes.get("cluster", model.cluster))
    return found
