"""A client's first architecture: train each one of a pool alone and keep the best on the validation part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isnan

import torch

from fedme.core.data import ClientData
from fedme.core.key import Key
from fedme.core.method import Round
from fedme.core.model import Arch, Model
from fedme.core.operations import Computation, Score, evaluate, in_parallel, train
from fedme.learning.objectives import CrossEntropy
from fedme.learning.training_settings import Training


@dataclass(frozen=True)
class Choice:
    """The chosen architecture, how each one did, and the model trained with the chosen one, if it was to be kept."""

    arch: Arch
    scores: Mapping[str, Score]
    model: Model | None = None


def best_local(
    pool: Sequence[Arch],
    data: ClientData,
    training: Training,
    rounds: int,
    key: Key,
    dtype: torch.dtype = torch.float32,
    keep: bool = False,
) -> Computation[Choice]:
    """The architecture that is best on the validation part after `rounds` rounds of local training; ties go to the smaller.

    Best is the most accurate; where numbers are predicted, which are never right or wrong, the one with the smallest loss.
    With `keep`, the trained model of the best architecture is returned too.
    """

    def train_and_score(arch: Arch) -> Computation[tuple[Model | None, Score]]:
        trained = Model.init(arch, key.at(arch.name, "init"), dtype)
        opt: Mapping[str, Mapping[str, torch.Tensor]] = {}
        for t in range(rounds):
            when = Round(t, rounds)
            result = yield from train(
                {"own": trained},
                training.local_optimizer(CrossEntropy(), when),
                data.train,
                training.batch_schedule(when),
                key.at(arch.name, "round", t),
                opt,
            )
            trained, opt = result.models["own"], result.opt
        score = (yield from evaluate(trained, data.val)) if len(data.val) else Score(0, 0.0, 0.0)
        return trained if keep else None, score

    trained = yield from in_parallel([train_and_score(arch) for arch in pool])
    models, scores = zip(*trained, strict=True)
    best = min(range(len(pool)), key=lambda i: (not isfinite(scores[i].loss), _cost(scores[i]), pool[i].parameters, i))
    return Choice(pool[best], {arch.name: score for arch, score in zip(pool, scores, strict=True)}, models[best])


def _cost(score: Score) -> float:
    return score.loss if isnan(score.accuracy) else -score.accuracy
