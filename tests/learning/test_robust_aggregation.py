"""Robust averages by hand, guests that are not let in, and settings that cannot be."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from fedme.core.key import Key
from fedme.core.method import Round, TaskError
from fedme.core.model import Model, average
from fedme.core.operations import Score
from fedme.execution.lockstep import run_in_lockstep
from fedme.execution.reference import one_by_one
from fedme.federation.in_process import InProcessEngine
from fedme.federation.round import run_round
from fedme.learning.partial_model import Part, merge
from fedme.learning.robust_aggregation import Defence, require_enough_copies
from fedme.learning.training_settings import Training
from fedme.methods import METHODS, fedmd, fml, hypcluster, shared_model
from fedme.methods.fedme.exchange import admitted_guest, averaged_copies
from fedme.methods.fedme.fedme import FedMe
from fedme_test_support import DENSE, LINEAR, clients, federate, split, task

ROWS = torch.tensor([[1.0, 10.0], [2.0, -5.0], [9.0, 0.0], [4.0, 1.0], [3.0, 2.0]])


@pytest.mark.parametrize(
    ("defence", "count", "expected"),
    [
        (Defence(average="median"), 5, [3.0, 1.0]),
        (Defence(average="median"), 4, [3.0, 0.5]),  # between the two in the middle
        (Defence(average="median"), 2, [1.5, 2.5]),  # of two it is the mean
        (Defence(average="median"), 1, [1.0, 10.0]),
        (Defence(average="trimmed", trim=0.2), 5, [3.0, 1.0]),  # 2, 3, 4 and 0, 1, 2
        (Defence(average="trimmed", trim=0.4), 5, [3.0, 1.0]),
        (Defence(average="trimmed", trim=0.2), 4, [4.0, 1.5]),  # 0.8 of a value at either end: none
        (Defence(average="trimmed", trim=0.25), 4, [3.0, 0.5]),
        (Defence(), 5, [3.8, 1.6]),
    ],
)
def test_middles_by_hand(defence, count, expected):
    assert defence.middle(ROWS[:count]).tolist() == pytest.approx(expected)


def test_one_liar_of_five_moves_a_median_no_further_than_the_honest_ones_lie():
    lied = torch.cat([ROWS[:4], torch.tensor([[1e30, -1e30]])])
    for defence in (Defence(average="median"), Defence(average="trimmed", trim=0.2)):
        middle = defence.middle(lied)
        assert (ROWS[:4].amin(0) <= middle).all()
        assert (middle <= ROWS[:4].amax(0)).all()


@given(st.floats(0.001, 0.499))
def test_a_trimmed_mean_needs_so_many_values_that_one_is_discarded(trim):
    fewest = Defence(average="trimmed", trim=trim).fewest
    assert fewest >= 5
    assert int(trim * fewest) >= 1
    assert fewest == 5 or int(trim * (fewest - 1)) == 0


def test_how_many_copies_an_average_needs():
    assert Defence().fewest == 1
    assert Defence(average="median").fewest == 5
    assert Defence(average="trimmed").fewest == 10
    assert Defence(average="trimmed", trim=0.2).fewest == 5
    require_enough_copies(Defence(average="median"), 5)
    require_enough_copies(Defence(), 1)
    with pytest.raises(TaskError, match="'median' needs at least 5 clients in a round, got 4"):
        require_enough_copies(Defence(average="median"), 4)


class Choosing(InProcessEngine):
    """HypCluster's clients: the first five choose cluster 0, the others cluster 1."""

    def exchange(self, downs, when):
        answers = dict(super().exchange(downs, when))
        for client, answer in answers.items():
            cluster = int(int(client) >= 5)
            up = hypcluster.Up(cluster, model_like(downs[client].models[cluster], float(client)), 1)
            answers[client] = replace(answer, up=up)
        return answers


def model_like(model, value):
    return model.with_params({name: torch.full_like(weight, value) for name, weight in model.params.items()})


