"""Who lent a model to whom in every round, and whether the borrower kept it."""

from typing import Any

from fedme.report.run_data import Run


def view(run: Run) -> dict[str, Any] | None:
    """For every round and borrower the lender (its place among the clients, or -1) and whether the guest was adopted.

    None for methods without an exchange: those that tell no lender.
    """
    if not any("lender" in notes for each in run.notes.values() for notes in each.values()):
        return None
    place = {client: index for index, client in enumerate(run.clients)}
    lenders, adopted = [], []
    for t in run.rounds:
        mine = [run.notes.get(t, {}).get(client, {}) for client in run.clients]
        lenders.append([place.get(notes.get("lender", ""), -1) for notes in mine])
        adopted.append([int(bool(notes.get("adopts"))) for notes in mine])
    return {"lenders": lenders, "adopted": adopted}


def totals(run: Run) -> tuple[int, int]:
    """How many models were lent, and how many of them were adopted."""
    told = [notes for each in run.notes.values() for notes in each.values() if notes.get("lender")]
    return len(told), sum(bool(notes.get("adopts")) for notes in told)
