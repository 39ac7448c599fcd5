"""What our numbers say about the paper's: a verdict for every cell, and for every claim.

A claim is decided by differences between runs with the same seeds. From three seeds on, by the 95 % interval of their mean;
with fewer, only if every seed says the same and by a wide margin: wider than chance makes it with so many test samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedme.reproduction.catalogue import Cell, Claim, Result
from fedme.reproduction.findings import Findings, error, points
from fedme.reproduction.stats import Paired, paired
from fedme.results.summary import spread

EQUAL = 0.005  # numbers that are printed alike
SEEDS = 3  # from which on an interval decides
MARGIN = 2.0  # points that fewer seeds must differ by, at least
NOISE = 2.0  # standard errors of a difference that they must differ by too
STEADY = 5  # seeds from which on deviations are compared
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
    rivals = [each for each in result.cells if _line(each, result) == _line(cell, result) and each != cell]
    pairs = [
        (each.paper, theirs) for each in rivals if each.paper is not None and (theirs := _mean(findings, each)) is not None
    ]
    if not pairs:
        return "nothing to compare with"
    agree = all((cell.paper - paper) * (ours - theirs) >= 0 for paper, theirs in pairs)
    return "same order" if agree else "differs"


def _line(cell: Cell, result: Result) -> tuple[str, str]:
    """What a cell is put in order with: its column, or its row."""
    return (cell.row, "") if result.order == "rows" else (cell.column, cell.group)


def _mean(findings: Findings, cell: Cell) -> float | None:
    values = findings.values(cell.run, cell.measure)
    return spread(list(values.values()))[0] if values else None


def of_claim(claim: Claim, findings: Findings) -> Verdict:
    """What the finished runs of a scale say about a claim."""
    if claim.kind in ("between", "steady"):
        comparisons = [_among(claim, findings)]
    else:
        ways = {"greater": _greater, "close": _within, "no better": _within, "slower": _slower}
        ways |= {"sooner": _sooner, "no later": _sooner}
        judge = ways[claim.kind]
        comparisons = [judge(claim, left, right, findings) for left, right in claim.pairs]
    return Verdict(claim, _together(claim, [each.decision for each in comparisons]), tuple(comparisons))


def _together(claim: Claim, decisions: Sequence[Decision]) -> str:
    run = [each for each in decisions if each != "not run"]
    if not run:
        return "not run"
    half, yes, no = len(decisions) / 2, run.count("yes"), run.count("no")
    against = no >= half if claim.need == "most" else no > 0
    holds = yes > half and (claim.need == "most" or yes == len(run))
    word = "does not hold" if against else "holds" if holds else "not decided at this scale"
    return word if len(run) == len(decisions) else f"{word} ({len(run)} of {len(decisions)} comparisons run)"


def _values(side: str, findings: Findings) -> dict[int, float]:
    run, _, measure = side.partition(" ")
    return findings.values(run, measure)


@dataclass(frozen=True)
class _Pair:
    """Two runs beside each other, for the seeds that both have."""

    found: Paired
    chance: tuple[float, ...]  # what a difference may be by chance, a seed each
    numbers: str

    @property
    def greater(self) -> Decision:
        """Whether the left one is greater."""
        if self.found.count >= SEEDS:
            return "yes" if self.found.low > 0 else "no" if self.found.high < 0 else "open"
        sure = [abs(each) >= max(MARGIN, chance) for each, chance in zip(self.found.differences, self.chance, strict=True)]
        signs = {each > 0 for each in self.found.differences}
        return "open" if not all(sure) or len(signs) > 1 else "yes" if signs == {True} else "no"


def _pair(left: str, right: str, findings: Findings) -> _Pair | None:
    mine, theirs = _values(left, findings), _values(right, findings)
    found = paired(mine, theirs)
    if found is None:
        return None
    common = sorted(mine.keys() & theirs.keys())
    means = [spread([each[seed] for seed in common])[0] for each in (mine, theirs)]
    chance = tuple(NOISE * math.hypot(*(_error(side, seed, findings) for side in (left, right))) for seed in common)
    doubt = f", two standard errors {max(chance):.2f}" if any(chance) else ""
    if found.count >= SEEDS:
        doubt = f", 95 % interval {found.low:+.2f} to {found.high:+.2f}"
    return _Pair(found, chance, f"{means[0]:.2f} against {means[1]:.2f}: {found.mean:+.2f}{doubt}")


def _error(side: str, seed: int, findings: Findings) -> float:
    run, _, measure = side.partition(" ")
    return error(findings.runs[run][seed], measure)


def _greater(claim: Claim, left: str, right: str, findings: Findings) -> Comparison:
    pair = _pair(left, right, findings)
    if pair is None:
        return Comparison(left, right, "", 0, "not run")
    return Comparison(left, right, pair.numbers, pair.found.count, pair.greater)


def _within(claim: Claim, left: str, right: str, findings: Findings) -> Comparison:
    """Differences of at most the tolerance, either way or, for "no better", in favour of the left one."""
    pair = _pair(left, right, findings)
    if pair is None:
        return Comparison(left, right, "", 0, "not run")
    found, most = pair.found, claim.tolerance
    least = -most if claim.kind == "close" else -math.inf
    if found.count >= SEEDS:
        inside, outside = least <= found.low and found.high <= most, found.low > most or found.high < least
    else:
        # Runs that do nearly the same err on the same samples: chance between strangers would be far too much for "close".
        doubts = pair.chance if claim.kind == "no better" else (0.0,) * found.count
        inside = all(least <= each <= most - doubt for each, doubt in zip(found.differences, doubts, strict=True))
        margin = max(MARGIN, *pair.chance)
        outside = all(each > most + margin for each in found.differences) or all(
            each < least - margin for each in found.differences
        )
    return Comparison(left, right, pair.numbers, found.count, "yes" if inside else "no" if outside else "open")


def _sooner(claim: Claim, left: str, right: str, findings: Findings) -> Comparison:
    """Rounds until the left one has (nearly) what the right one ends with, against the rounds that the right one needs.

    "No later" is content with as many.
    """
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
    if all(gain >= (SHARE * total if claim.kind == "sooner" else 0) for gain in gains):
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
    """One run among others, for the seeds that all have: between their extremes, or among the two that vary least."""
    left, others = claim.pairs[0][0], [right for _, right in claim.pairs]
    shared = _shared((left, *others), findings)
    spreads = {side: spread(list(_values(side, shared).values())) for side in (left, *others) if _values(side, shared)}
    if not spreads:
        return Comparison(left, ", ".join(others), "", 0, "not run")
    judge = _between if claim.kind == "between" else _steady
    numbers, decision = judge(left, others, spreads, shared)
    return Comparison(left, ", ".join(others), numbers, len(_values(left, shared)), decision)


def _shared(sides: Sequence[str], findings: Findings) -> Findings:
    """The runs of several sides, with the seeds that all of them have."""
    seeds = set.intersection(*(set(_values(side, findings)) for side in sides))
    names = {side.partition(" ")[0] for side in sides} & findings.runs.keys()
    return Findings(findings.scale, {name: {seed: findings.runs[name][seed] for seed in seeds} for name in names})


Spreads = Mapping[str, tuple[float, float | None]]


def _between(left: str, others: Sequence[str], spreads: Spreads, findings: Findings) -> tuple[str, Decision]:
    worst, best = (pick(others, key=lambda side: spreads[side][0]) for pick in (min, max))
    numbers = f"{spreads[left][0]:.2f}, the others {spreads[worst][0]:.2f} to {spreads[best][0]:.2f}"
    sides = [pair.greater for pair in (_pair(left, worst, findings), _pair(best, left, findings)) if pair]
    return numbers, "no" if "no" in sides else "open" if "open" in sides else "yes"


def _steady(left: str, others: Sequence[str], spreads: Spreads, findings: Findings) -> tuple[str, Decision]:
    mine, theirs = spreads[left][1], [each for side in others if (each := spreads[side][1]) is not None]
    if mine is None:
        return "one seed says nothing about deviations", "open"
    numbers = f"{mine:.2f}, the others {', '.join(f'{each:.2f}' for each in theirs)}"
    if len(_values(left, findings)) < STEADY:
        return numbers, "open"
    return numbers, "yes" if sum(each < mine for each in theirs) <= 1 else "no"
