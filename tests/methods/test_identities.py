"""What must hold between methods, exactly, whatever the data."""

from dataclasses import replace

import pytest
import torch

from fedme.core.data import Arrays, ClientData, Split
from fedme.core.key import Key
from fedme.core.method import Plan, Round, TaskError
from fedme.core.model import Arch, Model
from fedme.federation.round import run_round
from fedme.learning.training_settings import Training
from fedme.methods import METHODS, fedmd
from fedme.methods.centralized import Centralized
from fedme.methods.ditto import Ditto
from fedme.methods.fedamp import FedAMP
from fedme.methods.fedavg import FedAvg
from fedme.methods.fedmd import FedMD
from fedme.methods.fedme.fedme import FedMe
from fedme.methods.fedprox import FedProx
from fedme.methods.fml import FML
from fedme.methods.hypcluster import HypCluster
from fedme.methods.local import Local
from fedme.methods.mapper import Mapper
from fedme.methods.pfedme import PFedMe
from fedme.methods.pfml import PFML
from fedme_test_support import (
    ARCHS,
    BODIES,
    CLASSES,
    DENSE,
    DROPPING,
    LINEAR,
    NORMALISED,
    WIDE,
    Losing,
    clients,
    federate,
    personal,
    same,
    split,
    task,
)

TRAIN = Training(epochs=2, batch=3, lr=0.1, momentum=0.9, weight_decay=1e-3)


KINDS = (LINEAR, DENSE, DROPPING, NORMALISED)


@pytest.mark.parametrize("arch", KINDS, ids=lambda arch: arch.name)
def test_fedprox_without_pull_is_fedavg(arch):
    data = clients((7, 12, 1))
    a, _ = federate(FedAvg(TRAIN), task(shared=arch), data)
    b, _ = federate(FedProx(TRAIN, mu=0.0), task(shared=arch), data)
    c, _ = federate(FedProx(TRAIN, mu=0.5), task(shared=arch), data)
    assert same(a.model, b.model)
    assert not same(a.model, c.model, 1e-6)


def test_fedprox_pulls_towards_the_received_model():
    data = clients((9,))
    start = FedAvg(TRAIN).init_server(task((LINEAR,)), Key(0).at("init")).model
    distance = []
    for mu in (0.0, 1.0, 5.0):
        server, _ = federate(FedProx(TRAIN, mu=mu), task((LINEAR,)), data, rounds=1)
        distance.append(sum((server.model.params[n] - start.params[n]).square().sum().item() for n in start.params))
    assert distance[0] > distance[1] > distance[2]


@pytest.mark.parametrize("arch", KINDS, ids=lambda arch: arch.name)
def test_hypcluster_with_one_cluster_is_fedavg(arch):
    data = clients((7, 12, 1))
    a, _ = federate(FedAvg(TRAIN), task(shared=arch), data)
    b, _ = federate(HypCluster(TRAIN, clusters=1), task(shared=arch), data)
    assert same(a.model, b.models[0])


@pytest.mark.parametrize("arch", KINDS, ids=lambda arch: arch.name)
def test_fml_beta_one_is_fedavg_with_uniform_weights_on_the_server(arch):
    data = clients((7, 12, 1))
    a, _ = federate(FedAvg(TRAIN, weighting="uniform"), task(shared=arch), data)
    b, _ = federate(FML(TRAIN, alpha=0.3, beta=1.0), task((DENSE, WIDE, LINEAR), shared=arch), data)
    assert b.params.keys() == a.model.params.keys()
    assert all(torch.equal(a.model.params[name], value) for name, value in b.params.items())
    assert all(torch.equal(a.model.buffers[name], value) for name, value in b.buffers.items())


def test_fml_alpha_one_is_local_at_the_client_with_momentum_kept():
    data = clients()
    archs = (DROPPING, NORMALISED, LINEAR)
    local, fml = Local(TRAIN, optimizer_state="keep"), FML(TRAIN, alpha=1.0, beta=0.3)
    a = personal(local, *federate(local, task(archs), data))
    b = personal(fml, *federate(fml, task(archs), data))
    assert all(same(a[client], b[client]) for client in data)
    forgetful = FML(TRAIN, alpha=1.0, beta=0.3, optimizer_state="reset")
    c = personal(forgetful, *federate(forgetful, task(archs), data))
    assert not any(same(a[client], c[client], 1e-9) for client in data)


ADAM = Training(epochs=2, batch=3, optimizer="adam", lr=0.02)


