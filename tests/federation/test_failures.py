"""Clients that fail: what the server computes without them, what they keep, and that nothing happens unnamed."""

import dataclasses

import pytest
import torch

from fedme.core.key import Key
from fedme.core.method import Round, TaskError
from fedme.execution.reference import one_by_one
from fedme.federation.failures import FailingClients, Faults
from fedme.federation.in_process import InProcessEngine
from fedme.federation.round import NoReply, Quorum, Reply, run_round
from fedme.learning.training_settings import Training
from fedme.methods import METHODS
from fedme.methods.fedavg import FedAvg
from fedme.methods.fedmd import FedMD
from fedme.methods.fedme.fedme import FedMe
from fedme.methods.fml import FML
from fedme.results import records
from fedme.results.lineage import lineages
from fedme_test_support import BODIES, DENSE, LINEAR, WIDE, clients, personal, same, split, task

TRAIN = Training(epochs=1, batch=4, lr=0.05)
ROOT = Key(0)


def begin(method, faults, setting=None, data=None):
    setting = setting or task()
    inner = InProcessEngine(method, setting, data or clients(), ROOT)
    return FailingClients(inner, faults, ROOT), method.init_server(setting, ROOT.at("init"))


def rounds(method, faults, count=3, setting=None, data=None):
    """Play some rounds: the server after each, the traffic of each, and the engine."""
    engine, server = begin(method, faults, setting, data)
    servers, traffic = [], []
    for t in range(count):
        done = run_round(method, engine.current_task(), engine, server, t, count, ROOT, faults.needs)
        server = done.server
        servers.append(server)
        traffic.append(done.traffic)
    return servers, traffic, engine


def reasons(traffic):
    return {client: each.reason for client, each in traffic.items() if not each.answered}


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        (Faults(dropped_in={"1": (0,)}, repeats=0), "dropped out"),
        (Faults(dropout={"1": 1.0}), "dropped out"),
        (Faults(lost_in={"1": (0,)}), "its reply was lost"),
        (Faults(lost={"1": 1.0}), "its reply was lost"),
        (Faults(seconds={"1": 30.0}, deadline=10.0), "late: it took 30.00 s, the deadline is 10 s"),
        (Faults(join={"1": 1}), "joins in round 1"),
        (Faults(leave={"1": 0}), "left in round 0"),
    ],
)
def test_the_average_is_that_of_the_others_by_hand(faults, why):
    method, setting, data = FedAvg(TRAIN), task(), clients()
    servers, traffic, _ = rounds(method, faults, 1)
    assert reasons(traffic[0]) == {"1": why}
    healthy, server = begin(method, Faults())
    downs = {client: method.deliver(setting, server, client) for client in ("0", "2")}
    ups = {client: answer.up.model for client, answer in healthy.exchange(downs, Round(0, 1)).items()}
    assert (len(data["0"].train), len(data["2"].train)) == (7, 4)
    for name, value in servers[0].model.params.items():
        expected = (7 * ups["0"].params[name] + 4 * ups["2"].params[name]) / 11
        assert torch.allclose(value, expected, rtol=0, atol=1e-14)


def test_whoever_drops_out_stays_as_it_is_and_whoever_is_lost_goes_on_from_there():
    method, setting = FML(TRAIN), task((DENSE, WIDE, LINEAR))
    _, _, healthy = rounds(method, Faults(), 2, setting)
    _, _, once = rounds(method, Faults(), 1, setting)
    _, _, dropping = rounds(method, Faults(dropped_in={"1": (1,)}), 2, setting)
    servers, _, losing = rounds(method, Faults(lost_in={"1": (1,)}), 2, setting)
    assert same(dropping.states["1"].own, once.states["1"].own), "it never heard of round 1"
    assert same(losing.states["1"].own, healthy.states["1"].own), "it trained in round 1"
    assert not same(dropping.states["1"].own, losing.states["1"].own)
    others, _, _ = rounds(method, Faults(dropped_in={"1": (1,)}), 2, setting)
    assert all(torch.equal(servers[1].params[name], value) for name, value in others[1].params.items()), (
        "the server sees no difference"
    )