def test_a_cluster_of_fewer_than_five_keeps_its_model_and_says_so():
    method = METHODS["hypcluster"](Training(epochs=1, batch=4), defence=Defence(average="median"))
    setting, data = task((LINEAR,) * 8), clients((6,) * 8)
    server = method.init_server(setting, Key(0).at("init"))
    done = run_round(method, setting, Choosing(method, setting, data, Key(0)), server, 0, 1, Key(0))
    first, second = done.server.models
    assert all((weight == 2.0).all() for weight in first.params.values())
    assert all(torch.equal(weight, server.models[1].params[name]) for name, weight in second.params.items())
    assert done.not_averaged == dict.fromkeys("567", "3 copies of this model came, and 'median' needs 5")
    assert done.traffic["6"].report.notes["not_averaged"] == done.not_averaged["6"]
    plain = replace(method, defence=Defence())
    done = run_round(plain, setting, Choosing(plain, setting, data, Key(0)), server, 0, 1, Key(0))
    assert not done.not_averaged
    assert all(torch.allclose(weight, torch.full_like(weight, 6.0)) for weight in done.server.models[1].params.values())


@given(st.permutations(range(5)), st.sampled_from(["median", "trimmed"]))
def test_the_order_does_not_matter(order, kind):
    defence = Defence(average=kind, trim=0.2)
    assert torch.equal(defence.middle(ROWS), defence.middle(ROWS[list(order)]))


def weights(value):
    return {"w": torch.tensor([float(value)]), "n": torch.tensor(7)}


def model(value):
    return Model(LINEAR, {"w": torch.tensor([float(value)])}, {"m": torch.tensor([float(value)]), "n": torch.tensor(7)})


def test_median_of_models_parts_and_copies_wherever_they_are_averaged():
    median = Defence(average="median")
    assert median.combine([weights(1), weights(2), weights(90)], [0.1, 0.1, 0.8])["w"].item() == 2.0
    assert median.combine([weights(1), weights(2), weights(90)], [0.1, 0.1, 0.8])["n"].item() == 7
    assert Defence().combine([weights(1), weights(3)], [0.25, 0.75])["w"].item() == 2.5
    middle = average([model(1), model(2), model(90)], [1, 1, 8], median.combine)
    assert (middle.params["w"].item(), middle.buffers["m"].item(), middle.buffers["n"].item()) == (2.0, 2.0, 7)
    parts = [Part(weights(v), {}) for v in (1, 2, 90)]
    assert merge(parts, [1.0, 1.0, 8.0], median.combine).params["w"].item() == 2.0
    copies = [("a", model(1)), ("a", model(2)), ("a", model(90)), ("b", None), (None, model(5))]
    after = averaged_copies({"b": model(4)}, copies)
    assert {client: each.params["w"].item() for client, each in after.items()} == {"a": 31.0, "b": 4.0}


def test_every_method_that_averages_does_so_with_its_defence():
    median, when, key = Defence(average="median"), Round(0, 1), Key(0)
    ups = {str(i): shared_model.TrainedCopy(model(v), 1 + 100 * (v == 90)) for i, v in enumerate((1, 2, 90))}
    server = shared_model.SharedModel(model(0))
    for name in ("fedavg", "fedprox", "mapper", "pfedme"):
        after = METHODS[name](defence=median).aggregate(server, ups, when, key)
        assert after.model.params["w"].item() == 2.0, name
    shared = {client: shared_model.SharedModel(up.model) for client, up in ups.items()}
    assert METHODS["pfml"](defence=median).aggregate(server, shared, when, key).model.params["w"].item() == 2.0
    chosen = {client: hypcluster.Up(0, up.model, up.samples) for client, up in ups.items()}
    two = hypcluster.Hypotheses((model(0), model(5)))
    after = METHODS["hypcluster"](defence=median).aggregate(two, chosen, when, key)
    assert [m.params["w"].item() for m in after.models] == [2.0, 5.0]
    parts = {client: fml.Up(Part(up.model.params, {}), up.samples) for client, up in ups.items()}
    assert METHODS["fml"](defence=median).aggregate(Part({}, {}), parts, when, key).params["w"].item() == 2.0
    logits = {client: fedmd.Up(up.model.params["w"]) for client, up in ups.items()}
    assert METHODS["fedmd"](defence=median).aggregate(fedmd.Server(), logits, when, key).logits.item() == 2.0
    averaging = {name for name, kind in METHODS.items() if "defence" in kind.__dataclass_fields__}
    assert averaging == METHODS.keys() - {"local", "centralized", "fedamp"}  # FedAMP mixes models, and a hint says so