def test_local_keeps_the_whole_state_of_adam_and_fml_that_of_its_private_model():
    data = clients()
    archs = (DROPPING, NORMALISED, LINEAR)
    local, fml = Local(ADAM), FML(ADAM, alpha=1.0, beta=0.3)
    states = federate(local, task(archs), data)[1].states
    a = personal(local, *federate(local, task(archs), data))
    b = personal(fml, *federate(fml, task(archs), data))
    assert all(same(a[client], b[client]) for client in data)
    for client, state in states.items():
        parts = {part for name in state.model.params for part in (f"{name}.exp_avg", f"{name}.exp_avg_sq", f"{name}.step")}
        assert state.opt["own"].keys() == parts
        steps = {int(value) for name, value in state.opt["own"].items() if name.endswith(".step")}
        assert steps == {3 * 2 * -(-len(data[client].train) // 3)}  # of all three rounds
    for forgetful in (Local(ADAM, optimizer_state="reset"), FML(ADAM, alpha=1.0, beta=0.3, optimizer_state="reset")):
        server, engine = federate(forgetful, task(archs), data)
        c = personal(forgetful, server, engine)
        assert not any(same(a[client], c[client], 1e-9) for client in data)
        assert all(state.opt == {} for state in engine.states.values())


@pytest.mark.parametrize("arch", KINDS, ids=lambda arch: arch.name)
def test_fedme_with_one_client_is_local_with_momentum_reset(arch):
    data = clients((11,))
    local, fedme = Local(TRAIN, optimizer_state="reset"), FedMe(TRAIN)
    a = personal(local, *federate(local, task((arch,)), data))
    b = personal(fedme, *federate(fedme, task((arch,)), data))
    assert same(a["0"], b["0"])


def test_fedme_without_mutual_learning_trains_its_own_model_as_local_does():
    data = clients()
    archs = (DENSE, WIDE, LINEAR)
    method = FedMe(TRAIN, mutual=False)
    local = Local(TRAIN, optimizer_state="reset")
    alone = personal(local, *federate(local, task(archs), data, rounds=1), rounds=1)
    server, engine = federate(method, task(archs), data, rounds=0)
    when = Round(0, 1)
    downs = engine.run_on_server(
        method.dispatch(task(archs), server, Plan.all(list(data)), when, Key(0).at("round", 0, "server"))
    ).value
    answers = engine.exchange(downs, when)
    assert all(down.guest is not None for down in downs.values())
    assert all(same(answers[client].up.own, alone[client]) for client in data)


@pytest.mark.parametrize("mutual", [True, False])
def test_fedme_without_tuning_never_changes_an_architecture(mutual):
    archs = (DENSE, WIDE, LINEAR)
    method = FedMe(TRAIN, tuning=False, mutual=mutual)
    models = personal(method, *federate(method, task(archs), clients(), rounds=4), rounds=4)
    assert [models[str(i)].arch for i in range(3)] == list(archs)


def test_fedme_tuning_changes_architectures_when_guests_are_better():
    # Two clients without training data worth the name hold a model that cannot learn; the third one's is better for all.
    archs = (DENSE, WIDE, LINEAR, LINEAR)
    method = FedMe(Training(epochs=5, batch=4, lr=0.3))
    server, _ = federate(method, task(archs), clients((40, 3, 3, 3)), rounds=8)
    assert [m.arch for m in server.models.values()] != list(archs)


ORDERED = replace(TRAIN, shuffle=False)  # Ditto draws batches for its personal model apart


@pytest.mark.parametrize("arch", [LINEAR, DENSE, NORMALISED], ids=lambda arch: arch.name)
def test_ditto_without_pull_is_local_at_the_client_and_fedavg_at_the_server(arch):
    data, setting_ = clients((7, 12, 1)), task((arch,) * 3, shared=arch)
    fedavg, local = FedAvg(ORDERED, weighting="uniform"), Local(ORDERED, optimizer_state="reset")
    a, _ = federate(fedavg, setting_, data)
    alone = personal(local, *federate(local, setting_, data))
    for lam in (0.0, 0.5):
        method = Ditto(ORDERED, lam=lam)
        server, engine = federate(method, setting_, data)
        assert same(server.model, a.model)  # the personal models never touch the shared one
        found = personal(method, server, engine)
        assert all(same(found[c], alone[c], 0.0 if lam == 0 else 1e-6) is (lam == 0) for c in data)


def test_ditto_by_default_is_neither_local_nor_fedavg():
    data, method = clients(), Ditto(ORDERED)
    server, engine = federate(method, task(), data)
    alone = personal(Local(ORDERED), *federate(Local(ORDERED), task(), data))
    found = personal(method, server, engine)
    assert not any(same(found[c], alone[c], 1e-3) or same(found[c], server.model, 1e-3) for c in data)
    strong = federate(Ditto(Training(epochs=9, batch=4, lr=0.05), lam=15.0), task(), data, rounds=1)[1].states
    weak = federate(Ditto(Training(epochs=9, batch=4, lr=0.05), lam=0.1), task(), data, rounds=1)[1].states
    start = method.init_server(task(), Key(0).at("init")).model

    def distance(model):
        return sum((model.params[n] - start.params[n]).square().sum().item() for n in start.params)

    assert all(distance(strong[c].personal) < 0.5 * distance(weak[c].personal) for c in data)  # the pull moves weights


def test_ditto_personal_epochs_are_those_of_the_personal_model():
    data = clients((9,))
    a, one = federate(Ditto(replace(ORDERED, epochs=3), personal_epochs=1), task((LINEAR,)), data, rounds=1)
    b, three = federate(Ditto(replace(ORDERED, epochs=3)), task((LINEAR,)), data, rounds=1)
    assert same(a.model, b.model)
    assert not same(one.states["0"].personal, three.states["0"].personal, 1e-6)


def test_clients_of_one_architecture_may_start_from_the_same_weights():
    archs, key = (LINEAR, DENSE, LINEAR), Key(0).at("init")
    apart, together = task(archs), replace(task(archs), same_start=True)
    first = [together.first_model(c, key) for c in "012"]
    assert same(first[0], first[2])
    assert first[1].arch == DENSE
    assert same(first[0], FedAvg(TRAIN).init_server(together, key).model)  # also the server's
    assert not same(apart.first_model("0", key), apart.first_model("2", key), 1e-6)
    assert same(apart.first_model("0", key), Model.init(LINEAR, key.at("client", "0"), torch.float64))
    for method in (Local(TRAIN), FML(TRAIN), FedMe(TRAIN)):
        server, engine = federate(method, together, clients((5, 5, 5)), rounds=0)
        models = personal(method, server, engine, rounds=1)
        assert same(models["0"], models["2"])


@pytest.mark.parametrize("arch", [LINEAR, DROPPING, NORMALISED], ids=lambda arch: arch.name)
def test_fedamp_without_pull_is_local_from_one_start_and_with_its_defaults_it_is_not(arch):
    data, setting_ = clients((7, 12, 1)), replace(task((arch,) * 3, shared=arch), same_start=True)
    local, none, usual = Local(TRAIN, optimizer_state="reset"), FedAMP(TRAIN, lam=0.0), FedAMP(TRAIN)
    alone, unpulled, pulled = (personal(m, *federate(m, setting_, data)) for m in (local, none, usual))
    assert all(same(alone[c], unpulled[c]) for c in data)
    assert not any(same(alone[c], pulled[c], 1e-3) for c in data)


def test_fedamp_mixes_with_those_who_have_replied_only():
    data, method = clients(), FedAMP(TRAIN)
    server, _ = federate(method, task(), data, rounds=2, lost=lambda t, client: client == "1")
    assert server.models.keys() == {"0", "2"}
    _, engine = federate(method, task(), data, rounds=0)
    downs = engine.run_on_server(method.dispatch(task(), server, Plan.all(list(data)), Round(2, 3), Key(0))).value
    assert same(downs["1"].model, server.first)
    assert not same(downs["0"].model, server.models["0"], 1e-6)
    (far,) = method.mixing_weights(torch.tensor([[0.0, 10_000.0]], dtype=torch.float64), [0])
    assert far.tolist() == [1.0, 0.0]  # models that are far apart do not attract each other


def test_pfedme_without_inner_steps_leaves_the_global_model():
    method = PFedMe(TRAIN, inner_steps=0)
    server, _ = federate(method, task(), clients())
    start = method.init_server(task(), Key(0).at("init"))
    assert same(server.model, start.model)


def test_pfedme_with_no_pull_of_the_server_keeps_moving_towards_theta():
    method = PFedMe(Training(epochs=1, batch=20, lr=0.1), lam=1.0, inner_steps=3, inner_lr=0.1, l2=0.0)
    server, engine = federate(method, task((LINEAR,)), clients((9,)), rounds=1)
    start = method.init_server(task((LINEAR,)), Key(0).at("init")).model
    theta = engine.states["0"].theta
    for name in start.params:  # w1 = w0 - eta lam (w0 - theta)
        assert torch.allclose(server.model.params[name], start.params[name] - 0.1 * (start.params[name] - theta.params[name]))


def test_mapper_restricted_to_lambda_zero_leaves_the_local_model_untouched():
    method = Mapper(TRAIN, lambdas=(0.0,))
    server, engine = federate(method, task(), clients())
    for client, state in engine.states.items():
        fresh = engine.run_on_server(method.init_client(task(), client, engine.clients[client], Key(0).at("init"))).value
        assert same(state.local, fresh.local)
    shared = method.init_server(task(), Key(0).at("init"))
    assert not same(server.model, shared.model, 1e-6)  # the global model does learn, on the last third


def test_mapper_restricted_to_lambda_one_is_a_local_model():
    method = Mapper(TRAIN, lambdas=(1.0,))
    _, engine = federate(method, task(), clients(), rounds=1)
    for state in engine.states.values():
        assert all(torch.isfinite(p).all() for p in state.local.params.values())


def test_centralized_with_one_client_is_fedavg_with_one_client():
    plain = Training(epochs=2, batch=50, lr=0.1)  # whole batches: the order of samples does not matter
    data = clients((11,))
    a, _ = federate(FedAvg(plain), task((LINEAR,)), data)
    b, _ = federate(Centralized(plain), task((LINEAR,)), data)
    assert same(a.model, b.model, 1e-12)


def test_pfml_reset_starts_both_models_from_the_global_one():
    method = PFML(Training(steps=1, batch=50, lr=0.05), lam=2.0, inner_steps=1, aux="reset")
    server, engine = federate(method, task((LINEAR,)), clients((9,)), rounds=2)
    # Two equal models have no divergence and equal anchors, so they stay equal.
    assert same(engine.states["0"].aux, server.model, 1e-12)


@pytest.mark.parametrize("aux", ["persistent", "anchored", "reset"])
def test_pfml_readings_differ_from_the_second_round_on(aux):
    data = clients()
    train = Training(steps=3, batch=5, lr=0.1)
    first = [federate(PFML(train, aux=a), task(), data, rounds=1)[0] for a in ("persistent", aux)]
    assert same(first[0].model, first[1].model)
    if aux != "persistent":
        second = [federate(PFML(train, aux=a), task(), data, rounds=3)[1].states["0"].aux for a in ("persistent", aux)]
        assert not same(second[0], second[1], 1e-9)


def everything(train: Training) -> dict[str, object]:
    return {name: kind(train=train) for name, kind in METHODS.items()}


def setting(name: str):
    archs = (
        (DENSE, WIDE, NORMALISED, LINEAR)
        if name in ("local", "fd", "feddf", "fedmd", "fml", "pfml", "fedme")
        else (BODIES.get(name, LINEAR),) * 4
    )
    return task(archs, public=8, unlabeled=split(10, Key(9))), clients((7, 12, 1, 2), public=8)


@pytest.mark.parametrize("name", METHODS)
def test_same_seed_same_bits_and_other_seed_other_bits(name):
    method = everything(TRAIN)[name]
    task_, data = setting(name)
    runs = [personal(method, *federate(method, task_, data, rounds=2, seed=s), rounds=2) for s in (0, 0, 1)]
    assert all(same(runs[0][c], runs[1][c]) for c in data)
    assert not all(same(runs[0][c], runs[2][c], 1e-9) for c in data)


@pytest.mark.parametrize("name", METHODS)
def test_global_generators_are_neither_used_nor_moved(name):
    method = everything(TRAIN)[name]
    task_, data = setting(name)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = personal(method, *federate(method, task_, data, rounds=2), rounds=2)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    second = personal(method, *federate(method, task_, data, rounds=2), rounds=2)
    assert all(same(first[c], second[c]) for c in data)


@pytest.mark.parametrize("name", METHODS)
def test_a_round_that_loses_clients_or_everybody_is_normal(name):
    method = everything(TRAIN)[name]
    task_, data = setting(name)

    def lost(t, client):
        return t == 1 or (t == 0 and client in ("0", "3")) or (t == 2 and client == "1")

    server, engine = federate(method, task_, data, rounds=4, lost=lost)
    models = personal(method, server, engine, rounds=4)
    assert models.keys() == data.keys()
    assert all(torch.isfinite(p).all() for m in models.values() for p in m.params.values())


@pytest.mark.parametrize("name", METHODS)
def test_cohorts_are_honoured(name):
    train = Training(epochs=1, batch=3, lr=0.05, cohort=2)
    method = everything(train)[name]
    task_, data = setting(name)
    seen = []
    federate(method, task_, data, rounds=3, lost=lambda t, c: seen.append((t, c)) or False)
    everybody = name in ("pfedme", "pfml")
    phases = len(method.phases)
    expected = 1 if name == "centralized" else (4 if everybody else 2)
    assert all(len([c for t, c in seen if t == r]) == expected * phases for r in range(3))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns(name):
    train = Training(epochs=3, batch=5, lr=0.1)
    kind = METHODS[name]
    method = kind(train=train, inner_lr=0.1, lam=1.0) if name in ("pfedme", "pfml") else kind(train=train)
    method = FedAMP(train, lam=0.1) if name == "fedamp" else method  # the usual pull is too strong for eight rounds
    archs = (DENSE, LINEAR, LINEAR, LINEAR) if name in ("local", "fedmd", "fml", "fedme") else (BODIES.get(name, LINEAR),) * 4
    task_, data = task(archs, public=40, unlabeled=split(10, Key(9))), clients((60, 60, 60, 60), public=40)
    server, engine = federate(method, task_, data, rounds=8)
    deliveries = {client: method.deliver(task_, server, client) for client in data}
    done = engine.evaluate_models(deliveries, Round(7, 8))
    accuracy = [s.metrics.accuracy for d in done.values() for s in d.value.scores if (s.model, s.split) == ("personal", "val")]
    assert sum(accuracy) / len(accuracy) > 2 / CLASSES


def test_fedme_a_client_that_diverges_does_not_spoil_the_others():
    method = FedMe(Training(epochs=1, batch=5, lr=0.1))
    task_ = task((DENSE, LINEAR, WIDE, LINEAR))
    data = clients((9, 9, 9, 9))
    two = data["1"].train
    huge = Split(Arrays(two.inputs(torch.arange(9)) * 1e200, two.y), torch.arange(9))
    data["1"] = replace(data["1"], train=huge)  # whatever is trained on this diverges
    server, engine = federate(method, task_, data, rounds=0)
    for t in range(4):
        played = run_round(method, task_, engine, server, t, 4, Key(1))
        server = played.server
        assert all(model.finite for model in server.models.values())
        assert all(each.answered for each in played.traffic.values())  # to diverge is no offence
    assert {"0", "2", "3"} <= server.models.keys()


def test_fedmd_logits_of_a_model_that_diverged_do_not_count():
    method = FedMD(TRAIN, public_epochs=1, digest_loss="mse")
    task_, data = task(public=8), clients(public=8)
    _, engine = federate(method, task_, data, rounds=0)
    dict(engine.exchange(dict.fromkeys(data, fedmd.Down(torch.arange(3))), Round(0, 1, "outputs")))
    model = engine.states["1"].model
    engine.states["1"] = fedmd.State(model.with_params({name: value * float("nan") for name, value in model.params.items()}))
    heard = {}

    class Watched(FedMD):
        def aggregate(self, server, replies, when, key):
            heard[when.phase] = set(replies)
            return super().aggregate(server, replies, when, key)

    watched = Watched(TRAIN, public_epochs=1, digest_loss="mse")
    traffic = run_round(watched, task_, engine, fedmd.Server(), 0, 1, Key(0)).traffic
    assert heard == {"outputs": {"0", "2"}, "digest": {"0", "1", "2"}}
    assert {client for client, each in traffic.items() if each.report.notes.get("diverged")} == {"1"}


def resolve(name, classes):
    return Arch.named(f"{name}[{classes}]", ARCHS[name].factory, classes=classes, **dict(ARCHS[name].options))


def test_fml_clients_with_other_classes_share_a_part_and_keep_an_adaptor():
    method = FML(TRAIN, shared="0.")
    setting = task((LINEAR, resolve("dense", 2)), shared=DENSE, labels={"1": "xy"}, resolve=resolve)
    data = clients((8, 8))
    two = data["1"]
    data["1"] = ClientData("1", *(part.labelled(part.y % 2) for part in (two.train, two.val, two.test)))
    server, engine = federate(method, setting, data, rounds=3)
    assert set(server.params) == {"0.weight", "0.bias"}
    models = [
        engine.run_on_server(
            method.models(engine.states[c], method.deliver(setting, server, c), data[c], Round(2, 3), Key(0))
        ).value
        for c in data
    ]
    assert [m["global"].params["2.bias"].shape[0] for m in models] == [CLASSES, 2]
    assert torch.equal(models[0]["global"].params["0.weight"], models[1]["global"].params["0.weight"])
    again, _ = federate(method, setting, data, rounds=3)
    assert all(torch.equal(again.params[name], server.params[name]) for name in server.params)


def test_fml_refuses_to_share_what_depends_on_the_classes():
    setting = task((LINEAR, LINEAR), shared=DENSE, labels={"1": "xy"}, resolve=resolve)
    with pytest.raises(TaskError, match="client 1 cannot share '2.' of dense: 2.weight depends on its number of classes"):
        FML(TRAIN, shared="2.").check(setting)
    with pytest.raises(TaskError, match="no weight of dense has a name that 'conv' matches; it has 0.weight, 0.bias, 2.weight"):
        FML(TRAIN, shared=("0.", "conv")).check(task(shared=DENSE))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "local"])
