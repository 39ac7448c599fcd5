"""Operations on several threads."""

import threading
import time
from dataclasses import dataclass

import pytest

from fedme.execution.threads import on_threads


def work(count: int) -> list[list[int]]:
    """Pieces of one number each."""
    return [[number] for number in range(1, count + 1)]


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


def total(piece):
    answer = []
    yield lambda: answer.append(sum(piece))
    return answer[0]


@pytest.mark.parametrize("threads", [1, 2, 5, 50])
def test_results_come_in_order_and_each_is_told_of_once(threads):
    told = Told()
    assert on_threads(work(7), total, threads, told) == [1, 2, 3, 4, 5, 6, 7]
    assert told.times == 7


def test_progress_counts_the_items_of_a_piece():
    told = Told()
    assert on_threads([[1, 2, 3], [4], [5, 6]], total, 2, told) == [6, 4, 11]
    assert told.times == 6


def test_nothing_to_do():
    assert on_threads([], total, 2, Told()) == []


def test_pieces_are_computed_in_order():
    order = []

    def noting(piece):
        yield lambda: order.append(piece[0])

    on_threads(work(5), noting, 1, Told())
    assert order == [1, 2, 3, 4, 5]


def test_others_compute_while_one_prepares():
    """The first piece is done on another thread before the second is prepared."""
    begun = threading.Event()

    def preparing(piece):
        if piece == [2]:
            assert begun.wait(10)
        yield begun.set if piece == [1] else lambda: None
        return threading.get_ident()

    assert set(on_threads(work(2), preparing, 2, Told())) == {threading.get_ident()}


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("wrong", [1, 4, 8])
def test_a_piece_that_fails_stops_the_others(threads, wrong):
    def failing(piece):
        yield (lambda: 1 // 0) if piece == [wrong] else (lambda: None)

    with pytest.raises(ZeroDivisionError):
        on_threads(work(8), failing, threads, Told())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_what_cannot_be_prepared_stops_the_others(threads):
    ran = []

    def failing(piece):
        if piece == [3]:
            raise ValueError("unfit")
        yield lambda: ran.extend(piece)

    with pytest.raises(ValueError, match="unfit"):
        on_threads(work(8), failing, threads, Told())
    assert set(ran) <= {1, 2}


@pytest.mark.parametrize("threads", [1, 2])
def test_who_is_stopped_leaves_the_rest(threads):
    ran = []

    def slow(piece):
        yield lambda: (ran.append(piece), time.sleep(0.01))

    with pytest.raises(KeyboardInterrupt):
        on_threads(work(50), slow, threads, Told(stop=1))
    assert 1 <= len(ran) < 50
