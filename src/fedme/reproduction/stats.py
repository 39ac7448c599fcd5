"""Statistics over seeds: the paired comparison of two runs with the same seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedme.results.summary import spread

LEVEL = 0.95  # of confidence intervals


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
    from scipy.stats import t

    mean, std = spread(differences)
    if std is None:
        return Paired(tuple(differences), mean, -math.inf, math.inf, math.nan)
    error, freedom = std / math.sqrt(len(differences)), len(differences) - 1
    reach = float(t.ppf((1 + LEVEL) / 2, freedom)) * error
    p = 2 * float(t.sf(abs(mean) / error, freedom)) if error > 0 else float(mean == 0)
    return Paired(tuple(differences), mean, mean - reach, mean + reach, p)
