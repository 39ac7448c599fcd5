"""Records of a short round are made while clients compute the next one; nobody sees a difference, and nothing is lost."""

import json

import pytest
import torch

import fedme
from fedme.core.key import Key
from fedme.running import checkpoint, round_loop
from fedme.running.deferred_work import DeferredWork
from fedme.running.round_loop import Interrupted

ROUNDS = 5
SECONDS = ("client_seconds", "server_seconds")


def clients():
    def samples(number):
        draw = Key(number).torch()
        x = torch.randn(60, 4, generator=draw)
        return x, (x[:, 0] + 0.5 * torch.randn(60, generator=draw) > 0).long()

    return [fedme.Client(str(number), train=samples(number)) for number in range(3)]


def fitted(folder, **more):
    learner = fedme.FedMe(rounds=ROUNDS, models={"pool": ["mlr"]}, train={"batch": 10, "epochs": 1})
    return learner.fit(clients(), output=folder, quiet=True, **more)


def recorded(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in SECONDS} for row in rows]


@pytest.fixture
def deferred(monkeypatch):
    """How much work was deferred."""
    seen, put = [], DeferredWork.put
    monkeypatch.setattr(DeferredWork, "put", lambda self, work: (seen.append(work), put(self, work))[1])
    return seen


def test_work_is_done_once_and_in_order():
    done, deferred = [], DeferredWork()
    deferred.finish()
    deferred.put(lambda: done.append(1))
    assert done == []
    deferred.put(lambda: done.append(2))
    assert done == [1]
    deferred.finish()
    deferred.finish()
    assert done == [1, 2]


def test_work_that_fails_is_not_repeated():
    deferred = DeferredWork()
    deferred.put(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        deferred.finish()
    deferred.finish()


def test_records_do_not_depend_on_when_they_are_made(tmp_path, monkeypatch, deferred):
    later = fitted(tmp_path / "later")
    assert len(deferred) == ROUNDS - 1  # nothing is computed after the last round
    monkeypatch.setattr(round_loop, "REPEATED", 0.0)
    at_once = fitted(tmp_path / "at-once")
    assert len(deferred) == ROUNDS - 1
    assert recorded(later.folder) == recorded(at_once.folder)
    headers = [json.loads((result.folder / checkpoint.NAME).read_text())["header"]["round"] for result in (later, at_once)]
    assert headers == [ROUNDS, ROUNDS]


@pytest.mark.parametrize("error", [Interrupted, RuntimeError])
def test_a_finished_round_is_saved_if_the_next_one_fails(tmp_path, monkeypatch, deferred, error):
    inner = round_loop.run_round

    def failing(method, task, engine, server, t, *rest):
        if t == 3:
            raise error("in the fourth round")
        return inner(method, task, engine, server, t, *rest)

    monkeypatch.setattr(round_loop, "run_round", failing)
    with pytest.raises(error):
        fitted(tmp_path / "run")
    assert len(deferred) == 3
    assert json.loads((tmp_path / "run" / checkpoint.NAME).read_text())["header"]["round"] == 3
    assert {row["round"] for row in recorded(tmp_path / "run")} == {0, 1, 2}
    monkeypatch.setattr(round_loop, "run_round", inner)
    assert recorded(fitted(tmp_path / "run").folder) == recorded(fitted(tmp_path / "whole").folder)


def test_callbacks_see_a_round_before_the_next_one_begins(tmp_path, deferred):
    events = []

    class Order(fedme.Callback):
        def on_client(self, event):
            events.append(("client", event.round))

        def on_round(self, event):
            events.append(("round", event.round))

    fitted(tmp_path / "run", callbacks=[Order()])
    assert not deferred
    assert events == [each for t in range(ROUNDS) for each in [("client", t)] * 3 + [("round", t)]]
