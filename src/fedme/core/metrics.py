"""How good predictions are: every number that is reported of a model on a split, from its outputs and the targets.

A client often lacks classes, so each number says which classes it is a mean over, and is None where it has no meaning. What is
measured depends on what is predicted (`core/task_types.py`): `MEASURES` lists it, the one that counts first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedme.core.task_types import TASK_LOSSES, TaskType, task_type_of

Array = NDArray[Any]

BINS = 15  # of the calibration error, as in Guo et al. 2017


@dataclass(frozen=True)
class Metrics:
    """How a model does on a split.

    A sample whose probabilities are not numbers has no prediction, which is wrong.

    `loss` is the mean of the kind's loss, carried through when it is infinite or not a number.
    All are None when there are no samples, and where they do not belong to the kind.

    Classes:
    `accuracy` is the share of samples whose class is right.
    `balanced_accuracy` is the mean recall of the classes among the labels.
    `macro_f1` is the mean F1 of the classes among the labels or the predictions, as scikit-learn has it by default.
    `auroc` is the mean area under the one-versus-rest curve of a class's probability, ties half, over the classes
    with at least one sample inside and one outside; None when there is no such class or a probability is not a number.
    `ece` is the calibration error of the top probability in 15 bins of equal width; None when one is not a number.

    Several labels at once (there is one where its probability is above 1/2):
    `accuracy` is the share of all yes-or-no answers that are right, `exact_match` of the samples with no wrong answer.
    `micro_f1` is the F1 of all answers, `macro_f1` the mean over the labels that occur or are predicted; None without any.
    `auroc` is the mean over the labels that some samples have and some have not.

    Numbers, in their own unit:
    `rmse` is the root of the mean squared error over samples and targets, `mae` the mean absolute error.
    `r2` is 1 minus the squared error over that of the split's mean, the mean over targets that are not all the same.
    """

    samples: int
    correct: int
    classes_present: int
    loss: float | None = None
    accuracy: float | None = None
    balanced_accuracy: float | None = None
    macro_f1: float | None = None
    auroc: float | None = None
    ece: float | None = None
    exact_match: float | None = None
    micro_f1: float | None = None
    rmse: float | None = None
    mae: float | None = None
    r2: float | None = None

    def plain(self, kind: TaskType) -> dict[str, Any]:
        """What belongs to the kind."""
        counts = ("samples",) if kind == "regression" else ("samples", "correct", "classes_present")
        return {name: getattr(self, name) for name in (*counts, "loss", *(m.key for m in MEASURES[kind] if m.key != "loss"))}


@dataclass(frozen=True)
class Measure:
    """A number of `Metrics` as people read it."""

    key: str
    title: str
    percent: bool = False
    higher: bool = True  # whether more is better

    @property
    def heading(self) -> str:
        """Of a column."""
        return f"{self.title} %" if self.percent else self.title

    def text(self, value: float | None, digits: int | None = None) -> str:
        """The number without its sign."""
        if value is None:
            return "-"
        return f"{100 * value:.{2 if digits is None else digits}f}" if self.percent else f"{value:.{_digits(value, digits)}f}"

    def shown(self, value: float | None, digits: int | None = None) -> str:
        """The number with what it is; accuracy goes without saying."""
        what = "" if self.title == "accuracy" else f"{self.title} "
        return f"{what}{self.text(value, digits)}{' %' if self.percent and value is not None else ''}"

    def gain(self, value: float, other: float) -> float:
        """How much better than `other` it is: positive is better."""
        return value - other if self.higher else other - value

    def pooled(self, rows: Sequence[Mapping[str, Any]]) -> float | None:
        """The number over the samples of all rows, for accuracies, losses and `rmse`; None where one is not finite."""
        known = [row for row in rows if row["samples"]]
        if not known or any(row[self.key] is None for row in known):
            return None
        power = 2 if self.key == "rmse" else 1
        total = sum(row["samples"] for row in known)
        return float((sum(row[self.key] ** power * row["samples"] for row in known) / total) ** (1 / power))


def _digits(value: float, digits: int | None) -> int:
    """Three after the point, more where the number is small and fewer where it is large."""
    if digits is not None:
        return digits
    size = abs(value)
    return 0 if size >= 10000 else 1 if size >= 100 else 3 if size >= 0.01 or size == 0 else 5


LOSS = Measure("loss", "loss", higher=False)
MEASURES: dict[TaskType, tuple[Measure, ...]] = {
    "classification": (
        Measure("accuracy", "accuracy", percent=True),
        Measure("balanced_accuracy", "balanced", percent=True),
        Measure("macro_f1", "macro F1"),
        Measure("auroc", "AUROC"),
        Measure("ece", "ECE", higher=False),
        LOSS,
    ),
    "multi-label": (
        Measure("accuracy", "label accuracy", percent=True),
        Measure("exact_match", "exact match", percent=True),
        Measure("micro_f1", "micro F1"),
        Measure("macro_f1", "macro F1"),
        Measure("auroc", "AUROC"),
        LOSS,
    ),
    "regression": (
        Measure("rmse", "RMSE", higher=False),
        Measure("mae", "MAE", higher=False),
        Measure("r2", "R2"),
        LOSS,
    ),
}


def kind_of_row(row: Mapping[str, Any]) -> TaskType:
    """What is predicted in a run, from one of its rows, which has the numbers of its kind."""
    return "regression" if "rmse" in row else "multi-label" if "exact_match" in row else "classification"


@torch.no_grad()
def measure(logits: Tensor, y: Tensor, unit: Sequence[float] = ()) -> Metrics:
    """Everything about outputs (samples by classes, labels or targets), computed in double precision.

    `unit` says how large 1 is in the unit of each target, for numbers that were standardised.
    """
    kind = task_type_of(y)
    if not len(logits):
        return Metrics(samples=0, correct=0, classes_present=0)
    if kind == "classification":
        return _classes(logits, y)
    return _labels(logits, y) if kind == "multi-label" else _numbers(logits, y, unit)


def _labels(logits: Tensor, y: Tensor) -> Metrics:
    z = logits.double()
    said = z > 0
    hits = (said == y) & ~z.isnan()
    present, predicted = y.sum(0), said.sum(0)
    right = (said & y).sum(0).double()
    seen = present + predicted > 0
    f1 = 2 * right[seen] / (present + predicted)[seen]
    scores = z.T.numpy(force=True)
    areas = (
        []
        if bool(z.isnan().any())
        else [_auroc(np.stack((-score, score), 1), there) for score, there in zip(scores, y.T.numpy(force=True), strict=True)]
    )
    known = [area for area in areas if area is not None]
    return Metrics(
        samples=len(y),
        correct=int(hits.sum()),
        classes_present=int((present > 0).sum()),
        loss=TASK_LOSSES["multi-label"].loss(z, y).mean().item(),
        accuracy=hits.double().mean().item(),
        exact_match=hits.all(1).double().mean().item(),
        micro_f1=float(2 * right.sum() / (present + predicted).sum()) if bool(seen.any()) else None,
        macro_f1=float(f1.mean()) if bool(seen.any()) else None,
        auroc=sum(known) / len(known) if known else None,
    )


def _numbers(z: Tensor, y: Tensor, unit: Sequence[float]) -> Metrics:
    error = z.double() - y.double()
    scaled = error * torch.tensor(unit, dtype=torch.float64) if len(unit) else error
    spread = (y.double() - y.double().mean(0)).square().sum(0)
    varied = spread > 0
    return Metrics(
        samples=len(y),
        correct=0,
        classes_present=0,
        loss=TASK_LOSSES["regression"].loss(z.double(), y).mean().item(),
        rmse=scaled.square().mean().sqrt().item(),
        mae=scaled.abs().mean().item(),
        r2=float((1 - error.square().sum(0)[varied] / spread[varied]).mean()) if bool(varied.any()) else None,
    )


def _classes(logits: Tensor, labels: Tensor) -> Metrics:
    """In numpy, which is several times faster than torch for so few numbers."""
    samples, classes = logits.shape
    z, y = logits.double().numpy(force=True), labels.numpy(force=True)
    log_probabilities = _log_softmax(z)
    loss = -log_probabilities[np.arange(samples), y].mean()
    top = log_probabilities.max(1)  # nan when anything in the row is
    predictions = np.where(np.isnan(top), classes, z.argmax(1))
    hits = predictions == y

    support = np.bincount(y, minlength=classes)
    predicted = np.bincount(predictions, minlength=classes + 1)[:classes]
    right = np.bincount(y[hits], minlength=classes)
    present = support > 0
    seen = support + predicted > 0

    correct = int(hits.sum())
    numbers = not np.isnan(top).any()
    return Metrics(
        samples=samples,
        correct=correct,
        classes_present=int(present.sum()),
        loss=float(loss),
        accuracy=correct / samples,
        balanced_accuracy=float((right[present] / support[present]).mean()),
        macro_f1=float((2 * right[seen] / (support + predicted)[seen]).mean()),
        auroc=_auroc(log_probabilities, y) if numbers else None,
        ece=_calibration_error(np.exp(top), hits) if numbers else None,
    )


def _log_softmax(logits: Array) -> Array:
    with np.errstate(invalid="ignore"):  # infinite logits: what they give is not a number, and is reported so
        shifted: Array = logits - logits.max(1, keepdims=True)
        shifted -= np.log(np.exp(shifted).sum(1, keepdims=True))
    return shifted


def _auroc(scores: Array, labels: Array) -> float | None:
    """The ranks of a class's own samples give the area under its curve (the Mann-Whitney statistic).

    Log-probabilities rank like probabilities, but those near 0 stay apart.
    """
    samples = len(labels)
    support = np.bincount(labels, minlength=scores.shape[1])
    classes = support.nonzero()[0]
    if len(classes) < 2:  # a class with all samples has nothing outside
        return None
    mine = scores.T[classes]
    order = mine.argsort(1)
    values = np.take_along_axis(mine, order, 1)
    changes = values[:, 1:] != values[:, :-1]
    places = np.arange(samples)
    own = labels[order] == classes[:, None]
    if changes.all():
        twice = 2 * places
    else:  # tied samples share the mean of their ranks
        edge = np.ones((len(classes), 1), dtype=bool)
        first = np.maximum.accumulate(np.where(np.hstack((edge, changes)), places, 0), 1)
        last = np.minimum.accumulate(np.where(np.hstack((changes, edge)), places, samples)[:, ::-1], 1)[:, ::-1]
        twice = first + last
    ranks = ((twice + 2) * own).sum(1) / 2  # from 1
    inside = support[classes]
    return float(((ranks - inside * (inside + 1) / 2) / (inside * (samples - inside))).mean())


def _calibration_error(confidence: Array, hits: Array) -> float:
    """The mean gap between confidence and accuracy, in bins open below and closed above."""
    bins = np.searchsorted(np.linspace(0.0, 1.0, BINS + 1)[1:-1], confidence)
    gaps = np.bincount(bins, weights=hits - confidence, minlength=BINS)
    return float(np.abs(gaps).sum()) / len(hits)
