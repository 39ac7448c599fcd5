"""A client uses and compares models with running statistics of its own samples, where these are better on its validation part.

Statistics that were averaged over clients do not fit clients whose inputs differ. Where clients differ in their classes, the
averaged ones may be better: statistics of the client's own samples remove what tells its classes from those of others.

A method does not know about it. The operations that its client yields pass through `with_own_statistics` on their way to the
engine. Models that are trained, sent or asked for predictions keep the statistics that they came with.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedme.core.data import ClientData
from fedme.core.model import Model
from fedme.core.operations import Computation, Evaluate, Op, T, estimate_statistics, evaluate_each, in_parallel
from fedme.core.running_statistics import running_statistics


def with_better_statistics(model: Model, data: ClientData) -> Computation[Model]:
    """The model with running statistics of the client's training samples, unless those it came with are better.

    Better is a smaller loss on the validation part; without one, the client's own statistics are taken. A network without
    running statistics takes no operation.
    """
    own = yield from estimate_statistics(model, data.train)
    if own is model or not len(data.val):
        return own
    before, after = yield from evaluate_each((model, own), data.val)
    return model if before.loss < after.loss else own


def with_own_statistics(work: Computation[T], data: ClientData) -> Computation[T]:
    """The same work in which models are evaluated `with_better_statistics`."""
    results: Sequence[Any] | None = None
    while True:
        try:
            operations = work.send(results)  # type: ignore[arg-type]
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        for op in operations:
            if type(op) is Evaluate and running_statistics(op.model.arch):
                operations = tuple((yield from in_parallel([_with_better_statistics(op, data) for op in operations])))
                break
        results = yield operations


def _with_better_statistics(op: Op, data: ClientData) -> Computation[Op]:
    if not isinstance(op, Evaluate):
        return op
    return replace(op, model=(yield from with_better_statistics(op.model, data)))
