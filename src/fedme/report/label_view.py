"""Samples per client and label."""

from typing import Any

from fedme.report.run_data import Run


def view(run: Run) -> dict[str, Any] | None:
    """Label counts, clients by classes; None if the run did not record them."""
    if run.labels is None:
        return None
    clients = run.labels["clients"]
    classes = list(dict.fromkeys(name for client in clients.values() for name in client["labels"]))
    return {
        "classes": classes,
        "counts": [[clients[client]["labels"].get(name, 0) for name in classes] for client in run.clients],
        "parts": [[clients[client][part] for part in ("train", "val", "test")] for client in run.clients],
    }
