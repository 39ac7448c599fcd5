"""What a family of runs cost: bytes, seconds and parameters."""

import statistics
from collections import Counter
from typing import Any

from fedme.artifacts import saved_models
from fedme.core.atomic_files import RunError
from fedme.report import lineage_view
from fedme.report.formats import count, duration, size
from fedme.report.run_data import Family, Run


def sent(family: Family) -> float:
    """Bytes sent in both directions, mean over seeds."""
    return statistics.fmean(sum(run.sent.values()) for run in family.runs)


def seconds(family: Family) -> tuple[float, float]:
    """Seconds of all clients together and of the server, mean over seeds."""
    at_clients, at_server = (
        statistics.fmean(float(run.result[key]) for run in family.runs) for key in ("client_seconds", "server_seconds")
    )
    return at_clients, at_server


def parameters(run: Run) -> dict[str, tuple[int, int]]:
    """By architecture of the personal models: the number of its parameters and of the clients that hold it."""
    held = lineage_view.architectures(run)[-1]
    found = {}
    for arch, many in Counter(held.values()).most_common():
        for client in (client for client in run.clients if held.get(client) == arch):
            try:
                about = saved_models.describe(saved_models.folder_of(run.folder, client))
            except RunError:
                break  # the run is not finished, or its models were deleted
            if about.get("arch") == arch and isinstance(about.get("parameters"), int):
                found[arch] = about["parameters"], many
                break
    return found


def sentences(family: Family) -> list[str]:
    """The same as text."""
    at_clients, at_server = seconds(family)
    total = sent(family)
    text = [f"{size(total)} were sent in total, in both directions." if total else "Nothing was sent."]
    text.append(f"Clients computed for {duration(at_clients)} together, the server for {duration(at_server)}.")
    known = parameters(family.runs[0])
    if known:
        listed = ", ".join(f"{arch} {parameters:,} ({many})" for arch, (parameters, many) in known.items())
        text.append(f"Parameters of the personal models, and clients that hold them: {listed}.")
    return [" ".join(text)]


def cells(family: Family) -> list[Any]:
    """Bytes, seconds of clients and server, and parameters per client, as text and number."""
    at_clients, at_server = seconds(family)
    mean = mean_parameters(family.runs[0])
    return [
        [size(sent(family)), sent(family)],
        [duration(at_clients), at_clients],
        [duration(at_server), at_server],
        "-" if mean is None else [count(mean), mean],
    ]


def mean_parameters(run: Run) -> float | None:
    """The parameters of a personal model, mean over clients."""
    known = parameters(run)
    many = sum(clients for _, clients in known.values())
    return sum(value * clients for value, clients in known.values()) / many if many else None
