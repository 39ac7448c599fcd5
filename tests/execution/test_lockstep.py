"""Many clients in lockstep: results in order, seconds added up, and the same bits as one client at a time."""

import time
from functools import partial

import pytest
import torch

from fedme.core.key import Key
from fedme.core.method import POOL, Round
from fedme.core.model import Model
from fedme.core.operations import Evaluate, Predict, Train, immediately, in_parallel
from fedme.execution.lockstep import in_lockstep, run_in_lockstep
from fedme.execution.reference import one_by_one
from fedme.federation import client_work as client_work
from fedme.federation.client_work import Finetune
from fedme.federation.in_process import InProcessEngine
from fedme.federation.round import run_round
from fedme.learning.training_settings import Training
from fedme.methods import METHODS
from fedme_test_support import DENSE, DROPPING, LINEAR, NORMALISED, WIDE, clients, split, task


def work(name, count, seconds=0.0):
    heard = []
    for i in range(count):
        time.sleep(seconds)
        (answer,) = yield (f"{name}{i}",)
        heard.append(answer)
    return heard


def test_results_come_in_the_order_of_the_work_and_operations_in_lockstep():
    asked = []

    def execute(operations):
        asked.append(operations)
        return [(op.upper(), 0.0) for op in operations]

    done = run_in_lockstep({"z": work("z", 1), "a": work("a", 3), "none": work("n", 0), "m": immediately("x")}, execute)
    assert list(done) == ["z", "a", "none", "m"]
    assert [each.value for each in done.values()] == [["Z0"], ["A0", "A1", "A2"], [], "x"]
    assert asked == [("z0", "a0"), ("a1",), ("a2",)]
    assert run_in_lockstep({}, execute) == {}


def test_what_has_ended_can_be_looked_at_while_results_of_others_are_waited_for():
    read = []

    class Answers(list):
        def __getitem__(self, places):
            read.append(places.start)
            return super().__getitem__(places)

    done = in_lockstep({name: work(name, 1) for name in "abc"}, lambda operations: Answers((op, 0.0) for op in operations))
    seen = [(name, each.value, list(read)) for name, each in done]
    assert seen == [("a", ["a0"], [0]), ("b", ["b0"], [0, 1]), ("c", ["c0"], [0, 1, 2])]


def test_seconds_of_operations_add_up_for_each_client():
    cost = {"a": 10.0, "b": 100.0}

    def execute(operations):
        return [(op, cost[op[0]] * (int(op[1]) + 1)) for op in operations]

    done = run_in_lockstep({"a": work("a", 3), "b": work("b", 1), "c": work("c", 0)}, execute)
    assert done["a"].seconds == pytest.approx(60, abs=1)
    assert done["b"].seconds == pytest.approx(100, abs=1)
    assert done["c"].seconds == pytest.approx(0, abs=1)

    def pair():
        return (yield from in_parallel([work("a", 2), work("b", 1)]))

    assert run_in_lockstep({"p": pair()}, execute)["p"].seconds == pytest.approx(10 + 20 + 100, abs=1)


def test_seconds_of_a_clients_own_code_count_for_it_and_for_nobody_else():
    done = run_in_lockstep({"slow": work("s", 2, 0.03), "quick": work("q", 2)}, lambda ops: [(op, 0.0) for op in ops])
    assert done["slow"].seconds >= 0.06
    assert done["quick"].seconds < 0.03


def test_one_by_one_times_every_operation_and_ticks_after_each():
    m, data = Model.init(LINEAR, Key(0)), split(5, Key(1))
    ticks = []
    results = one_by_one([Evaluate(m, data), Predict(m, data), Evaluate(m, data)], lambda: ticks.append(1))
    assert len(ticks) == 3
    assert all(seconds > 0 for _, seconds in results)
    assert results[0][0].loss == results[2][0].loss
    assert results[1][0].shape == (5, 4)


def test_a_tick_may_stop_everything():
    def stop():
        raise KeyboardInterrupt

    m, data = Model.init(LINEAR, Key(0)), split(5, Key(1))

    def steps():
        yield (Evaluate(m, data),)

    with pytest.raises(KeyboardInterrupt):
        run_in_lockstep({"a": steps()}, partial(one_by_one, tick=stop))


# Lockstep against one client at a time

TRAIN = Training(epochs=2, batch=3, lr=0.05, momentum=0.9, clip=5.0)


class OneAtATime(InProcessEngine):
    """Every client's work is driven to its end before the next one's begins."""

    def exchange(self, downs, when):
        return {client: super(OneAtATime, self).exchange({client: down}, when)[client] for client, down in downs.items()}

    def evaluate_models(self, deliveries, when, finetune=None):
        return {c: super(OneAtATime, self).evaluate_models({c: each}, when, finetune)[c] for c, each in deliveries.items()}


def everything(kind, name):
    method = METHODS[name](train=TRAIN)
    mixed = name in ("local", "fd", "feddf", "fedmd", "fml", "pfml", "fedme")
    archs = (DENSE, DROPPING, NORMALISED, WIDE) if mixed else (DROPPING,) * 4
    setting = task(archs, shared=DROPPING, public=8, unlabeled=split(10, Key(9)))
    root = Key(0)
    engine = kind(method, setting, clients((7, 12, 1, 2), public=8), root)
    server = method.init_server(setting, root.at("init"))
    for t in range(2):
        server = run_round(method, setting, engine, server, t, 2, root).server
    deliveries = {client: method.deliver(setting, server, client) for client in setting.members}
    done = engine.evaluate_models(deliveries, Round(1, 2), Finetune(TRAIN, 1))
    return {client: each.value for client, each in done.items()}


