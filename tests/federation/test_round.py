"""One round: what is sent is counted, what is missing is normal, and the order of arrival does not matter."""

import random
from collections.abc import Mapping

import pytest
import torch

from fedme.core.key import Key
from fedme.core.method import POOL, Plan, Report, Round
from fedme.core.tree import nbytes
from fedme.execution.lockstep import Timed
from fedme.federation.in_process import InProcessEngine
from fedme.federation.round import Reply, Traffic, run_round
from fedme.learning.training_settings import Training
from fedme.methods import METHODS
from fedme.methods.fedavg import FedAvg
from fedme_test_support import BODIES, DENSE, LINEAR, NORMALISED, WIDE, Losing, clients, split, task

TRAIN = Training(epochs=1, batch=4, lr=0.05)
ROOT = Key(0)


def begin(method, setting, data, kind=InProcessEngine):
    return kind(method, setting, data, ROOT), method.init_server(setting, ROOT.at("init"))


def test_fedavg_sends_its_weights_once_each_way_and_little_else():
    data, setting = clients(), task(shared=NORMALISED)
    method = FedAvg(TRAIN)
    engine, server = begin(method, setting, data)
    done = run_round(method, setting, engine, server, 0, 1, ROOT)
    model = done.server.model
    tensors = [*model.params.values(), *model.buffers.values()]
    weights = sum(t.numel() * t.element_size() for t in tensors)
    names = sum(len(name) for name in (*model.params, *model.buffers)) + len("normalised")
    assert done.traffic.keys() == data.keys()
    for traffic in done.traffic.values():
        assert traffic.bytes_down == weights + names
        assert traffic.bytes_up == weights + names + 8  # the number of samples
    floats = 8 * (model.parameters + 12)  # float64 weights and running statistics
    assert weights == floats + 8  # and the counter


def test_half_the_bytes_for_half_the_precision():
    data = clients()
    sizes = {}
    for dtype in (torch.float32, torch.float64):
        plain = task()
        setting = type(plain)(plain.schema, plain.members, plain.shared, plain.resolve, dtype=dtype)
        engine, server = begin(FedAvg(TRAIN), setting, data)
        sizes[dtype] = run_round(FedAvg(TRAIN), setting, engine, server, 0, 1, ROOT).traffic["0"].bytes_up
    assert sizes[torch.float64] - sizes[torch.float32] == 4 * LINEAR.parameters


class Recording(InProcessEngine):
    def exchange(self, downs, when):
        answers = super().exchange(downs, when)
        self.heard = getattr(self, "heard", [])
        self.heard += [(client, downs[client], answers[client]) for client in answers]
        return answers


@pytest.mark.parametrize("name", METHODS)
def test_bytes_and_seconds_are_those_of_the_messages_of_all_exchanges(name):
    method = METHODS[name](train=TRAIN)
    mixed = name in ("local", "fd", "feddf", "fedmd", "fml", "pfml", "fedme")
    setting = task((DENSE, WIDE, LINEAR) if mixed else (BODIES.get(name, LINEAR),) * 3, public=8, unlabeled=split(6, Key(9)))
    engine, server = begin(method, setting, clients(public=8), Recording)
    done = run_round(method, setting, engine, server, 0, 1, ROOT)
    assert len(engine.heard) == len(method.phases) * (1 if method.pooled else 3)
    for client, traffic in done.traffic.items():
        mine = [(down, answer) for who, down, answer in engine.heard if who == client]
        assert traffic.bytes_down == sum(nbytes(down) for down, _ in mine)
        assert traffic.bytes_up == sum(nbytes(answer.up) for _, answer in mine)
        assert traffic.seconds == pytest.approx(sum(answer.seconds for _, answer in mine))
    if name == "local":
        assert all((t.bytes_up, t.bytes_down) == (0, 0) for t in done.traffic.values())
    assert done.server_seconds > 0


