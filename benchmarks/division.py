"""How the samples of a benchmark are divided: sizes that are chosen once, so that all sides do exactly the same work.

The usual division of MNIST (PFLlib's) has 20 clients with 374 to 4641 samples, and measurements on it count 5,240 steps and
52,400 samples a round at batch size 10. Frameworks disagree on incomplete batches (some drop them, some pad or refill
them), so here every client has whole batches only: 380 to 4640 samples, the same 5,240 steps and 52,400 samples, nothing
left over. The smallest and the largest client are as given, the others follow a smooth curve between them. Rows are drawn
at random, labels are not skewed: labels do not change the time of a step.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fedme.core.key import Key
from fedme.datasets import PARTITIONS
from fedme.datasets.dataset import ClientRows
from fedme.datasets.partitioners import Natural, Pool


def sizes(clients: int, least: int, most: int, steps: int, batch: int) -> list[int]:
    """Numbers of samples, all multiples of `batch` within `least` and `most`, that make `steps` batches; smallest first."""
    low, high = -(-least // batch), most // batch
    if clients < 3 or not (clients - 1) * low + high <= steps <= low + (clients - 1) * high:
        raise ValueError(f"{clients} clients with {least} to {most} samples cannot make {steps} batches of {batch}")
    place = np.arange(clients) / (clients - 1)

    def curve(power: float) -> np.ndarray:
        return low + (high - low) * place**power

    flat, steep = 0.0, 1e3  # the sum falls with the power
    for _ in range(100):
        power = (flat + steep) / 2
        flat, steep = (power, steep) if curve(power).sum() > steps else (flat, power)
    exact = curve(steep)
    whole = np.floor(exact + 1e-9).astype(int)
    inner = np.argsort(whole[1:-1] - exact[1:-1], kind="stable") + 1  # those that lost most by rounding come first
    for turn in range(steps - int(whole.sum())):
        whole[inner[turn % len(inner)]] += 1
    return [int(count) * batch for count in whole]


@dataclass(frozen=True)
class Unequal:
    """Clients of the sizes above, in a fixed shuffled order; `val` is the data set's own share for validation.

    A client is given as many rows more as the validation part takes, so that its training part has exactly its size.
    """

    clients: int = 20
    least: int = 374
    most: int = 4641
    steps: int = 5240
    batch: int = 10
    val: float = 0.0
    min_samples: int = 2
    seed: int | None = None

    def __call__(self, pool: Pool, key: Key) -> ClientRows:
        wanted = sizes(self.clients, self.least, self.most, self.steps, self.batch)
        order = np.random.default_rng(0).permutation(self.clients)
        counts = [self._with_validation(wanted[index]) for index in order]
        if sum(counts) > len(pool.train):
            raise ValueError(f"{sum(counts)} samples are wanted, but there are {len(pool.train)}")
        rows = pool.train[torch.randperm(len(pool.train), generator=key.at("train").torch())]
        bounds = np.rint(np.cumsum([0, *counts]) / sum(counts) * len(pool.test)).astype(int)
        tested = torch.split(pool.test, np.diff(bounds).tolist())
        return {str(u): pair for u, pair in enumerate(zip(rows[: sum(counts)].split(counts), tested, strict=True))}

    def _with_validation(self, size: int) -> int:
        total = size
        while int((1 - self.val) * total + 1e-9) < size:
            total += 1
        return total


@dataclass(frozen=True)
class WholeBatches(Natural):
    """The owners a data set comes with, each cut to a multiple of `multiple` rows.

    With 40 and a test share of 0.25 every client trains on whole batches of 10.
    """

    multiple: int = 40

    def __call__(self, pool: Pool, key: Key) -> ClientRows:
        shares = super().__call__(pool, key)
        return {owner: (rows[: len(rows) // self.multiple * self.multiple], test) for owner, (rows, test) in shares.items()}


def register() -> None:
    """Make both known to experiments as `partition.name`."""
    PARTITIONS.setdefault("unequal", Unequal)
    PARTITIONS.setdefault("whole-batches", WholeBatches)
