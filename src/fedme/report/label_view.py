"""Who has how many samples of which label."""

from typing import Any

from fedme.report.run_data import Run


def view(run: Run) -> dict[str, Any] | None:
    """The counts of a run, clients by classes; None where they were not recorded."""
    if run.labels is None:
        return None
    clients = run.labels["clients"]
    classes = list(dict.fromkeys(name for each in clients.values() for name in each["labels"]))
    return {
        "classes": classes,
        "counts": [[clients[client]["labels"].get(name, 0) for name in classes] for client in run.clients],
        "parts": [[clients[client][part] for part in ("train", "val", "test")] for client in run.clients],
    }
