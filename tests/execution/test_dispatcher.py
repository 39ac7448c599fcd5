"""Batched equals alone: every method, mixed architectures, unequal sizes, dropout, partial participation, tiny clients."""

import warnings

import pytest
import torch
from torch import nn

from fedme.core.flat_params import flat_copy
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, Collect, Evaluate, GaussianMechanism, Predict, Train
from fedme.execution import compiled, dispatcher, reference
from fedme.execution.dense_layers import dense_layers
from fedme.execution.dispatcher import Dispatcher
from fedme.execution.reference import one_by_one
from fedme.execution.stacked_vmap import vmap_obstacle
from fedme.learning.objectives import CrossEntropy, Imitate, Mutual
from fedme.learning.optimizers import SGD, Adam, Moreau, MutualMoreau
from fedme.learning.training_settings import Training
from fedme.methods import METHODS
from fedme_test_support import (
    BODIES,
    CLASSES,
    DENSE,
    DROPPING,
    LINEAR,
    NORMALISED,
    WIDE,
    clients,
    federate,
    personal,
    split,
    task,
)

SIZES = (7, 23, 1, 12, 2)
NOT_COMPILED = ("fedmd",)  # a loss that the compiled code does not have
NOT_STACKED = ("fd", "fedproto")  # they collect outputs while training, which stacks do not
OWN = ("local", "fd", "feddf", "fedmd", "fml", "pfml", "fedme")


def near(a, b, tolerance=1e-9):
    assert a.arch == b.arch
    return all(torch.allclose(a.params[n], b.params[n], rtol=0, atol=tolerance) for n in a.params)


def taken(batched):
    """The operations and paths that were taken, without reasons."""
    return {(operation, path) for operation, path, _ in batched.paths}


TRAININGS = [
    Training(epochs=2, batch=5, lr=0.1),
    Training(epochs=2, batch=5, lr=0.1, momentum=0.9, weight_decay=1e-2, clip=0.7),
    Training(epochs=1, batch=4, lr=0.1, momentum=0.5, cohort=3),
    Training(steps=6, batch=4, lr=0.05, weight_decay=1e-2, shuffle=False),
    Training(epochs=2, batch=5, lr=0.1, momentum=0.9, last_batch="drop", lr_schedule="cosine", warmup=1),
    Training(steps=7, batch=4, lr=0.05, last_batch="scale"),
]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("train", TRAININGS, ids=["plain", "momentum, decay, clip", "cohort", "steps", "drop", "scale"])
@pytest.mark.parametrize("path", ["auto", "stacked"])
def test_every_method_batched_equals_alone(name, train, path):
    method = METHODS[name](train=train)
    archs = (DENSE, WIDE, DROPPING, LINEAR, DENSE) if name in OWN else (BODIES.get(name, LINEAR),) * 5
    shared = DROPPING if name not in ("pfml",) else LINEAR
    setting = task(archs, shared=shared, public=8, unlabeled=split(10, Key(9)))
    data = clients(SIZES, public=8)
    batched = Dispatcher(path=path)
    a = personal(method, *federate(method, setting, data, rounds=3))
    b = personal(method, *federate(method, setting, data, rounds=3, execute=batched))
    assert all(near(a[c], b[c]) for c in data)
    assert not any(
        near(a["0"], b[c], 1e-6) for c in data if c != "0" and a[c].arch == a["0"].arch and not near(a[c], a["0"], 1e-6)
    )
    native = path == "auto" and not isinstance(compiled.library(), str)
    shifted = name == "scaffold" and train.clip is not None  # compiled code does not clip shifted gradients
    expected = "compiled" if native and not shifted and name not in NOT_COMPILED else "stacked"
    if name in NOT_STACKED and expected == "stacked":
        expected = "eager" if path == "auto" and train.last_batch != "scale" else "reference"
    assert ("train", expected) in taken(batched)
    assert not any(path.startswith("reference") for _, path in taken(batched)) or expected == "reference"


