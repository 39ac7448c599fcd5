"""A client evaluates models with running statistics of its own samples: it compares models as it would use them.

A method does not know about it. The operations that its client yields pass through `with_own_statistics` on their way to the
engine. Models that are trained, sent or asked for predictions keep the statistics that they came with.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedme.core.data import Split
from fedme.core.operations import Computation, Evaluate, Op, T, estimate_statistics, in_parallel


def with_own_statistics(work: Computation[T], samples: Split) -> Computation[T]:
    """The same work in which models are evaluated with running statistics that are re-estimated on `samples`."""
    results: Sequence[Any] | None = None
    while True:
        try:
            operations = work.send(results)  # type: ignore[arg-type]
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        results = yield tuple((yield from in_parallel([_with_own_statistics(op, samples) for op in operations])))


def _with_own_statistics(op: Op, samples: Split) -> Computation[Op]:
    if not isinstance(op, Evaluate):
        return op
    return replace(op, model=(yield from estimate_statistics(op.model, samples)))
