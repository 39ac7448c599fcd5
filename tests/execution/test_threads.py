"""Operations on several threads."""

import threading
import time
from dataclasses import dataclass

import pytest
import torch

from fedme.core.key import Key
from fedme.core.model import Model
from fedme.core.operations import Evaluate
from fedme.execution.threads import on_threads
from fedme_test_support import LINEAR, clients


def looks(count: int) -> list[Evaluate]:
    """Evaluations of samples that differ in number, the smallest first."""
    model = Model.init(LINEAR, Key(1))
    data = next(iter(clients((count,)).values())).train
    return [Evaluate(model, data.take(torch.arange(n))) for n in range(1, count + 1)]


@dataclass
class Told:
    """How often progress was told, and when to stop."""

    stop: int = 10**9
    times: int = 0

    def __call__(self) -> None:
        """Count."""
        self.times += 1
        if self.times >= self.stop:
            raise KeyboardInterrupt


def length(op):
    answer = []
    yield lambda: answer.append(len(op.data))
    return answer[0]


@pytest.mark.parametrize("threads", [1, 2, 5, 50])
def test_results_come_in_order_and_each_is_told_of_once(threads):
    told = Told()
    assert on_threads(looks(7), length, threads, told) == [1, 2, 3, 4, 5, 6, 7]
    assert told.times == 7


def test_nothing_to_do():
    assert on_threads([], length, 2, Told()) == []


def test_the_longest_goes_first():
    order = []

    def noting(op):
        yield lambda: order.append(len(op.data))

    on_threads(looks(5), noting, 1, Told())
    assert order == [5, 4, 3, 2, 1]


def test_others_compute_while_one_prepares():
    """The first operation is done on another thread before the second is prepared."""
    begun = threading.Event()

    def preparing(op):
        if len(op.data) == 1:
            assert begun.wait(10)
        yield begun.set if len(op.data) == 2 else lambda: None
        return threading.get_ident()

    assert set(on_threads(looks(2), preparing, 2, Told())) == {threading.get_ident()}


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("wrong", [1, 4, 8])
def test_an_operation_that_fails_stops_the_others(threads, wrong):
    def failing(op):
        yield (lambda: 1 // 0) if len(op.data) == wrong else (lambda: None)

    with pytest.raises(ZeroDivisionError):
        on_threads(looks(8), failing, threads, Told())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_what_cannot_be_prepared_stops_the_others(threads):
    ran = []

    def failing(op):
        if len(op.data) == 6:
            raise ValueError("unfit")
        yield lambda: ran.append(len(op.data))

    with pytest.raises(ValueError, match="unfit"):
        on_threads(looks(8), failing, threads, Told())
    assert set(ran) <= {7, 8}


@pytest.mark.parametrize("threads", [1, 2])
def test_who_is_stopped_leaves_the_rest(threads):
    ran = []

    def slow(op):
        yield lambda: (ran.append(len(op.data)), time.sleep(0.01))

    with pytest.raises(KeyboardInterrupt):
        on_threads(looks(50), slow, threads, Told(stop=1))
    assert 1 <= len(ran) < 50
