"""Shadow models: how confident models are of samples that they have not seen.

They are trained, without noise, on random halves of everybody's training and test samples, two complementary halves at a time,
so that every sample is unknown to exactly half of them.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedme.auditing.membership_inference import Scores, confidence
from fedme.core.data import Split
from fedme.core.key import Key
from fedme.core.method import Round
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, Computation, OptState, in_parallel, predict, train
from fedme.learning.local_training import Training
from fedme.learning.objectives import CrossEntropy

EPOCHS = 20


def halves(samples: int, count: int, key: Key) -> list[torch.Tensor]:
    """The positions of every shadow model's samples; `count` is even."""
    found = []
    for pair in range(count // 2):
        order = torch.randperm(samples, generator=key.at(pair).torch())
        found += [order[: samples // 2], order[samples // 2 :]]
    return found


def unseen(arch: Arch, pool: Split, count: int, training: Training, dtype: torch.dtype, key: Key) -> Computation[Scores]:
    """For every sample of the pool, the mean confidence of the shadow models that have not seen it."""
    parts = halves(len(pool), count, key.at("halves"))

    def shadow(number: int, part: torch.Tensor) -> Computation[Scores]:
        mine = key.at(arch.name, number)
        models: Mapping[str, Model] = {"own": Model.init(arch, mine.at("init"), dtype)}
        opt: OptState = {}
        local, optimizer = BatchSchedule(EPOCHS, training.batch), training.sgd(CrossEntropy(), Round(0, 1))
        models = (yield from train(models, optimizer, pool.take(part), local, mine.at("train"), opt)).models
        return confidence((yield from predict(models["own"], pool)), pool.y)

    answers: Sequence[Scores] = yield from in_parallel([shadow(number, part) for number, part in enumerate(parts)])
    total, times = np.zeros(len(pool)), np.zeros(len(pool))
    for scores, part in zip(answers, parts, strict=True):
        out = np.ones(len(pool), dtype=bool)
        out[part.numpy()] = False
        total[out] += scores[out]
        times[out] += 1
    return total / times
