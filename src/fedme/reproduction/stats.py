"""Statistics over seeds: mean and deviation, and a comparison of two runs that share their seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedme.results.summary import spread

LEVEL = 0.95  # of confidence intervals


@dataclass(frozen=True)
class Paired:
    """Differences of pairs: their mean, its 95 % interval, and the two-sided p of no difference."""

    differences: tuple[float, ...]
    mean: float
    low: float
    high: float
    p: float

    @property
    def count(self) -> int:
        """How many pairs there are."""
        return len(self.differences)


def paired(left: Mapping[int, float], right: Mapping[int, float]) -> Paired | None:
    """Compare what two runs have for the same seeds (Student's t); None if they share none. One pair has no interval."""
    seeds = sorted(left.keys() & right.keys())
    return compare([left[seed] - right[seed] for seed in seeds]) if seeds else None


def compare(differences: Sequence[float]) -> Paired:
    """What differences say about their true mean."""
    from scipy.stats import t

    mean, std = spread(differences)
    if std is None:
        return Paired(tuple(differences), mean, -math.inf, math.inf, math.nan)
    error, freedom = std / math.sqrt(len(differences)), len(differences) - 1
    reach = float(t.ppf((1 + LEVEL) / 2, freedom)) * error
    p = 2 * float(t.sf(abs(mean) / error, freedom)) if error > 0 else float(mean == 0)
    return Paired(tuple(differences), mean, mean - reach, mean + reach, p)
