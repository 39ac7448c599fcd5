"""Validation scores of what a client has trained, before the server aggregates: the stage "trained" of the records.

A method does not know about it. The operations that its client yields pass through `with_trained_scores` on their way to the
engine; the models of the last training are evaluated on the client's validation part when the client's round ends.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedme.core.data import ClientData
from fedme.core.method import Report
from fedme.core.operations import Computation, Models, Train, evaluate_each

ClientRound = Computation[tuple[Any, Any, Report]]


def with_trained_scores(work: ClientRound, data: ClientData) -> ClientRound:
    """The same round of a client; its report has scores of the trained models, unless the method has scores of its own."""
    results: Sequence[Any] | None = None
    trained: Models = {}
    while True:
        try:
            operations = work.send(results)  # type: ignore[arg-type]
        except StopIteration as done:
            state, up, report = done.value
            break
        results = yield operations
        for operation, result in zip(operations, results, strict=True):
            if isinstance(operation, Train):
                trained = result.models
    if report.scores or not trained or not len(data.val):
        return state, up, report
    scores = yield from evaluate_each(trained.values(), data.val)
    return state, up, replace(report, scores=dict(zip(trained, scores, strict=True)))
