"""The plan of the runs that decide the claims: how many seeds, how long, and what decides most per hour.

`plan.toml` was committed before the runs: for every claim the scale, the margin, the number of seeds, and the differences that
were seen before it was made, with their deviations over seeds. After that only seeds are added, up to the planned number, and
no setting is chosen by a verdict.
"""

import functools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from fedme.core.typed import build
from fedme.reproduction.catalogue import DATA, Claim, Scale, claims, minutes, read_data, results
from fedme.reproduction.findings import Findings
from fedme.results.statistics import LEVEL, pairs_needed, power

UNKNOWN = 0.5  # the chance that a comparison decides which is not one of means
UNKNOWN_MEANS = (1.0, 2.0, 4.0)  # differences in points that are equally likely where none was seen


@dataclass(frozen=True)
class PlannedComparison:
    """A comparison of a claim: its sides, and the mean and the deviation of the differences over seeds, in points."""

    left: str
    right: str
    mean: float | None = None  # None: not known with the present settings
    std: float = 2.0
    seeds: int = 0  # behind the mean and, from two on, the deviation; otherwise the deviation is assumed


@dataclass(frozen=True)
class Row:
    """The plan of a claim at a scale."""

    claim: str
    scale: Scale
    seeds: int
    margin: float = 1.0
    comparisons: tuple[PlannedComparison, ...] = ()

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs that it compares."""
        return tuple(dict.fromkeys(side.partition(" ")[0] for seen in self.comparisons for side in (seen.left, seen.right)))

    @property
    def minutes(self) -> float:
        """The approximate time of all its runs on one processor."""
        return minutes(self.runs, self.scale) * self.seeds

    def needed(self, level: float = LEVEL) -> int | None:
        """The seeds with which a difference of the margin is found in 80 % of all cases, in every comparison."""
        counts = [pairs_needed(self.margin, seen.std, level) for seen in self.comparisons]
        return None if None in counts else max((count for count in counts if count is not None), default=None)

    def chance(self, claim: Claim, level: float = LEVEL) -> float:
        """The approximate chance that the planned seeds decide the claim, if the differences are as they were seen."""
        if claim.kind in ("sooner", "no later", "between", "steady", "slower"):
            return UNKNOWN
        outcomes = [self._outcomes(claim, seen, level) for seen in self.comparisons]
        if claim.need == "most":
            return sum(max(outcome) for outcome in outcomes) / len(outcomes)
        # Elsewhere the other comparisons have no runs: half of them or fewer can refute the claim, but not confirm it.
        holds = math.prod(yes for yes, _ in outcomes) if 2 * len(outcomes) > len(claim.pairs) else 0.0
        fails = 1 - math.prod(1 - no for _, no in outcomes)
        return min(1.0, holds + fails)

    def _outcomes(self, claim: Claim, seen: PlannedComparison, level: float) -> tuple[float, float]:
        """The chance that a comparison holds, and that it does not."""

        def above(distance: float) -> float:
            return power(distance, seen.std, self.seeds, level)

        if claim.kind == "greater":
            means = UNKNOWN_MEANS if seen.mean is None else (seen.mean,)
            return statistics.fmean(map(above, means)), statistics.fmean(above(-mean) for mean in means)
        mean = 0.0 if seen.mean is None else seen.mean
        below = above(claim.tolerance - mean)
        if claim.kind == "no better":
            return below, above(mean - claim.tolerance)
        return max(0.0, below + above(claim.tolerance + mean) - 1), above(abs(mean) - claim.tolerance)


@dataclass(frozen=True)
class Background:
    """Planned runs that decide no claim: those of a result that a paragraph of the page rests on."""

    result: str
    scale: Scale
    seeds: int
    why: str

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs of the result."""
        return results()[self.result].runs

    @property
    def minutes(self) -> float:
        """The approximate time of all its runs on one processor."""
        return minutes(self.runs, self.scale) * self.seeds

    @property
    def command(self) -> str:
        """The command that makes it."""
        return f"fedme reproduce {self.result} --scale {self.scale} --seeds {self.seeds}"