def test_a_guest_much_worse_than_ones_own_model_is_not_let_in():
    defence = Defence(guest=2.0)
    own = Score(10, 1.0, 0.5)
    assert not defence.unwelcome(own, Score(10, 2.9, 0.1))
    assert defence.unwelcome(own, Score(10, 3.1, 0.1))
    assert defence.unwelcome(own, Score(10, math.nan, 0.0))
    assert defence.unwelcome(own, Score(10, math.inf, 0.0))
    assert not Defence().unwelcome(own, Score(10, math.inf, 0.0))


def turned_away(own, guest, data, defence):
    return run_in_lockstep({"me": admitted_guest(own, guest, data, defence)}, one_by_one)["me"].value


def test_fedmes_clients_look_at_a_guest_before_they_train_it():
    data, good = split(12, Key(3)), Model.init(LINEAR, Key(1), torch.float64)
    wild = good.with_params({name: 1e3 * value for name, value in good.params.items()})
    also = Model.init(LINEAR, Key(2), torch.float64)
    defence = Defence(guest=3.0)
    assert turned_away(good, also, data, defence) == (also, {})  # untrained models are equally bad
    taken, notes = turned_away(good, wild, data, defence)
    assert taken is None
    assert notes["guest_refused"].startswith("loss ")
    assert turned_away(good, wild, data.take(torch.arange(0)), defence) == (wild, {})  # nothing to look at
    assert turned_away(good, wild, data, Defence()) == (wild, {})
    assert turned_away(good, None, data, defence) == (None, {})


def test_a_client_that_turned_a_guest_away_trains_alone_and_says_so():
    method = FedMe(Training(epochs=1, batch=4, lr=0.05), defence=Defence(guest=3.0))
    setting, data = task((LINEAR, LINEAR)), clients((8, 8))
    server, engine = federate(method, setting, data, rounds=1)
    wild = {name: 1e3 * value for name, value in server.models["1"].params.items()}
    server = type(server)({**server.models, "1": server.models["1"].with_params(wild)}, server.key)
    downs = engine.run_on_server(
        method.dispatch(setting, server, method.plan(server, ["0", "1"], Round(1, 2), Key(0)), Round(1, 2), Key(0))
    )
    answers = engine.exchange(downs.value, Round(1, 2))
    assert answers["0"].up.guest is None
    assert not answers["0"].up.adopts
    assert answers["0"].up.lender == "1"
    assert "guest_refused" in answers["0"].report.notes
    assert set(answers["0"].report.losses) == {"own"}
    assert answers["1"].up.guest is not None  # the other way round it is an improvement
    assert "guest_refused" not in answers["1"].report.notes


@pytest.mark.parametrize(
    "wrong",
    [
        {"trim": 0.5},
        {"trim": -0.1},
        {"trim": 0.0, "average": "trimmed"},
        {"norm": 0.0},
        {"guest": -1.0},
        {"quarantine": 0},
        {"quarantine_rounds": 0},
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Defence(**wrong)


def test_feddf_counts_the_copies_of_every_architecture():
    method = METHODS["feddf"](Training(epochs=1, batch=4), distil_epochs=0, defence=Defence(average="median"))
    setting, data = task((LINEAR,) * 5 + (DENSE,) * 2, unlabeled=split(6, Key(9))), clients((6,) * 7)
    server = method.init_server(setting, Key(0).at("init"))
    done = run_round(method, setting, InProcessEngine(method, setting, data, Key(0)), server, 0, 1, Key(0))
    assert done.not_averaged == dict.fromkeys("56", "2 copies of this model came, and 'median' needs 5")
    unchanged = {name: done.server.models[name].params is model.params for name, model in server.models.items()}
    assert unchanged == {LINEAR.name: False, DENSE.name: True}
