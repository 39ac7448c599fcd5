"""Training in place gives the bits of the reference, for networks and optimizers of every awkward kind."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedme.core.data import Arrays, CropFlip, Scaling, Split
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, Evaluate, GaussianMechanism, Predict, Train
from fedme.execution import eager, reference
from fedme.execution.eager import Eager
from fedme.execution.input_tables import InputTables
from fedme.learning.objectives import CrossEntropy, Imitate, Mutual
from fedme.learning.optimizers import SGD, Moreau

SHAPE, CLASSES = (3, 8, 8), 4
IMAGES = Arrays(
    torch.randint(0, 256, (60, *SHAPE), dtype=torch.uint8, generator=Key(1).torch()),
    torch.randint(0, CLASSES, (60,), generator=Key(2).torch()),
    Scaling(1 / 255, torch.tensor(0.5), torch.tensor(0.25)),
)


class Swish(torch.autograd.Function):
    """A function with its own backward pass."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * s * (1 + x * (1 - s))


class Net(nn.Module):
    """Dense layers; the other networks change what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(192, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x.flatten(1))))

    def between(self, x: Tensor) -> Tensor:
        return F.relu(x)


class Custom(Net):
    def between(self, x):
        return Swish.apply(x)


class Branching(Net):
    def between(self, x):
        return F.relu(x) if x.mean() > 0 else torch.tanh(x)


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def between(self, x):
        return F.relu(self.b(F.relu(self.a(x))))


class Dropping(Net):
    """One layer that is called twice, and one that draws from the global generator."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def between(self, x):
        return F.dropout(self.drop(F.relu(self.drop(x))), 0.2, self.training)


class Frozen(Net):
    """Frozen and unused weights."""

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))


class Tracking(Net):
    """Assigns a buffer that depends on its weights."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(6))

    def between(self, x):
        if self.training:
            self.centre = 0.5 * self.centre + 0.5 * x.mean(0)
        return x - self.centre


class SharedGradient(Net):
    """Two weights whose gradients are one piece of memory."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(6))

    def between(self, x):
        return x + (self.a.view(6) + self.b)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.last = nn.LSTM(24, 5, 2, batch_first=True, dropout=0.2), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.last(self.cells(x.permute(0, 2, 1, 3).flatten(2))[0][:, -1])


class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.layer = nn.Conv2d(3, 8, 4, 4), nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.last(self.layer(self.patch(x).flatten(2).transpose(1, 2)).mean(1))


def residual(norm="group"):
    kind = (lambda c: nn.GroupNorm(2, c)) if norm == "group" else nn.BatchNorm2d
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, 2, 1), kind(4), nn.ReLU(), nn.Conv2d(4, 4, 3, 1, 1, groups=4), nn.Conv2d(4, 6, 1), kind(6)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(6, CLASSES)),
    )


def normed():
    return nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(192, CLASSES)))


NETWORKS = [
    *(Arch(net) for net in (Net, Custom, Branching, Tied, Dropping, Frozen, Tracking, SharedGradient, Recurrent, Patches)),
    *(Arch(residual), Arch(residual, norm="batch"), Arch(normed)),
]


@pytest.fixture
def engine():
    return Eager(InputTables(torch.device("cpu")))


def training(archs, optimizer, samples=21, source=IMAGES, dtype=torch.float64, opt=False, **more):
    models = {role: Model.init(arch, Key(i).at(role), dtype) for i, (role, arch) in enumerate(archs.items())}
    given = {"schedule": BatchSchedule(2, 5), "frozen": {}, **more}
    state = {
        role: {n: torch.rand(p.shape, generator=Key(4).torch(), dtype=dtype) for n, p in models[role].params.items()}
        for role in [*models][: int(opt)]
    }
    data = Split(source, torch.arange(3, 3 + samples))
    return Train(models, optimizer, data, given["schedule"], Key(7), state, given["frozen"])