DESCENT = [name for name, method in METHODS.items() if not method.own_step]
OPTIMIZERS = {
    "nesterov": Training(epochs=2, batch=5, lr=0.1, momentum=0.9, nesterov=True),
    "adam, scale": Training(epochs=2, batch=5, optimizer="adam", lr=0.02, weight_decay=1e-2, clip=0.7, last_batch="scale"),
    "adamw, drop": Training(epochs=1, batch=4, optimizer="adamw", lr=0.02, cohort=3, last_batch="drop"),
}


@pytest.mark.parametrize("name", DESCENT)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_method_of_ordinary_descent_takes_every_optimizer_on_every_path(name, kind):
    method = METHODS[name](train=OPTIMIZERS[kind])
    archs = (DENSE, WIDE, DROPPING, LINEAR, DENSE) if name in OWN else (BODIES.get(name, LINEAR),) * 5
    setting = task(archs, shared=DROPPING, public=8, unlabeled=split(10, Key(9)))
    data = clients(SIZES, public=8)
    a = personal(method, *federate(method, setting, data, rounds=3))
    sgd = METHODS[name](train=Training(epochs=2, batch=5, lr=0.1))
    plain = personal(sgd, *federate(sgd, setting, data, rounds=3))
    assert not any(near(a[c], plain[c], 1e-6) for c in data if a[c].arch == plain[c].arch)
    for path in ("auto", "stacked"):
        batched = Dispatcher(path=path)
        b = personal(method, *federate(method, setting, data, rounds=3, execute=batched))
        assert all(near(a[c], b[c]) for c in data)
        native = path == "auto" and not isinstance(compiled.library(), str)
        routes = {route for operation, route in taken(batched) if operation == "train"}
        expected = {"compiled" if native and name not in NOT_COMPILED else "stacked"}
        expected = {"reference"} if name in NOT_STACKED and expected == {"stacked"} else expected
        assert routes == expected or name in (
            "fedmd",
            "feddf",
            "heterofl",
        )  # each has losses that are compiled and some that are not


def test_what_cannot_be_stacked_runs_alone_beside_the_rest():
    method = METHODS["fedme"](train=Training(epochs=2, batch=5, lr=0.1))
    setting = task((DENSE, NORMALISED, WIDE, LINEAR, DENSE))
    data = clients(SIZES)
    batched = Dispatcher(path="stacked")
    a = personal(method, *federate(method, setting, data, rounds=3))
    b = personal(method, *federate(method, setting, data, rounds=3, execute=batched))
    assert all(near(a[c], b[c]) for c in data)
    assert any("normalised has buffers" in line for line in batched.explain())
    assert any("stacked" in line for line in batched.explain())


