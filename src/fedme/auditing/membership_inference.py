"""Membership inference: how well scores separate training samples (members) from others.

A score is larger the more a model behaves as if it was trained on the sample. The loss-threshold attack (Yeom et al. 2018)
uses the confidence itself. The calibrated attack (Watson et al. 2022; the offline attack of Carlini et al. 2022) subtracts the
mean confidence of models that were *not* trained on the sample, so that easy samples are not mistaken for members.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Scores = npt.NDArray[np.float64]

FALSE_POSITIVE_RATE = 0.01
CONFIDENCE = 0.95


@dataclass(frozen=True)
class AttackResult:
    """The success of an attack; `low` and `high` are the ends of 95 % confidence intervals.

    The interval of the AUC is DeLong's; that of the true positive rate is Clopper and Pearson's, for the given threshold.
    """

    members: int
    others: int
    auc: float
    auc_low: float
    auc_high: float
    found: float  # true positive rate at a false positive rate of at most 1 %
    found_low: float
    found_high: float


def confidence(logits: Tensor, y: Tensor) -> Scores:
    """log(p / (1 - p)) of the true class p, per sample. It orders samples as the loss does."""
    true_class = torch.nn.functional.one_hot(y, logits.shape[-1]).bool()
    z = logits.double()
    values: Scores = (z[true_class] - z.masked_fill(true_class, -torch.inf).logsumexp(-1)).numpy()
    return np.nan_to_num(values, nan=0.0, posinf=1e6, neginf=-1e6)


def evaluate_attack(members: Scores, others: Scores) -> AttackResult:
    """How well the scores separate members from others."""
    from scipy import stats  # slow to import

    wins = (members[:, None] > others[None, :]) + 0.5 * (members[:, None] == others[None, :])
    auc = float(wins.mean())
    variance = _variance_of_mean(wins.mean(1)) + _variance_of_mean(wins.mean(0))
    half = float(stats.norm.ppf(0.5 + CONFIDENCE / 2) * np.sqrt(variance))
    threshold = np.sort(others)[::-1][int(FALSE_POSITIVE_RATE * len(others))]
    hits = int((members > threshold).sum())
    low, high = _clopper_pearson(hits, len(members))
    return AttackResult(
        members=len(members),
        others=len(others),
        auc=auc,
        auc_low=max(0.0, auc - half),
        auc_high=min(1.0, auc + half),
        found=hits / len(members),
        found_low=low,
        found_high=high,
    )


def _variance_of_mean(values: Scores) -> float:
    """The variance of the mean of values in [0, 1]; for a single value its upper bound."""
    return float(values.var(ddof=1) / len(values)) if len(values) > 1 else 0.25


def _clopper_pearson(hits: int, tries: int) -> tuple[float, float]:
    """The exact confidence interval of a proportion."""
    from scipy import stats  # slow to import

    tail = (1 - CONFIDENCE) / 2
    low = float(stats.beta.ppf(tail, hits, tries - hits + 1)) if hits else 0.0
    high = float(stats.beta.ppf(1 - tail, hits + 1, tries - hits)) if hits < tries else 1.0
    return low, high
