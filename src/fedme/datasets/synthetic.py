"""Synthetic(alpha, beta): every user has a linear classifier and an input distribution of its own.

Recipe of pFedMe (Dinh et al. 2020, after Li et al. 2020, FedProx), with its draws in its order, so that seed 0
gives the very same samples: sizes, classifier means, input means, then for each user its classifier and its inputs.

Deviations: none in the draws. Labels are taken from the logits (softmax does not move the largest), and the shuffle and the
75/25 cut of the papers are left to the federation, which cuts every data set the same way.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedme.core.data import Arrays, Schema
from fedme.datasets.data_errors import DataError
from fedme.datasets.dataset import Dataset

FEATURES = 60
CLASSES = 10


@dataclass(frozen=True)
class Synthetic:
    """Made-up data of pFedMe and PFML: 60 features, 10 classes, 100 users who each have a classifier of their own."""

    users: int = 100  # how many clients
    alpha: float = 0.5  # standard deviation of the users' classifiers around a common one
    beta: float = 0.5  # standard deviation of the users' inputs around a common mean
    seed: int = 0  # of the generator; 0 gives the data of the papers

    def __post_init__(self) -> None:
        if self.users < 1:
            raise DataError(f"synthetic: users = {self.users}; at least one is needed")
        if not (0 <= self.alpha < float("inf") and 0 <= self.beta < float("inf")):
            raise DataError(f"synthetic: alpha = {self.alpha}, beta = {self.beta}; both must be finite and not negative")
        if not 0 <= self.seed < 2**32:
            raise DataError(f"synthetic: seed = {self.seed}; it must lie between 0 and 2**32 - 1")

    def load(self, root: Path) -> Dataset:
        """Draw the samples; nothing is read from `root`."""
        draw = np.random.RandomState(self.seed)
        sizes = 5 * (draw.lognormal(4, 2, self.users).astype(int) + 50)
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
        owned = torch.split(rows, sizes.tolist())
        none = torch.empty(0, dtype=torch.int64)
        return Dataset(
            name="synthetic",
            source=Arrays(torch.from_numpy(x), torch.from_numpy(y)),
            schema=Schema((FEATURES,), tuple(str(c) for c in range(CLASSES)), {"scaling": "none"}),
            train=rows,
            test=none,
            owners={str(user): (mine, none) for user, mine in enumerate(owned)},
        )
