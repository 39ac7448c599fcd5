"""A client's personal model after its best round: the evaluated round in which it did best on the client's validation part.

At the end it is a candidate beside the last model (`artifacts/model_choice.py`). It costs no computation, because it is taken
from the evaluations that a run makes anyway, but a second set of weights per client is kept. It is part of the checkpoint, so a
resumed run ends with the same one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fedme.core.metrics import measure_all
from fedme.core.model import Model
from fedme.core.task_types import task_type_of
from fedme.federation.client_work import Evaluation, ModelScore
from fedme.results.verdicts import scores_per_sample

BEST = "best"  # its role among the models of a client


@dataclass(frozen=True)
class BestRound:
    """The model after a round, its mean score on the validation part (larger is better), and its outputs."""

    round: int  # from 0
    value: float
    model: Model
    outputs: Mapping[str, Tensor]
    scores: tuple[ModelScore, ...] = ()  # in checkpoints of earlier versions; they follow from the outputs


def better(before: BestRound | None, evaluation: Evaluation, t: int) -> BestRound | None:
    """The best round up to `t`, whose evaluation is given; of equal rounds the latest. None without validation samples."""
    answers, targets = evaluation.outputs.get("val/personal"), evaluation.outputs.get("val/targets")
    if answers is None or targets is None:
        return before
    known = (score.metrics.accuracy for score in evaluation.scores if _names(score) == ("personal", "round", "val"))
    if task_type_of(targets) == "classification" and (accuracy := next(known, None)) is not None:
        value = accuracy
    else:
        value = float(scores_per_sample(task_type_of(targets), answers, targets).mean())
    if not math.isfinite(value) or (before is not None and value < before.value):
        return before
    outputs = {f"{part}/{BEST}": evaluation.outputs[f"{part}/personal"] for part in ("val", "test") if _has(evaluation, part)}
    return BestRound(t, value, evaluation.models["personal"], outputs)


def _has(evaluation: Evaluation, part: str) -> bool:
    return f"{part}/personal" in evaluation.outputs


def _names(score: ModelScore) -> tuple[str, str, str]:
    return score.model, score.stage, score.split


def with_best_round(evaluation: Evaluation, best: BestRound | None, t: int, unit: Sequence[float] = ()) -> Evaluation:
    """The evaluation after the last round `t`, with the model of the best round, unless that is the last.

    `unit` is that of regression targets.
    """
    if best is None or best.round == t:
        return evaluation
    models, outputs = {**evaluation.models, BEST: best.model}, {**evaluation.outputs, **best.outputs}
    parts = [part for part in ("val", "test") if f"{part}/{BEST}" in best.outputs]
    metrics = measure_all([(best.outputs[f"{part}/{BEST}"], outputs[f"{part}/targets"]) for part in parts], unit)
    own = [
        ModelScore(BEST, best.model.arch.name, "round", part, measured) for part, measured in zip(parts, metrics, strict=True)
    ]
    return replace(evaluation, models=models, scores=[*evaluation.scores, *own], outputs=outputs)
