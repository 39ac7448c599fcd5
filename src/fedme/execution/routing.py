"""How an operation is run is a value: its route, which the dispatcher decides once."""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fedme.core.model import LARGE_NETWORK, Model
from fedme.core.operations import Op, Train

STEP = 3e6  # effort that takes as long as the fixed cost of a step by autograd, about 0.15 ms
Tick = Callable[[], None]  # called after every operation, for progress and for stopping


def no_tick() -> None:
    """Do nothing."""


class Backend(Protocol):
    """A way to run operations."""

    @property
    def name(self) -> str:
        """As `--explain-engine` prints it."""
        ...

    def supports(self, op: Op) -> str:
        """Why this backend cannot run the operation; empty if it can."""
        ...

    def group(self, op: Op) -> Hashable:
        """Supported operations with equal groups run as one program; None: each runs on its own."""
        ...

    def run(self, ops: Sequence[Op], tick: Tick) -> list[Any]:
        """The results of supported operations of one group."""
        ...


@dataclass(frozen=True)
class Route:
    """The backend of an operation, the group it runs with, and why no backend before it was taken."""

    backend: Backend
    group: Hashable
    reason: str
    made: dict[str, Any] = field(default_factory=dict, compare=False)  # by the backend, for all operations that share the route
    efforts: dict[Hashable, float] = field(default_factory=dict, compare=False)  # of these operations, by what `sizes` says


def models_of(op: Op) -> list[Model]:
    """The models that an operation trains or runs."""
    return list(op.models.values()) if isinstance(op, Train) else [op.model]


def sizes(op: Op) -> Hashable:
    """What decides, beside the models, what the batches of an operation are and how long it takes."""
    if not isinstance(op, Train):
        return op.data.rows.numel()
    schedule = op.batch_schedule
    return op.data.rows.numel(), schedule.batch, schedule.epochs, schedule.steps, schedule.last_batch, schedule.poisson


def is_large(op: Op) -> bool:
    """Whether an operation has a network so large that copies of its weights matter more than anything else."""
    return any(model.arch.parameters >= LARGE_NETWORK for model in models_of(op))


def effort(op: Op) -> float:
    """An estimate of how long an operation takes: samples times passes times parameters."""
    if not isinstance(op, Train):
        return float(len(op.data) * op.model.arch.parameters)
    schedule, samples = op.batch_schedule, len(op.data)
    visits = schedule.count(samples) * schedule.batch
    if schedule.steps is None:  # the last batch of an epoch may be incomplete
        visits = min(visits, schedule.epochs * samples)
    return 3.0 * visits * sum([model.arch.parameters for model in op.models.values()])


def effort_alone(op: Op) -> float:
    """The same of an operation that runs alone by autograd, where every step of every model takes some time of its own."""
    steps = op.batch_schedule.count(len(op.data)) if isinstance(op, Train) else 1
    return effort(op) + STEP * steps * len(models_of(op))


def pieces(efforts: Sequence[float], most: float) -> list[list[int]]:
    """Operations by index, the longest first; those that together have an effort of `most` at most share a piece."""
    result: list[list[int]] = []
    size = 0.0
    for index in sorted(range(len(efforts)), key=lambda index: -efforts[index]):
        if not result or size + efforts[index] > most:
            result.append([])
            size = 0.0
        result[-1].append(index)
        size += efforts[index]
    return result


def run_timed(backend: Backend, ops: Sequence[Op], tick: Tick = no_tick) -> list[tuple[Any, float]]:
    """The results of operations with their seconds; those of a group have parts of its seconds, by effort."""
    if len(ops) > 1 and backend.group(ops[0]) is None:
        return [timed for op in ops for timed in run_timed(backend, [op], tick)]
    start = time.perf_counter()
    values = [
        replace(value, opt={}) if isinstance(op, Train) and not op.keep_opt and value.opt else value
        for op, value in zip(ops, backend.run(ops, tick), strict=True)
    ]
    seconds = time.perf_counter() - start
    return timed_by_effort(values, [effort(op) for op in ops], seconds)


def timed_by_effort(values: Sequence[Any], efforts: Sequence[float], seconds: float) -> list[tuple[Any, float]]:
    """Results of operations that ran together, with their parts of the seconds."""
    total = sum(efforts)
    return [
        (value, seconds * (part / total if total else 1 / len(values))) for value, part in zip(values, efforts, strict=True)
    ]
