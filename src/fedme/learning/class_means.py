"""Class means: what clients of different architectures can share about their samples, and how a server combines it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedme.core.data import Split
from fedme.core.model import Model
from fedme.core.operations import ClassSums, Computation, predict
from fedme.core.typed import TypedError
from fedme.learning.robust_aggregation import Defence


@dataclass(frozen=True)
class ClassMeans:
    """The mean of some outputs over a client's training samples of every class, and the numbers of samples."""

    means: Tensor  # classes x width; zeros for a class without samples
    counts: Tensor  # classes

    def require_possible(self, samples: int) -> None:
        """Raise a TypedError, naming the field, for numbers of samples that no client of this size has."""
        if bool((self.counts < 0).any()) or int(self.counts.sum()) > samples:
            raise TypedError("counts", f"must be >= 0 and add up to at most {samples}, got {self.counts.tolist()}")


@dataclass(frozen=True)
class ClassTargets:
    """One vector per class, and for which classes there is one."""

    means: Tensor  # classes x width; zeros where there is none
    known: Tensor  # classes

    @classmethod
    def none(cls, classes: int, width: int, dtype: torch.dtype) -> "ClassTargets":
        """Before anybody has sent something."""
        return cls(torch.zeros((classes, width), dtype=dtype), torch.zeros(classes, dtype=torch.bool))


def class_means(outputs: Tensor, y: Tensor, classes: int) -> ClassMeans:
    """The mean row of every class."""
    counts = torch.bincount(y, minlength=classes)
    sums = torch.zeros((classes, outputs.shape[1]), dtype=outputs.dtype).index_add_(0, y, outputs)
    return ClassMeans(sums / counts.clamp(min=1)[:, None], counts)


def means_seen(seen: ClassSums | None, classes: int, width: int, dtype: torch.dtype, first: int = 0) -> ClassMeans:
    """The mean outputs of every class that a training has seen, from output `first` on; of a training without samples zeros."""
    if seen is None:
        return ClassMeans(torch.zeros((classes, width), dtype=dtype), torch.zeros(classes, dtype=torch.int64))
    return ClassMeans(seen.sums[:, first:] / seen.counts.clamp(min=1)[:, None], seen.counts)


def outputs_on(model: Model, data: Split, width: int) -> Computation[Tensor]:
    """The outputs of a model for every sample, in evaluation mode; without samples an empty table."""
    if not len(data):
        return torch.zeros((0, width), dtype=model.dtype)
    return (yield from predict(model, data))


def combined(
    sent: Sequence[ClassMeans], weighting: Literal["uniform", "samples"], defence: Defence, before: ClassTargets
) -> ClassTargets:
    """Class by class, the mean over those who have the class, or a robust one; `before` for classes that nobody has."""
    means, known = before.means.clone(), before.known.clone()
    for label in range(len(known)):
        having = [sent_by for sent_by in sent if sent_by.counts[label] > 0]
        if not having:
            continue
        rows = torch.stack([sent_by.means[label] for sent_by in having])
        counts = torch.stack([sent_by.counts[label] for sent_by in having]).to(rows.dtype)
        by_samples = weighting == "samples" and defence.average == "mean"
        means[label] = counts / counts.sum() @ rows if by_samples else defence.middle(rows)
        known[label] = True
    return ClassTargets(means, known)