RULES = [
    SGD(CrossEntropy(), 0.1),
    SGD(CrossEntropy(), 0.1, momentum=0.9, weight_decay=0.1),
    SGD(CrossEntropy(), 0.1, clip=0.2, prox=0.5),
    SGD(CrossEntropy(), 0.1, prox=0.5, weight_decay=0.1),
    SGD(CrossEntropy(), 0.1, momentum=0.9, prox=0.5, clip=0.3, weight_decay=0.1),
    SGD(Mutual("a", "b"), 0.1, momentum=0.9),
    SGD(Mutual("a", "b", (0.7, 0.2), (0.3, 0.8)), 0.1, clip=0.3),
    SGD(Mutual("a", "b"), 0.1, momentum=0.9, alternating=True, clip=0.3),
    SGD(CrossEntropy(), 0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    Adam(CrossEntropy(), 0.02, weight_decay=0.1, clip=0.3, prox=0.5),
    Adam(Mutual("a", "b"), 0.02, weight_decay=0.1, decoupled_weight_decay=True),
    Adam(Mutual("a", "b"), 0.02, alternating=True),
]


@pytest.mark.parametrize("last_batch", ["keep", "drop", "scale"])
@pytest.mark.parametrize("optimizer", RULES, ids=str)
def test_rules_over_two_roles_of_mixed_architectures(optimizer, last_batch):
    data = clients(SIZES)
    kinds = [(DENSE, WIDE), (WIDE, DENSE), (DENSE, DENSE), (DROPPING, LINEAR), (LINEAR, DROPPING)]
    ops = []
    for i, (first, second) in enumerate(kinds):
        models = {"a": Model.init(first, Key(i).at("a"), torch.float64), "b": Model.init(second, Key(i).at("b"), torch.float64)}
        frozen = {r: Model.init(m.arch, Key(i).at("f", r), torch.float64) for r, m in models.items()}
        # Role "a" brings a state, of another number of steps at every client; role "b" begins with a new one.
        before = Train(models, optimizer, data["1"].train, BatchSchedule(steps=i + 1), Key(i), frozen=frozen)
        opt = {role: state for role, state in reference.run(before).opt.items() if role == "a"}
        ops.append(
            Train(
                models,
                optimizer,
                data[str(i)].train,
                BatchSchedule(2, 4, last_batch=last_batch),
                Key(7).at(i),
                opt,
                frozen,
            )
        )
    expected = [reference.run(op) for op in ops]
    batched = Dispatcher(path="stacked")
    for want, (got, _) in zip(expected, batched(ops), strict=True):
        assert list(got.models) == list(want.models)
        assert all(near(want.models[r], got.models[r]) for r in want.models)
        assert want.losses.keys() == got.losses.keys()
        assert all(want.losses[r] == pytest.approx(got.losses[r], abs=1e-9) for r in want.losses)
        assert want.opt.keys() == got.opt.keys()
        assert all(torch.allclose(want.opt[r][n], got.opt[r][n], atol=1e-9) for r in want.opt for n in want.opt[r])
    assert batched.paths == {("train", "stacked", ""): len(ops)}


@pytest.mark.parametrize("path", ["auto", "stacked"])
@pytest.mark.parametrize("optimizer", [SGD(CrossEntropy(), 0.1, momentum=0.9, clip=0.3), Adam(CrossEntropy(), 0.02)], ids=str)
def test_frozen_weights_stay_and_the_others_are_trained(optimizer, path):
    """Clients freeze different weights, of networks with dropout and without: the first layer, the last, biases."""
    choices = [lambda name: name.startswith("0."), lambda name: not name.startswith("0."), lambda name: name.endswith("bias")]
    ops = []
    for i, data in enumerate(clients((7, 23, 1, 12, 2, 9)).values()):
        model = Model.init((WIDE, DROPPING)[i // 3], Key(i), torch.float64)
        fixed = [name for name in model.params if choices[i % 3](name)]
        assert 0 < len(fixed) < len(model.params)
        ops.append(Train({"own": model.frozen(fixed)}, optimizer, data.train, BatchSchedule(2, 4), Key(7).at(i)))
    batched = Dispatcher(path=path)
    results = batched(ops)
    for op, (got, _) in zip(ops, results, strict=True):
        before, after, want = op.models["own"], got.models["own"], reference.run(op)
        assert after.params.keys() == before.params.keys()
        assert near(want.models["own"], after)
        assert not any(torch.equal(before.params[name], value) for name, value in after.params.items())
        assert after.buffers.keys() == before.buffers.keys()
        assert all(torch.equal(before.buffers[name], value) for name, value in after.buffers.items())
        assert want.losses == pytest.approx(got.losses)
    predictions = [Predict(got.models["own"], op.data) for op, (got, _) in zip(ops, results, strict=True)]
    for op, (logits, _) in zip(predictions, batched(predictions), strict=True):
        assert torch.allclose(logits, reference.run(op), atol=1e-12)
    native = path == "auto" and not isinstance(compiled.library(), str)
    assert {way for _, way in taken(batched)} == {"compiled" if native else "stacked"}


@pytest.mark.parametrize(
    "optimizer",
    [
        Moreau(0.1, 0.05, 2.0, 3, 0.01),
        MutualMoreau(0.1, 0.05, 2.0, 2, 0.01),
        MutualMoreau(0.1, 0.05, 2.0, 2, 0.5, aux_l2=0.0),
        MutualMoreau(0.1, 0.05, 2.0, 2, 0.0, aux_l2=0.5),
    ],
    ids=["moreau", "mutual", "mutual, l2 of the local model", "mutual, l2 of the auxiliary model"],
)
def test_inner_loops(optimizer):
    data = clients(SIZES)
    ops = []
    for i in range(5):
        w, aux = (
            Model.init(DROPPING, Key(i), torch.float64),
            Model.init(WIDE if i % 2 else DROPPING, Key(i).at(1), torch.float64),
        )
        models = {"theta": w, "w": w} if isinstance(optimizer, Moreau) else {"aux": aux, "local": w, "theta": aux}
        frozen = {} if isinstance(optimizer, Moreau) else {"aux": aux, "local": w}
        ops.append(Train(models, optimizer, data[str(i)].train, BatchSchedule(2, 4), Key(7).at(i), {}, frozen))
    expected = [reference.run(op) for op in ops]
    batched = Dispatcher()
    for want, (got, _) in zip(expected, batched(ops), strict=True):
        assert all(near(want.models[r], got.models[r]) for r in want.models)
        assert want.losses == pytest.approx(got.losses)
    assert {way for _, way in taken(batched)} == {"stacked" if isinstance(compiled.library(), str) else "compiled"}


@pytest.mark.parametrize("path", ["auto", "stacked"])
def test_predictions_and_scores_of_one_model_and_of_many(path):
    data = clients((7, 23, 1, 12, 2, 200))
    shared = Model.init(WIDE, Key(0), torch.float64)
    models = [Model.init(WIDE, Key(i), torch.float64) for i in range(6)]
    ops = [Predict(shared, d.train) for d in data.values()] + [Evaluate(shared, d.train) for d in data.values()]
    ops += [Predict(m, d.train) for m, d in zip(models, data.values(), strict=True)]
    ops += [Evaluate(m, d.test) for m, d in zip(models, data.values(), strict=True)]
    for want, (got, seconds) in zip([reference.run(op) for op in ops], Dispatcher(path=path)(ops), strict=True):
        if isinstance(want, torch.Tensor):
            assert torch.allclose(want, got, atol=1e-12)
        else:
            assert (want.samples, want.accuracy) == (got.samples, got.accuracy)
            assert want.loss == pytest.approx(got.loss)
        assert seconds >= 0


def test_digest_targets_are_imitated():
    data = clients(SIZES)
    models = [Model.init(DENSE, Key(i), torch.float64) for i in range(5)]
    for loss in ("mae", "mse", "kl"):
        ops = [
            Train(
                {"own": m},
                SGD(Imitate(loss), 0.1),
                d.train.labelled(torch.randn(len(d.train), 4, generator=Key(3).torch(), dtype=torch.float64)),
                BatchSchedule(2, 3),
                Key(1),
            )
            for m, d in zip(models, data.values(), strict=True)
        ]
        for want, (got, _) in zip([reference.run(op) for op in ops], Dispatcher()(ops), strict=True):
            assert near(want.models["own"], got.models["own"])


@pytest.mark.parametrize("path", ["auto", "stacked"])
def test_single_precision_agrees_after_a_round(path):
    data = clients((40, 60, 30))
    optimizer = SGD(CrossEntropy(), 0.1, momentum=0.9)
    ops = [
        Train({"own": Model.init(WIDE, Key(i))}, optimizer, d.train, BatchSchedule(1, 10), Key(1))
        for i, d in enumerate(data.values())
    ]
    for want, (got, _) in zip([reference.run(op) for op in ops], Dispatcher(path=path)(ops), strict=True):
        assert near(want.models["own"], got.models["own"], 1e-4)


@pytest.mark.parametrize("objective", [CrossEntropy(), Mutual("a", "b"), Mutual("a", "b", (0.7, 0.2), (0.3, 0.8))], ids=str)
def test_slopes_are_the_derivatives_of_the_losses(objective):
    draw = Key(0).torch()
    logits = {r: torch.randn(3, 5, 4, generator=draw, dtype=torch.float64, requires_grad=True) for r in "ab"}
    y = torch.randint(0, 4, (3, 5), generator=draw)
    logit_gradients = objective.logit_gradients({r: z.detach() for r, z in logits.items()}, y)
    expected = objective(logits, y)
    for role, z in logits.items():
        (grad,) = torch.autograd.grad(expected[role].sum(), z, retain_graph=True)
        assert torch.allclose(logit_gradients[role], grad, atol=1e-12)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 4)

    def forward(self, x):
        return self.net(x) * 2


def tied():
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer)


def half_frozen():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    net[0].weight.requires_grad_(False)
    return net


def hooked():
    net = nn.Sequential(nn.Linear(3, 4))
    net[0].register_forward_hook(lambda module, args, out: out * 2)
    return net


@pytest.mark.parametrize("factory", [Odd, tied, half_frozen, hooked])
def test_networks_that_only_look_like_chains(factory):
    assert isinstance(dense_layers(Arch(factory), (3,)), str)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return 2 * gradient


class OwnBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x):
        return self.b(Doubled.apply(torch.relu(self.a(x))))


