"""What private trainings cost in all: epsilon for a delta, by the Rényi accountant of Opacus.

One gradient on a batch drawn by chance is a subsampled Gaussian mechanism (Abadi et al. 2016; Mironov et al. 2019); those of a
client compose. Several gradients on the *same* batch are, together, one Gaussian mechanism with less noise: k of them with
deviation s tell no more than one with s / sqrt(k), also if each depends on the answers before (Dong et al. 2022); subsampling
then counts once.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedme.core.key import Floats
from fedme.core.method import TaskError

ORDERS = (1.5, 1.75, 2, 2.5, *range(3, 33), 40, 48, 64, 96, 128, 256, 512)  # of Rényi divergences
CLOSE = 1.002  # a noise that was looked for is at most so many times the least one
LARGEST = 1e6  # noise


class PrivacyError(TaskError):
    """Training cannot be private as asked; the message says why and what to change."""


@dataclass(frozen=True)
class PrivacyCost:
    """So many steps, each on a batch that a sample is in with chance `rate`; `noise` is that of all gradients of a step."""

    rate: float
    noise: float
    steps: int

    def __post_init__(self) -> None:  # entries also arrive in messages
        if not (0 < self.rate <= 1 and 0 <= self.noise <= LARGEST and 0 <= self.steps < 2**53):
            raise ValueError(f"rate: invalid privacy cost: rate {self.rate}, noise {self.noise}, {self.steps} steps")


Ledger = tuple[PrivacyCost, ...]


def added(ledger: Ledger, more: Ledger) -> Ledger:
    """Both together; steps of one kind are one entry."""
    steps: dict[tuple[float, float], int] = {}
    for cost in (*ledger, *more):
        steps[cost.rate, cost.noise] = steps.get((cost.rate, cost.noise), 0) + cost.steps
    return tuple(PrivacyCost(rate, noise, count) for (rate, noise), count in steps.items() if count)


def difference(after: Ledger, before: Ledger) -> Ledger:
    """What was added to the ledger `before` to make it `after`."""
    steps = {(cost.rate, cost.noise): cost.steps for cost in before}
    rest = [(cost, cost.steps - steps.get((cost.rate, cost.noise), 0)) for cost in after]
    return tuple(PrivacyCost(cost.rate, cost.noise, count) for cost, count in rest if count)


def one_step(noise: float, gradients: int) -> float:
    """The noise of one step with several gradients on its batch."""
    return noise / math.sqrt(gradients)


def epsilon(ledger: Ledger, delta: float) -> float:
    """The epsilon of everything in the ledger; infinite without noise."""
    if not ledger:
        return 0.0
    if any(cost.noise <= 0 for cost in ledger):
        return math.inf
    total = sum((cost.steps * _renyi(cost.rate, cost.noise) for cost in ledger), np.zeros(len(ORDERS)))
    with warnings.catch_warnings():  # that another order might give less: what is given holds
        warnings.simplefilter("ignore")
        value, _ = _opacus().get_privacy_spent(orders=list(ORDERS), rdp=total, delta=delta)
    return max(0.0, float(value))


def noise_for(target: float, delta: float, plan: Sequence[tuple[float, int, int]]) -> float:
    """The least noise (nearly) with which a plan costs at most `target`: a rate, steps and gradients a step for each part."""

    def cost(noise: float) -> float:
        return epsilon(added((), tuple(PrivacyCost(rate, one_step(noise, k), steps) for rate, steps, k in plan)), delta)

    guess = 1.0
    for _ in range(4):  # epsilon falls roughly as the noise grows
        guess = min(max(guess * cost(guess) / target, guess / 8), guess * 8, LARGEST)
    low, high = guess, guess
    while cost(high) > target:
        high *= 1.1
        if high > LARGEST:
            raise PrivacyError(f"no noise is enough for epsilon {target} with delta {delta}")
    while cost(low) <= target and low > 1e-3:
        low /= 1.1
    while high / low > CLOSE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cost(middle) > target else (low, middle)
    return high


@functools.lru_cache(maxsize=4096)
def _renyi(rate: float, noise: float) -> Floats:
    """The Rényi divergence of one step, for every order."""
    value = _opacus().compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=list(ORDERS))
    return np.asarray(value, dtype=np.float64)


def require_accountant() -> None:
    """Refuse to begin what could not be accounted for."""
    _opacus()


@functools.cache
def _opacus() -> Any:
    try:
        from opacus.accountants.analysis import rdp
    except ImportError as error:
        raise PrivacyError("[privacy] needs Opacus for its accountant: pip install 'fedme[privacy]'") from error
    return rdp
