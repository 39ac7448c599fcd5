"""Details of a classifier: confusion matrix, sensitivity and specificity of every class, Brier score, calibration."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

BINS = 10  # of the calibration table


@dataclass(frozen=True)
class ClassDetails:
    """One class against the others; None where there are no such samples.

    `sensitivity` is the share of its samples that are found (recall), `specificity` the share of the others that are not taken
    for it, `precision` the share of predictions of this class that are right.
    """

    name: str
    samples: int
    sensitivity: float | None
    specificity: float | None
    precision: float | None


@dataclass(frozen=True)
class CalibrationBin:
    """The samples whose top probability is in a range: how many, their mean probability, and how many are right."""

    low: float
    high: float
    samples: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Details:
    """Of a classifier: `confusion` has a row per true class and a column per predicted class.

    `brier` is the mean squared distance between probabilities and truth, summed over classes: 0 is perfect, 2 the worst; for
    two classes it is twice the Brier score of the second class.
    """

    classes: tuple[ClassDetails, ...]
    confusion: tuple[tuple[int, ...], ...]
    brier: float
    calibration: tuple[CalibrationBin, ...]

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "classes": [vars(one) for one in self.classes],
            "confusion": [list(row) for row in self.confusion],
            "brier": self.brier,
            "calibration": [vars(one) for one in self.calibration],
        }


def details(logits: Tensor, labels: Tensor, names: Sequence[str]) -> Details:
    """The details of outputs of shape (samples, classes)."""
    probabilities = logits.double().softmax(1).numpy()
    y, count = labels.numpy(), len(names)
    predicted = probabilities.argmax(1)
    confusion = np.zeros((count, count), dtype=int)
    np.add.at(confusion, (y, predicted), 1)
    support, taken, right = confusion.sum(1), confusion.sum(0), np.diag(confusion)
    others = len(y) - support
    classes = tuple(
        ClassDetails(
            name,
            int(support[c]),
            _share(right[c], support[c]),
            _share(others[c] - (taken[c] - right[c]), others[c]),
            _share(right[c], taken[c]),
        )
        for c, name in enumerate(names)
    )
    truth = np.eye(count)[y]
    top, hits = probabilities.max(1), predicted == y
    places = np.clip((top * BINS).astype(int), 0, BINS - 1)
    calibration = tuple(
        CalibrationBin(b / BINS, (b + 1) / BINS, int(inside.sum()), float(top[inside].mean()), float(hits[inside].mean()))
        for b in range(BINS)
        if (inside := places == b).any()
    )
    brier = float(np.square(probabilities - truth).sum(1).mean())
    return Details(classes, tuple(tuple(map(int, row)) for row in confusion), brier, calibration)


def _share(part: Any, total: Any) -> float | None:
    return float(part / total) if total else None
