"""Per client: does joining help? The gain over the best that it could train alone, with its interval and the verdict."""

import math
import shlex
from collections.abc import Sequence
from typing import Any

from fedme.report.run_data import Family, Run
from fedme.results import verdicts
from fedme.results.verdicts import Verdict

ALARMS = 5  # shown as text; the others are in the table


def of_family(family: Family) -> list[Verdict]:
    """The verdicts over all seeds if `fedme verdict` was asked for all of them, else those of the first run that has some."""
    judged = [run.verdicts for run in family.runs if run.verdicts]
    if not judged:
        return []
    return verdicts.over_seeds(judged) if len(judged) == len(family.runs) else list(judged[0])


def view(family: Family, run: Run) -> dict[str, Any]:
    """What the chart and its table show; without verdicts, why there are none."""
    if run.isolated:
        return {"missing": "here every client trained alone, which is what others are compared with."}
    judged = of_family(family)
    if not judged:
        command = f"fedme verdict {shlex.quote(str(run.folder))}"
        return {"missing": f"has no verdicts yet: `{command}` compares it with training every client alone."}
    known = {verdict.client: verdict for verdict in judged}
    first = judged[0]
    over = f"{first.seeds} seeds" if first.seeds > 1 else f"{first.folds} folds" if first.folds > 1 else ""
    return {
        "missing": None,
        "over": over,
        "summary": verdicts.overall(judged).words(),
        "alarms": alarm_lines(judged),
        "clients": [None if client not in known else _client(known[client]) for client in run.clients],
    }


def alarm_lines(judged: Sequence[Verdict]) -> list[str]:
    """The first alarms, and how many more there are."""
    lines = verdicts.alarms(judged)
    more = [f"ALARM: joining hurts {len(lines) - ALARMS} more clients; the table names them."] if len(lines) > ALARMS else []
    return lines[:ALARMS] + more


def _client(verdict: Verdict) -> dict[str, Any]:
    gain = verdict.main
    return {
        "gain": _rounded(gain.gain),
        "low": _rounded(gain.low),
        "high": _rounded(gain.high),
        "value": _rounded(verdict.value),
        "alone": _rounded(verdict.local),
        "constant": _rounded(verdict.constant),
        "arch": verdict.local_arch,
        "samples": verdict.samples,
        "decision": verdict.decision,
        "label": verdict.label,
        "words": verdict.words(),
    }


def _rounded(value: float | None) -> float | None:
    """None for an end of an interval that does not exist."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