def test_nobody_asks_or_lends_the_model_of_whoever_is_away():
    method, setting = FedMe(TRAIN), task((DENSE, WIDE, LINEAR))
    faults = Faults(join={"0": 2}, leave={"2": 2})
    _, traffic, _ = rounds(method, faults, 3, setting)
    assert [reasons(each) for each in traffic] == [{"0": "joins in round 2"}] * 2 + [{"2": "left in round 2"}]
    assert traffic[0]["0"].bytes_down == traffic[2]["2"].bytes_down == 0
    assert {traffic[0][client].report.notes["lender"] for client in ("1", "2")} == {"1", "2"}
    assert {traffic[2][client].report.notes["lender"] for client in ("0", "1")} == {"0", "1"}


@pytest.mark.parametrize(
    ("join", "leave", "there"),
    [(None, None, "012345"), (2, None, "2345"), (None, 3, "012"), (2, 4, "23"), (4, 2, "0145"), (None, 0, "")],
)
def test_when_a_client_is_there(join, leave, there):
    faults = Faults(join={"a": join} if join is not None else {}, leave={"a": leave} if leave is not None else {})
    assert "".join(str(t) for t in range(6) if not faults.unavailable("a", t)) == there
    assert not any(faults.unavailable("b", t) for t in range(6))


def trained(engine):
    """Count how often each client is handed a message."""
    counts, real = {}, engine.engine.exchange

    def exchange(downs, when):
        for client in downs:
            counts[client] = counts.get(client, 0) + 1
        return real(downs, when)

    engine.engine.exchange = exchange
    return counts


def test_below_the_quorum_only_those_missing_are_asked_again(monkeypatch):
    method = FedAvg(TRAIN)
    first = ("round", 0, "attempt", 0, "client", "1")
    monkeypatch.setattr(Faults, "drops", lambda self, client, t, key: "dropped out" if key.path[1:] == first else "")
    engine, server = begin(method, Faults(quorum=3, dropout=0.5))
    counts = trained(engine)
    again = run_round(method, task(), engine, server, 0, 1, ROOT, Quorum(3, 2))
    whole = run_round(method, task(), InProcessEngine(method, task(), clients(), ROOT), server, 0, 1, ROOT)
    assert not again.short
    assert counts == {"0": 1, "1": 1, "2": 1}
    assert same(again.server.model, whole.server.model), "in the end everybody replied"
    assert again.traffic["1"].bytes_down == 2 * again.traffic["0"].bytes_down, "it was sent its message twice"
    assert reasons(again.traffic) == {}


def test_a_lost_reply_that_is_asked_for_again_is_the_same_reply(monkeypatch):
    method, setting = FML(TRAIN), task((DENSE, WIDE, LINEAR))
    monkeypatch.setattr(Faults, "loses", lambda self, client, when, key: "its reply was lost" if key.path[4] == 0 else "")
    engine, server = begin(method, Faults(lost=0.5), setting)
    counts = trained(engine)
    again = run_round(method, setting, engine, server, 0, 1, ROOT, Quorum(3, 1))
    other = InProcessEngine(method, setting, clients(), ROOT)
    whole = run_round(method, setting, other, server, 0, 1, ROOT)
    assert counts == {"0": 1, "1": 1, "2": 1}, "nobody trains twice for one round"
    assert all(torch.equal(again.server.params[name], value) for name, value in whole.server.params.items())
    assert all(same(engine.states[client].own, other.states[client].own) for client in "012")


@pytest.mark.parametrize("quorum", [2, 0.5, 3, 1.0])
def test_a_round_below_the_quorum_leaves_the_server_as_it_was_and_says_so(quorum):
    method = FedAvg(TRAIN)
    faults = Faults(dropped_in={"1": (1,), "2": (1,)}, quorum=quorum, repeats=3)
    engine, server = begin(method, faults)
    first = run_round(method, task(), engine, server, 0, 2, ROOT, faults.needs)
    second = run_round(method, task(), engine, first.server, 1, 2, ROOT, faults.needs)
    needed = {2: 2, 0.5: 2, 3: 3, 1.0: 3}[quorum]
    assert first.short == ""
    assert second.server is first.server
    assert second.short == f"1 of {needed} needed replies came, after asking 4 times"
    assert reasons(second.traffic) == {
        "0": f"the round does not count: {second.short}",
        "1": "dropped out",
        "2": "dropped out",
    }
    assert second.traffic["1"].bytes_down == 4 * second.traffic["0"].bytes_down
    assert second.traffic["0"].bytes_up > 0, "it was sent in vain, but it was sent"


