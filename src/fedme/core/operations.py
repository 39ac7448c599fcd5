"""Operations: what a client's round yields. The round is a generator that reads like the paper's pseudo-code.

There are four operations, `Train`, `Evaluate`, `Predict` and `EstimateStatistics`, created by the functions `train`,
`evaluate`, `predict` and `estimate_statistics`. Every ``yield`` passes a tuple of operations that may run at the same time to
the engine and receives their results in the same order.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from fedme.core.data import Inputs, Split
from fedme.core.key import Key
from fedme.core.model import Model, WithFrozen
from fedme.core.running_statistics import running_statistics
from fedme.core.tree import Params
from fedme.core.value_class import value_class

Role = str
Models = Mapping[Role, Model]
OptState = Mapping[Role, Params]
LastBatch = Literal["keep", "drop", "scale"]
T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """One mini-batch; `step` counts the batches of this training, from 0. Its mean loss is multiplied by `weight`."""

    x: Inputs
    y: Tensor
    step: int
    weight: float = 1.0


@dataclass(frozen=True)
class BatchSchedule:
    """The mini-batches of a training: a number of epochs, or a number of steps.

    If the number of samples is no multiple of the batch size, the last batch of an epoch is incomplete. `last_batch` says what
    happens to it: "keep" trains on it like on any other, "drop" leaves it out, "scale" multiplies its loss by its size divided
    by the batch size, so that every sample has the same weight. A client with less than one batch has one incomplete batch per
    epoch, which is neither dropped nor scaled. Poisson sampling has no epochs, and so no last batch.
    """

    epochs: int = 1
    batch: int = 20
    steps: int | None = None  # the number of batches, instead of `epochs`
    shuffle: bool = True  # False: batches in the order of the data, wrapping around
    offset: int = 0  # without shuffling, the index of the first batch
    augment: bool = True  # apply the random augmentation of the source, if it has one
    poisson: bool = False  # Poisson sampling: every sample is drawn independently; `batch` is the mean size
    last_batch: LastBatch = "keep"  # what happens to the incomplete last batch of an epoch

    def positions(self, samples: int, key: Key) -> tuple[Tensor, Tensor]:
        """The positions of the samples of every batch (steps x batch, padded with 0) and the size of every batch (steps).

        The last batch of an epoch may be smaller. Poisson-sampled batches may be empty.
        """
        if not samples:
            return torch.zeros((0, self.batch), dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        per_epoch, count = self.per_epoch(samples), self.count(samples)
        if self.poisson:
            return self._poisson(samples, count, key)
        first = self.offset % per_epoch if not self.shuffle else 0
        epochs = -(-(first + count) // per_epoch)
        used = min(samples, per_epoch * self.batch)
        orders = torch.zeros((epochs, per_epoch * self.batch), dtype=torch.int64)
        for epoch in range(epochs):
            order = torch.randperm(samples, generator=key.at("epoch", epoch).torch()) if self.shuffle else torch.arange(samples)
            orders[epoch, :used] = order[:used]
        sizes = torch.full((epochs, per_epoch), self.batch)
        sizes[:, -1] = used - (per_epoch - 1) * self.batch
        chosen = slice(first, first + count)
        return orders.reshape(-1, self.batch)[chosen], sizes.reshape(-1)[chosen]

    def count(self, samples: int) -> int:
        """The number of batches."""
        if not samples:
            return 0
        return self.steps if self.steps is not None else self.epochs * self.per_epoch(samples)

    def per_epoch(self, samples: int) -> int:
        """The number of batches of an epoch over one sample or more."""
        drops = self.last_batch == "drop" and not self.poisson
        return max(1, samples // self.batch) if drops else -(-samples // self.batch)

    def divisors(self, samples: int, sizes: Tensor) -> Tensor:
        """What the sum of the losses of every batch is divided by, given the size of every batch.

        This is the size of the batch; with "scale" and with Poisson sampling it is the same number for all batches.
        """
        same = self.poisson or self.scales(samples)
        return torch.full_like(sizes, min(self.batch, samples)) if same else sizes

    def scales(self, samples: int) -> bool:
        """Whether the losses of incomplete batches are scaled, and there are any."""
        return self.last_batch == "scale" and not self.poisson and samples > self.batch and samples % self.batch > 0

    def rate(self, samples: int) -> float:
        """The probability that a sample is in a batch."""
        return min(1.0, self.batch / samples)

    def _poisson(self, samples: int, steps: int, key: Key) -> tuple[Tensor, Tensor]:
        rate = self.rate(samples)
        drawn = [torch.from_numpy(key.at("step", s).uniform(samples) < rate).nonzero().flatten() for s in range(steps)]
        sizes = torch.tensor([len(batch) for batch in drawn], dtype=torch.int64)
        positions = torch.zeros((steps, max(1, int(sizes.max()))), dtype=torch.int64)
        for row, batch in zip(positions, drawn, strict=True):
            row[: len(batch)] = batch
        return positions, sizes

    def batches(self, samples: int, key: Key) -> list[Tensor]:
        """The positions of every batch, in order."""
        positions, sizes = self.positions(samples, key)
        return [row[:size] for row, size in zip(positions, sizes.tolist(), strict=True)]


class Objective(Protocol):
    """A loss of outputs, independent of the weights, so that different architectures can be trained together."""

    def __call__(self, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
        """The loss of every role for every sample. A role's loss must not depend on the weights of another role.

        An objective may have a method `logit_gradients` with the same arguments that returns, in closed form, the
        derivatives of the losses by the logits.
        """
        ...


class Gradient(Protocol):
    """Computes gradients of the mean loss of a batch; implemented by the engine."""

    def clip(self, grads: Params, limit: float) -> Params:
        """The gradients of one role, scaled per client so that their norm is at most `limit`.

        This and `dot` apart, an optimizer is elementwise. Only the engine knows which weights belong to one client.
        """
        ...

    def dot(self, a: Params, b: Params) -> Params:
        """The dot product of all weights of one role, one number per client, under the name of every weight."""
        ...

    def __call__(self, models: Models, batch: Batch, draw: int = 0) -> tuple[Mapping[Role, Params], Mapping[Role, Params]]:
        """Gradients and new buffers of every model in `models`, a subset of the roles that the objective accepts.

        `draw` numbers the calls within a step: each has its own dropout masks.
        """
        ...


class LocalOptimizer(Protocol):
    """One local step: elementwise arithmetic over weights and calls of `gradient`, for one client or a stack of clients."""

    @property
    def objective(self) -> Objective:
        """The loss that is minimised."""
        ...

    def init(self, models: Models) -> OptState:
        """The initial optimizer state of one client; a role without a state is left out."""
        ...

    def __call__(
        self, gradient: Gradient, models: Models, opt: OptState, frozen: Models, batch: Batch
    ) -> tuple[Models, OptState]:
        """The models and the optimizer state after one step; `frozen` models do not change."""
        ...


@value_class
class Score:
    """The score of a model on a split. `seconds` is the measured time per sample, if requested; it is not repeatable."""

    samples: int
    loss: float
    accuracy: float
    seconds: float = 0.0


@dataclass(frozen=True)
class Collect:
    """A training adds up the outputs of its models by the class of the sample, as they were before every step."""

    classes: int
    chances: bool = False  # the softmax of the outputs instead


@dataclass(frozen=True)
class ClassSums:
    """The sum of a model's outputs over all samples of every class that a training has seen, and their numbers."""

    sums: Tensor  # classes x outputs
    counts: Tensor  # classes


