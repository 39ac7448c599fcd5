"""How good predictions are: every number that is reported of a model on a split, from its logits and the labels.

A client often lacks classes, so each number says which classes it is a mean over, and is None where it has no meaning.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

BINS = 15  # of the calibration error, as in Guo et al. 2017


@dataclass(frozen=True)
class Metrics:
    """How a model does on a split.

    A sample whose probabilities are not numbers has no prediction, which is wrong.

    `loss` is the mean cross-entropy, carried through when it is infinite or not a number.
    `balanced_accuracy` is the mean recall of the classes among the labels.
    `macro_f1` is the mean F1 of the classes among the labels or the predictions, as scikit-learn has it by default.
    `auroc` is the mean area under the one-versus-rest curve of a class's probability, ties half, over the classes
    with at least one sample inside and one outside; None when there is no such class or a probability is not a number.
    `ece` is the calibration error of the top probability in 15 bins of equal width; None when one is not a number.
    All are None when there are no samples.
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


@torch.no_grad()
def measure(logits: Tensor, labels: Tensor) -> Metrics:
    """Everything about `logits` (samples by classes) for `labels` (int64), computed in double precision."""
    samples, classes = logits.shape
    if samples == 0:
        return Metrics(samples=0, correct=0, classes_present=0)
    log_probabilities = _log_softmax(logits.double())
    loss = -log_probabilities.gather(1, labels[:, None]).mean()
    top = log_probabilities.amax(1)  # nan when anything in the row is
    predictions = torch.where(top.isnan(), classes, logits.argmax(1))
    hits = predictions == labels

    support = torch.bincount(labels, minlength=classes)
    predicted = torch.bincount(predictions, minlength=classes + 1)[:classes]
    right = torch.bincount(labels[hits], minlength=classes).double()
    present = support > 0
    recall = right[present] / support[present]
    seen = support + predicted > 0
    f1 = 2 * right[seen] / (support + predicted)[seen]

    correct = int(hits.sum())
    numbers = not bool(top.isnan().any())
    return Metrics(
        samples=samples,
        correct=correct,
        classes_present=int(present.sum()),
        loss=float(loss),
        accuracy=correct / samples,
        balanced_accuracy=float(recall.mean()),
        macro_f1=float(f1.mean()),
        auroc=_auroc(log_probabilities, labels, support) if numbers else None,
        ece=_calibration_error(top.exp(), hits) if numbers else None,
    )


def _log_softmax(logits: Tensor) -> Tensor:
    """In parts, because torch's own (like its `max` over rows) wakes all threads however few samples there are."""
    shifted = logits - logits.amax(1, keepdim=True)
    return shifted - shifted.exp().sum(1, keepdim=True).log()


def _auroc(scores: Tensor, labels: Tensor, support: Tensor) -> float | None:
    """The ranks of a class's own samples give the area under its curve (the Mann-Whitney statistic).

    Log-probabilities rank like probabilities, but those near 0 stay apart.
    """
    samples = len(labels)
    classes = (support > 0).nonzero().squeeze(1)
    if len(classes) < 2:  # a class with all samples has nothing outside
        return None
    values, order = scores.T[classes].sort(1)
    changes = values[:, 1:] != values[:, :-1]
    places = torch.arange(samples, device=scores.device)
    first = torch.where(pad(changes, (1, 0), value=True), places, 0).cummax(1).values
    last = torch.where(pad(changes, (0, 1), value=True), places, samples).flip(1).cummin(1).values.flip(1)
    own = labels[order] == classes[:, None]
    ranks = ((first + last + 2) * own).sum(1) / 2  # from 1; tied samples share the mean of their ranks
    inside = support[classes]
    areas = (ranks.double() - inside * (inside + 1) / 2) / (inside * (samples - inside))
    return float(areas.mean())


def _calibration_error(confidence: Tensor, hits: Tensor) -> float:
    """The mean gap between confidence and accuracy, in bins open below and closed above."""
    edges = torch.linspace(0.0, 1.0, BINS + 1, dtype=torch.float64, device=confidence.device)
    bins = torch.bucketize(confidence, edges[1:-1])
    gaps = torch.bincount(bins, weights=hits.double() - confidence, minlength=BINS)
    return float(gaps.abs().sum()) / len(hits)
