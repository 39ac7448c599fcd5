"""Private gradients: what one sample can do is bounded, whichever way they are computed."""

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import nn

from fedme.core import tree
from fedme.core.data import Arrays, Split
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import Batch, BatchSchedule, GaussianMechanism, Train
from fedme.execution import reference
from fedme.execution.dispatcher import Dispatcher
from fedme.learning.objectives import CrossEntropy, Mutual
from fedme.learning.optimizers import SGD, Adam, Moreau, MutualMoreau

SOURCE = Arrays(
    torch.randn(90, 3, 4, generator=Key(1).torch(), dtype=torch.float64), torch.randint(0, 3, (90,), generator=Key(2).torch())
)


def dense(width=8, drop=0.0):
    return nn.Sequential(nn.Flatten(), nn.Linear(12, width), nn.ReLU(), nn.Dropout(drop), nn.Linear(width, 3, bias=not drop))


class Odd(nn.Module):
    """No chain of dense layers: vmap runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(12, 5), nn.LayerNorm(5), nn.Dropout(0.3), nn.Linear(5, 3)

    def forward(self, x):
        return self.b(self.drop(torch.tanh(self.norm(self.a(x.flatten(1))))))


def conv():
    return nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))


class Functional(nn.Module):
    """A convolutional network as in tutorials, with group normalisation and dropout in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Linear(24, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x.unsqueeze(1))))
        return self.head(nn.functional.dropout(x.flatten(1), 0.3, self.training))