@pytest.mark.parametrize("name", METHODS)
def test_nobody_is_never_averaged(name):
    method = METHODS[name](train=TRAIN)
    setting = task((BODIES.get(name, LINEAR),) * 3, public=8, unlabeled=split(6, Key(9)))
    for faults in (Faults(dropout=1.0), Faults(leave=dict.fromkeys("012", 0)), Faults(lost=1.0)):
        engine, server = begin(method, faults, setting, clients(public=8))
        done = run_round(method, setting, engine, server, 0, 1, ROOT, faults.needs)
        if method.pooled:  # the one trainer is no client, and does not fail
            assert not done.short
            continue
        assert done.server is server
        assert done.short.startswith("0 of 1 needed replies came")
        assert ("nobody could be asked" in done.short) == bool(faults.leave)
        assert reasons(done.traffic).keys() == set("012")
        assert all(reasons(done.traffic).values())


def test_a_round_of_several_exchanges_counts_as_a_whole():
    class Watched(FedMD):
        seen = []

        def aggregate(self, server, replies, when, key):
            self.seen.append((when.t, when.phase, sorted(replies)))
            return super().aggregate(server, replies, when, key)

    method, setting = Watched(TRAIN, public_epochs=1), task(public=8)
    faults = Faults(dropped_in={"0": (0,), "1": (1,), "2": (1,)}, quorum=2)
    servers, traffic, _ = rounds(method, faults, 2, setting, clients(public=8))
    assert Watched.seen == [(0, "outputs", ["1", "2"]), (0, "digest", ["1", "2"])], (
        "dropped out of both, and round 1 was not aggregated"
    )
    assert servers[1] is servers[0]
    assert reasons(traffic[1]).keys() == set("012")


@pytest.mark.parametrize("name", METHODS)
def test_with_a_third_failing_every_client_keeps_a_model_and_every_loss_has_a_name(name):
    method = METHODS[name](train=TRAIN)
    mixed = name in ("local", "fd", "feddf", "fedmd", "fml", "pfml", "fedme")
    setting = task(
        (DENSE, WIDE, LINEAR, LINEAR, DENSE) if mixed else (BODIES.get(name, LINEAR),) * 5, public=8, unlabeled=split(6, Key(9))
    )
    data = clients((7, 3, 5, 2, 9), public=8)
    faults = Faults(dropout=0.3, lost=0.1, spread=1.0, deadline=4.0, join={"3": 2}, leave={"4": 4})
    servers, traffic, engine = rounds(method, faults, 6, setting, data)
    models = personal(method, servers[-1], engine.engine, 6)
    assert models.keys() == setting.members.keys()
    assert all(model.finite for model in models.values())
    rows = [row for t, each in enumerate(traffic) for row in records.rows(t, each, {}, {}, 0.0)]
    named = {(row["round"], row["client"]): row["notes"]["missing"] for row in rows if "missing" in row.get("notes", {})}
    assert all(isinstance(why, str) and why for why in named.values())
    heard = {(row["round"], row["client"]) for row in rows}
    if not method.pooled:
        assert {why.split(":")[0] for why in named.values()} >= {"dropped out", "joins in round 2", "left in round 4"}
        assert heard == {(t, client) for t in range(6) for client in "01234"}, "everybody has a row in every round"


def test_chances_are_those_asked_for_and_the_same_for_the_same_seed():
    downs = {str(i): i for i in range(400)}

    class Willing:
        def exchange(self, downs, when):
            return {client: Reply(down, None, 0.0) for client, down in downs.items()}

    def fates(faults, seed):
        engine = FailingClients(Willing(), faults, Key(seed))
        return [
            (t, client, each.reason)
            for t in range(5)
            for client, each in engine.exchange(downs, Round(t, 5)).items()
            if isinstance(each, NoReply)
        ]

    faults = Faults(dropout=0.3)
    assert fates(faults, 0) == fates(faults, 0) != fates(faults, 1)
    assert len(fates(faults, 0)) / 2000 == pytest.approx(0.3, abs=0.04)
    assert len(fates(Faults(lost=0.1), 0)) / 2000 == pytest.approx(0.1, abs=0.03)
    late = fates(Faults(seconds=2.0, spread=0.5, deadline=4.0), 0)
    assert len(late) / 2000 == pytest.approx(0.0828, abs=0.02)  # P(z > ln(4 / 2) / 0.5)
    assert fates(Faults(deadline=4.0), 0) == []
    assert len({client for _, client, _ in fates(faults, 0)}) > 300, "not always the same ones"