@value_class
class Trained:
    """The result of training; `losses` are means over the training samples, taken while the weights changed.

    `seen` are sums of outputs, where the training collects them.
    """

    models: Models
    opt: OptState
    losses: Mapping[Role, float]
    seen: Mapping[Role, ClassSums] = field(default_factory=dict)


@dataclass(frozen=True)
class GaussianMechanism:
    """Differential privacy of one training: every gradient is a Gaussian mechanism over the samples of its batch.

    The gradient of one sample, over all models together, is clipped to norm `clip`. The sum over the batch gets normal noise
    with standard deviation ``noise * clip`` and is divided by the mean batch size.
    """

    clip: float
    noise: float


@value_class
class Train:
    """Train several models on the same batches."""

    models: Models
    optimizer: LocalOptimizer
    data: Split
    batch_schedule: BatchSchedule
    key: Key
    opt: OptState = field(default_factory=dict)
    frozen: Models = field(default_factory=dict)
    mechanism: GaussianMechanism | None = None
    collect: Collect | None = None
    keep_opt: bool = True  # whether the result has the optimizer state, which may be larger than the models


@value_class
class Evaluate:
    """Mean loss and accuracy of a model on a split, in evaluation mode; `timed` also measures the time of inference."""

    model: Model
    data: Split
    timed: bool = False