def test_traffic_adds_up_over_exchanges_and_later_reports_win():
    traffic = Traffic()
    traffic.add(12, Reply(torch.zeros(2), Report({"own": 1.0}, {}, {"a": 1, "b": 1}), 0.5))
    traffic.add(4, Reply(torch.zeros(5), Report({"guest": 2.0}, {}, {"b": 2}), 0.25))
    assert (traffic.bytes_down, traffic.bytes_up, traffic.seconds) == (16, 28, 0.75)
    assert traffic.report == Report({"own": 1.0, "guest": 2.0}, {}, {"a": 1, "b": 2})
    assert traffic.answered
    traffic.add(8, None)  # a reply that never came
    traffic.add(8, Reply(None, Report({}), 0.25))  # one that does not count
    assert (traffic.bytes_down, traffic.bytes_up, traffic.seconds) == (32, 28, 1.0)
    assert not traffic.answered
    assert Traffic().report == Report({})


class Shuffled(InProcessEngine):
    """Answers arrive in any order."""

    def exchange(self, downs, when):
        answers = list(super().exchange(downs, when).items())
        random.Random(when.t).shuffle(answers)
        answers.reverse()
        return dict(answers)


def tensors(value) -> list[torch.Tensor]:
    """All tensors of a state, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for each in value.values() for t in tensors(each)]
    if isinstance(value, list | tuple):
        return [t for each in value for t in tensors(each)]
    if hasattr(value, "__dataclass_fields__"):
        return [t for name in value.__dataclass_fields__ for t in tensors(getattr(value, name))]
    return []


@pytest.mark.parametrize("name", METHODS)
def test_the_order_of_arrival_changes_no_bit(name):
    method = METHODS[name](train=TRAIN)
    setting = task((BODIES.get(name, LINEAR),) * 5, public=8, unlabeled=split(6, Key(9)))
    data = clients((7, 3, 5, 2, 9), public=8)
    results = []
    for kind in (InProcessEngine, Shuffled):
        engine, server = begin(method, setting, data, kind)
        for t in range(3):
            server = run_round(method, setting, engine, server, t, 3, ROOT).server
        states = {client: engine.states[client] for client in sorted(engine.states)}
        results.append(tensors(server) + tensors(states))
    assert len(results[0]) == len(results[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_replies_are_handed_on_in_the_order_of_the_members():
    seen = []

    class Watched(FedAvg):
        def aggregate(self, server, replies, when, key):
            seen.append(list(replies))
            return super().aggregate(server, replies, when, key)

    setting = task((LINEAR,) * 5)
    engine, server = begin(Watched(TRAIN), setting, clients((3,) * 5), Shuffled)
    run_round(Watched(TRAIN), setting, engine, server, 0, 1, ROOT)
    assert seen == [["0", "1", "2", "3", "4"]]


def test_missing_replies_are_left_out_and_nobody_is_normal():
    data, setting, method = clients(), task(), FedAvg(TRAIN)
    engine, server = begin(method, setting, data, Losing)
    engine.lost = lambda t, client: client == "1" or t == 1
    first = run_round(method, setting, engine, server, 0, 2, ROOT)
    assert {c: each.answered for c, each in first.traffic.items()} == {"0": True, "1": False, "2": True}
    silent = first.traffic["1"]
    assert (silent.bytes_down, silent.bytes_up) == (first.traffic["0"].bytes_down, 0)  # it was sent its message
    alone = {c: engine.exchange({c: method.deliver(setting, server, c)}, Round(0, 2))[c].up.model for c in ("0", "2")}
    for name, value in first.server.model.params.items():
        expected = (7 * alone["0"].params[name] + 4 * alone["2"].params[name]) / 11
        assert torch.allclose(value, expected, rtol=0, atol=1e-14)
    second = run_round(method, setting, engine, first.server, 1, 2, ROOT)
    assert not any(each.answered or each.bytes_up for each in second.traffic.values())
    assert second.server is first.server


def test_whoever_trains_without_counting_is_recorded_but_not_aggregated():
    class Partly(FedAvg):
        def plan(self, server, present, when, key):
            return Plan(tuple(present), frozenset({"2"}))

    method, setting = Partly(TRAIN), task()
    engine, server = begin(method, setting, clients(), Recording)
    done = run_round(method, setting, engine, server, 0, 1, ROOT)
    assert list(done.traffic) == ["0", "1", "2"]
    two = next(answer.up.model for client, _, answer in engine.heard if client == "2")
    assert all(torch.allclose(done.server.model.params[n], p, rtol=0, atol=1e-15) for n, p in two.params.items())


@pytest.mark.parametrize("name", ["pfedme", "pfml"])
def test_whoever_trains_for_its_own_sake_sends_nothing(name):
    method, setting = METHODS[name](train=Training(epochs=1, batch=4, lr=0.05, cohort=1)), task()
    engine, server = begin(method, setting, clients(), Recording)
    done = run_round(method, setting, engine, server, 0, 1, ROOT)
    (counted,) = method.plan(server, list(setting.members), Round(0, 1), ROOT.at("round", 0, "server")).count
    assert {client for client, _, answer in engine.heard if answer.up is not None} == {counted}
    assert [client for client, each in done.traffic.items() if each.bytes_up] == [counted]
    assert all(each.answered and each.bytes_down for each in done.traffic.values())
    assert all(state.theta is not None for state in engine.states.values())  # but everybody trained


def test_only_those_who_are_there_are_asked():
    class Away(InProcessEngine):
        def unavailable(self, when):
            return {"1": "not connected"}

    method, setting = FedAvg(TRAIN), task()
    engine, server = begin(method, setting, clients(), Away)
    traffic = run_round(method, setting, engine, server, 0, 1, ROOT).traffic
    assert {client: each.reason for client, each in traffic.items()} == {"0": "", "1": "not connected", "2": ""}
    assert not traffic["1"].answered
    assert not traffic["1"].bytes_down
    assert InProcessEngine(method, setting, clients(), ROOT).unavailable(Round(0, 1)) == {}


def test_an_answer_of_a_stranger_is_not_aggregated():
    class Strange(InProcessEngine):
        def exchange(self, downs, when):
            answers = super().exchange(downs, when)
            return {**answers, "1": Reply("nonsense", Report({}), 0.0)}

    class Few(FedAvg):
        def plan(self, server, present, when, key):
            return Plan.all(["0", "2"])

        def dispatch(self, task, server, plan, when, key):
            downs = yield from super().dispatch(task, server, plan, when, key)
            return {**downs, "1": server}

    setting = task()
    engine, server = begin(Few(TRAIN), setting, clients(), Strange)
    assert run_round(Few(TRAIN), setting, engine, server, 0, 1, ROOT).server.model.arch == LINEAR


def test_every_exchange_of_a_round_has_its_own_phase_and_the_same_server_key():
    calls = []

    class Two(FedAvg):
        phases = ("first", "second")

        def plan(self, server, present, when, key):
            calls.append((when, key))
            return super().plan(server, present, when, key)

    setting = task()
    engine, server = begin(Two(TRAIN), setting, clients())
    run_round(Two(TRAIN), setting, engine, server, 4, 9, ROOT)
    assert calls == [(Round(4, 9, phase), ROOT.at("round", 4, "server")) for phase in ("first", "second")]


def test_the_pool_counts_as_a_client():
    method, setting, data = METHODS["centralized"](train=TRAIN), task(), clients()
    engine, server = begin(method, setting, data)
    done = run_round(method, setting, engine, server, 0, 1, ROOT)
    assert list(done.traffic) == [POOL]
    assert not torch.equal(done.server.model.params["0.weight"], server.model.params["0.weight"])


def test_work_of_the_server_is_timed_as_its_own():
    class Sleepy(InProcessEngine):
        def exchange(self, downs, when):
            return {c: Reply(a.up, a.report, 1000.0) for c, a in super().exchange(downs, when).items()}

        def run_on_server(self, steps):
            result = super().run_on_server(steps)
            return Timed(result.value, 2000.0)

    method, setting = FedAvg(TRAIN), task()
    engine, server = begin(method, setting, clients(), Sleepy)
    done = run_round(method, setting, engine, server, 0, 1, ROOT)
    assert all(t.seconds == 1000.0 for t in done.traffic.values())
    assert done.server_seconds < 10.0  # not the clients'