def agree(engine, op):
    assert engine.supports(op) == ""
    before = {role: {n: v.clone() for n, v in ({**m.params, **m.buffers}).items()} for role, m in op.models.items()}
    want, (got,) = reference.train(op), engine.run([op], lambda: None)
    assert list(got.models) == list(want.models)
    for role, model in want.models.items():
        other = got.models[role]
        assert list(model.params) == list(other.params)
        assert list(model.buffers) == list(other.buffers)
        for name, value in (*model.params.items(), *model.buffers.items()):
            found = {**other.params, **other.buffers}[name]
            assert torch.equal(value, found), name
            assert found.is_contiguous() == value.is_contiguous()
            assert not found.requires_grad
        given = {**op.models[role].params, **op.models[role].buffers}
        assert all(torch.equal(before[role][name], given[name]) for name in given)
    assert got.losses == want.losses
    assert got.opt.keys() == want.opt.keys()
    assert all(torch.equal(want.opt[role][n], got.opt[role][n]) for role in want.opt for n in want.opt[role])
    return got


RULES = [
    SGD(CrossEntropy(), 0.1),
    SGD(CrossEntropy(), 0.1, 0.9, 0.01),
    SGD(Mutual("own", "guest"), 0.1, 0.9),
    SGD(Mutual("own", "guest", (0.7, 0.2), (0.3, 0.8)), 0.1, 0.9, 0.01, clip=0.5, prox=0.3),
]


@pytest.mark.parametrize("arch", NETWORKS, ids=lambda a: a.name.rpartition(":")[2])
@pytest.mark.parametrize("rule", RULES, ids=["plain", "momentum", "mutual", "everything"])
def test_every_network_has_the_bits_of_the_reference(engine, arch, rule):
    archs = {"own": arch, "guest": arch} if isinstance(rule.objective, Mutual) else {"own": arch}
    op = training(archs, rule, opt=bool(rule.momentum))
    if rule.prox:
        op = replace(op, frozen={"guest": Model.init(arch, Key(9), torch.float64)})
    agree(engine, op)
    agree(engine, replace(op, key=Key(8)))  # nothing is left of the training before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_roles_of_other_architectures_and_memory_formats(engine, dtype):
    agree(engine, training({"own": Arch(Patches), "guest": Arch(residual)}, RULES[2], dtype=dtype))
    agree(engine, training({"own": Arch(residual, norm="batch"), "guest": Arch(Dropping)}, RULES[3], dtype=dtype))


def test_alternating_steps(engine):
    op = training({"own": Arch(Dropping), "guest": Arch(Net)}, SGD(Mutual("own", "guest"), 0.1, 0.9, alternating=True))
    agree(engine, op)
    both = training({"own": Arch(Tracking), "guest": Arch(Net)}, op.optimizer)
    assert engine.supports(both) == "alternating steps of networks with buffers"


def test_a_batch_of_one_sample_uses_the_statistics_there_are(engine):
    after = agree(engine, training({"own": Arch(residual, norm="batch")}, RULES[1], samples=6)).models["own"]
    assert after.buffers["1.num_batches_tracked"].item() == 2  # in batches of five, not in those of one
    agree(engine, training({"own": Arch(residual, norm="batch")}, RULES[1]))


def test_augmented_images_and_other_sources(engine):
    augmented = replace(IMAGES, augmentation=CropFlip(1))
    agree(engine, training({"own": Arch(residual)}, RULES[1], source=augmented))
    agree(engine, training({"own": Arch(Net)}, RULES[1], source=augmented, schedule=BatchSchedule(1, 4, augment=False)))

    class Padded:
        """Inputs that depend on the whole batch."""

        labels = IMAGES.labels

        def inputs(self, rows, augment=None):
            return IMAGES.inputs(rows) - IMAGES.inputs(rows).mean()

    agree(engine, training({"own": Arch(Net)}, RULES[1], source=Padded()))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(5, 2, sparse=True), nn.Linear(4, CLASSES)

    def forward(self, symbols, numbers):
        return self.out(torch.cat([self.table(symbols), numbers], 1))


def test_inputs_by_name_and_sparse_gradients(engine):
    x = {"symbols": torch.arange(60) % 5, "numbers": torch.rand(60, 2, generator=Key(0).torch())}
    op = training({"own": Arch(TwoInputs)}, SGD(CrossEntropy(), 0.1), source=Arrays(x, IMAGES.labels))
    agree(engine, op)
    assert engine.train(replace(op, optimizer=RULES[1])).losses["own"] > 0


