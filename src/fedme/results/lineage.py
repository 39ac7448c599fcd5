"""The lineage of personal models: the client that began a model, and its adoptions, from the notes in the records."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedme.core.data import ClientId


@dataclass(frozen=True)
class Adoption:
    """A client adopts the model of another client after this round (from 0)."""

    round: int
    by: ClientId
    lender: ClientId


@dataclass(frozen=True)
class Lineage:
    """The client that began a model, its adoptions, and the cluster of the last round, if there is one."""

    origin: ClientId
    adoptions: tuple[Adoption, ...] = ()
    cluster: int | None = None


def lineages(rows: Iterable[Mapping[str, Any]], clients: Iterable[ClientId]) -> dict[ClientId, Lineage]:
    """The lineage of every client's model, from the rows of a run."""
    current = {client: Lineage(client) for client in clients}
    rounds: dict[int, dict[ClientId, Mapping[str, Any]]] = {}
    for row in rows:
        notes = row.get("notes")
        if notes and not notes.get("missing"):
            rounds.setdefault(row["round"], {})[row["client"]] = notes
    for t in sorted(rounds):
        before = dict(current)  # all clients of a round adopt at the same time
        for client, notes in rounds[t].items():
            if client not in current:
                continue
            model, lender = before[client], notes.get("lender")
            if notes.get("adopts") and lender in before:
                model = Lineage(before[lender].origin, (*before[lender].adoptions, Adoption(t, client, lender)))
            current[client] = Lineage(model.origin, model.adoptions, notes.get("cluster", model.cluster))
    return current