@dataclass(frozen=True)
class Step:
    """A part of the plan: a claim at a scale, or runs behind a paragraph, with what is missing."""

    row: Row | Background
    number: int  # of the claim; 0: none
    chance: float
    missing: tuple[tuple[str, int], ...]  # runs and seeds
    minutes: float  # on one processor

    @property
    def per_hour(self) -> float:
        """How many claims it decides per hour of one processor."""
        return self.chance / max(self.minutes / 60, 1e-9)

    @property
    def command(self) -> str:
        """The command that makes it."""
        if isinstance(self.row, Background):
            return self.row.command
        return f"fedme reproduce --claim {self.number} --scale {self.row.scale}"


@functools.cache
def rows() -> tuple[Row, ...]:
    """The committed plan."""
    return tuple(build(Row, table, f"{DATA.name}/plan.toml") for table in read_data("plan")["row"])


def backgrounds() -> list[Background]:
    """The planned runs behind paragraphs of the page."""
    return [build(Background, table, f"{DATA.name}/plan.toml") for table in read_data("plan")["background"]]


def numbered() -> dict[str, tuple[int, Claim]]:
    """Every claim that the page shows, by its text, with its number there."""
    shown = [claim for claim in claims() if claim.kind != "slower"]
    return {claim.text: (number, claim) for number, claim in enumerate(shown, 1)}


def order(finished: Mapping[Scale, Findings], hours: float, processors: int) -> list[Step]:
    """The steps that fit into so many hours, in the order of how much they decide per hour.

    Those behind paragraphs come after those that can decide a claim.

    Runs that several claims share count once: for the first of them.
    """
    known = numbered()
    planned: list[Row | Background] = [*rows(), *backgrounds()]
    level = 1 - (1 - LEVEL) / len(rows())  # the strictest level of Holm's correction
    done = _done(finished)
    chosen, left = list[Step](), hours * 60 * processors
    while planned:
        steps = [_step(row, known, done, level) for row in planned]
        steps = [step for step in steps if step.missing and step.minutes <= left]
        if not steps:
            break
        best = max(steps, key=lambda step: (step.per_hour, -step.number))
        chosen.append(best)
        planned.remove(best.row)
        left -= best.minutes
        done |= {(best.row.scale, run, seed) for run, seed in best.missing}
    return chosen


def missing(row: Row | Background, finished: Mapping[Scale, Findings]) -> list[tuple[str, int]]:
    """The planned runs and seeds of a claim at a scale that are not finished."""
    return _missing(row, _done(finished))


def _done(finished: Mapping[Scale, Findings]) -> set[tuple[Scale, str, int]]:
    return {
        (scale, run, seed) for scale, archive in finished.items() for run, by_seed in archive.runs.items() for seed in by_seed
    }


def _missing(row: Row | Background, done: set[tuple[Scale, str, int]]) -> list[tuple[str, int]]:
    return [(run, seed) for seed in range(row.seeds) for run in row.runs if (row.scale, run, seed) not in done]


def _step(
    row: Row | Background, known: Mapping[str, tuple[int, Claim]], done: set[tuple[Scale, str, int]], level: float
) -> Step:
    left = tuple(_missing(row, done))
    time = minutes((run for run, _ in left), row.scale)
    if isinstance(row, Background):
        return Step(row, 0, 0.0, left, time)
    number, claim = known[row.claim]
    return Step(row, number, row.chance(claim, level), left, time)


def planned(claim: Claim, scale: Scale) -> Row | None:
    """The plan of a claim at a scale; None if there is none."""
    return next((row for row in rows() if row.claim == claim.text and row.scale == scale), None)


def of_claim(number: int, scale: Scale) -> Row | None:
    """The plan of a claim at a scale; None if there is none."""
    texts = [text for text, (n, _) in numbered().items() if n == number]
    return next((row for row in rows() if row.claim in texts and row.scale == scale), None)