def test_another_label_space_of_the_same_size_is_refused_by_name(name):
    setting = task(labels={"1": "abdc"}, public=8, unlabeled=split(10, Key(9)))
    with pytest.raises(TaskError, match=r"these differ: 1 \(4\)"):
        METHODS[name](train=TRAIN).check(setting)


def test_adopt_by_names_must_be_clients():
    with pytest.raises(TaskError, match="adopt_by names nobody"):
        FedMe(TRAIN, adopt_by={"nobody": "size"}).check(task())


def test_a_client_may_have_a_criterion_of_its_own():
    archs = (WIDE, LINEAR, DENSE)
    smallest = FedMe(TRAIN, adopt_by={"0": "size"}, tuning=True, adopt=lambda candidate: 0.0)  # the others never change
    server, _ = federate(smallest, task(archs), clients(), rounds=4)
    assert server.models["0"].arch != WIDE
    assert [server.models[c].arch for c in "12"] == [LINEAR, DENSE]


def test_a_guest_that_does_not_fit_is_never_sent():
    archs = (WIDE, LINEAR, DENSE, LINEAR)
    setting = task(archs, room={"1": LINEAR.parameters, "2": 1})
    method = FedMe(TRAIN)
    server, engine = federate(method, setting, clients((5, 5, 5, 5)), rounds=0)
    for t in range(6):
        plan = Plan.all(list("0123"))
        downs = engine.run_on_server(method.dispatch(setting, server, plan, Round(t, 6), Key(t))).value
        assert downs["1"].lender == "3"
        assert downs["2"].guest is None
        assert downs["0"].guest is not None


