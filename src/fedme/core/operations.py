"""What a client does in a round: a generator that yields expensive operations and reads like the paper's pseudo-code.

There are three operations, `Train`, `Evaluate` and `Predict`, reached only through the helpers below. Every ``yield`` hands
the engine a tuple of operations that may run at the same time and receives their results in the same order; that is all an
engine has to know.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fedme.core.data import Inputs, Split
from fedme.core.key import Key
from fedme.core.model import Model
from fedme.core.tree import Params

Role = str
Models = Mapping[Role, Model]
OptState = Mapping[Role, Params]
T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """One mini-batch; `step` counts the batches of this training, from 0."""

    x: Inputs
    y: Tensor
    step: int


@dataclass(frozen=True)
class BatchSchedule:
    """How a client goes through its data: whole epochs, or a number of steps (mini-batches)."""

    epochs: int = 1
    batch: int = 20
    steps: int | None = None  # when given, stop after so many batches, however many epochs they are
    shuffle: bool = True  # False: the order of the data, wrapping around
    offset: int = 0  # in that order, the batch to begin with
    augment: bool = True  # let the source change inputs at random, if it does
    poisson: bool = False  # every sample is in every batch with the same chance, for itself; `batch` is the mean size

    def positions(self, samples: int, key: Key) -> tuple[Tensor, Tensor]:
        """The positions of every batch (steps x batch, padded with 0) and how many of them count (steps).

        The last batch of an epoch may be small; nothing is dropped. Batches drawn by chance (`poisson`) may be empty.
        """
        if not samples:
            return torch.zeros((0, self.batch), dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        per_epoch, count = -(-samples // self.batch), self.count(samples)
        if self.poisson:
            return self._poisson(samples, count, key)
        first = self.offset % per_epoch if not self.shuffle else 0
        epochs = -(-(first + count) // per_epoch)
        whole = torch.zeros((epochs, per_epoch * self.batch), dtype=torch.int64)
        for epoch in range(epochs):
            order = torch.randperm(samples, generator=key.at("epoch", epoch).torch()) if self.shuffle else torch.arange(samples)
            whole[epoch, :samples] = order
        sizes = torch.full((epochs, per_epoch), self.batch)
        sizes[:, -1] = samples - (per_epoch - 1) * self.batch
        chosen = slice(first, first + count)
        return whole.reshape(-1, self.batch)[chosen], sizes.reshape(-1)[chosen]

    def count(self, samples: int) -> int:
        """How many batches there are."""
        if not samples:
            return 0
        return self.steps if self.steps is not None else self.epochs * -(-samples // self.batch)

    def rate(self, samples: int) -> float:
        """The chance of a sample to be in a batch."""
        return min(1.0, self.batch / samples)

    def _poisson(self, samples: int, steps: int, key: Key) -> tuple[Tensor, Tensor]:
        rate = self.rate(samples)
        drawn = [torch.from_numpy(key.at("step", s).uniform(samples) < rate).nonzero().flatten() for s in range(steps)]
        sizes = torch.tensor([len(each) for each in drawn], dtype=torch.int64)
        positions = torch.zeros((steps, max(1, int(sizes.max()))), dtype=torch.int64)
        for row, each in zip(positions, drawn, strict=True):
            row[: len(each)] = each
        return positions, sizes

    def batches(self, samples: int, key: Key) -> list[Tensor]:
        """The positions of every batch, in order."""
        positions, sizes = self.positions(samples, key)
        return [row[:size] for row, size in zip(positions, sizes.tolist(), strict=True)]


class Objective(Protocol):
    """A loss that sees outputs only, never weights, so that any mix of architectures can be trained together."""

    def __call__(self, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
        """The loss of every role for every sample. A role's loss must not depend on the weights of another role.

        An objective may have a method `slopes` with the same arguments that returns, in closed form, the derivatives of the
        losses by the logits.
        """
        ...


class Gradient(Protocol):
    """The mean loss of the current batch, differentiated by the engine."""

    def clip(self, grads: Params, limit: float) -> Params:
        """`grads` of one role, shrunk client by client so that their norm is at most `limit`.

        Rules are elementwise but for this: only the engine knows which weights belong to one client.
        """
        ...

    def __call__(self, models: Models, batch: Batch, draw: int = 0) -> tuple[Mapping[Role, Params], Mapping[Role, Params]]:
        """Gradients and new buffers of each of `models` (any subset of the roles the objective can do with).

        `draw` numbers the calls within a step, so that each has dropout masks of its own.
        """
        ...


class LocalOptimizer(Protocol):
    """One local step: elementwise arithmetic over weights plus calls of `gradient`, for one client or a stack of them."""

    @property
    def objective(self) -> Objective:
        """What `gradient` differentiates."""
        ...

    def init(self, models: Models) -> OptState:
        """A fresh optimiser state."""
        ...

    def __call__(
        self, gradient: Gradient, models: Models, opt: OptState, frozen: Models, batch: Batch
    ) -> tuple[Models, OptState]:
        """The models and the optimiser state after the step; `frozen` models are only looked at."""
        ...


@dataclass(frozen=True)
class Score:
    """How a model does on a split. `seconds` is the measured time for one sample, if asked for: it is not repeatable."""

    samples: int
    loss: float
    accuracy: float
    seconds: float = 0.0


@dataclass(frozen=True)
class Trained:
    """What training gives back; `losses` are means over the samples seen, while the models were changing."""

    models: Models
    opt: OptState
    losses: Mapping[Role, float]


@dataclass(frozen=True)
class GaussianMechanism:
    """Every gradient of a training is a Gaussian mechanism over its samples.

    The gradient of one sample, all models together, is shrunk to norm `clip`; the sum over the batch gets normal noise of
    deviation ``noise * clip`` and is divided by the mean batch size.
    """

    clip: float
    noise: float


@dataclass(frozen=True)
class Train:
    """Train models together on the same batches."""

    models: Models
    optimizer: LocalOptimizer
    data: Split
    batch_schedule: BatchSchedule
    key: Key
    opt: OptState = field(default_factory=dict)
    frozen: Models = field(default_factory=dict)
    mechanism: GaussianMechanism | None = None


@dataclass(frozen=True)
class Evaluate:
    """Mean cross-entropy and accuracy of a model on a split, in evaluation mode; `timed` asks for its speed too."""

    model: Model
    data: Split
    timed: bool = False


@dataclass(frozen=True)
class Predict:
    """Logits of a model for every sample of a split, in evaluation mode."""

    model: Model
    data: Split


Op = Train | Evaluate | Predict
Computation = Generator[tuple[Op, ...], Sequence[Any], T]


def train(
    models: Models,
    optimizer: LocalOptimizer,
    data: Split,
    batch_schedule: BatchSchedule,
    key: Key,
    opt: OptState | None = None,
    frozen: Models | None = None,
) -> Computation[Trained]:
    """Train `models` together; a role missing from `opt` starts with a fresh optimiser state."""
    result: Sequence[Trained] = yield (Train(models, optimizer, data, batch_schedule, key, opt or {}, frozen or {}),)
    return result[0]


def evaluate(model: Model, data: Split, timed: bool = False) -> Computation[Score]:
    """Loss and accuracy of `model` on `data`."""
    result: Sequence[Score] = yield (Evaluate(model, data, timed),)
    return result[0]


def predict(model: Model, data: Split) -> Computation[Tensor]:
    """Logits of `model` for `data`."""
    result: Sequence[Tensor] = yield (Predict(model, data),)
    return result[0]


def immediately(value: T) -> Computation[T]:
    """Work that needs no operation."""
    return value
    yield  # never reached: it makes this function a generator


def in_parallel(steps: Sequence[Computation[T]]) -> Computation[list[T]]:
    """Independent pieces of work of one client, side by side: what they wait for is handed to the engine at once."""
    results: dict[int, T] = {}
    waiting: dict[int, tuple[Op, ...]] = {}

    def advance(index: int, resume: Callable[[], tuple[Op, ...]]) -> None:
        try:
            waiting[index] = resume()
        except StopIteration as done:
            waiting.pop(index, None)
            results[index] = done.value

    for index, work in enumerate(steps):
        advance(index, work.__next__)
    while waiting:
        pending = list(waiting.items())
        answers = yield tuple(op for _, ops in pending for op in ops)
        start = 0
        for index, ops in pending:
            part = answers[start : start + len(ops)]
            start += len(ops)
            advance(index, lambda index=index, part=part: steps[index].send(part))  # type: ignore[misc]
    return [results[index] for index in range(len(steps))]
