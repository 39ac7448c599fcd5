"""Which cluster every client is in, round by round."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from fedme.core.data import ClientId
from fedme.report.run_data import Run


def view(run: Run) -> dict[str, Any] | None:
    """The cluster by round and client (-1: took no part); None for methods without clusters, or when there is only one."""
    rounds = [
        {client: int(notes["cluster"]) for client, notes in run.notes.get(t, {}).items() if "cluster" in notes}
        for t in run.rounds
    ]
    if max((cluster for each in rounds for cluster in each.values()), default=0) == 0:
        return None
    # k-means numbers its clusters anew each time; models that a server keeps (no lender is told) have numbers of their own.
    anew = any("lender" in notes for each in run.notes.values() for notes in each.values())
    steady = renumbered(rounds) if anew else rounds
    return {"of": [[each.get(client, -1) for client in run.clients] for each in steady], "renumbered": anew}


def renumbered(rounds: list[dict[ClientId, int]]) -> list[dict[ClientId, int]]:
    """The same groups, numbered so that as many clients as possible keep the number they had last."""
    last: dict[ClientId, int] = {}
    found = []
    for each in rounds:
        names = _matched(each, last)
        now = {client: names[cluster] for client, cluster in each.items()}
        last |= now
        found.append(now)
    return found


def _matched(now: Mapping[ClientId, int], last: Mapping[ClientId, int]) -> dict[int, int]:
    groups = sorted(set(now.values()))
    numbers = range(max([len(groups) - 1, *last.values()]) + 1)
    shared = np.zeros((len(groups), len(numbers)))
    for client, cluster in now.items():
        if client in last:
            shared[groups.index(cluster), last[client]] += 1
    # Ties go to small numbers, so that the first round begins with 0.
    cost = -shared + 1e-6 * np.arange(len(numbers))
    chosen = linear_sum_assignment(cost)
    return {groups[row]: int(column) for row, column in zip(*chosen, strict=True)}
