"""Personal models have running statistics of their client's samples, and those stay with the client."""

from dataclasses import replace

import pytest
import torch

from fedme.core.key import Key
from fedme.core.method import Round
from fedme.core.operations import EstimateStatistics, Evaluate, GaussianMechanism
from fedme.core.running_statistics import running_statistics
from fedme.core.tree import leaves
from fedme.execution import reference
from fedme.execution.reference import one_by_one
from fedme.federation.client_work import Finetune
from fedme.federation.in_process import InProcessEngine
from fedme.federation.round import run_round
from fedme.learning.differential_privacy import PrivacyPolicy
from fedme.learning.training_settings import Training
from fedme.methods import METHODS
from fedme_test_support import BODIES, DENSE, LINEAR, NORMALISED, clients, same, split, task

TRAIN = Training(epochs=2, batch=4, lr=0.1)
ROUNDS = 3
MARK = 4321.5  # a value that no statistics have by chance


class Recording(InProcessEngine):
    """Keeps every message and every operation. Models score best with estimated statistics, so that these are always taken."""

    def __init__(self, method, setting, data, mark=False, **more):
        self.messages, self.operations, self.mark, self.estimated = [], [], mark, {}
        super().__init__(method, setting, data, Key(0), self.record, **more)

    def record(self, operations):
        self.operations += operations
        return [(self.changed(op, value), s) for op, (value, s) in zip(operations, one_by_one(operations), strict=True)]

    def changed(self, op, value):
        if isinstance(op, EstimateStatistics):
            value = marked(value) if self.mark else value
            self.estimated |= {id(value): value} if value is not op.model else {}
        if isinstance(op, Evaluate) and id(op.model) in self.estimated:
            return replace(value, loss=value.loss - 1e9)
        return value

    def exchange(self, downs, when):
        replies = super().exchange(downs, when)
        self.messages += [*downs.values(), *(reply.up for reply in replies.values())]
        return replies


def marked(model):
    """The model with statistics that can be recognised."""
    names = running_statistics(model.arch)
    return model.with_buffers({n: torch.full_like(b, MARK) if n in names else b for n, b in model.buffers.items()})


def has_mark(value):
    return any(isinstance(leaf, torch.Tensor) and bool((leaf == MARK).any()) for _, leaf in leaves(value))


def played(method, arch=NORMALISED, finetune=None, **more):
    """Some rounds and an evaluation: the server, the engine, the deliveries and the evaluations."""
    setting = task((arch,) * 3, shared=arch, public=8, unlabeled=split(10, Key(9)))
    engine = Recording(method, setting, clients((7, 12, 5), public=8), **more)
    server = method.init_server(setting, Key(0).at("init"))
    for t in range(ROUNDS):
        server = run_round(method, setting, engine, server, t, ROUNDS, Key(0)).server
    deliveries = {client: method.deliver(setting, server, client) for client in setting.members}
    done = engine.evaluate_models(deliveries, Round(ROUNDS - 1, ROUNDS), finetune)
    return server, engine, deliveries, {client: each.value for client, each in done.items()}


def method_of(name):
    return METHODS[name](train=TRAIN, **({"public_epochs": 1, "private_epochs": 1} if name == "fedmd" else {}))


@pytest.mark.parametrize("name", METHODS)
def test_statistics_of_a_client_are_in_its_own_models_only(name):
    method = method_of(name)
    server, engine, deliveries, evaluations = played(method, finetune=Finetune(TRAIN, 1), mark=True)
    for evaluation in evaluations.values():
        assert evaluation.models.keys() - {"global"} == {"personal", "finetuned"}
        marked = {role for role, model in evaluation.models.items() if has_mark(model)}
        # The server's model stays as it was sent; HeteroFL's has no statistics, so every client estimates them for its slice.
        assert marked == {"personal", "finetuned"} | ({"global"} if name == "heterofl" else set())
    assert len(engine.messages) >= 2
    assert not has_mark([*engine.messages, *deliveries.values(), server])
    assert not has_mark(list(engine.states.values()))
    assert not has_mark(method.offers(server, engine.task, Key(0).at("init")))