def test_another_attempt_and_another_exchange_are_other_chances():
    engine = FailingClients(InProcessEngine(FedAvg(TRAIN), task(), clients(), ROOT), Faults(), ROOT)
    seen = []
    for when in (Round(0, 2, "a"), Round(0, 2, "a"), Round(0, 2, "b"), Round(1, 2, "a")):
        engine._count(when, "1")
        seen.append(engine.attempts["1"])
    assert seen == [0, 1, 1, 0], "who came back in the first exchange is there in the second"


@pytest.mark.parametrize("method", ["fedme", "fedmd"])
def test_clients_that_are_asked_in_groups_fail_and_learn_as_if_asked_together(method):
    faults = Faults(dropout=0.3, lost=0.3, quorum=1.0, repeats=20)

    def play(size):
        def execute(operations):
            return one_by_one(operations)

        execute.clients_at_a_time = size
        setting = task(public=8)
        engine = FailingClients(
            InProcessEngine(METHODS[method](TRAIN), setting, clients(public=8), ROOT, execute), faults, ROOT
        )
        server = engine.method.init_server(setting, ROOT.at("init"))
        done = run_round(engine.method, setting, engine, server, 0, 1, ROOT, faults.needs)
        bytes_down = {client: sent.bytes_down for client, sent in done.traffic.items()}
        return personal(engine.method, done.server, engine.engine, 1), bytes_down, engine.attempts

    together, in_groups = play(None), play(1)
    assert in_groups[1:] == together[1:]
    assert together[2], "somebody was asked again"
    assert all(same(in_groups[0][client], model) for client, model in together[0].items())


def test_a_client_adopts_nothing_in_a_round_that_does_not_count():
    notes = {"lender": "1", "adopts": True}
    rows = [{"round": 0, "client": "0", "notes": notes | {"missing": "the round does not count: 1 of 2 needed replies came"}}]
    assert lineages(rows, "01")["0"].adoptions == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dropout": 1.2}, "dropout: must be between 0 and 1"),
        ({"lost": {"1": -0.1}}, "lost: must be between 0 and 1"),
        ({"seconds": 0.0}, "seconds: must be positive"),
        ({"spread": -1.0}, "spread: must be >= 0"),
        ({"deadline": 0.0}, "deadline: must be > 0"),
        ({"dropped_in": {"1": (-1,)}}, "dropped_in: rounds must be >= 0; they count from 0"),
        ({"lost_in": {"1": (3, -1)}}, "lost_in: rounds must be >= 0; they count from 0"),
        ({"join": {"1": -1}}, "join: rounds must be >= 0; they count from 0"),
        ({"join": {"1": 2}, "leave": {"1": 2}}, "join: 1 cannot join and leave in the same round"),
        ({"quorum": 0}, "quorum: must be an integer >= 1, or a fraction > 0 and <= 1.0, got 0"),
        ({"quorum": 1.5}, "quorum: must be an integer >= 1, or a fraction > 0 and <= 1.0, got 1.5"),
        ({"repeats": -1}, "repeats: must be >= 0"),
    ],
)
def test_impossible_settings_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Faults(**change)


def test_clients_that_do_not_exist_and_quorums_that_cannot_be_reached_are_refused():
    with pytest.raises(TaskError, match=r"faults\.join names 7, 9, but there is no such client"):
        Faults(join={"9": 1, "1": 1, "7": 2}).check(task())
    with pytest.raises(TaskError, match=r"faults\.quorum is 4, but there are only 3 clients"):
        Faults(quorum=4).check(task())
    Faults(quorum=3, dropout={"1": 0.5}).check(task())


def test_what_simulates():
    assert not Faults().simulates
    assert not Faults(quorum=0.5, repeats=7).simulates
    for f in dataclasses.fields(Faults):
        value = {"dropout": 0.1, "lost": 0.1, "seconds": 2.0, "spread": 1.0, "deadline": 3.0}.get(f.name, {"1": 2})
        assert f.name in ("quorum", "repeats") or Faults(**{f.name: value if "_in" not in f.name else {"1": (2,)}}).simulates