def test_a_chain_with_its_own_backward_pass_is_not_one():
    assert dense_layers(Arch(OwnBackward), (3,)) == f"{Arch(OwnBackward).name} does more than its layers say"


@pytest.mark.parametrize("path", ["auto", "stacked"])
def test_other_activations_and_no_bias(path):
    def net():
        return nn.Sequential(
            nn.Linear(3, 6, bias=False), nn.Tanh(), nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Identity()), nn.Linear(5, 4)
        )

    arch = Arch.named("other", net)
    assert not isinstance(dense_layers(arch, (3,)), str)
    data = clients(SIZES)
    ops = [
        Train({"own": Model.init(arch, Key(i), torch.float64)}, SGD(CrossEntropy(), 0.1), d.train, BatchSchedule(2, 3), Key(1))
        for i, d in enumerate(data.values())
    ]
    for want, (got, _) in zip([reference.run(op) for op in ops], Dispatcher(path=path)(ops), strict=True):
        assert near(want.models["own"], got.models["own"])


@pytest.mark.parametrize("path", ["auto", "stacked"])
def test_an_activation_that_stands_in_several_places_acts_in_each(path):
    def net():
        tanh = nn.Tanh()
        return nn.Sequential(nn.Linear(3, 5), tanh, nn.Linear(5, 6), tanh, nn.Linear(6, 4))

    model, data = Model.init(Arch.named("one-tanh", net), Key(0), torch.float64), clients(SIZES)["1"].train
    assert torch.allclose(Dispatcher(path=path)([Predict(model, data)])[0][0], reference.run(Predict(model, data)), atol=1e-12)