@value_class
class Predict:
    """The logits of a model for every sample of a split, in evaluation mode."""

    model: Model
    data: Split


@dataclass(frozen=True)
class EstimateStatistics:
    """The model with the running statistics of its normalisation layers re-estimated on the inputs of a split.

    The statistics describe the samples, so the result must not leave the client; [privacy] refuses the operation.
    """

    model: Model
    data: Split


Op = Train | Evaluate | Predict | EstimateStatistics
Computation = Generator[tuple[Op, ...], Sequence[Any], T]


def train(
    models: Models,
    optimizer: LocalOptimizer,
    data: Split,
    batch_schedule: BatchSchedule,
    key: Key,
    opt: OptState | None = None,
    frozen: Models | None = None,
    collect: Collect | None = None,
) -> Computation[Trained]:
    """Train `models` on the same batches. A role that is missing in `opt` starts with a new optimizer state.

    The result has the optimizer state at the end if `opt` is given, be it empty; without `opt` nobody asks for it.

    An objective with a method `fitted_to`, such as one with class weights, is fitted to the samples first.
    """
    if (fitted_to := getattr(optimizer.objective, "fitted_to", None)) is not None:
        optimizer = replace(optimizer, objective=fitted_to(data))  # type: ignore[type-var]
    operation = Train(
        models, optimizer, data, batch_schedule, key, opt or {}, frozen or {}, collect=collect, keep_opt=opt is not None
    )
    result: Sequence[Trained] = yield (operation,)
    if WithFrozen not in [type(model.buffers) for model in models.values()]:
        return result[0]
    trained = {role: m.frozen_like(models[role]) if role in models else m for role, m in result[0].models.items()}
    return replace(result[0], models=trained)


def evaluate(model: Model, data: Split, timed: bool = False) -> Computation[Score]:
    """Loss and accuracy of `model` on `data`."""
    result: Sequence[Score] = yield (Evaluate(model, data, timed),)
    return result[0]


def evaluate_each(models: Iterable[Model], data: Split, timed: bool = False) -> Computation[Sequence[Score]]:
    """The same of several models."""
    result: Sequence[Score] = yield tuple([Evaluate(model, data, timed) for model in models])
    return result


def predict(model: Model, data: Split) -> Computation[Tensor]:
    """Logits of `model` for `data`."""
    result: Sequence[Tensor] = yield (Predict(model, data),)
    return result[0]


def estimate_statistics(model: Model, data: Split) -> Computation[Model]:
    """`model` with running statistics re-estimated on `data`; the same model if it has none."""
    if not running_statistics(model.arch):
        return model
    result: Sequence[Model] = yield (EstimateStatistics(model, data),)
    return result[0]


def immediately(value: T) -> Computation[T]:
    """A computation without operations that returns `value`."""
    return value
    yield  # never reached: it makes this function a generator


def in_parallel(steps: Sequence[Computation[T]]) -> Computation[list[T]]:
    """Independent computations of one client. The operations that they wait for are passed to the engine together."""
    results: list[Any] = [None] * len(steps)
    waiting: list[tuple[int, int]] = []  # what has not ended, and for how many operations it waits
    wanted: list[Op] = []

    def advance(index: int, answers: Sequence[Any] | None) -> None:
        try:
            ops = steps[index].send(answers)  # type: ignore[arg-type]
        except StopIteration as done:
            results[index] = done.value
            return
        waiting.append((index, len(ops)))
        wanted.extend(ops)

    for index in range(len(steps)):
        advance(index, None)
    while waiting:
        answers = yield tuple(wanted)
        pending, waiting, wanted, start = waiting, [], [], 0
        for index, count in pending:
            advance(index, answers[start : start + count])
            start += count
    return results
