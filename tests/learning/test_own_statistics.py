"""Clients evaluate models with running statistics of their own samples; nothing else that they do changes."""

from dataclasses import replace

import pytest
import torch

from fedme.core.key import Key
from fedme.core.model import Model
from fedme.core.operations import (
    BatchSchedule,
    EstimateStatistics,
    Evaluate,
    Predict,
    Train,
    evaluate,
    in_parallel,
    predict,
    train,
)
from fedme.execution import reference
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD
from fedme.learning.own_statistics import with_better_statistics, with_own_statistics
from fedme_test_support import DENSE, NORMALISED, clients

NORMED, PLAIN = (Model.init(arch, Key(0), torch.float64) for arch in (NORMALISED, DENSE))
DATA = clients()["1"]


def played(work, losses=()):
    """The result of some work, and every tuple of operations that it yielded; `losses` of models replace what they score."""
    yielded, results = [], None
    while True:
        try:
            operations = work.send(results)
        except StopIteration as done:
            return done.value, yielded
        yielded.append(operations)
        results = [reference.run(op) for op in operations]
        results = [
            replace(result, loss=losses[id(op.model)]) if isinstance(op, Evaluate) and id(op.model) in losses else result
            for op, result in zip(operations, results, strict=True)
        ]


def test_models_are_evaluated_with_statistics_of_the_samples():
    work = in_parallel([evaluate(NORMED, DATA.val), evaluate(PLAIN, DATA.val, timed=True), evaluate(NORMED, DATA.test)])
    fitted = reference.run(EstimateStatistics(NORMED, DATA.train))
    scores, yielded = played(with_own_statistics(work, DATA), {id(NORMED): 1e9})
    assert yielded[0] == (EstimateStatistics(NORMED, DATA.train),) * 2
    assert [(type(op), op.data) for op in yielded[1]] == [(Evaluate, DATA.val)] * 4  # with both statistics
    assert [(type(op), op.data, op.timed) for op in yielded[2]] == [
        (Evaluate, DATA.val, False),
        (Evaluate, DATA.val, True),
        (Evaluate, DATA.test, False),
    ]
    assert yielded[2][1].model is PLAIN
    assert scores[0] == reference.run(Evaluate(fitted, DATA.val))
    assert scores[0] != reference.run(Evaluate(NORMED, DATA.val))
    assert scores[2] == reference.run(Evaluate(fitted, DATA.test))


def test_trained_models_and_predictions_keep_the_statistics_that_they_came_with():
    def work():
        outputs = yield from predict(NORMED, DATA.test)
        trained = yield from train({"own": NORMED}, SGD(CrossEntropy(), 0.1), DATA.train, BatchSchedule(1, 4), Key(1))
        yield from evaluate(trained.models["own"], DATA.val)
        return outputs, trained.models["own"]

    expected, _ = played(work())
    found, yielded = played(with_own_statistics(work(), DATA))
    assert [[type(op) for op in operations] for operations in yielded] == [
        [Predict],
        [Train],
        [EstimateStatistics],
        [Evaluate, Evaluate],
        [Evaluate],
    ]
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1].buffers[name], value) for name, value in expected[1].buffers.items())


def test_networks_without_statistics_take_the_same_operations():
    def work():
        score = yield from evaluate(PLAIN, DATA.val)
        outputs = yield from predict(PLAIN, DATA.test)
        return score, outputs

    _, expected = played(work())
    _, yielded = played(with_own_statistics(work(), DATA))
    assert yielded == expected


@pytest.mark.parametrize(("loss", "own"), [(-1.0, False), (1e9, True), (float("nan"), True)])
def test_the_statistics_with_the_smaller_validation_loss_are_kept(loss, own):
    found, yielded = played(with_better_statistics(NORMED, DATA), {id(NORMED): loss})
    assert (found is not NORMED) == own
    fitted = reference.run(EstimateStatistics(NORMED, DATA.train))
    assert torch.equal(found.buffers["1.running_mean"], (fitted if own else NORMED).buffers["1.running_mean"])
    assert all(op.data is DATA.val for op in yielded[1])


def test_without_validation_samples_the_own_statistics_are_taken():
    found, yielded = played(with_better_statistics(NORMED, replace(DATA, val=DATA.val.take(torch.arange(0)))))
    assert [len(operations) for operations in yielded] == [1]
    assert found is not NORMED
    assert played(with_better_statistics(PLAIN, DATA)) == (PLAIN, [])
