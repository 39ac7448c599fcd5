"""How well scores tell members from others: the area under the curve, and members found at one false alarm in a hundred.

A score is larger the more a model looks as if it had seen the sample. The loss-threshold attack (Yeom et al. 2018) takes the
confidence itself. The calibrated one (Watson et al. 2022; the offline attack of Carlini et al. 2022) subtracts how confident
models are on average that have *not* seen it, so that easy samples are not mistaken for members.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from torch import Tensor

Scores = npt.NDArray[np.float64]

FALSE_ALARMS = 0.01
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Measured:
    """What an attack comes to; `low` and `high` are the ends of 95 % confidence intervals.

    That of the area is DeLong's; that of the members found is exact for the threshold that was taken.
    """

    members: int
    others: int
    auc: float
    auc_low: float
    auc_high: float
    found: float  # share of the members above the score that at most 1 % of the others reach
    found_low: float
    found_high: float


def confidence(logits: Tensor, y: Tensor) -> Scores:
    """log(p / (1 - p)) of the right class, for every sample: the order is that of the loss."""
    right = torch.nn.functional.one_hot(y, logits.shape[-1]).bool()
    z = logits.double()
    values: Scores = (z[right] - z.masked_fill(right, -torch.inf).logsumexp(-1)).numpy()
    return np.nan_to_num(values, nan=0.0, posinf=1e6, neginf=-1e6)


def measured(members: Scores, others: Scores) -> Measured:
    """How well the scores tell members from others."""
    wins = (members[:, None] > others[None, :]) + 0.5 * (members[:, None] == others[None, :])
    auc = float(wins.mean())
    spread = _variance(wins.mean(1)) + _variance(wins.mean(0))
    half = float(stats.norm.ppf(0.5 + CONFIDENCE / 2) * np.sqrt(spread))
    allowed = int(FALSE_ALARMS * len(others))
    threshold = np.sort(others)[::-1][allowed]
    hits = int((members > threshold).sum())
    low, high = _exact(hits, len(members))
    return Measured(
        members=len(members),
        others=len(others),
        auc=auc,
        auc_low=max(0.0, auc - half),
        auc_high=min(1.0, auc + half),
        found=hits / len(members),
        found_low=low,
        found_high=high,
    )


def _variance(values: Scores) -> float:
    """Of a mean; nothing is known of it from a single value."""
    return float(values.var(ddof=1) / len(values)) if len(values) > 1 else 0.25


def _exact(hits: int, tries: int) -> tuple[float, float]:
    """Clopper and Pearson's interval."""
    tail = (1 - CONFIDENCE) / 2
    low = float(stats.beta.ppf(tail, hits, tries - hits + 1)) if hits else 0.0
    high = float(stats.beta.ppf(1 - tail, hits + 1, tries - hits)) if hits < tries else 1.0
    return low, high
