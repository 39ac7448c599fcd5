"""A client's first architecture is the one that does best on its validation part after local training."""

import math

import pytest
import torch

from fedme.core.key import Key
from fedme.core.method import Round
from fedme.core.model import Arch, Model
from fedme.core.operations import Evaluate, Score, Train, Trained
from fedme.execution.lockstep import run_in_lockstep
from fedme.execution.reference import one_by_one
from fedme.learning.architecture_selection import best_local
from fedme.learning.objectives import CrossEntropy
from fedme.learning.training_settings import Training
from fedme_test_support import DENSE, LINEAR, WIDE, clients

TRAINING = Training(epochs=1, batch=4, lr=0.1, momentum=0.9, lr_schedule="step", lr_decay=0.5, lr_decay_at=(0.5,))


def choose(pool, accuracies, losses=None):
    """The choice when the trained models score as given; every operation that was asked for, too."""
    data, asked = clients((9,))["0"], []

    def execute(operations):
        answers = []
        for op in operations:
            asked.append(op)
            if isinstance(op, Train):
                answers.append(Trained(op.models, {"own": {"round": torch.ones(1)}}, {}))
            else:
                name = op.model.arch.name
                answers.append(Score(6, (losses or {}).get(name, 1.0), accuracies[name]))
        return [(answer, 0.0) for answer in answers]

    return run_in_lockstep({"c": best_local(pool, data, TRAINING, 4, Key(0), torch.float64)}, execute)["c"].value, asked, data


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ({"linear": 0.2, "dense": 0.3, "wide": 0.9}, WIDE),
        ({"linear": 0.2, "dense": 0.9, "wide": 0.3}, DENSE),
        ({"linear": 0.5, "dense": 0.9, "wide": 0.9}, DENSE),  # a tie goes to the smaller
        ({"linear": 0.9, "dense": 0.9, "wide": 0.9}, LINEAR),
    ],
)
def test_the_most_accurate_is_chosen_and_a_tie_goes_to_the_smaller(accuracies, expected):
    misleading = {"linear": 0.3, "dense": 0.2, "wide": 0.1}  # the loss decides nothing
    for pool in ([WIDE, DENSE, LINEAR], [LINEAR, DENSE, WIDE]):
        choice, _, _ = choose(pool, accuracies, misleading)
        assert choice.arch == expected
        assert {name: score.accuracy for name, score in choice.scores.items()} == accuracies


def test_a_model_that_diverged_is_not_chosen():
    accuracies = {"linear": 0.9, "dense": 0.3, "wide": 0.2}
    for bad in (math.nan, math.inf):
        assert choose([LINEAR, DENSE, WIDE], accuracies, {"linear": bad})[0].arch == DENSE
    assert choose([DENSE, LINEAR], accuracies, {"linear": math.nan, "dense": math.nan})[0].arch == LINEAR


def test_equal_in_everything_the_first_is_kept():
    twin = Arch.named("twin", LINEAR.factory)
    assert choose([twin, LINEAR], {"linear": 0.5, "twin": 0.5})[0].arch == twin
    assert choose([LINEAR, twin], {"linear": 0.5, "twin": 0.5})[0].arch == LINEAR


def test_each_one_trains_on_the_training_part_and_is_judged_on_the_validation_part():
    _, asked, data = choose([WIDE, LINEAR], {"linear": 0.1, "wide": 0.2})
    trainings = [op for op in asked if isinstance(op, Train)]
    assert len(trainings) == 2 * 4
    assert all(op.data is data.train for op in trainings)
    assert all(op.data is data.val for op in asked if isinstance(op, Evaluate))
    assert [op.optimizer.lr for op in trainings] == [0.1] * 4 + [0.05] * 4  # side by side, round by round
    assert all(op.optimizer.momentum == 0.9 for op in trainings)
    assert [bool(op.opt) for op in trainings] == [False] * 2 + [True] * 6  # momentum is kept between rounds
    assert len({op.key for op in trainings}) == 8
    first = trainings[0].models["own"]
    assert first.dtype == torch.float64
    assert torch.equal(first.params["0.weight"], Model.init(WIDE, Key(0).at("wide", "init"), torch.float64).params["0.weight"])


def test_what_one_architecture_gets_does_not_depend_on_the_pool():
    data = clients((30,))["0"]

    def scores(pool):
        steps = best_local(pool, data, TRAINING, 2, Key(0), torch.float64)
        return run_in_lockstep({"c": steps}, one_by_one)["c"].value.scores

    whole, part = scores([LINEAR, DENSE, WIDE]), scores([WIDE])
    assert (whole["wide"].loss, whole["wide"].accuracy) == (part["wide"].loss, part["wide"].accuracy)
    assert whole["wide"].loss != whole["dense"].loss


def test_by_hand_with_one_architecture():
    data = clients((30,))["0"]
    choice = run_in_lockstep({"c": best_local([DENSE], data, TRAINING, 1, Key(0), torch.float64)}, one_by_one)["c"].value
    start = Model.init(DENSE, Key(0).at("dense", "init"), torch.float64)
    optimizer = TRAINING.local_optimizer(CrossEntropy(), Round(0, 1))
    op = Train({"own": start}, optimizer, data.train, TRAINING.batch_schedule(Round(0, 1)), Key(0).at("dense", "round", 0))
    ((trained, _),) = one_by_one([op])
    module = trained.models["own"].module()
    expected = torch.nn.functional.cross_entropy(module(data.val.inputs()), data.val.y).item()
    assert choice.scores["dense"].loss == pytest.approx(expected, abs=1e-12)