@pytest.mark.parametrize("name", METHODS)
def test_all_clients_together_are_each_client_alone_bit_for_bit(name):
    together_, apart = everything(InProcessEngine, name), everything(OneAtATime, name)
    assert list(together_) == list(apart)
    for client, a in together_.items():
        b = apart[client]
        assert a.models.keys() == b.models.keys()
        assert a.models.keys() - {"global"} == {"personal", "finetuned"}
        for role in a.models:
            x, y = a.models[role], b.models[role]
            assert x.arch == y.arch
            assert all(torch.equal(x.params[n], y.params[n]) for n in x.params)
            assert all(torch.equal(x.buffers[n], y.buffers[n]) for n in x.buffers)
        assert list(a.scores) == list(b.scores)


def test_lockstep_hands_operations_of_all_clients_over_at_once():
    sizes = []
    plain = one_by_one

    def execute(operations):
        sizes.append([type(op).__name__ for op in operations])
        return plain(operations)

    setting, root = task((LINEAR,) * 3), Key(0)
    method = METHODS["fedme"](train=TRAIN)
    engine = InProcessEngine(method, setting, clients(), root, execute)
    run_round(method, setting, engine, method.init_server(setting, root.at("init")), 0, 1, root)
    assert sizes == [["Train"] * 3, ["Evaluate"] * 6]  # own and guest of every client


# A client's work around the method


def test_a_state_is_made_once_at_the_first_participation(monkeypatch):
    made = []
    method = METHODS["local"](train=TRAIN)
    init = type(method).init_client
    monkeypatch.setattr(type(method), "init_client", lambda self, t, me, d, k: made.append((me, k)) or init(self, t, me, d, k))
    setting, root = task((LINEAR,) * 3), Key(0)
    engine = InProcessEngine(method, setting, clients(), root)
    server = method.init_server(setting, root.at("init"))
    for t in range(2):
        run_round(method, setting, engine, server, t, 2, root)
    assert made == [(str(i), Key(0).at("init")) for i in range(3)]
    late = InProcessEngine(method, setting, clients(), root)  # looked at before it ever took part: keeps that state
    late.evaluate_models({"1": method.deliver(setting, server, "1")}, Round(0, 2))
    assert list(late.states) == ["1"]
    assert len(made) == 4


def test_assessment_scores_every_model_on_every_part_that_is_there():
    method = METHODS["fml"](train=TRAIN)
    setting, root = task((DENSE,) * 3), Key(0)
    data = clients()
    none = data["0"].val.take(torch.tensor([], dtype=torch.int64))
    data["0"] = client_work.ClientData("0", data["0"].train, none, data["0"].test)
    engine = InProcessEngine(method, setting, data, root)
    server = method.init_server(setting, root.at("init"))
    done = engine.evaluate_models({c: method.deliver(setting, server, c) for c in data}, Round(0, 1), Finetune(TRAIN, 1))
    shown = [(s.model, s.arch, s.stage, s.split) for s in done["1"].value.scores]
    assert shown == [
        (model, arch, stage, part)
        for model, arch, stage in (
            ("personal", "dense", "round"),
            ("global", "linear", "round"),
            ("personal", "dense", "finetuned"),
        )
        for part in ("val", "test")
    ]
    assert {s.split for s in done["0"].value.scores} == {"test"}
    assert set(done["1"].value.models) == {"personal", "finetuned", "global"}
    state = engine.states["1"]
    assert done["1"].value.models["personal"] is state.own  # fine-tuning leaves the model of the rounds alone
    without = engine.evaluate_models({"1": method.deliver(setting, server, "1")}, Round(0, 1))["1"].value
    assert set(without.models) == {"personal", "global"}


def test_finetuning_is_a_fresh_optimiser_on_the_training_part():
    asked = []
    plain = one_by_one

    def execute(operations):
        asked.extend(op for op in operations if isinstance(op, Train))
        return plain(operations)

    method = METHODS["local"](train=TRAIN)
    setting, root, data = task((LINEAR,) * 3), Key(0), clients()
    engine = InProcessEngine(method, setting, data, root, execute)
    engine.evaluate_models(
        {"1": method.deliver(setting, None, "1")},
        Round(1, 2),
        Finetune(Training(lr=0.7, batch=2, lr_schedule="step", lr_decay=0.1, lr_decay_at=(0.5,)), 3),
    )
    (op,) = asked
    assert op.data is data["1"].train
    assert (op.batch_schedule.epochs, op.batch_schedule.batch, op.batch_schedule.steps) == (3, 2, None)
    assert op.optimizer.lr == pytest.approx(0.07)
    assert not op.opt


def test_a_model_with_two_roles_is_run_once():
    asked = []
    plain = one_by_one

    def execute(operations):
        asked.extend(operations)
        return plain(operations)

    method = METHODS["fedavg"](train=TRAIN)
    setting, root, data = task(), Key(0), clients()
    engine = InProcessEngine(method, setting, data, root, execute)
    server = method.init_server(setting, root.at("init"))
    done = engine.evaluate_models({"1": method.deliver(setting, server, "1")}, Round(0, 1))
    assert len(asked) == 2  # validation and test
    assert [(s.model, s.split) for s in done["1"].value.scores] == [
        (model, part) for model in ("personal", "global") for part in ("val", "test")
    ]


def test_pooled_methods_get_one_client_with_everybodys_data():
    data = clients()
    engine = InProcessEngine(METHODS["centralized"](train=TRAIN), task(), data, Key(0))
    pool = engine.clients[POOL]
    for part in ("train", "val", "test"):
        rows = [row for each in data.values() for row in getattr(each, part).rows.tolist()]
        assert getattr(pool, part).rows.tolist() == rows
    assert POOL not in InProcessEngine(METHODS["fedavg"](train=TRAIN), task(), data, Key(0)).clients
