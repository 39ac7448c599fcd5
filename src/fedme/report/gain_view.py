"""Who gained and who lost by joining: every client beside itself alone, with intervals, and corrected for their number."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedme.report import against_local, client_view
from fedme.report.run_data import Family, Run
from fedme.results import verdicts
from fedme.results.verdicts import Overall, Verdict

ALARMS = 5  # shown as text; the others are in the table
BEST_ALONE = "the best that each client could train alone"
STAGES = {"round": "Local", "finetuned": "Local, after fine-tuning here"}
SEEDS = 3  # from so many on, runs with Local are compared over all seeds; two seeds cannot tell anything apart by their spread


@dataclass(frozen=True)
class Comparison:
    """The clients of a family beside themselves alone; `against` says what they had alone."""

    key: str
    against: str
    verdicts: Sequence[Verdict]

    @cached_property
    def overall(self) -> Overall:
        """Over all clients, corrected for their number."""
        return verdicts.overall(self.verdicts)

    @property
    def known(self) -> bool:
        """Whether any client has an interval; without answers to single samples there is none."""
        return any(math.isfinite(verdict.main.p) for verdict in self.verdicts)

    def words(self) -> str:
        """The counts and the mean gain in a sentence or two."""
        if self.known:
            return self.overall.words(self.against)
        measure = self.overall.measure
        mean = f"{measure.title} {verdicts.signed(measure, self.overall.mean)}{' points' if measure.percent else ''}"
        return (
            f"Compared with {self.against}, the mean gain is {mean}. Whether single clients differ by more than chance cannot "
            "be told: this needs a finished run, with the answers of its models."
        )

    def alarms(self) -> list[str]:
        """The first alarms, of clients that lost beyond chance, and how many more there are."""
        lost = set(self.overall.worse)
        lines = verdicts.alarms([verdict for verdict in self.verdicts if verdict.client in lost])
        more = [f"ALARM: joining hurts {len(lines) - ALARMS} more clients; the table names them."]
        return lines[:ALARMS] + (more if len(lines) > ALARMS else [])


def comparisons(family: Family, families: Sequence[Family]) -> list[Comparison]:
    """By `fedme verdict`, if it was asked; and beside a run of Local with the same samples, if the report has one."""
    if family.runs[0].isolated:
        return []
    comparisons_found = []
    judged = [run.verdicts for run in family.runs if run.verdicts]
    if judged:
        comparisons_found.append(Comparison("verdict", BEST_ALONE, _over_seeds(judged, len(family.runs))))
    runs = [run for other in families for run in other.runs]
    pairs = [(run, baseline) for run in family.runs if (baseline := client_view.local(run, runs)) is not None]
    if pairs and not SEEDS <= len(family.runs) == len(pairs):
        pairs = pairs[:1]
    seed = f", seed {pairs[0][0].result['seed']}" if 0 < len(pairs) < len(family.runs) else ""
    for stage, against in STAGES.items():
        of_seeds = [paired for pair in pairs if (paired := against_local.verdicts_of(*pair, stage))]
        if of_seeds:
            comparisons_found.append(Comparison(stage, against + seed, _over_seeds(of_seeds, len(pairs))))
    return comparisons_found


def _over_seeds(judged: Sequence[Sequence[Verdict]], seeds: int) -> list[Verdict]:
    """Over all seeds if all of them were compared, else those of the first that was."""
    return (verdicts.over_seeds(judged) or list(judged[0])) if len(judged) == seeds else list(judged[0])


def view(family: Family, compared: Sequence[Comparison]) -> dict[str, Any]:
    """What the chart and its table show; without any comparison, why there is none."""
    return {"missing": None if compared else missing(family), "compared": [_comparison(one) for one in compared]}


def missing(family: Family) -> str:
    """Why clients cannot be compared with themselves alone."""
    if family.runs[0].isolated:
        return "here every client trained alone, which is what others are compared with."
    return f"not compared with training alone yet: `{command(family.runs[0])}` does it."


def command(run: Run) -> str:
    """The command that compares."""
    return verdicts.command(run.folder)


def _comparison(one: Comparison) -> dict[str, Any]:
    first, overall = one.verdicts[0], one.overall
    over = f"{first.seeds} seeds" if first.seeds > 1 else f"{first.folds} folds" if first.folds > 1 else ""
    side = dict.fromkeys(overall.better, "gained") | dict.fromkeys(overall.worse, "lost")
    return {
        "key": one.key,
        "against": one.against,
        "over": over,
        "words": one.words(),
        "alarms": one.alarms(),
        "clients": [_client(verdict, side.get(verdict.client, "not clear")) for verdict in one.verdicts],
    }


def _client(verdict: Verdict, side: str) -> dict[str, Any]:
    gain = verdict.main
    return {
        "client": verdict.client,
        "side": side,
        "gain": _finite(gain.gain),
        "low": _rounded(gain.low),
        "high": _rounded(gain.high),
        "value": _finite(verdict.value),
        "alone": _finite(verdict.local),
        "constant": _finite(verdict.constant),
        "arch": verdict.local_arch,
        "samples": verdict.samples,
        "label": verdict.label,
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _rounded(value: float) -> float | None:
    """None for an end of an interval that does not exist."""
    return None if not math.isfinite(value) else float(f"{value:.4g}")
