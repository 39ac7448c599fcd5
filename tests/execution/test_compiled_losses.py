"""Compiled code equals the reference for the losses and steps of FD, FedProto, HeteroFL, FedDF and APFL."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from fedme.core.data import Arrays, Split
from fedme.core.key import Key
from fedme.core.model import Arch, Model, dropout_layers
from fedme.core.operations import BatchSchedule, Collect, Predict, Train
from fedme.execution import reference
from fedme.execution.dispatcher import Dispatcher
from fedme.learning.features import feature_width, widened
from fedme.learning.objectives import CrossEntropy, Imitate, MaskedCrossEntropy, TowardsClass, TowardsPrototype
from fedme.learning.optimizers import SGD, Adam, Mixing
from fedme_test_support import needs_compiled_code
from fedme_test_traced_networks import CLASSES, Functional, Gated, Grouped, ResNet

pytestmark = needs_compiled_code


def dnn(hidden=13):
    return nn.Sequential(nn.Flatten(), nn.Linear(36, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, CLASSES))


def cnn():
    convolutions = nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*convolutions, nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, CLASSES))


NETWORKS = {kind.__name__: Arch.named(kind.__name__, kind) for kind in (dnn, cnn, Functional, ResNet, Grouped, Gated)}
every_network = pytest.mark.parametrize("arch", NETWORKS.values(), ids=NETWORKS)
RULES = {
    "plain": SGD(CrossEntropy(), 0.02),
    "momentum, decay": SGD(CrossEntropy(), 0.02, 0.9, 0.05),
    "clip, nesterov": SGD(CrossEntropy(), 0.02, 0.9, clip=0.3, nesterov=True),
    "adamw": Adam(CrossEntropy(), 0.02, eps=1e-3, weight_decay=0.05, decoupled_weight_decay=True),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def samples(arch, count=11, labels=None, seed=0):
    draw = Key(seed).at("samples").torch()
    symbols = arch.name == "Gated"
    x = torch.randint(9, (count, 7), generator=draw) if symbols else torch.randn(count, 1, 6, 6, generator=draw)
    y = torch.randint(0, CLASSES, (count,), generator=draw)
    return Split(Arrays(x, y if labels is None else labels), torch.arange(count))


def targets(classes, width, chances=False):
    values = torch.randn(classes, width, generator=Key(9).torch(), dtype=torch.float64)
    return (values.softmax(-1) if chances else values), torch.arange(classes) % 3 != 1


def compare(op, tolerance=1e-9):
    """Compiled and reference give the same models, states and losses; what was compiled."""
    execute = Dispatcher(path="compiled")
    ((got, _),) = execute([op])
    assert execute.explain() == ["train: 1 operations compiled"]
    want = reference.run(op)
    assert got.models.keys() == want.models.keys()
    assert got.opt.keys() == want.opt.keys()
    for role, model in want.models.items():
        for found, expected in ((got.models[role].params, model.params), (got.models[role].buffers, model.buffers)):
            assert found.keys() == expected.keys()
            assert all(torch.allclose(found[name], value, rtol=0, atol=tolerance) for name, value in expected.items())
    for role, state in want.opt.items():
        assert got.opt[role].keys() == state.keys()
        assert all(torch.allclose(got.opt[role][name], value, rtol=0, atol=tolerance) for name, value in state.items())
    assert dict(got.losses) == pytest.approx(dict(want.losses), rel=tolerance, abs=tolerance)
    assert got.seen.keys() == want.seen.keys()
    for role, seen in want.seen.items():
        assert torch.allclose(got.seen[role].sums, seen.sums, rtol=0, atol=tolerance)
        assert got.seen[role].counts.tolist() == seen.counts.tolist()
    return got


def training(arch, rule, loss, schedule=BatchSchedule(2, 4), data=None):
    model = Model.init(arch, Key(1), torch.float64)
    model = widened(model) if isinstance(loss, TowardsPrototype) else model
    return Train({"own": model}, replace(rule, objective=loss), data or samples(arch), schedule, Key(2))


@every_network
@every_rule
@pytest.mark.parametrize("distance", ["mse", "cross-entropy"])
def test_outputs_close_to_those_of_the_class(arch, rule, distance):
    loss = TowardsClass(*targets(CLASSES, CLASSES, distance != "mse"), 0.7, distance)
    found = compare(training(arch, rule, loss))
    without = compare(training(arch, rule, replace(loss, weight=0.0)))
    assert found.losses["own"] > without.losses["own"] + 0.01


@every_network
@every_rule
def test_features_close_to_prototypes(arch, rule):
    loss = TowardsPrototype(*targets(CLASSES, feature_width(arch)), 0.9)
    op = training(arch, rule, loss)
    model = compare(op).models["own"]
    execute = Dispatcher(path="compiled")
    ((features, _),) = execute([Predict(model, op.data)])
    assert execute.explain() == ["predict: 1 operations compiled"]
    assert torch.allclose(features, reference.run(Predict(model, op.data)), rtol=0, atol=1e-9)


@every_network
@every_rule
def test_logits_of_absent_classes_are_zero(arch, rule):
    data = samples(arch)
    data = data.take((data.y % 2 == 0).nonzero().flatten())
    loss = MaskedCrossEntropy(tuple(c % 2 == 0 for c in range(CLASSES)))
    before, after = training(arch, rule, loss, data=data).models["own"], compare(training(arch, rule, loss, data=data))
    if not rule.weight_decay:
        head = next(name for name in reversed(before.params) if name.endswith("weight") and len(before.params[name]) == CLASSES)
        moved = (after.models["own"].params[head] - before.params[head]).abs().amax(1) > 0
        assert moved.tolist() == list(loss.present)


@every_network
@every_rule
def test_another_models_logits_are_imitated(arch, rule):
    given_logits = 3 * torch.randn(11, CLASSES, generator=Key(4).torch(), dtype=torch.float64)
    given_logits[0, 1] = -2000.0  # its chance is exactly zero
    compare(training(arch, rule, Imitate("kl"), data=samples(arch, labels=given_logits)))


@every_network
@pytest.mark.parametrize("chances", [False, True])
@pytest.mark.parametrize("loss", [CrossEntropy(), TowardsClass(*targets(CLASSES, CLASSES), 0.7)], ids=["labels", "targets"])
def test_outputs_are_collected_by_class(arch, chances, loss):
    op = replace(training(arch, RULES["momentum, decay"], loss), collect=Collect(CLASSES, chances))
    seen = compare(op).seen["own"]
    assert seen.counts.tolist() == (2 * op.data.y.bincount(minlength=CLASSES)).tolist()  # two epochs
    if chances:
        assert torch.allclose(seen.sums.sum(1), seen.counts.double())
    only = replace(op, batch_schedule=BatchSchedule(1, 100))  # one step: the outputs are those of the first weights
    if not dropout_layers(arch) and not op.models["own"].buffers and arch.name != "Grouped":
        outputs = reference.run(Predict(op.models["own"], op.data))
        outputs = outputs.softmax(-1) if chances else outputs
        wanted = torch.zeros_like(seen.sums).index_add(0, op.data.y, outputs)
        assert torch.allclose(compare(only).seen["own"].sums, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("path", ["workers", "stacked", "auto"])
def test_features_are_collected_on_every_path(path):
    ops = []
    for name in ("dnn", "cnn", "ResNet"):
        op = training(NETWORKS[name], RULES["plain"], TowardsPrototype(*targets(CLASSES, feature_width(NETWORKS[name])), 0.4))
        ops.append(replace(op, collect=Collect(CLASSES)))
    execute = Dispatcher(path=path, workers=2)
    try:
        found = [result for result, _ in execute(ops)]
    finally:
        execute.close()
    for op, got in zip(ops, found, strict=True):
        want = reference.run(op)
        assert want.seen["own"].sums.shape == (CLASSES, CLASSES + feature_width(Arch(op.models["own"].arch.factory.factory)))
        same_bits = torch.equal if path == "workers" else torch.allclose
        assert same_bits(got.seen["own"].sums, want.seen["own"].sums)
        assert torch.equal(got.seen["own"].counts, want.seen["own"].counts)


def mixture(arch, rule, adapt, alpha, schedule=BatchSchedule(2, 4), count=11):
    optimizer = Mixing(CrossEntropy(), rule, adapt)
    models = {role: Model.init(arch, Key(1).at(role), torch.float64) for role in ("own", "global")}
    return Train(models, optimizer, samples(arch, count), schedule, Key(2), optimizer.started(models, alpha))


@every_network
@every_rule
@pytest.mark.parametrize("adapt", ["step", "round", "never"])
def test_mixtures(arch, rule, adapt):
    found = compare(mixture(arch, rule, adapt, 0.3))
    alphas = {a.item() for name, a in found.opt["own"].items() if name.endswith(".alpha") and not a.dim()}
    assert len(alphas) == 1
    assert (alphas == {0.3}) is (adapt == "never")


def test_mixtures_that_go_on_with_their_states_and_stay_between_zero_and_one():
    op = mixture(NETWORKS["cnn"], RULES["adamw"], "step", 0.5)
    again = replace(op, opt=compare(op).opt)
    assert next(v for name, v in compare(again).opt["own"].items() if name.endswith(".step")) == 12
    wild = compare(mixture(NETWORKS["dnn"], SGD(CrossEntropy(), 0.9), "step", 0.9, BatchSchedule(6, 3)))
    assert {a.item() for name, a in wild.opt["own"].items() if name.endswith(".alpha")} <= {0.0, 1.0}


def test_clients_share_a_network_and_nothing_else():
    """Trainings with and without targets, masks and mixtures in one call: no client sees what another one had."""
    arch, rule, ops = NETWORKS["Functional"], RULES["momentum, decay"], []
    losses = [
        CrossEntropy(),
        MaskedCrossEntropy((True,) * 4 + (False,)),
        TowardsClass(*targets(CLASSES, CLASSES), 0.5),
        TowardsPrototype(*targets(CLASSES, feature_width(arch)), 0.5),
    ]
    for i in range(12):
        op = mixture(arch, rule, "step", 0.4) if i % 5 == 4 else training(arch, rule, losses[i % 5 % 4])
        ops.append(replace(op, data=op.data.take(torch.arange(4 + i % 3)), key=Key(i)))
    source = ops[0].data.source
    ops = [replace(op, data=Split(source, op.data.rows)) for op in ops]
    execute = Dispatcher(path="compiled")
    for op, (found, _) in zip(ops, execute(ops), strict=True):
        for role, model in reference.run(op).models.items():
            assert all(torch.allclose(found.models[role].params[n], v, rtol=0, atol=1e-9) for n, v in model.params.items())


def test_a_step_uses_no_gradient_of_the_client_before():
    """One client stores its gradients, to clip them; the next one, on the same network in the same call, does not."""
    rules = [SGD(CrossEntropy(), 0.1, clip=0.01), SGD(CrossEntropy(), 0.1), SGD(CrossEntropy(), 0.1, momentum=0.5)]
    ops = [training(NETWORKS["Functional"], rules[i % 3], CrossEntropy()) for i in range(24)]
    ops = [replace(op, optimizer=rules[i % 3], data=ops[0].data) for i, op in enumerate(ops)]
    for op, (found, _) in zip(ops, Dispatcher(path="compiled")(ops), strict=True):
        for role, model in reference.run(op).models.items():
            assert all(torch.allclose(found.models[role].params[n], v, rtol=0, atol=1e-9) for n, v in model.params.items())


@settings(max_examples=60, deadline=None)
@given(
    hidden=st.integers(1, 37),
    count=st.integers(1, 9),
    batch=st.integers(1, 6),
    weight=st.floats(0, 3),
    alpha=st.floats(0, 1),
    last=st.sampled_from(["keep", "drop", "scale"]),
)
def test_any_width_and_any_batches(hidden, count, batch, weight, alpha, last):
    arch, schedule = Arch.named("dnn", dnn, hidden=hidden), BatchSchedule(2, batch, last_batch=last)
    data, rule = samples(arch, count), RULES["momentum, decay"]
    compare(training(arch, rule, TowardsPrototype(*targets(CLASSES, hidden), weight), schedule, data))
    compare(training(arch, rule, TowardsClass(*targets(CLASSES, CLASSES), weight), schedule, data))
    compare(mixture(arch, rule, "step", alpha, schedule, count))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (TowardsClass(*targets(CLASSES, 3), 1.0), r"the loss has targets of shape \(5, 3\), but the model has 5 outputs"),
        (TowardsPrototype(*targets(CLASSES, 4), 1.0), r"targets of shape \(5, 4\), but the model has 18 outputs"),
        (MaskedCrossEntropy((True, False)), "the loss has 2 classes, but the model has 5 outputs"),
    ],
)
def test_targets_that_do_not_fit_are_refused(loss, message):
    with pytest.raises(ValueError, match=message):
        Dispatcher(path="compiled")([training(NETWORKS["dnn"], RULES["plain"], loss)])


def test_a_label_that_is_a_feature_is_no_class():
    arch = NETWORKS["dnn"]
    data = samples(arch, labels=torch.full((11,), CLASSES))
    with pytest.raises(IndexError, match="class numbers must be >= 0 and < 5, got 5 to 5"):
        Dispatcher(path="compiled")([training(arch, RULES["plain"], TowardsPrototype(*targets(CLASSES, 13), 1.0), data=data)])


def test_what_is_not_compiled_is_named():
    arch = NETWORKS["dnn"]
    op = mixture(arch, replace(RULES["plain"], prox=0.1), "step", 0.5)
    execute = Dispatcher(path="compiled")
    execute(
        [
            replace(op, frozen=op.models),
            training(arch, RULES["plain"], Imitate("mse"), data=samples(arch, labels=torch.randn(11, 5))),
        ]
    )
    lines = execute.explain()
    assert any("a mixture with a proximal term, a shifted gradient or another loss" in line for line in lines)
    assert any("unsupported loss Imitate" in line for line in lines)
