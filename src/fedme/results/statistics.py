"""Statistics of differences: between runs with the same seeds, and between two models on the same samples.

* `compare`, `paired`: mean difference, its 95 % confidence interval and p value (Student's t).
* `equivalent`: whether a difference is smaller than a margin (two one-sided tests, Schuirmann 1987).
* `pairs_needed`, `power`: how many pairs a comparison needs, and the chance that it decides.
* `holm`: p values corrected for several tests (Holm 1979).
* `bootstrap`: the mean over clients and seeds, with an interval that takes both into account.
* `over_clients`: the mean gain over clients; few of them have an interval of their own.
* `refits`: the mean over repeated random splits or folds of the same samples (Nadeau and Bengio 2003); `same_samples`: over
  repeated trainings that were tested on the same samples.
* `proportion`: the interval of an accuracy (Wilson 1927).
* `accuracy_gain`, `auroc_gain`, `mean_gain`, `share_gain`, `rmse_gain`: two models on the same samples. For accuracy, the
  score interval of Tango 1998, which excludes 0 exactly if McNemar's test rejects; for AUROC, the variance of DeLong et al.
  1988.

`tests/results/test_statistics.py` compares them with scipy and statsmodels, and measures their errors by simulation.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedme.core.key import Key
from fedme.results.summary import spread

LEVEL = 0.95  # of confidence intervals
POWER = 0.8  # with which `Gain.needed` samples show a difference
CLUSTER_RESAMPLES = 2_000  # of clusters and, in each, of members
RESAMPLES = 2000  # of the bootstrap
FEW_CLIENTS = 6  # five values contain their median between the smallest and the largest in 94 % of all cases, six in 97 %
ROUNDING = 1e-9  # a smaller standard error is none
Z, Z_POWER = NormalDist().inv_cdf((1 + LEVEL) / 2), NormalDist().inv_cdf(POWER)

Array = NDArray[Any]


@dataclass(frozen=True)
class Paired:
    """Paired differences: their mean, its 95 % confidence interval, and the two-sided p value of no difference."""

    differences: tuple[float, ...]
    mean: float
    low: float
    high: float
    p: float

    @property
    def count(self) -> int:
        """The number of pairs."""
        return len(self.differences)


def paired(left: Mapping[int, float], right: Mapping[int, float]) -> Paired | None:
    """Compare two runs over their common seeds (Student's t); None if they have none. One pair has no interval."""
    seeds = sorted(left.keys() & right.keys())
    return compare([left[seed] - right[seed] for seed in seeds]) if seeds else None


def compare(differences: Sequence[float]) -> Paired:
    """The confidence interval and the p value of differences."""
    mean, std = spread(differences)
    if std is None:
        return Paired(tuple(differences), mean, -math.inf, math.inf, math.nan)
    error, freedom = std / math.sqrt(len(differences)), len(differences) - 1
    reach = _quantile(freedom) * error
    return Paired(tuple(differences), mean, mean - reach, mean + reach, _p(mean, error, freedom))


def equivalent(differences: Sequence[float], margin: float) -> float:
    """The p value of "the mean difference is at least `margin` in size"; if it is small, the two are equivalent.

    The larger of two one-sided t tests. NaN for fewer than two differences.
    """
    from scipy.stats import t

    mean, std = spread(differences)
    if std is None:
        return math.nan
    error, freedom = std / math.sqrt(len(differences)), len(differences) - 1
    if error == 0:
        return float(abs(mean) >= margin)
    return float(t.sf((margin - abs(mean)) / error, freedom))  # of the two tests, the one towards the mean is the larger


def power(difference: float, std: float, pairs: int, level: float = LEVEL) -> float:
    """The chance that the two-sided t test of so many differences finds a mean of `difference` above 0.

    The chance of the other direction is `power(-difference, ...)`, that of lying below a bound b `power(b - difference, ...)`.
    """
    from scipy.stats import nct, t

    if pairs < 2:
        return 0.0
    if std <= 0:
        return float(difference > 0)
    bound = t.ppf((1 + level) / 2, pairs - 1)
    return float(nct.sf(bound, pairs - 1, difference / std * math.sqrt(pairs)))


def pairs_needed(difference: float, std: float, level: float = LEVEL, most: int = 10_000) -> int | None:
    """The number of pairs with which a difference of this size is found in 80 % of all cases; None if `most` are too few."""
    low, high = 1, most
    if power(difference, std, high, level) < POWER:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(difference, std, middle, level) >= POWER else (middle, high)
    return high


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values corrected for the number of tests, in the order given; the chance of any false rejection stays below."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def smaller_deviation(left: Sequence[float], right: Sequence[float]) -> float:
    """The one-sided p value of the left values of some pairs having the smaller deviation (the test of Pitman and Morgan).

    Sums and differences of pairs are uncorrelated if both sides have the same variance.
    """
    from scipy.stats import t

    total, difference = np.add(left, right), np.subtract(left, right)
    if len(total) < 3 or not np.ptp(total) or not np.ptp(difference):
        return 1.0
    freedom, r = len(total) - 2, float(np.clip(np.corrcoef(total, difference)[0, 1], -1, 1))
    return float(r > 0) if abs(r) == 1 else float(t.cdf(r * math.sqrt(freedom / (1 - r * r)), freedom))


def bootstrap(values: Array, key: Key, resamples: int = RESAMPLES) -> tuple[float, float, float]:
    """The mean of a matrix (clients x seeds) and the interval in which it would lie for other clients and seeds like these.

    Clients and seeds are drawn with replacement, independently, because a seed is common to all clients (Owen 2007). The
    percentiles are those of Student's t over the clients instead of the normal distribution (Hesterberg 2015), because the
    percentiles of few clients are too close together. One client has no interval.
    """
    clients, seeds = values.shape
    mean = float(values.mean())
    if clients < 2:
        return mean, -math.inf, math.inf
    draw = key.numpy()
    weights = draw.multinomial(clients, np.full(clients, 1 / clients), resamples) / clients
    times = draw.multinomial(seeds, np.full(seeds, 1 / seeds), resamples) / seeds
    return mean, *_percentiles(np.einsum("rc,cs,rs->r", weights, values, times, optimize=True), clients)


def cluster_bootstrap(
    clusters: Sequence[Array], weights: Sequence[Array], key: Key, resamples: int = CLUSTER_RESAMPLES
) -> tuple[float, float, float]:
    """The mean over clusters of their weighted means, and its interval for other clusters and members like these.

    Clusters are drawn with replacement, then members within each drawn cluster. For runs with several seeds, a cluster is a
    seed, and its members are the clients of that seed, which are others with every seed. One cluster has no interval.
    """
    means = np.array([np.average(values, weights=weight) for values, weight in zip(clusters, weights, strict=True)])
    count = len(clusters)
    if count < 2:
        return float(means.mean()), -math.inf, math.inf
    draw = key.numpy()
    picked = draw.integers(count, size=(resamples, count))
    drawn = np.empty(picked.shape)
    for number, (values, weight) in enumerate(zip(clusters, weights, strict=True)):
        places = picked == number
        times = draw.multinomial(len(values), np.full(len(values), 1 / len(values)), int(places.sum()))
        drawn[places] = (times @ (values * weight)) / (times @ weight)
    return float(means.mean()), *_percentiles(drawn.mean(1), count)


def _percentiles(means: Array, count: int) -> tuple[float, float]:
    """The interval of resampled means of `count` values."""
    tail = NormalDist().cdf(-math.sqrt(count / (count - 1)) * _quantile(count - 1))
    low, high = np.quantile(means, (tail, 1 - tail))
    return float(low), float(high)


def refits(gains: Sequence[float], test_fraction: float, sample_error: float = 0.0) -> Paired:
    """Gains of repeated trainings on random splits or folds of the same samples; `test_fraction` is tested / trained samples.

    Such gains are not independent: their training parts overlap. The variance of the mean is larger than that of independent
    gains by a factor of 1 + number of gains x `test_fraction`. `sample_error` is a standard error of the mean below which the
    number of tested samples does not allow to go: a few equal gains in small test parts say little.
    """
    mean, std = spread(gains)
    if std is None:
        return Paired(tuple(gains), mean, -math.inf, math.inf, math.nan)
    error, freedom = std * math.sqrt(1 / len(gains) + test_fraction), len(gains) - 1
    reach = max(_quantile(freedom) * error, Z * sample_error)
    by_samples = math.erfc(abs(mean) / (sample_error * math.sqrt(2))) if sample_error > 0 else 0.0
    return Paired(tuple(gains), mean, mean - reach, mean + reach, max(_p(mean, error, freedom), by_samples))


def error_of_samples(gains: Sequence["Gain"]) -> float:
    """The standard error of the mean of gains on different samples, from the interval of each; 0 if none has one."""
    variances = [((gain.high - gain.low) / (2 * Z)) ** 2 for gain in gains if math.isfinite(gain.high - gain.low)]
    return math.sqrt(float(np.mean(variances)) / len(gains)) if variances else 0.0


def over_clients(gains: Sequence["Gain"], key: Key) -> tuple[float, float, float]:
    """The mean gain over clients and its interval.

    A bootstrap never leaves the range of its values, which is too narrow for fewer than `FEW_CLIENTS`. For them the interval is
    Student's, and no narrower than their numbers of test samples allow.
    """
    if not gains:
        return math.nan, -math.inf, math.inf
    if len(gains) >= FEW_CLIENTS:
        return bootstrap(np.array([[gain.gain] for gain in gains]), key)
    few = refits([gain.gain for gain in gains], 0.0, error_of_samples(gains))
    return few.mean, few.low, few.high


def needed_samples(samples: int, mean: float, reach: float) -> int | None:
    """The samples with which a gain of this size is found in 80 % of all cases, if `samples` give an interval of ± `reach`."""
    return _needed_for(mean, reach / Z * math.sqrt(samples))


def same_samples(gains: Sequence["Gain"]) -> Paired:
    """Gains of repeated trainings that were tested on the same samples.

    Neither part of the error becomes smaller by repeating the other: that of the samples, which all gains share, and that of
    the trainings.
    """
    values = [gain.gain for gain in gains]
    mean, std = spread(values)
    samples = Z**2 * float(np.mean([((gain.high - gain.low) / (2 * Z)) ** 2 for gain in gains]))
    trainings = 0.0 if std is None else (_quantile(len(values) - 1) * std) ** 2 / len(values)
    reach = math.sqrt(samples + trainings)
    p = math.erfc(Z * abs(mean) / reach / math.sqrt(2)) if reach > 0 else float(mean == 0)
    return Paired(tuple(values), mean, mean - reach, mean + reach, p)


@dataclass(frozen=True)
class Gain:
    """By how much one model is better than another on the same samples; positive is better.

    `p` is the two-sided p value of no difference. `needed` is the number of samples with which a difference of this size is
    found in 80 % of all cases; None if there is none to find.
    """

    samples: int
    gain: float
    low: float
    high: float
    p: float
    needed: int | None = None

    @property
    def direction(self) -> int:
        """1 if the model is clearly better: the 95 % interval is above 0; -1 if it is clearly worse; 0 if it cannot be told."""
        return 1 if self.low > 0 else -1 if self.high < 0 else 0

    def within(self, margin: float) -> bool:
        """Whether the two models are equivalent: a difference of `margin` or more is excluded in both directions.

        The 95 % interval lies inside ± `margin`, which are two one-sided tests at 2.5 % (compare `equivalent`).
        """
        return -margin < self.low and self.high < margin


def proportion(correct: float, samples: int) -> tuple[float, float]:
    """The 95 % score interval of a proportion: of the accuracy of a model that is right on `correct` of so many samples."""
    share = correct / samples
    middle = (share + Z**2 / (2 * samples)) / (1 + Z**2 / samples)
    reach = Z / (1 + Z**2 / samples) * math.sqrt(share * (1 - share) / samples + Z**2 / (4 * samples**2))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def accuracy_gain(right: Array, other: Array) -> Gain:
    """The gain in accuracy, where `right` and `other` say for every sample whether the two models are right."""
    wins, losses = int((right & ~other).sum()), int((~right & other).sum())
    low, high, p = _mcnemar(wins, losses, len(right))
    differences = right.astype(float) - other
    return Gain(len(right), (wins - losses) / len(right), low, high, p, _needed(differences))


def mean_gain(score: Array, other: Array) -> Gain:
    """The gain in the mean of a score per sample, larger is better (Student's t)."""
    differences = np.asarray(score, dtype=float) - other
    samples, mean = len(differences), float(differences.mean())
    if samples < 2:
        return Gain(samples, mean, -math.inf, math.inf, math.nan)
    error = float(differences.std(ddof=1)) / math.sqrt(samples)
    reach = _quantile(samples - 1) * error
    return Gain(samples, mean, mean - reach, mean + reach, _p(mean, error, samples - 1), _needed(differences))


def share_gain(share: Array, other: Array) -> Gain:
    """The gain in a share per sample, between 0 and 1: of right labels (Student's t).

    If the differences of all samples are equal, their variance is 0, and Student's t would be sure after two samples. Then the
    interval is that of an accuracy with as many wins, in units of the difference.
    """
    gain = mean_gain(share, other)
    if gain.samples < 2 or gain.high - gain.low > ROUNDING:
        return gain
    wins, losses = (gain.samples if gain.gain * sign > 0 else 0 for sign in (1, -1))
    low, high, p = _mcnemar(wins, losses, gain.samples)
    unit = abs(gain.gain) or 1.0
    return replace(gain, low=unit * low, high=unit * high, p=p)


def rmse_gain(squares: Array, other: Array) -> Gain:
    """The reduction in RMSE, from the squared errors of every sample.

    Student's t compares the mean squared errors; their difference, divided by the sum of both RMSEs, is that of the RMSEs.
    """
    test = mean_gain(-np.asarray(squares), -np.asarray(other))
    scale = math.sqrt(float(np.mean(squares))) + math.sqrt(float(np.mean(other)))
    if not scale > 0:
        return test
    return Gain(test.samples, test.gain / scale, test.low / scale, test.high / scale, test.p, test.needed)


def auroc_gain(scores: Array, other: Array, labels: Array) -> Gain | None:
    """The gain in AUROC, the mean over classes one-versus-rest; `scores` are samples x classes.

    None if fewer than two classes occur, or if a class occurs once or all but once, which has no variance. None also if both
    models separate the classes without any error, or one of them always wrongly: the estimated variance is 0, and an interval
    without width would pretend certainty.
    """
    support = np.bincount(labels, minlength=scores.shape[1])
    classes = [int(c) for c in support.nonzero()[0]]
    if len(classes) < 2 or any(support[c] < 2 or len(labels) - support[c] < 2 for c in classes):
        return None
    if not (np.isfinite(scores).all() and np.isfinite(other).all()):
        return None
    pairs = [(_placements(scores[:, c], labels == c), _placements(other[:, c], labels == c)) for c in classes]
    gain = sum(ours[0] - theirs[0] for ours, theirs in pairs) / len(pairs)
    influence = sum(ours[1] - theirs[1] for ours, theirs in pairs) / len(pairs)
    error = float(np.sqrt(np.square(influence).sum()))
    if error < ROUNDING:
        return None
    low, high = max(-1.0, gain - Z * error), min(1.0, gain + Z * error)
    p = math.erfc(abs(gain) / (error * math.sqrt(2)))
    return Gain(len(labels), gain, low, high, p, _needed_for(gain, error * math.sqrt(len(labels))))


def _placements(score: Array, positive: Array) -> tuple[float, Array]:
    """The AUROC of a score, and the influence of every sample on it: the variance is the sum of their squares (DeLong)."""
    ranks = _ranks(score)
    up, down = positive.nonzero()[0], (~positive).nonzero()[0]
    above = (ranks[up] - _ranks(score[up])) / len(down)  # the share of negative samples below each positive one
    below = 1 - (ranks[down] - _ranks(score[down])) / len(up)
    area = float(above.mean())
    influence = np.zeros(len(score))
    influence[up] = (above - area) / math.sqrt(len(up) * (len(up) - 1))
    influence[down] = (below - area) / math.sqrt(len(down) * (len(down) - 1))
    return area, influence


def _ranks(values: Array) -> Array:
    """Ranks from 1; equal values get the mean of their ranks."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Array = (np.cumsum(count) - (count - 1) / 2)[place]
    return ranks


@functools.lru_cache(maxsize=65536)
def _mcnemar(wins: int, losses: int, samples: int) -> tuple[float, float, float]:
    """Tango's interval of a difference of paired proportions, and the p value of McNemar's test."""
    from scipy.optimize import brentq

    gain = (wins - losses) / samples

    def score(delta: float) -> float:
        """The score statistic of a difference of `delta`; it falls with `delta`."""
        distance = wins - losses - samples * delta
        a = 2 * samples
        b = -wins - losses + (2 * samples - wins + losses) * delta
        c = -losses * delta * (1 - delta)
        share = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)  # the most likely share of losses
        variance = samples * (2 * share + delta * (1 - delta))
        return distance / math.sqrt(variance) if variance > 1e-300 else math.copysign(math.inf, distance) if distance else 0.0

    edge = 1 - 1e-12
    high = brentq(lambda delta: score(delta) + Z, gain, edge) if gain < edge and score(edge) < -Z else 1.0
    low = brentq(lambda delta: score(delta) - Z, -edge, gain) if gain > -edge and score(-edge) > Z else -1.0
    p = math.erfc(abs(wins - losses) / math.sqrt(2 * (wins + losses))) if wins + losses else 1.0
    return low, high, p


def _needed(differences: Array) -> int | None:
    return _needed_for(float(differences.mean()), float(differences.std()))


def _needed_for(gain: float, deviation: float) -> int | None:
    """The samples with which a mean difference `gain` of differences with this deviation is found in 80 % of all cases."""
    if gain == 0 or not math.isfinite(gain) or not math.isfinite(deviation):
        return None
    return max(2, math.ceil(((Z + Z_POWER) * deviation / gain) ** 2))


@functools.lru_cache(maxsize=4096)
def _quantile(freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + LEVEL) / 2, freedom))


def _p(mean: float, error: float, freedom: int) -> float:
    from scipy.special import stdtr

    return 2 * float(stdtr(freedom, -abs(mean) / error)) if error > 0 else float(mean == 0)