def test_far_fewer_torch_operations():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    data = clients((30,) * 20)
    ops = [
        Train({"own": Model.init(DENSE, Key(i), torch.float64)}, SGD(CrossEntropy(), 0.1), d.train, BatchSchedule(1, 3), Key(1))
        for i, d in enumerate(data.values())
    ]
    counts = []
    for execute in (one_by_one, Dispatcher(path="stacked")):
        execute(ops)  # warm
        with Count() as count:
            execute(ops)
        counts.append(count.calls)
    assert counts[1] * 5 < counts[0]


class Residual(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.3)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.last(self.norm(x + self.drop(torch.atan(self.middle(x)))))  # the arctangent is not compiled


class Wild(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 4)

    def forward(self, x):
        return self.net(x * torch.bernoulli(torch.full_like(x, 0.5)) if self.training else x)


RESIDUAL, WILD = Arch.named("residual", Residual), Arch.named("wild", Wild)


@pytest.mark.parametrize("name", ["fedme", "fml", "pfml", "fedavg", "pfedme"])
def test_other_networks_are_stacked_by_vmap(name):
    method = METHODS[name](train=Training(epochs=2, batch=5, lr=0.02, clip=1.0))
    setting = task(
        (DENSE, RESIDUAL, WIDE, RESIDUAL, LINEAR) if name in OWN else (BODIES.get(name, LINEAR),) * 5, shared=RESIDUAL
    )
    data = clients(SIZES)
    batched = Dispatcher()
    a = personal(method, *federate(method, setting, data, rounds=3))
    b = personal(method, *federate(method, setting, data, rounds=3, execute=batched))
    assert all(near(a[c], b[c]) for c in data)
    assert ("train", "stacked by vmap") in taken(batched)
    assert ("predict", "stacked by vmap") in taken(batched) or name == "fedme"  # nobody may have adopted it
    assert not any("reference" in line for line in batched.explain())