def test_other_targets_and_losses_of_ones_own(engine):
    op = training({"own": Arch(Net)}, SGD(Imitate("mse"), 0.1))
    targets = torch.randn(len(op.data), CLASSES, generator=Key(3).torch(), dtype=torch.float64)
    agree(engine, replace(op, data=op.data.labelled(targets)))


def test_no_samples_no_steps(engine):
    op = training({"own": Arch(residual, norm="batch")}, RULES[1], samples=0, opt=True)
    assert agree(engine, op).losses == {}


def test_many_steps_are_gathered_at_once_or_one_by_one(engine, monkeypatch):
    op = training({"own": Arch(Dropping)}, RULES[1])
    for values in (1, 2 * 5 * 192, 1 << 20):
        monkeypatch.setattr(eager, "GATHERED", values)
        monkeypatch.setattr(eager, "MASKS", values)
        agree(engine, op)


def test_a_failed_training_leaves_nothing_behind(engine):
    class Failing(CrossEntropy):
        calls = 0

        def __call__(self, logits, y):
            Failing.calls += 1
            if Failing.calls == 3:
                raise RuntimeError("the third step")
            return super().__call__(logits, y)

    op = training({"own": Arch(residual, norm="batch")}, RULES[1])
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="the third step"):
        engine.train(replace(op, optimizer=SGD(Failing(), 0.1, 0.9)))
    assert torch.equal(state, torch.get_rng_state())
    agree(engine, op)


def test_results_do_not_change_with_the_next_training(engine):
    op = training({"own": Arch(Tracking)}, RULES[1])
    first = engine.train(op)
    kept = {n: v.clone() for n, v in (first.models["own"].params | first.models["own"].buffers | first.opt["own"]).items()}
    engine.train(replace(op, key=Key(8)))
    now = first.models["own"].params | first.models["own"].buffers | first.opt["own"]
    assert all(torch.equal(kept[name], value) for name, value in now.items())


def test_evaluation_and_prediction_are_those_of_the_reference(engine):
    op = training({"own": Arch(residual, norm="batch")}, RULES[0])
    model = op.models["own"]
    logits, score = engine.run([Predict(model, op.data), Evaluate(model, op.data)], lambda: None)
    assert torch.equal(logits, reference.predict(Predict(model, op.data)))
    assert score == reference.evaluate(Evaluate(model, op.data))


@dataclass(frozen=True)
class Nesterov(SGD):
    """An optimizer that the backend does not know."""


ONE = nn.Linear(192, CLASSES)


def one_for_all():
    return nn.Sequential(nn.Flatten(), ONE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"optimizer": Moreau(0.1, 0.1, 1.0, 1)}, "the optimizer Moreau is not SGD"),
        ({"optimizer": Nesterov(CrossEntropy(), 0.1)}, "the optimizer Nesterov is not SGD"),
        ({"mechanism": GaussianMechanism(1.0, 1.0)}, "private training needs the gradient of every sample"),
        ({"models": {"own": Model.init(Arch(one_for_all), Key(0))}}, "is built from modules that exist already"),
    ],
)
def test_what_is_left_to_the_reference(engine, change, reason):
    assert reason in engine.supports(replace(training({"own": Arch(Net)}, RULES[0]), **change))


def test_a_new_setting_of_sgd_is_left_to_the_reference_until_it_is_known(engine, monkeypatch):
    op = training({"own": Arch(Net)}, RULES[1])
    monkeypatch.setattr(eager, "KNOWN", eager.KNOWN - {"momentum"})
    assert engine.supports(op) == "SGD with momentum"
    assert engine.supports(replace(op, optimizer=RULES[0])) == ""


def test_weights_of_another_network_are_refused(engine):
    op = training({"own": Arch(Net)}, RULES[0])
    odd = Model(Arch(Tied), op.models["own"].params, {})
    with pytest.raises(ValueError, match=r"the weights do not fit the network .*Tied: a\.bias"):
        engine.train(replace(op, models={"own": odd}))
