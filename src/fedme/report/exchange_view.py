"""Which client lent its model to which other in every round, and whether the borrower adopted it."""

from typing import Any

from fedme.report.run_data import Run


def view(run: Run) -> dict[str, Any] | None:
    """Per round and borrower, the lender (its position among the clients, or -1) and whether its model was adopted.

    None for methods without an exchange: they record no lender.
    """
    if not any("lender" in notes for clients in run.notes.values() for notes in clients.values()):
        return None
    position = {client: index for index, client in enumerate(run.clients)}
    rounds = [[run.notes.get(t, {}).get(client, {}) for client in run.clients] for t in run.rounds]
    return {
        "lenders": [[position.get(notes.get("lender", ""), -1) for notes in clients] for clients in rounds],
        "adopted": [[int(bool(notes.get("adopts"))) for notes in clients] for clients in rounds],
    }


def totals(run: Run) -> tuple[int, int]:
    """The number of models lent, and of those adopted."""
    loans = [notes for clients in run.notes.values() for notes in clients.values() if notes.get("lender")]
    return len(loans), sum(bool(notes.get("adopts")) for notes in loans)
