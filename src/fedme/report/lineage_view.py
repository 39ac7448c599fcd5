"""The architecture of every client's model, at the start and after every round, and the client it descends from."""

from typing import Any

from fedme.core.data import ClientId
from fedme.report.run_data import PERSONAL, Run


def view(run: Run) -> dict[str, Any]:
    """Architectures as positions in `names` (-1: unknown) and origins as positions of clients: the start, then every round."""
    held = architectures(run)
    names = list(dict.fromkeys(name for archs in held for name in archs.values()))
    position = {client: index for index, client in enumerate(run.clients)}
    return {
        "names": names,
        "held": [[names.index(archs[client]) if client in archs else -1 for client in run.clients] for archs in held],
        "began": [[position[origin[client]] for client in run.clients] for origin in origins(run)],
    }


def architectures(run: Run) -> list[dict[ClientId, str]]:
    """The architecture of each client at the start and after each round: as evaluated, else as noted, else as before."""
    personal = run.scores.get(PERSONAL) or run.scores.get(("personal", "round", "val"), {})
    # At the start a client holds the first architecture that is known of it.
    held: dict[ClientId, str] = {}
    for t in sorted(personal, reverse=True):
        held |= {client: score["arch"] for client, score in personal[t].items()}
    for t in reversed(run.rounds):
        held |= {client: notes["own"] for client, notes in run.notes.get(t, {}).items() if "own" in notes}
    history = [held]
    for t in run.rounds:
        adopted = {client: notes["guest"] for client, notes in run.notes.get(t, {}).items() if notes.get("adopts")}
        evaluated = {client: score["arch"] for client, score in personal.get(t, {}).items()}
        history.append(history[-1] | adopted | evaluated)
    return history


def origins(run: Run) -> list[dict[ClientId, ClientId]]:
    """The client from whose first model each client's model descends, at the start and after each round."""
    history = [{client: client for client in run.clients}]
    for t in run.rounds:
        notes = run.notes.get(t, {})
        lender = {client: note["lender"] for client, note in notes.items() if note.get("adopts") and note.get("lender")}
        history.append({client: history[-1].get(lender.get(client, client), client) for client in run.clients})
    return history


def lost(run: Run) -> list[str]:
    """Architectures that a client held at the start and none holds at the end."""
    held = architectures(run)
    return [name for name in dict.fromkeys(held[0].values()) if name not in held[-1].values()]
