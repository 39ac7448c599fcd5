"""The cluster of every client, round by round."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from fedme.core.data import ClientId
from fedme.report.run_data import Run


def view(run: Run) -> dict[str, Any] | None:
    """The cluster by round and client (-1: did not take part); None for methods without clusters or with only one."""
    rounds = [
        {client: int(notes["cluster"]) for client, notes in run.notes.get(t, {}).items() if "cluster" in notes}
        for t in run.rounds
    ]
    if max((cluster for clusters in rounds for cluster in clusters.values()), default=0) == 0:
        return None
    # FedMe runs k-means in every round, which numbers clusters arbitrarily. Methods without lenders keep their numbers.
    arbitrary = any("lender" in notes for clients in run.notes.values() for notes in clients.values())
    rounds = renumbered(rounds) if arbitrary else rounds
    return {"of": [[clusters.get(client, -1) for client in run.clients] for clusters in rounds], "renumbered": arbitrary}


def renumbered(rounds: list[dict[ClientId, int]]) -> list[dict[ClientId, int]]:
    """The same groups, numbered so that as many clients as possible keep their last number."""
    last: dict[ClientId, int] = {}
    result = []
    for clusters in rounds:
        numbers = _matched(clusters, last)
        result.append({client: numbers[cluster] for client, cluster in clusters.items()})
        last |= result[-1]
    return result


def _matched(clusters: Mapping[ClientId, int], last: Mapping[ClientId, int]) -> dict[int, int]:
    groups = sorted(set(clusters.values()))
    numbers = range(max([len(groups) - 1, *last.values()]) + 1)
    overlap = np.zeros((len(groups), len(numbers)))
    for client, cluster in clusters.items():
        if client in last:
            overlap[groups.index(cluster), last[client]] += 1
    # Ties go to small numbers, so that the first round begins with 0.
    cost = -overlap + 1e-6 * np.arange(len(numbers))
    return {groups[row]: int(column) for row, column in zip(*linear_sum_assignment(cost), strict=True)}
