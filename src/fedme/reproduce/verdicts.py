"""What our numbers say about the paper's: a verdict for every cell, and for every claim.

A claim is decided by differences between runs with the same seeds. From three seeds on, by the 95 % interval of their mean;
with fewer, only if every seed says the same and by a wide margin.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedme.experiment.summary import spread
from fedme.reproduce.catalogue import Cell, Claim, Result
from fedme.reproduce.findings import Findings, points
from fedme.reproduce.stats import Paired, paired

EQUAL = 0.005  # numbers that are printed alike
SEEDS = 3  # from which on an interval decides
MARGIN = 2.0  # points that fewer seeds must differ by
GOALS = (0.95, 1.0)  # of what a run ends with, that the other must reach sooner: a noisy curve passes one by chance
SHARE = 0.1  # of the rounds, that one must be sooner by
FACTOR = 1.2  # that seconds must differ by

Decision = Literal["yes", "no", "open", "not run"]


@dataclass(frozen=True)
class Comparison:
    """One pair of a claim."""

    left: str
    right: str
    numbers: str
    seeds: int
    decision: Decision


@dataclass(frozen=True)
class Verdict:
    """What a scale says about a claim."""

    claim: Claim
    says: str  # holds, does not hold, not decided at this scale, not run
    comparisons: tuple[Comparison, ...]


def of_cell(cell: Cell, result: Result, findings: Findings) -> str:
    """Within the paper's deviation, or in the paper's order among its column, or different; empty if it has not been run."""
    ours = _mean(findings, cell)
    if ours is None or cell.paper is None:
        return ""
    if cell.std is not None and abs(ours - cell.paper) <= cell.std:
        return "within the paper's std"
    if result.unit == "samples":
        return "equal" if abs(ours - cell.paper) < EQUAL else "differs"
    rivals = [each for each in result.cells if (each.column, each.group) == (cell.column, cell.group) and each != cell]
    pairs = [
        (each.paper, theirs) for each in rivals if each.paper is not None and (theirs := _mean(findings, each)) is not None
    ]
    if not pairs:
        return "nothing to compare with"
    agree = all((cell.paper - paper) * (ours - theirs) >= 0 for paper, theirs in pairs)
    return "same order" if agree else "differs"


def _mean(findings: Findings, cell: Cell) -> float | None:
    values = findings.values(cell.run, cell.measure)
    return spread(list(values.values()))[0] if values else None


def of_claim(claim: Claim, findings: Findings) -> Verdict:
    """What the finished runs of a scale say about a claim."""
    if claim.kind in ("between", "steady"):
        comparisons = [_among(claim, findings)]
    else:
        ways = {"greater": _greater, "close": _within, "no better": _within, "sooner": _sooner, "slower": _slower}
        judge = ways[claim.kind]
        comparisons = [judge(claim, left, right, findings) for left, right in claim.pairs]
    return Verdict(claim, _together(claim, [each.decision for each in comparisons]), tuple(comparisons))


def _together(claim: Claim, decisions: Sequence[Decision]) -> str:
    run = [each for each in decisions if each != "not run"]
    if not run:
        return "not run"
    enough = len(run) / 2 if claim.need == "most" else len(run) - 1
    against = run.count("no") >= len(run) / 2 if claim.need == "most" else "no" in run
    word = "does not hold" if against else "holds" if run.count("yes") > enough else "not decided at this scale"
    return word if len(run) == len(decisions) else f"{word} ({len(run)} of {len(decisions)} comparisons run)"


def _values(side: str, findings: Findings) -> dict[int, float]:
    run, _, measure = side.partition(" ")
    return findings.values(run, measure)


def _pair(left: str, right: str, findings: Findings) -> tuple[Paired | None, str]:
    mine, theirs = _values(left, findings), _values(right, findings)
    found = paired(mine, theirs)
    if found is None:
        return None, ""
    common = sorted(mine.keys() & theirs.keys())
    means = [spread([each[seed] for seed in common])[0] for each in (mine, theirs)]
    interval = f", 95 % interval {found.low:+.2f} to {found.high:+.2f}" if found.count >= SEEDS else ""
    return found, f"{means[0]:.2f} against {means[1]:.2f}: {found.mean:+.2f}{interval}"


def _greater(claim: Claim, left: str, right: str, findings: Findings) -> Comparison:
    found, numbers = _pair(left, right, findings)
    if found is None:
        return Comparison(left, right, "", 0, "not run")
    if found.count >= SEEDS:
        decision: Decision = "yes" if found.low > 0 else "no" if found.high < 0 else "open"
    else:
        decision = "open"
        if all(each >= MARGIN for each in found.differences):
            decision = "yes"
        elif all(each <= -MARGIN for each in found.differences):
            decision = "no"
    return Comparison(left, right, numbers, found.count, decision)


def _within(claim: Claim, left: str, right: str, findings: Findings) -> Comparison:
    """Differences of at most the tolerance, either way or, for "no better", in favour of the left one."""
    found, numbers = _pair(left, right, findings)
    if found is None:
        return Comparison(left, right, "", 0, "not run")
    most = claim.tolerance
    least = -most if claim.kind == "close" else -math.inf
    if found.count >= SEEDS:
        inside, outside = least <= found.low and found.high <= most, found.low > most or found.high < least
    else:
        inside = all(least <= each <= most for each in found.differences)
        outside = all(each > most + MARGIN for each in found.differences) or all(
            each < least - MARGIN for each in found.differences
        )
    return Comparison(left, right, numbers, found.count, "yes" if inside else "no" if outside else "open")


def _sooner(claim: Claim, left: str, right: str, findings: Findings) -> Comparison:
    """Rounds until the left one has (nearly) what the right one ends with, against the rounds that the right one needs."""
    (run, _, measure), (other, _, theirs) = left.partition(" "), right.partition(" ")
    mine, others = findings.runs.get(run, {}), findings.runs.get(other, {})
    told, gains, total, seeds = [], list[float](), 1, 0
    for seed in sorted(mine.keys() & others.keys()):
        line, rival = list(points(mine[seed], measure)), list(points(others[seed], theirs))
        if not line or not rival:
            continue
        total, seeds = max(total, rival[-1][0] + 1), seeds + 1
        for goal in (each * rival[-1][1] for each in GOALS):
            needed = [next((t + 1 for t, value in each if value >= goal), None) for each in (line, rival)]
            told.append(f"{needed[0] or 'never'} against {needed[1]} rounds to {goal:.2f}")
            gains.append((needed[1] or total) - (needed[0] or 2 * total))
    if not gains:
        return Comparison(left, right, "", 0, "not run")
    decision: Decision = "open"
    if all(gain >= SHARE * total for gain in gains):
        decision = "yes"
    elif all(gain <= -SHARE * total for gain in gains):
        decision = "no"
    return Comparison(left, right, "; ".join(told), seeds, decision)


def _slower(claim: Claim, left: str, right: str, findings: Findings) -> Comparison:
    mine, theirs = _values(left, findings), _values(right, findings)
    common = sorted(mine.keys() & theirs.keys())
    if not common:
        return Comparison(left, right, "", 0, "not run")
    yes = all(mine[seed] >= FACTOR * theirs[seed] for seed in common)
    no = all(theirs[seed] >= FACTOR * mine[seed] for seed in common)
    means = [spread([each[seed] for seed in common])[0] for each in (mine, theirs)]
    numbers = f"{means[0]:.3f} against {means[1]:.3f} s"
    return Comparison(left, right, numbers, len(common), "yes" if yes else "no" if no else "open")


def _among(claim: Claim, findings: Findings) -> Comparison:
    """One run among others: between their extremes, or among the two that vary least over seeds."""
    left, others = claim.pairs[0][0], [right for _, right in claim.pairs]
    mine = _values(left, findings)
    rivals = [values for other in others if (values := _values(other, findings))]
    if not mine or len(rivals) < len(others):
        return Comparison(left, ", ".join(others), "", 0, "not run")
    seeds = min(len(each) for each in [mine, *rivals])
    (mean, std), spreads = spread(list(mine.values())), [spread(list(each.values())) for each in rivals]
    decision: Decision = "open"
    if claim.kind == "between":
        low, high = min(each for each, _ in spreads), max(each for each, _ in spreads)
        numbers = f"{mean:.2f}, the others {low:.2f} to {high:.2f}"
        if low <= mean <= high:
            decision = "yes"
        elif mean < low - MARGIN or mean > high + MARGIN:
            decision = "no"
    else:
        deviations = [each for _, each in spreads]
        if std is None or seeds < SEEDS or any(each is None for each in deviations):
            return Comparison(left, ", ".join(others), f"{seeds} seeds say nothing about deviations", seeds, "open")
        smaller = sum(each < std for each in deviations if each is not None)
        numbers = f"{std:.2f}, smaller than {len(others) - smaller} of {len(others)}"
        decision = "yes" if smaller <= 1 else "no"
    return Comparison(left, ", ".join(others), numbers, seeds, decision)
