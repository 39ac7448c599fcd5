"""Samples per client and label, with clients and labels in an order that puts similar ones side by side."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedme.report.run_data import Run

NEW_ORDER = 3  # from this number of clients or labels on they are sorted
MOST = 3000  # clients that are compared with each other


def view(run: Run) -> dict[str, Any] | None:
    """Label counts, clients by classes, and the order of clients by similarity; None if the run did not record them."""
    if run.labels is None:
        return None
    clients = run.labels["clients"]
    classes = list(dict.fromkeys(name for client in clients.values() for name in client["labels"]))
    counts = [[clients[client]["labels"].get(name, 0) for name in classes] for client in run.clients]
    return {
        "classes": classes,
        "counts": counts,
        "parts": [[clients[client][part] for part in ("train", "val", "test")] for client in run.clients],
        "order": similar(np.array(counts, dtype=float).reshape(len(counts), len(classes))),
    }


def similar(counts: NDArray[Any]) -> list[int]:
    """The rows in an order in which neighbours have similar distributions of labels: the leaves of a clustering tree."""
    from scipy.cluster.hierarchy import leaves_list, linkage

    rows, columns = counts.shape
    if rows < NEW_ORDER or columns < 2:
        return list(range(rows))
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    if rows > MOST:  # comparing all pairs takes too much memory: by the mean label
        return [int(row) for row in np.argsort(shares @ np.arange(columns), kind="stable")]
    # Hellinger distance: Euclidean between the roots. Ordering the leaves optimally costs too much for many clients.
    return [int(row) for row in leaves_list(linkage(np.sqrt(shares), "average", optimal_ordering=rows <= 150))]