@pytest.mark.parametrize("name", METHODS)
def test_the_personal_model_has_the_statistics_of_the_training_samples(name):
    _, engine, _, evaluations = played(method_of(name), finetune=Finetune(TRAIN, 1))
    for client, evaluation in evaluations.items():
        for model in (evaluation.models["personal"], evaluation.models["finetuned"]):
            again = reference.run(EstimateStatistics(model, engine.clients[client].train))
            assert same(model, again, 1e-12)
            assert again is not model


def test_the_global_model_keeps_the_averaged_statistics():
    method = method_of("fedavg")
    server, engine, _, evaluations = played(method)
    server_off, _, _, off = played(method, update_bn=False)
    assert same(server.model, server_off.model)
    for client, evaluation in evaluations.items():
        personal = evaluation.models["personal"]
        assert personal.params is server.model.params
        assert not torch.equal(personal.buffers["1.running_mean"], server.model.buffers["1.running_mean"])
        assert off[client].models["personal"] is not personal
        assert same(off[client].models["personal"], server_off.model)
        found, before = ({(s.model, s.split): s.metrics for s in e.scores} for e in (evaluation, off[client]))
        for part in ("val", "test"):
            assert found["global", part] == before["global", part] == before["personal", part]
            assert found["personal", part].loss != found["global", part].loss
            split_of = getattr(engine.clients[client], part)
            assert found["personal", part].loss == pytest.approx(reference.run(Evaluate(personal, split_of)).loss)


def test_own_and_guest_are_compared_with_statistics_of_the_same_samples():
    _, engine, _, _ = played(method_of("fedme"))
    compared = [op for op in engine.operations if isinstance(op, Evaluate) and id(op.model) in engine.estimated]
    assert len(compared) == 2 * (2 * 3 * ROUNDS) + 3  # own and guest: once to choose statistics, once to compare; at the end
    samples = {op.data.rows[0].item(): client for client, d in engine.clients.items() for op in compared if op.data is d.val}
    for op in compared:
        client = samples[op.data.rows[0].item()]
        assert same(op.model, reference.run(EstimateStatistics(op.model, engine.clients[client].train)), 1e-12)
    _, engine, _, _ = played(method_of("fedme"), update_bn=False)
    assert not any(isinstance(op, EstimateStatistics) for op in engine.operations)


@pytest.mark.parametrize("arch", [LINEAR, DENSE], ids=lambda arch: arch.name)
@pytest.mark.parametrize("name", METHODS)
def test_nothing_changes_for_networks_without_statistics(name, arch):
    arch = BODIES.get(name, arch)
    server, engine, _, evaluations = played(method_of(name), arch, Finetune(TRAIN, 1))
    before, engine_off, _, off = played(method_of(name), arch, Finetune(TRAIN, 1), update_bn=False)
    assert [type(op) for op in engine.operations] == [type(op) for op in engine_off.operations]
    assert not any(isinstance(op, EstimateStatistics) for op in engine.operations)
    evaluations, off = ({c: replace(e, scores=list(e.scores)) for c, e in each.items()} for each in (evaluations, off))
    for a, b in ((server, before), (dict(engine.states), dict(engine_off.states)), (evaluations, off)):
        pairs = zip(leaves(a, opaque=(float,)), leaves(b, opaque=(float,)), strict=True)
        assert all(
            at == other and (torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y or x != x)
            for (at, x), (other, y) in pairs
        )


def test_a_client_of_one_sample_keeps_the_statistics_it_gets():
    method = method_of("fedavg")
    setting = task((NORMALISED,) * 2, shared=NORMALISED)
    engine = Recording(method, setting, clients((1, 6)))
    server = run_round(method, setting, engine, method.init_server(setting, Key(0)), 0, 1, Key(0)).server
    done = engine.evaluate_models({"0": server, "1": server}, Round(0, 1))
    assert same(done["0"].value.models["personal"], server.model)
    assert not same(done["1"].value.models["personal"], server.model)


def test_private_clients_do_not_estimate_statistics():
    policy = PrivacyPolicy(GaussianMechanism(1.0, 2.0), 1e-5)
    setting = task((NORMALISED,) * 3, shared=NORMALISED)
    private = Recording(method_of("fedavg"), setting, clients(), policies=lambda data, occasions: policy)
    shared = method_of("fedavg").init_server(setting, Key(0))
    done = private.evaluate_models(dict.fromkeys(setting.members, shared), Round(0, 1))
    assert all(each.value.models["personal"] is shared.model for each in done.values())
    assert not any(isinstance(op, EstimateStatistics) for op in private.operations)