@pytest.mark.parametrize("method", [Local(TRAIN, patience=1), Centralized(TRAIN, patience=1), FedMe(TRAIN)])
def test_a_missing_validation_part_is_said(method):
    data = {c: ClientData(c, d.train, d.val.take(torch.arange(0)), d.test) for c, d in clients().items()}
    with pytest.raises(TaskError, match="no validation data"):
        federate(method, task(), data, rounds=1)


def test_only_the_cohort_uploads_where_everybody_trains():
    train = Training(steps=1, batch=5, lr=0.05, cohort=1)
    for method in (PFedMe(train), PFML(train)):
        root = Key(0)
        engine = Losing(method, task(), clients(), root)
        played = run_round(method, task(), engine, method.init_server(task(), root.at("init")), 0, 1, root)
        assert sorted(t.bytes_up > 0 for t in played.traffic.values()) == [False, False, True]
        assert len(engine.states) == 3


def test_a_client_that_does_not_answer_is_charged_for_what_it_was_sent():
    method = FedAvg(TRAIN)
    root = Key(0)
    engine = Losing(method, task(), clients(), root)
    engine.lost = lambda t, client: client == "1"
    played = run_round(method, task(), engine, method.init_server(task(), root.at("init")), 0, 1, root)
    assert {c: t.answered for c, t in played.traffic.items()} == {"0": True, "1": False, "2": True}
    assert played.traffic["1"].bytes_down == played.traffic["0"].bytes_down > 0
    assert played.traffic["1"].bytes_up == 0


def test_time_is_measured_only_when_a_criterion_asks_for_it():
    for adopt, measured in (("loss", False), ("time", True), ("loss+time", True), (lambda c: c.score.seconds, True)):
        method = FedMe(TRAIN, adopt=adopt)
        root = Key(0)
        engine = Losing(method, task(), clients(), root)
        played = run_round(method, task(), engine, method.init_server(task(), root.at("init")), 0, 1, root)
        seconds = [score.seconds for t in played.traffic.values() for score in t.report.scores.values()]
        assert all((s > 0) is measured for s in seconds)
