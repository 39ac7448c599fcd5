"""A verdict for every cell and every claim of the papers.

A claim is decided by the differences between runs with the same seeds. With three or more seeds, the 95 % confidence
interval of their mean decides. With fewer, all seeds must agree, by more than the standard error of the test samples explains.
Two runs of which one should be better are equivalent if the interval lies within the margin that the plan gives the claim.
`corrected` then takes the number of claims into account: what is left has a p value of at most 5 % after Holm's correction.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedme.core.key import Key
from fedme.reproduction import power_plan
from fedme.reproduction.catalogue import Cell, Claim, Result, Scale
from fedme.reproduction.findings import Findings, client_differences, error, points
from fedme.results.statistics import Paired, cluster_bootstrap, compare, holm, paired, smaller_deviation
from fedme.results.summary import spread

EQUAL = 0.005  # the largest difference of numbers that are equal in print
SEEDS = 3  # the smallest number of seeds for which an interval decides
MARGIN = 2.0  # with fewer seeds, the smallest difference in points
NOISE = 2.0  # with fewer seeds, the smallest difference in standard errors
STEADY = 5  # the smallest number of seeds for which deviations are compared
GOALS = (0.95, 1.0)  # fractions of a run's last value that the other must reach sooner; a noisy curve may pass one by chance
FRACTION = 0.1  # of the rounds, by which one run must be sooner
FACTOR = 1.2  # by which seconds must differ
ALPHA = 0.05  # the largest p value of a verdict, after correction for the number of claims

Decision = Literal["yes", "no", "equal", "open", "not run"]
VERDICTS = ("holds", "does not hold", "equivalent")  # how the words of a verdict begin


@dataclass(frozen=True)
class Comparison:
    """One pair of a claim."""

    left: str
    right: str
    numbers: str
    seeds: int
    decision: Decision
    p: float | None = None  # of the decision, two-sided; None without a test
    effect: Paired | None = None  # left minus right; of "sooner", the rounds that left needs less
    unit: Literal["points", "rounds"] = "points"
    clients: str = ""  # how the clients inside the seeds differ


@dataclass(frozen=True)
class Verdict:
    """The verdict of a scale on a claim."""

    claim: Claim
    says: str  # holds, does not hold, equivalent within a margin, not decided at this scale, not run
    comparisons: tuple[Comparison, ...]

    @property
    def tested(self) -> bool:
        """Whether the claim has had a chance of a verdict with a test; those that were left open count too."""
        needed = STEADY if self.claim.kind == "steady" else SEEDS
        return any(comparison.seeds >= needed for comparison in self.comparisons if comparison.decision != "not run")

    @property
    def p(self) -> float | None:
        """The p value of the verdict; None without one, or where too few seeds allow no test.

        A claim holds if all comparisons do, so the largest p value counts, and likewise if all are equivalent. It does not hold
        if any of them does not, so the smallest counts, times their number: others that agree without a test take nothing away.
        For "most", Bonferroni's correction in both directions.
        """
        wanted = next((of for of, word in zip(("yes", "no", "equal"), VERDICTS, strict=True) if self.says.startswith(word)), "")
        made = [comparison for comparison in self.comparisons if comparison.decision != "not run"]
        p_values = [comparison.p for comparison in made if comparison.decision == wanted]
        known = sorted(p for p in p_values if p is not None)
        any_is_enough = wanted == "no" and self.claim.need == "all"
        if not known or (len(known) < len(p_values) and not any_is_enough):
            return None
        if self.claim.need == "most":  # as many as a majority needs, each after correction for all of them
            return min(1.0, len(made) * known[min(len(known), len(self.comparisons) // 2 + 1) - 1])
        return known[-1] if wanted == "yes" else min(1.0, len(made) * known[0])

    @property
    def deciding(self) -> Comparison | None:
        """The comparison behind the verdict: the weakest of those that hold, or the strongest of those that do not.

        Without a verdict, the weakest of those that leave it open. None if nothing was run.
        """

        def p(comparison: Comparison) -> float:
            return 1.0 if comparison.p is None else comparison.p

        made = [comparison for comparison in self.comparisons if comparison.decision != "not run"]
        if self.says.startswith("does not hold"):
            return min((comparison for comparison in made if comparison.decision == "no"), key=p)
        doubtful = [comparison for comparison in made if comparison.decision == "open"]
        return max(doubtful or made, key=p, default=None)


def corrected(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts of all claims on one scale after Holm's correction for the number of those that were tested.

    A claim that its test has left open counts as well: a correction for the successful tests only would be too small.
    """
    tested = [verdict for verdict in verdicts if verdict.tested]
    after = dict(zip(map(id, tested), holm([1.0 if v.p is None else v.p for v in tested]), strict=True))
    return [_corrected(verdict, None if verdict.p is None else after[id(verdict)]) for verdict in verdicts]


