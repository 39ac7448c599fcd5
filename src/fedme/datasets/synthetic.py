"""Synthetic(alpha, beta): every user has its own linear classifier and input distribution.

Generated as in pFedMe (Dinh et al. 2020, after Li et al. 2020, FedProx), with the same draws in the same order, so that
seed 0 gives identical samples: sizes, classifier means, input means, then the classifier and the inputs of every user.

Deviations: none in the draws, unless `samples` cuts the sizes. Labels are the argmax of the logits, as softmax is monotonic;
the shuffle and the 75/25 split of the papers are left to the federation, which splits all data sets in the same way.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedme.core.data import Arrays, Schema
from fedme.core.settings import setting
from fedme.datasets.data_errors import require, require_memory
from fedme.datasets.dataset import Dataset

FEATURES = 60
CLASSES = 10


@dataclass(frozen=True)
class Synthetic:
    """Synthetic data of pFedMe and PFML: 60 features, 10 classes, 100 users, each with its own linear classifier."""

    users: int = setting(100, "number of clients")
    alpha: float = setting(0.5, "standard deviation of the users' classifiers around a common one")
    beta: float = setting(0.5, "standard deviation of the users' inputs around a common mean")
    seed: int = setting(0, "seed of the generator; 0 gives the data of the papers")
    samples: int | None = setting(None, "largest number of samples of a client; no limit by default, as in the papers")

    def __post_init__(self) -> None:
        require(self.samples is None or self.samples >= 1, "samples", f"must be >= 1, got {self.samples}")
        require(self.users >= 1, "users", f"must be >= 1, got {self.users}")
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            require(0 <= value < float("inf"), name, f"must be finite and >= 0, got {value}")
        require(0 <= self.seed < 2**32, "seed", f"must be between 0 and 2**32 - 1, got {self.seed}")

    def load(self, root: Path) -> Dataset:
        """Draw the samples; `root` is not used."""
        draw = np.random.RandomState(self.seed)
        sizes = 5 * (draw.lognormal(4, 2, self.users).astype(int) + 50)
        if self.samples is not None:
            sizes = np.minimum(sizes, self.samples)
        require_memory(
            "users", self.users, int(sizes.sum()), FEATURES * 4 + 8, "set data.samples to a largest number per client"
        )
        classifier_means = draw.normal(0, self.alpha, self.users)
        input_means = draw.normal(0, self.beta, self.users)
        centres = draw.normal(input_means[:, None], 1, (self.users, FEATURES))
        deviations = np.sqrt(np.arange(1, FEATURES + 1) ** -1.2)

        ends = np.cumsum(sizes)
        x = np.empty((ends[-1], FEATURES), dtype=np.float32)
        y = np.empty(ends[-1], dtype=np.int64)
        for user, (end, size) in enumerate(zip(ends, sizes, strict=True)):
            weight = draw.normal(classifier_means[user], 1, (FEATURES, CLASSES))
            bias = draw.normal(classifier_means[user], 1, CLASSES)
            inputs = draw.standard_normal((size, FEATURES)) * deviations + centres[user]
            x[end - size : end] = inputs
            y[end - size : end] = np.argmax(inputs @ weight + bias, axis=1)

        rows = torch.arange(len(y))
        user_rows = torch.split(rows, sizes.tolist())
        none = torch.empty(0, dtype=torch.int64)
        return Dataset(
            name="synthetic",
            source=Arrays(torch.from_numpy(x), torch.from_numpy(y)),
            schema=Schema((FEATURES,), tuple(str(c) for c in range(CLASSES)), {"scaling": "none"}),
            train=rows,
            test=none,
            owners={str(user): (train, none) for user, train in enumerate(user_rows)},
        )
