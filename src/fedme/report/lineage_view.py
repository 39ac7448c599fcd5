"""Which architecture every client holds, at the start and after every round, and at which client its model began."""

from typing import Any

from fedme.core.data import ClientId
from fedme.report.run_data import PERSONAL, Run


def view(run: Run) -> dict[str, Any]:
    """Architectures as places in `names` (-1: not known), and the clients where models began; the start, then the rounds."""
    held = architectures(run)
    names = list(dict.fromkeys(name for each in held for name in each.values()))
    place = {client: index for index, client in enumerate(run.clients)}
    return {
        "names": names,
        "held": [[names.index(each[client]) if client in each else -1 for client in run.clients] for each in held],
        "began": [[place[each[client]] for client in run.clients] for each in origins(run)],
    }


def architectures(run: Run) -> list[dict[ClientId, str]]:
    """What clients hold at the start and after each round: as evaluated where they were, else as told, else as before."""
    personal = run.scores.get(PERSONAL) or run.scores.get(("personal", "round", "val"), {})
    # At the start: the first that is known of a client, which it had kept till then.
    holds: dict[ClientId, str] = {}
    for t in sorted(personal, reverse=True):
        holds |= {client: score["arch"] for client, score in personal[t].items()}
    for t in reversed(run.rounds):
        holds |= {client: notes["own"] for client, notes in run.notes.get(t, {}).items() if "own" in notes}
    found = [dict(holds)]
    for t in run.rounds:
        for client, notes in run.notes.get(t, {}).items():
            if notes.get("adopts"):
                holds[client] = notes["guest"]
        holds |= {client: score["arch"] for client, score in personal.get(t, {}).items()}
        found.append(dict(holds))
    return found


def origins(run: Run) -> list[dict[ClientId, ClientId]]:
    """At which client the model began that a client holds at the start and after each round: adopting takes over a line."""
    began = {client: client for client in run.clients}
    found = [began]
    for t in run.rounds:
        told = run.notes.get(t, {})
        taken = {me: notes["lender"] for me, notes in told.items() if notes.get("adopts") and notes.get("lender")}
        began = {me: began.get(taken.get(me, me), me) for me in run.clients}
        found.append(began)
    return found
