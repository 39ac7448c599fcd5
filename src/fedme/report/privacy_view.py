"""Per client: the privacy budget spent, and how well membership inference works on its models, if the run was audited."""

from collections.abc import Mapping
from typing import Any

from fedme.auditing.run_audit import EVERYBODY
from fedme.report.run_data import Run
from fedme.results.views import private


def view(run: Run) -> dict[str, Any] | None:
    """A table with a row per client; None for a run that is neither private nor audited."""
    epsilon = run.result.get("privacy", {}).get("epsilon", {})
    results = {(row["client"], _attack(row)): row for row in (run.audit["rows"] if run.audit else [])}
    attacks = list(dict.fromkeys(attack for _, attack in results))
    if not epsilon and not results:
        return None
    rows = []
    for client in (*run.clients, EVERYBODY):
        spent = [_epsilon(epsilon[client]) if client in epsilon else ""] if epsilon else []
        cells = [*spent, *(_auc(results.get((client, attack))) for attack in attacks)]
        rows += [[client, *cells]] if any(cells) else []
    header = ["client", *(["epsilon"] if epsilon else []), *(f"{by}, {model}, {attack}" for by, model, attack in attacks)]
    return {"header": header, "rows": rows}


def sentences(run: Run) -> list[str]:
    """The same as text."""
    text = [private(run.result["privacy"])] if "privacy" in run.result else []
    overall = [row for row in (run.audit["rows"] if run.audit else []) if row["client"] == EVERYBODY]
    if overall:
        worst = max(overall, key=lambda row: row["auc"])
        observer = "the server sees" if worst["seen by"] == "server" else "the other clients see"
        text.append(
            f"Audit: from what {observer} ({worst['model']}), the {worst['attack']} attack separates training samples from "
            f"others with AUC {_auc(worst)}, and detects {100 * worst['found']:.1f} % of them at a false positive rate of 1 %."
        )
    return text


def _attack(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["seen by"], row["model"], row["attack"]


def _epsilon(value: float | None) -> str:
    return "no bound" if value is None else f"{value:.2f}"


def _auc(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else f"{row['auc']:.2f} ({row['auc_low']:.2f} to {row['auc_high']:.2f})"
