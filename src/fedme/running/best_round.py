"""A client's personal model after its best round: the evaluated round in which it did best on the client's validation part.

At the end it is a candidate beside the last model (`artifacts/model_choice.py`). It costs no computation, because it is taken
from the evaluations that a run makes anyway, but a second set of weights per client is kept. It is part of the checkpoint, so a
resumed run ends with the same one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fedme.core.model import Model
from fedme.core.task_types import task_type_of
from fedme.federation.client_work import Evaluation, ModelScore
from fedme.results.verdicts import scores_per_sample

BEST = "best"  # its role among the models of a client


@dataclass(frozen=True)
class BestRound:
    """The model after a round, its mean score on the validation part (larger is better), and its metrics and outputs."""

    round: int  # from 0
    value: float
    model: Model
    scores: tuple[ModelScore, ...]
    outputs: Mapping[str, Tensor]


def better(before: BestRound | None, evaluation: Evaluation, t: int) -> BestRound | None:
    """The best round up to `t`, whose evaluation is given; of equal rounds the latest. None without validation samples."""
    answers, targets = evaluation.outputs.get("val/personal"), evaluation.outputs.get("val/targets")
    if answers is None or targets is None:
        return before
    value = float(scores_per_sample(task_type_of(targets), answers, targets).mean())
    if not np.isfinite(value) or (before is not None and value < before.value):
        return before
    outputs = {f"{part}/{BEST}": evaluation.outputs[f"{part}/personal"] for part in ("val", "test") if _has(evaluation, part)}
    scores = [replace(score, model=BEST) for score in evaluation.scores if (score.model, score.stage) == ("personal", "round")]
    return BestRound(t, value, evaluation.models["personal"], tuple(scores), outputs)


def _has(evaluation: Evaluation, part: str) -> bool:
    return f"{part}/personal" in evaluation.outputs


def with_best_round(evaluation: Evaluation, best: BestRound | None, t: int) -> Evaluation:
    """The evaluation after the last round `t`, with the model of the best round, unless that is the last."""
    if best is None or best.round == t:
        return evaluation
    models, outputs = {**evaluation.models, BEST: best.model}, {**evaluation.outputs, **best.outputs}
    return replace(evaluation, models=models, scores=[*evaluation.scores, *best.scores], outputs=outputs)