class Written(nn.Module):
    """A chain of dense layers with a forward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(12, 7), nn.Dropout(0.2), nn.Linear(7, 3)

    def forward(self, x):
        return self.b(self.drop(torch.relu(self.a(x.flatten(1)))))


ARCHS = [Arch(dense), Arch(dense, width=5, drop=0.3), Arch(Odd)]


def operations(
    optimizer, archs=ARCHS, private=lambda i: GaussianMechanism(0.5 + 0.1 * i, 0.7), roles=("own", "guest"), frozen=False
):
    found = []
    for i in range(5):
        models = {role: Model.init(archs[(i + j) % len(archs)], Key(10 * i + j), torch.float64) for j, role in enumerate(roles)}
        rows = torch.arange(i * 15, i * 15 + 7 + 2 * i)
        anchors = models if frozen else {}
        local = BatchSchedule(1, 4, poisson=True)
        found.append(Train(models, optimizer, Split(SOURCE, rows), local, Key(7).at(i), frozen=anchors, mechanism=private(i)))
    return found


def distance(a, b):
    return max(float((a.models[r].params[n] - b.models[r].params[n]).abs().max()) for r in a.models for n in a.models[r].params)


PAIR = Mutual("own", "guest")
RULES = {
    "sgd": (SGD(PAIR, 0.1, 0.9, 1e-3), ("own", "guest"), False),
    "alternating": (SGD(PAIR, 0.1, alternating=True), ("own", "guest"), False),
    "pulled and clipped": (SGD(PAIR, 0.1, clip=0.3, prox=0.1), ("own", "guest"), True),
    "nesterov": (SGD(PAIR, 0.1, 0.9, nesterov=True), ("own", "guest"), False),
    "adam": (Adam(PAIR, 0.02, weight_decay=1e-3, clip=0.3, prox=0.1), ("own", "guest"), True),
    "adamw, alternating": (
        Adam(PAIR, 0.02, weight_decay=0.1, alternating=True, decoupled_weight_decay=True),
        ("own", "guest"),
        False,
    ),
    "moreau": (Moreau(0.1, 0.1, 2.0, 3), ("theta", "w"), False),
    "mutual moreau": (MutualMoreau(0.1, 0.1, 2.0, 2), ("aux", "local", "theta"), True),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("path", ["auto", "compiled", "stacked", "workers"])
def test_all_ways_agree(name, path):
    optimizer, roles, frozen = RULES[name]
    # Models that meet in arithmetic have one network: one with dropout, and what is no chain of layers.
    for archs in [[ARCHS[1]], [ARCHS[2]]] if "moreau" in name else [ARCHS]:
        ops = operations(optimizer, archs, roles=roles, frozen=frozen)
        plain = [reference.train(op) for op in ops]
        engine = Dispatcher(path=path, workers=2)
        try:
            found = [value for value, _ in engine(ops)]
            if path == "stacked":
                assert all("stacked" in where for _, where, _ in engine.paths), engine.paths
        finally:
            engine.close()
        for one, other in zip(plain, found, strict=True):
            assert distance(one, other) < 1e-12
            assert one.losses == pytest.approx(other.losses, nan_ok=True)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("network", "way"), [(Functional, "private by vmap"), (conv, "private by vmap"), (Written, "stacked")])
def test_networks_as_people_write_them_are_trained_in_batches(network, way, name):
    optimizer, roles, frozen = RULES[name]
    ops = operations(optimizer, [Arch(network)], roles=roles, frozen=frozen)
    engine = Dispatcher()
    found = [value for value, _ in engine(ops)]
    assert {where for _, where, _ in engine.paths} == {way}
    for one, other in zip([reference.train(op) for op in ops], found, strict=True):
        assert distance(one, other) < 1e-12
        assert one.losses == pytest.approx(other.losses, nan_ok=True)


@pytest.mark.parametrize(("network", "way"), [(Functional, "private by vmap"), (dense, "stacked"), (Written, "stacked")])
@pytest.mark.parametrize("part", [slice(None, 2), slice(2, None), slice(1, None, 2)], ids=["first", "others", "biases"])
def test_frozen_weights_are_neither_clipped_nor_changed(network, way, part):
    ops = []
    for op in operations(SGD(PAIR, 0.1, 0.9), [Arch(network)]):
        models = {role: model.frozen(list(model.params)[part]) for role, model in op.models.items()}
        ops.append(replace(op, models=models))
    engine = Dispatcher()
    found = [value for value, _ in engine(ops)]
    assert {where for _, where, _ in engine.paths} == {way}
    for op, one, other in zip(ops, [reference.train(op) for op in ops], found, strict=True):
        assert distance(one, other) < 1e-12
        for role, model in op.models.items():
            buffers = other.models[role].buffers
            assert buffers.keys() == model.buffers.keys()
            assert all(torch.equal(buffers[name], value) for name, value in model.buffers.items())
            assert all(buffers[name].data_ptr() for name in buffers)  # no tensor of a transform is left


def test_a_sample_whose_gradient_is_not_finite_adds_nothing():
    op = operations(SGD(CrossEntropy(), 0.1), [Arch(conv)], roles=("own",))[0]
    x = SOURCE.x.clone()
    x[op.data.rows[::2]] = math.inf
    op = replace(op, data=Split(Arrays(x, SOURCE.labels), op.data.rows))
    engine = Dispatcher()
    ((found, _),) = engine([op])
    assert {where for _, where, _ in engine.paths} == {"private by vmap"}
    assert found.models["own"].finite
    assert distance(found, reference.train(op)) < 1e-12


@pytest.mark.parametrize("path", ["reference", "stacked"])
def test_without_noise_and_clipping_it_is_training_on_the_same_batches(path):
    """The loss of a step is the sum over its batch, which may be empty, divided by the mean size of a batch."""
    op = replace(
        operations(SGD(PAIR, 0.2), [ARCHS[0]], lambda i: GaussianMechanism(math.inf, 0.0))[0],
        batch_schedule=BatchSchedule(12, 2, poisson=True),
    )
    ((found, _),) = Dispatcher(path=path)([op])
    batches = op.batch_schedule.batches(len(op.data), op.key.at("batches"))
    assert 0 in map(len, batches)
    networks = {role: model.module().train() for role, model in op.models.items()}
    for rows in batches:
        x, y = op.data.inputs(rows), op.data.y[rows]
        logits = {role: network(x) for role, network in networks.items()}
        total = sum(loss.sum() for loss in PAIR(logits, y).values()) / 2  # the batch size asked for
        for network in networks.values():
            network.zero_grad()
        total.backward()
        with torch.no_grad():
            for p in (p for network in networks.values() for p in network.parameters()):
                p -= 0.2 * p.grad
    for role, network in networks.items():
        for name, p in network.named_parameters():
            assert torch.allclose(p, found.models[role].params[name], rtol=0, atol=1e-12)


def gradient_of(op, models=None):
    """The private gradient of the whole training part as one batch."""
    seeds = reference.mask_seeds(op.models, op.key)
    gradient = reference.PerExample(op.optimizer.objective, seeds, op=op, mechanism=op.mechanism)
    everything = torch.arange(len(op.data))
    return gradient(models or op.models, Batch(op.data.inputs(everything), op.data.y, 0))[0]


def norm(grads):
    return float(tree.norm({f"{role}:{name}": g for role, each in grads.items() for name, g in each.items()}))


@pytest.mark.parametrize("arch", range(3))
def test_one_sample_moves_the_sum_by_at_most_the_clip_over_both_models(arch):
    limit = 0.3
    optimizer = SGD(PAIR, 1.0)
    for op in operations(optimizer, [ARCHS[arch]], lambda i: GaussianMechanism(limit, 0.0)):
        whole = min(op.batch_schedule.batch, len(op.data))
        one = replace(op, data=op.data.take(torch.tensor([2])))
        assert norm(gradient_of(one)) * 1 <= limit + 1e-12  # own and guest together
        both = {role: tree.norm(each) for role, each in gradient_of(one).items()}
        assert norm(gradient_of(one)) == pytest.approx(limit)
        assert all(0 < float(size) < limit for size in both.values())  # one norm over both, not one each
        with_it = gradient_of(op)
        without = gradient_of(replace(op, data=op.data.take(torch.arange(len(op.data) - 1))))
        change = {role: tree.sub(with_it[role], without[role]) for role in with_it}
        assert norm(change) * whole <= limit + 1e-12


def test_small_gradients_are_left_as_they_are():
    op = operations(SGD(PAIR, 1.0), [ARCHS[0]], lambda i: GaussianMechanism(1e6, 0.0))[0]
    free = gradient_of(replace(op, mechanism=GaussianMechanism(math.inf, 0.0)))
    assert all(torch.equal(free[role][name], g) for role, each in gradient_of(op).items() for name, g in each.items())


@pytest.mark.parametrize("path", ["reference", "stacked"])
def test_noise_is_on_the_sum_with_deviation_noise_times_clip(path):
    """Many steps of an empty-handed client: what moves its weights is noise alone."""
    steps, clip, noise = 100, 0.5, 1.7
    arch = ARCHS[0]
    flat = Arrays(torch.zeros(4, 3, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
    model = Model.init(arch, Key(0), torch.float64)
    still = SGD(CrossEntropy(), 1e-300)  # weights stay, so that the data's own gradient stays what it is
    train = Train(
        {"own": model},
        still,
        Split(flat, torch.arange(4)),
        BatchSchedule(batch=2, steps=steps, poisson=True),
        Key(3),
        mechanism=None,
    )
    seen = []

    class Watching:
        objective = CrossEntropy()

        def init(self, models):
            return {}

        def __call__(self, gradient, models, opt, frozen, batch):
            grads, _ = gradient(models, batch)
            name = next(n for n in grads["own"] if n.endswith("1.weight"))  # the inputs are zero, so is its gradient
            seen.append(grads["own"][name].flatten().clone())
            return models, opt

    Dispatcher(path=path)([replace(train, optimizer=Watching(), mechanism=GaussianMechanism(clip, noise))])
    assert len(seen) == steps
    drawn = torch.cat(seen) / (noise * clip / 2)  # two is the batch size asked for
    assert stats.kstest(drawn.numpy(), "norm").pvalue > 0.01
    assert 0.005 < stats.chi2.cdf(float(drawn.square().sum()), len(drawn)) < 0.995
    assert abs(float(drawn.mean())) < 4 / math.sqrt(len(drawn))


@pytest.mark.parametrize("path", ["reference", "stacked"])
def test_a_sample_that_is_not_a_number_says_nothing(path):
    spoiled = SOURCE.x.clone()
    spoiled[3] = math.inf
    spoiled[5] = math.nan
    op = operations(SGD(PAIR, 0.1), [ARCHS[0]], lambda i: GaussianMechanism(0.5, 0.3))[1]
    op = replace(
        op, data=Split(Arrays(spoiled, SOURCE.labels), torch.arange(9)), batch_schedule=BatchSchedule(3, 9, poisson=True)
    )
    ((found, _),) = Dispatcher(path=path)([op])
    assert all(model.finite for model in found.models.values())
    plain = reference.train(op)
    assert distance(found, plain) < 1e-12


def test_the_same_seed_gives_the_same_bits_and_another_one_other_noise():
    ops = operations(SGD(PAIR, 0.1))
    first, again = (Dispatcher()(ops) for _ in range(2))
    assert all(distance(a, b) == 0.0 for (a, _), (b, _) in zip(first, again, strict=True))
    other = Dispatcher()([replace(op, key=Key(8).at(i)) for i, op in enumerate(ops)])
    assert all(distance(a, b) > 1e-3 for (a, _), (b, _) in zip(first, other, strict=True))


def test_float32_and_convolutions():
    ops = operations(SGD(PAIR, 0.1), [Arch(conv), ARCHS[0]])
    narrow = [
        replace(
            op,
            models={
                role: Model(m.arch, {name: p.float() for name, p in m.params.items()}, {}) for role, m in op.models.items()
            },
        )
        for op in ops
    ]
    for exact, rough in zip(Dispatcher()(ops), Dispatcher()(narrow), strict=True):
        assert distance(exact[0], rough[0]) < 1e-4
