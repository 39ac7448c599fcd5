"""What makes a client prefer its guest."""

import math

import pytest

from fedme.core.operations import Score
from fedme.methods.fedme.adoption import CRITERIA, Candidate, needs_time, prefers_guest, require_criteria


def candidate(loss=1.0, accuracy=0.5, seconds=1e-3, parameters=1_000_000):
    return Candidate(Score(10, loss, accuracy, seconds), parameters)


BETTER = {
    "loss": candidate(loss=0.9, accuracy=0.1, seconds=9, parameters=10**9),
    "accuracy": candidate(loss=9, accuracy=0.6, seconds=9, parameters=10**9),
    "size": candidate(loss=9, accuracy=0.1, seconds=9, parameters=999_999),
    "time": candidate(loss=9, accuracy=0.1, seconds=0.9e-3, parameters=10**9),
    "loss+size": candidate(loss=1.09, accuracy=0.1, seconds=9, parameters=0),
    "loss+time": candidate(loss=1.09, accuracy=0.1, seconds=0.0, parameters=10**9),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_every_criterion_looks_at_its_own_number_and_smaller_cost_wins(name):
    assert CRITERIA.keys() == BETTER.keys()
    own, guest = candidate(), BETTER[name]
    assert prefers_guest(name, own, guest)
    assert not prefers_guest(name, guest, own)
    assert not prefers_guest(name, own, own)  # a tie keeps one's own


def test_penalties_are_a_tenth_of_a_nat_a_million_weights_and_a_millisecond():
    assert CRITERIA["loss+size"](candidate(loss=1.0, parameters=2_000_000)) == pytest.approx(1.2)
    assert CRITERIA["loss+time"](candidate(loss=1.0, seconds=2e-3)) == pytest.approx(1.2)
    assert not prefers_guest("loss+size", candidate(), candidate(loss=1.11, parameters=0))
    assert not prefers_guest("loss+time", candidate(), candidate(loss=1.11, seconds=0.0))


@pytest.mark.parametrize("name", [*CRITERIA, lambda c: -c.parameters])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_diverged_models(name, bad):
    fine, lost = candidate(), candidate(loss=bad)
    assert not prefers_guest(name, fine, candidate(loss=bad, accuracy=1.0, seconds=0.0, parameters=1))
    assert prefers_guest(name, candidate(loss=bad, accuracy=1.0, seconds=0.0, parameters=1), fine)
    assert not prefers_guest(name, lost, lost)


def test_a_function_may_decide():
    assert prefers_guest(lambda c: -c.parameters, candidate(parameters=1), candidate(parameters=2))
    assert not prefers_guest(lambda c: math.nan, candidate(), candidate(loss=0.1))


def test_time_is_measured_only_for_those_who_look_at_it():
    assert [name for name in CRITERIA if needs_time(name)] == ["time", "loss+time"]
    assert needs_time(lambda c: c.score.loss)  # it might


def test_unknown_names_are_refused_by_setting():
    require_criteria({"adopt": "loss", "adopt_by.3": lambda c: 0.0})
    with pytest.raises(
        ValueError,
        match=r"^adopt_by\.3: must be one of loss, accuracy, size, time, loss\+size, loss\+time or a function, got 'speed'",
    ):
        require_criteria({"adopt": "loss", "adopt_by.3": "speed"})
