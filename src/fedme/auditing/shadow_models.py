"""Shadow models: the confidence of models in samples that they were not trained on.

They are trained without noise on random halves of all clients' training and test samples. Halves come in complementary pairs,
so exactly half of the shadow models are not trained on a given sample.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedme.auditing.membership_inference import Scores, confidence
from fedme.core.data import Split
from fedme.core.key import Key
from fedme.core.method import Round
from fedme.core.model import Arch, Model
from fedme.core.operations import Computation, OptState, in_parallel, predict, train
from fedme.learning.objectives import CrossEntropy
from fedme.learning.training_settings import Training

EPOCHS = 20


def halves(samples: int, count: int, key: Key) -> list[torch.Tensor]:
    """The positions of every shadow model's samples; `count` is even."""
    parts = []
    for pair in range(count // 2):
        order = torch.randperm(samples, generator=key.at(pair).torch())
        parts += [order[: samples // 2], order[samples // 2 :]]
    return parts


def shadow_scores(arch: Arch, pool: Split, count: int, training: Training, dtype: torch.dtype, key: Key) -> Computation[Scores]:
    """For every sample of the pool, the mean confidence of the shadow models that were not trained on it."""
    parts = halves(len(pool), count, key.at("halves"))

    def shadow(number: int, part: torch.Tensor) -> Computation[Scores]:
        model_key = key.at(arch.name, number)
        models: Mapping[str, Model] = {"own": Model.init(arch, model_key.at("init"), dtype)}
        opt: OptState = {}
        schedule, optimizer = training.whole_epochs(EPOCHS), training.local_optimizer(CrossEntropy(), Round(0, 1))
        models = (yield from train(models, optimizer, pool.take(part), schedule, model_key.at("train"), opt)).models
        return confidence((yield from predict(models["own"], pool)), pool.y)

    all_scores: Sequence[Scores] = yield from in_parallel([shadow(number, part) for number, part in enumerate(parts)])
    total, count_unseen = np.zeros(len(pool)), np.zeros(len(pool))
    for scores, part in zip(all_scores, parts, strict=True):
        unseen = np.ones(len(pool), dtype=bool)
        unseen[part.numpy()] = False
        total[unseen] += scores[unseen]
        count_unseen[unseen] += 1
    return total / count_unseen
