"""Calls of the compiled code on several threads."""

import gc
import os
import time
from dataclasses import dataclass

import pytest
import torch

from fedme.core.data import Arrays, Split
from fedme.core.key import Key
from fedme.core.model import Model
from fedme.core.operations import Predict
from fedme.execution import compiled, compiled_jobs
from fedme.execution.compiled import Compiled
from fedme.execution.input_tables import InputTables
from fedme.execution.reference import predict
from fedme.execution.threads import Helpers, Running, on_threads
from fedme_test_support import DENSE

pytestmark = pytest.mark.skipif(isinstance(compiled.library(), str), reason="there is no compiled code")
SAMPLES = 40


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


def operations(count, wrong=None):
    """Predictions of different models; one may be for a sample that does not exist."""
    source = Arrays(torch.randn(SAMPLES, 3, generator=Key(1).torch()), torch.zeros(SAMPLES, dtype=torch.int64))
    rows = [torch.full((3,), SAMPLES if number == wrong else number) for number in range(count)]
    return [Predict(Model.init(DENSE, Key(number)), Split(source, mine)) for number, mine in enumerate(rows)]


@pytest.fixture
def preparing():
    """How an operation is prepared, and what was prepared so far."""
    backend = Compiled(InputTables(torch.device("cpu")))
    prepared = []

    def prepare(ops):
        prepared.extend(ops)
        return compiled_jobs.together(ops, backend.tables.table(ops[0]))

    return prepare, prepared


def helpers(threads):
    return Helpers.of(compiled.library(), threads)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_order_and_each_is_told_of_once(threads, preparing):
    told, ops = Told(), operations(7)
    results = on_threads([ops[:3], ops[3:4], ops[4:]], preparing[0], helpers(threads), told)
    for logits, op in zip([each for piece in results for each in piece], ops, strict=True):
        torch.testing.assert_close(logits, predict(op))
    assert told.times == 7
    assert on_threads([], preparing[0], helpers(threads), told) == []


def test_a_helper_computes_while_others_are_prepared(preparing):
    first = Running(preparing[0](operations(1)), helpers(2))
    deadline = time.monotonic() + 10
    while not first.call.ended and time.monotonic() < deadline:
        time.sleep(0.001)
    assert first.call.ended
    assert first.call.seconds > 0
    assert len(first.result()) == 1


def test_without_helpers_the_one_who_asks_computes(preparing):
    first = Running(preparing[0](operations(1)), helpers(1))
    time.sleep(0.05)
    assert not first.call.ended
    assert len(first.result()) == 1


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("wrong", [0, 4, 7])
def test_a_piece_that_fails_is_an_error(threads, wrong, preparing):
    told = Told()
    with pytest.raises(IndexError, match="row numbers must be"):
        on_threads([[op] for op in operations(8, wrong)], preparing[0], helpers(threads), told)
    assert told.times == wrong


def test_what_cannot_be_prepared_stops_the_others(preparing):
    def prepare(ops):
        if len(preparing[1]) == 2:
            raise ValueError("unfit")
        return preparing[0](ops)

    with pytest.raises(ValueError, match="unfit"):
        on_threads([[op] for op in operations(8)], prepare, helpers(2), Told())
    assert len(preparing[1]) == 2


def test_who_is_stopped_leaves_the_rest(preparing):
    with pytest.raises(KeyboardInterrupt):
        on_threads([[op] for op in operations(8)], preparing[0], helpers(1), Told(stop=1))


def test_a_call_that_is_forgotten_is_ended_first(preparing):
    """Threads write to the memory of a call."""
    for _ in range(200):
        Running(preparing[0](operations(1)), helpers(3))
    gc.collect()
    waits = Running(preparing[0](operations(1)), helpers(1))
    call = waits.call
    del waits
    assert call.ended  # nobody will compute it


def test_a_forked_process_has_helpers_of_its_own(preparing):
    on_threads([[op] for op in operations(2)], preparing[0], helpers(2), Told())
    child = os.fork()
    if not child:
        try:
            done = on_threads([[op] for op in operations(4)], preparing[0], helpers(2), Told())
            os._exit(0 if len(done) == 4 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