def test_a_network_that_draws_its_own_random_numbers_runs_alone():
    method = METHODS["local"](train=Training(epochs=2, batch=5, lr=0.1))
    batched = Dispatcher()
    a = personal(method, *federate(method, task((WILD,) * 5), clients(SIZES), rounds=2))
    b = personal(method, *federate(method, task((WILD,) * 5), clients(SIZES), rounds=2, execute=batched))
    assert all(near(a[c], b[c], 0.0) for c in a)
    assert any("operations eager" in line and "wild cannot be stacked" in line for line in batched.explain())


def test_operations_that_torch_cannot_stack_run_alone_without_its_warning():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), nn.Linear(4, CLASSES)

        def forward(self, x):
            return self.head(self.layer(x).mean(1))

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        reason = vmap_obstacle(Arch.named("attends", Attends), (5, 4), torch.float32)
    assert reason.startswith("attends has operations that torch cannot stack (")
    assert not seen


def agree(ops):
    batched = Dispatcher()
    for want, (got, _) in zip([reference.run(op) for op in ops], batched(ops), strict=True):
        assert all(near(want.models[r], got.models[r]) for r in want.models)
        assert want.losses == pytest.approx(got.losses)
    return batched


def two_roles(optimizer, frozen=()):
    ops = []
    for i, data in enumerate(clients(SIZES).values()):
        models = {r: Model.init(DENSE, Key(i).at(r), torch.float64) for r in "ab"}
        anchors = {r: Model.init(DENSE, Key(i).at("f", r), torch.float64) for r in frozen}
        ops.append(Train(models, optimizer, data.train, BatchSchedule(2, 4), Key(7).at(i), {}, anchors))
    return ops


@pytest.mark.parametrize("frozen", ["", "a", "ab"])
def test_only_models_with_an_anchor_are_pulled(frozen):
    agree(two_roles(SGD(CrossEntropy(), 0.1, prox=0.5, weight_decay=0.1), frozen))


class Smoothed:
    """A loss of one's own that knows samples x classes only, and has no closed form."""

    def __call__(self, logits, y):
        return {role: nn.functional.cross_entropy(z, y, reduction="none", label_smoothing=0.1) for role, z in logits.items()}


def test_a_loss_that_expects_samples_by_classes_can_be_stacked():
    batched = agree(two_roles(SGD(Smoothed(), 0.1)))
    assert taken(batched) == {("train", "stacked")}


def test_a_rule_that_cannot_be_compared_runs_alone():
    class Unhashable(Smoothed):
        __hash__ = None

    batched = agree(two_roles(SGD(Unhashable(), 0.1)))
    assert taken(batched) == {("train", "eager")}
    assert "the optimizer SGD is not hashable" in batched.explain()[-1]


