"""What every client spent of its privacy, and what others could tell from its models, if that has been tried."""

from collections.abc import Mapping
from typing import Any

from fedme.auditing.run_audit import EVERYBODY
from fedme.report.run_data import Run
from fedme.results.views import private


def view(run: Run) -> dict[str, Any] | None:
    """A table with a line a client; None if there is nothing to say."""
    epsilon = run.result.get("privacy", {}).get("epsilon", {})
    rows = run.audit["rows"] if run.audit else []
    kinds = list(dict.fromkeys(_kind(row) for row in rows))
    if not epsilon and not rows:
        return None
    found = {(row["client"], _kind(row)): row for row in rows}
    clients = [
        client for client in (*run.clients, EVERYBODY) if any((client, kind) in found for kind in kinds) or client in epsilon
    ]
    header = ["client", *(["epsilon"] if epsilon else []), *(f"{by}, {model}, {attack}" for by, model, attack in kinds)]
    cells = [
        [
            client,
            *([_number(epsilon[client]) if client in epsilon else ""] if epsilon else []),
            *(_auc(found.get((client, kind))) for kind in kinds),
        ]
        for client in clients
    ]
    return {"header": header, "rows": cells}


def told(run: Run) -> list[str]:
    """The same in words."""
    text = [private(run.result["privacy"])] if "privacy" in run.result else []
    whole = [row for row in (run.audit["rows"] if run.audit else []) if row["client"] == EVERYBODY]
    if whole:
        worst = max(whole, key=lambda row: row["auc"])
        eyes = "the server sees" if worst["seen by"] == "server" else "the other clients see"
        text.append(
            f"Audit: from what {eyes} ({worst['model']}), the {worst['attack']} attack tells training samples from others "
            f"with AUC {_auc(worst)}, and finds {100 * worst['found']:.1f} % of them at 1 % false alarms."
        )
    return text


def _kind(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["seen by"], row["model"], row["attack"]


def _number(value: float | None) -> str:
    return "no bound" if value is None else f"{value:.2f}"


def _auc(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else f"{row['auc']:.2f} ({row['auc_low']:.2f} to {row['auc_high']:.2f})"