def _corrected(verdict: Verdict, p: float | None) -> Verdict:
    if not verdict.says.startswith(VERDICTS):
        return verdict
    if p is None:
        return replace(verdict, says=f"{verdict.says}, so far: too few seeds for a test")
    if p > ALPHA:
        return replace(verdict, says=f"not decided at this scale (p = {p:.2f} for all claims)")
    return replace(verdict, says=f"{verdict.says} (p {_p_text(p)})")


def _p_text(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def of_cell(cell: Cell, result: Result, findings: Findings) -> str:
    """Within the paper's deviation, or in the paper's order within its column, or different; empty if it is not run."""
    ours = _mean(findings, cell)
    if ours is None or cell.paper is None:
        return ""
    if cell.std is not None and abs(ours - cell.paper) <= cell.std:
        return "within the paper's std"
    if result.unit == "samples":
        return "equal" if abs(ours - cell.paper) < EQUAL else "differs"
    rivals = [rival for rival in result.cells if _line(rival, result) == _line(cell, result) and rival != cell]
    pairs = [
        (rival.paper, mean) for rival in rivals if rival.paper is not None and (mean := _mean(findings, rival)) is not None
    ]
    if not pairs:
        return "nothing to compare with"
    agree = all((cell.paper - paper) * (ours - mean) >= 0 for paper, mean in pairs)
    return "same order" if agree else "differs"


def _line(cell: Cell, result: Result) -> tuple[str, str]:
    """The column or row within which a cell is ranked."""
    return (cell.row, "") if result.order == "rows" else (cell.column, cell.group)


def _mean(findings: Findings, cell: Cell) -> float | None:
    values = findings.values(cell.run, cell.measure)
    return spread(list(values.values()))[0] if values else None


def of_claim(claim: Claim, findings: Findings) -> Verdict:
    """The verdict of the finished runs of a scale on a claim."""
    if claim.kind in ("between", "steady"):
        comparisons = [_among(claim, findings)]
    else:
        judges = {"greater": _greater, "close": _within, "no better": _within, "slower": _slower}
        judges |= {"sooner": _sooner, "no later": _sooner}
        comparisons = [judges[claim.kind](claim, left, right, findings) for left, right in claim.pairs]
    decisions = [comparison.decision for comparison in comparisons]
    return Verdict(claim, _combined(claim, decisions, margin(claim, findings.scale)), tuple(comparisons))


def _combined(claim: Claim, decisions: Sequence[Decision], margin: float | None) -> str:
    run = [decision for decision in decisions if decision != "not run"]
    if not run:
        return "not run"
    half, yes, no = len(decisions) / 2, run.count("yes"), run.count("no")
    against = no >= half if claim.need == "most" else no > 0
    holds = yes > half and (claim.need == "most" or yes == len(run))
    word = "does not hold" if against else "holds" if holds else "not decided at this scale"
    if len(run) > half and set(run) == {"equal"}:
        word = f"equivalent within {margin:g} point{'' if margin == 1 else 's'}"
    return word if len(run) == len(decisions) else f"{word} ({len(run)} of {len(decisions)} comparisons run)"


def margin(claim: Claim, scale: Scale) -> float | None:
    """The smallest difference that matters, in points, as the plan has it for a claim that one run is better than another."""
    planned = power_plan.planned(claim, scale)
    return planned.margin if planned is not None and claim.kind == "greater" else None


def _values(side: str, findings: Findings) -> dict[int, float]:
    run, _, measure = side.partition(" ")
    return findings.values(run, measure)


@dataclass(frozen=True)
class _Pair:
    """Two runs over their common seeds."""

    test: Paired
    chance: tuple[float, ...]  # the largest difference that chance explains, per seed
    numbers: str

    @property
    def greater(self) -> Decision:
        """Whether the left one is greater."""
        if self.test.count >= SEEDS:
            return "yes" if self.test.low > 0 else "no" if self.test.high < 0 else "open"
        differences = self.test.differences
        sure = [abs(value) >= max(MARGIN, chance) for value, chance in zip(differences, self.chance, strict=True)]
        signs = {value > 0 for value in differences}
        return "open" if not all(sure) or len(signs) > 1 else "yes" if signs == {True} else "no"

    @property
    def p(self) -> float | None:
        """The two-sided p value of no difference; None with fewer seeds."""
        return self.test.p if self.test.count >= SEEDS else None

    def p_within(self, least: float, most: float, inside: bool) -> float | None:
        """The p value of the mean lying between two bounds, or outside; twice the one-sided one, as intervals have 95 %."""
        if self.test.count < SEEDS:
            return None
        ends = (least, most) if inside else (most if self.test.mean > most else least,)
        return max(compare([value - end for value in self.test.differences]).p for end in ends if math.isfinite(end))


def _pair(left: str, right: str, findings: Findings) -> _Pair | None:
    sides = _values(left, findings), _values(right, findings)
    test = paired(*sides)
    if test is None:
        return None
    common = _common_seeds(*sides)
    means = [spread([values[seed] for seed in common])[0] for values in sides]
    chance = tuple(NOISE * math.hypot(*(_error(side, seed, findings) for side in (left, right))) for seed in common)
    doubt = f", two standard errors {max(chance):.2f}" if any(chance) else ""
    if test.count >= SEEDS:
        doubt = f", 95 % interval {test.low:+.2f} to {test.high:+.2f}"
    return _Pair(test, chance, f"{means[0]:.2f} against {means[1]:.2f}: {test.mean:+.2f}{doubt}")


def _common_seeds(left: Mapping[int, Any], right: Mapping[int, Any]) -> list[int]:
    return sorted(left.keys() & right.keys())


def _error(side: str, seed: int, findings: Findings) -> float:
    run, _, measure = side.partition(" ")
    return error(findings.runs[run][seed], measure)


def _greater(claim: Claim, left: str, right: str, findings: Findings) -> Comparison:
    pair = _pair(left, right, findings)
    if pair is None:
        return Comparison(left, right, "", 0, "not run")
    inside, decision, p = clients_inside(left, right, findings), pair.greater, pair.p
    most = margin(claim, findings.scale) if pair.test.count >= SEEDS else None
    if decision == "open" and most is not None and -most <= pair.test.low and pair.test.high <= most:
        decision, p = "equal", pair.p_within(-most, most, inside=True)
    return Comparison(left, right, pair.numbers, pair.test.count, decision, p, pair.test, clients=inside)


def _within(claim: Claim, left: str, right: str, findings: Findings) -> Comparison:
    """Differences of at most the tolerance, in both directions or, for "no better", in favour of the left one."""
    pair = _pair(left, right, findings)
    if pair is None:
        return Comparison(left, right, "", 0, "not run")
    test, most = pair.test, claim.tolerance
    least = -most if claim.kind == "close" else -math.inf
    if test.count >= SEEDS:
        inside, outside = least <= test.low and test.high <= most, test.low > most or test.high < least
    else:
        # Similar models err on the same samples, so the standard error of independent samples is too large for "close".
        doubts = pair.chance if claim.kind == "no better" else (0.0,) * test.count
        inside = all(least <= value <= most - doubt for value, doubt in zip(test.differences, doubts, strict=True))
        margin = max(MARGIN, *pair.chance)
        above = all(value > most + margin for value in test.differences)
        outside = above or all(value < least - margin for value in test.differences)
    p = pair.p_within(least, most, inside) if inside or outside else None
    decision: Decision = "yes" if inside else "no" if outside else "open"
    clients = clients_inside(left, right, findings)
    return Comparison(left, right, pair.numbers, test.count, decision, p, test, clients=clients)


def clients_inside(left: str, right: str, findings: Findings) -> str:
    """How the clients of every seed differ between two runs; empty without their numbers, or with too few seeds.

    The paired test sees one mean per seed. This shows whether most clients go with it, and how far the mean would move with
    other seeds and other clients of each: an interval that resamples seeds, then the clients of each.
    """
    seeds = client_differences(findings, left, right)
    if len(seeds) < SEEDS:
        return ""
    every = np.concatenate([differences for differences, _ in seeds.values()])
    better, worse = (100 * float(np.mean(sign * every > 0)) for sign in (1, -1))
    differences, weights = zip(*seeds.values(), strict=True)
    _, low, high = cluster_bootstrap(differences, weights, Key(0).at("clients inside", left, right))
    return f"{better:.0f} % of the clients better, {worse:.0f} % worse; resampled seeds and clients {low:+.2f} to {high:+.2f}"


def _sooner(claim: Claim, left: str, right: str, findings: Findings) -> Comparison:
    """Rounds until the left run reaches (nearly) the last value of the right run, against the rounds of the right run.

    A run that never reaches it counts as twice all rounds. For "no later" the same number of rounds is enough, in every seed
    (a sign test); for "sooner", the interval of the mean decides.
    """
    (run, _, measure), (other_run, _, other_measure) = left.partition(" "), right.partition(" ")
    runs, others = findings.runs.get(run, {}), findings.runs.get(other_run, {})
    texts, gains, total = [], dict[float, list[float]](), 1
    for seed in _common_seeds(runs, others):
        line, rival = list(points(runs[seed], measure)), list(points(others[seed], other_measure))
        if not line or not rival:
            continue
        total = max(total, rival[-1][0] + 1)
        for fraction in GOALS:
            goal = fraction * rival[-1][1]
            needed = [next((t + 1 for t, value in curve if value >= goal), None) for curve in (line, rival)]
            texts.append(f"{needed[0] or 'never'} against {needed[1]} rounds to {goal:.2f}")
            gains.setdefault(fraction, []).append((needed[1] or total) - (needed[0] or 2 * total))
    if not gains:
        return Comparison(left, right, "", 0, "not run")
    tests = [compare(values) for values in gains.values()]
    weakest, seeds = min(tests, key=lambda test: abs(test.mean)), tests[0].count
    least = FRACTION * total
    if claim.kind == "no later" or seeds < SEEDS:
        every = [gain for values in gains.values() for gain in values]
        yes = all(gain >= (least if claim.kind == "sooner" else 0) for gain in every)
        no = all(gain <= -least for gain in every)
        p = 2.0 ** (1 - seeds) if seeds >= SEEDS and (yes or no) else None  # the sign test: all seeds agree
    else:
        yes, no = all(test.low > least for test in tests), all(test.high < -least for test in tests)
        bound = least if yes else -least
        p = max(compare([gain - bound for gain in values]).p for values in gains.values()) if yes or no else None
    decision: Decision = "yes" if yes else "no" if no else "open"
    return Comparison(left, right, "; ".join(texts), seeds, decision, p, weakest, "rounds")


def _slower(claim: Claim, left: str, right: str, findings: Findings) -> Comparison:
    ours, others = _values(left, findings), _values(right, findings)
    common = _common_seeds(ours, others)
    if not common:
        return Comparison(left, right, "", 0, "not run")
    yes = all(ours[seed] >= FACTOR * others[seed] for seed in common)
    no = all(others[seed] >= FACTOR * ours[seed] for seed in common)
    means = [spread([values[seed] for seed in common])[0] for values in (ours, others)]
    numbers = f"{means[0]:.3f} against {means[1]:.3f} s"
    return Comparison(left, right, numbers, len(common), "yes" if yes else "no" if no else "open")


def _among(claim: Claim, findings: Findings) -> Comparison:
    """One run among others, over the seeds that all have: between their extremes, or among the two that vary least."""
    left, others = claim.pairs[0][0], [right for _, right in claim.pairs]
    shared = _shared((left, *others), findings)
    spreads = {side: spread(list(_values(side, shared).values())) for side in (left, *others) if _values(side, shared)}
    if not spreads:
        return Comparison(left, ", ".join(others), "", 0, "not run")
    judge = _between if claim.kind == "between" else _steady
    numbers, decision, p, effect = judge(left, others, spreads, shared)
    return Comparison(left, ", ".join(others), numbers, len(_values(left, shared)), decision, p, effect)


def _shared(sides: Sequence[str], findings: Findings) -> Findings:
    """The runs of several sides, restricted to their common seeds."""
    seeds = set.intersection(*(set(_values(side, findings)) for side in sides))
    names = {side.partition(" ")[0] for side in sides} & findings.runs.keys()
    return Findings(findings.scale, {name: {seed: findings.runs[name][seed] for seed in seeds} for name in names})


Spreads = Mapping[str, tuple[float, float | None]]


Judged = tuple[str, Decision, float | None, Paired | None]


def _between(left: str, others: Sequence[str], spreads: Spreads, findings: Findings) -> Judged:
    worst, best = (pick(others, key=lambda side: spreads[side][0]) for pick in (min, max))
    numbers = f"{spreads[left][0]:.2f}, the others {spreads[worst][0]:.2f} to {spreads[best][0]:.2f}"
    pairs = [pair for pair in (_pair(left, worst, findings), _pair(best, left, findings)) if pair]
    sides = [pair.greater for pair in pairs]
    effect = min((pair.test for pair in pairs), key=lambda test: test.mean, default=None)  # towards the nearer extreme
    if "no" in sides:
        against = [pair.p for pair in pairs if pair.greater == "no"]
        p = None if None in against else min(1.0, len(others) * min(p for p in against if p is not None))
        return numbers, "no", p, effect
    tested = [pair.p for pair in pairs if pair.p is not None]
    # The extremes were chosen among the others by the same numbers.
    p = min(1.0, len(others) * max(tested)) if len(tested) == len(pairs) else None
    return numbers, "open" if "open" in sides else "yes", p, effect


def _steady(left: str, others: Sequence[str], spreads: Spreads, findings: Findings) -> Judged:
    deviation, deviations = spreads[left][1], [std for side in others if (std := spreads[side][1]) is not None]
    if deviation is None:
        return "one seed has no deviation", "open", None, None
    numbers = f"{deviation:.2f}, the others {', '.join(f'{std:.2f}' for std in deviations)}"
    own = list(_values(left, findings).values())
    if len(own) < STEADY:
        return numbers, "open", None, None
    rivals = [list(_values(side, findings).values()) for side in others]
    # One of the others may vary less, so the second largest p value counts; it is false if two of them do.
    steadier = sorted(2 * smaller_deviation(own, rival) for rival in rivals)[-2]
    others_steadier = len(rivals) * sorted(2 * smaller_deviation(rival, own) for rival in rivals)[1]
    p = min(1.0, steadier, others_steadier)
    return numbers, "open" if p > ALPHA else "yes" if steadier <= others_steadier else "no", p if p <= ALPHA else None, None