@pytest.mark.parametrize("path", ["reference", "stacked", "workers"])
@pytest.mark.parametrize("name", ["fedme", "pfml", "fml", "fedavg"])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_path_can_be_forced(name, path, monkeypatch):
    monkeypatch.setattr(dispatcher, "WORTHWHILE", 0)
    method = METHODS[name](train=Training(epochs=2, batch=5, lr=0.1, momentum=0.9))
    setting = task(
        (DENSE, WIDE, DROPPING, LINEAR, NORMALISED) if name in OWN else (BODIES.get(name, LINEAR),) * 5, shared=DROPPING
    )
    data = clients(SIZES)
    batched = Dispatcher(workers=2, path=path)
    try:
        a = personal(method, *federate(method, setting, data, rounds=2))
        b = personal(method, *federate(method, setting, data, rounds=2, execute=batched))
    finally:
        batched.close()
    assert all(near(a[c], b[c], 0.0 if path in ("reference", "workers") else 1e-9) for c in data)
    ways = {way for operation, way in taken(batched) if operation == "train"}
    alone = "reference in workers" if name == "pfml" else "eager in workers"  # its optimizer is not SGD
    assert ways <= {"reference": {"reference"}, "stacked": {"stacked", "reference"}}.get(path, {alone})
    assert ways & {"reference": {"reference"}, "workers": {alone}}.get(path, {"stacked"})


def test_speed_is_measured_in_this_process():
    batched = Dispatcher(workers=2)
    ops = [Evaluate(Model.init(NORMALISED, Key(i)), clients()["1"].val, timed=True) for i in range(3)]
    assert all(score.seconds > 0 for score, _ in batched(ops))
    assert batched.workers.workers == []
    assert batched.paths == {("evaluate", "reference", "the time of inference is measured"): 3}


def flat(arch, seed):
    """A model with its weights in one tensor, as compiled training makes it."""
    model = Model.init(arch, Key(seed), torch.float64)
    params = flat_copy(model.params)
    assert params is not None
    return model.with_params(params)


def test_operations_that_share_a_route_would_have_it_alone():
    """The route of similar operations is found once; what differs in anything that matters is asked for itself."""
    data = split(12, Key(1))
    splits = [data, split(5, Key(2)), data.take(torch.arange(0)), data.labelled(torch.rand(12, CLASSES))]
    rules = [
        SGD(CrossEntropy(), 0.1),
        SGD(Mutual("own", "guest"), 0.1),
        SGD(CrossEntropy(), 0.1, alternating=True),
        SGD(CrossEntropy(), 0.1, prox=0.5),
        SGD(Imitate("mae"), 0.1),
    ]
    pairs = [
        {"own": flat(DENSE, 1)},
        {"own": flat(DENSE, 2), "guest": flat(WIDE, 3)},
        {"own": Model.init(DENSE, Key(4), torch.float64)},
    ]
    trainings = [
        Train(models, rule, part, BatchSchedule(), Key(0), frozen=frozen, mechanism=mechanism, collect=collect)
        for models in pairs
        for rule in rules
        for part in splits
        for frozen in ({}, models)
        for mechanism in (None, GaussianMechanism(1.0, 1.0))
        for collect in (None, Collect(CLASSES))
    ]
    looks = [
        op
        for models in pairs
        for model in models.values()
        for part in splits
        for op in (Predict(model, part), Evaluate(model, part), Evaluate(model, part, timed=True))
    ]
    operations = [*trainings, *looks, *reversed(trainings)]
    batched = Dispatcher()
    shared, alone = [batched._route_of(op)[0] for op in operations], [batched.route(op) for op in operations]
    assert [(r.backend, r.group, r.reason) for r in shared] == [(r.backend, r.group, r.reason) for r in alone]
    if not isinstance(compiled.library(), str):
        assert len({id(route) for route in shared}) < len({id(route) for route in alone})
