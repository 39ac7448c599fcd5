"""A module whose weights change in place gives the bits of the reference, and changes nothing else."""

import pytest
import torch
from torch import nn

from fedme.core.data import Arrays, Split
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, Predict, Train
from fedme.execution import inplace, reference
from fedme.execution.dispatcher import Dispatcher
from fedme.learning.objectives import CrossEntropy, Mutual
from fedme.learning.optimizers import SGD, Moreau
from fedme_test_support import NORMALISED, clients, same

CONV = Arch.named(
    "conv",
    lambda: nn.Sequential(
        *(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Conv2d(5, 4, 2), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(16, 6), nn.Dropout(0.5), nn.Linear(6, 4)),
    ),
)
OTHER = Arch.named("other", lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(108, 4)))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = self.a
        self.out = nn.Linear(3, 4)

    def forward(self, x):
        return self.out(self.b(torch.relu(self.a(x))))


def images(count, key=5):
    draw = Key(key).torch()
    x, y = torch.randn(count, 2, 8, 8, generator=draw), torch.randint(0, 4, (count,), generator=draw)
    return Split(Arrays(x, y), torch.arange(count))


def equal(a, b):
    assert a.losses == b.losses
    assert a.models.keys() == b.models.keys()
    assert all(same(a.models[role], b.models[role]) for role in a.models)
    assert a.opt.keys() == b.opt.keys()
    assert all(torch.equal(a.opt[role][name], b.opt[role][name]) for role in a.opt for name in a.opt[role])


RULES = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "decay": {"weight_decay": 0.1},
    "clipped": {"clip": 0.05},
    "hardly clipped": {"clip": 50.0},
    "everything": {"momentum": 0.9, "weight_decay": 0.1, "clip": 0.3, "prox": 0.5},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", RULES.values(), ids=RULES)
def test_the_bits_of_the_reference(settings, dtype):
    model, anchor = (Model.init(CONV, Key(i), dtype) for i in range(2))
    opt = {"own": {name: torch.full_like(p, 0.01) for name, p in model.params.items()}} if "momentum" in settings else {}
    op = Train(
        {"own": model},
        SGD(CrossEntropy(), 0.1, **settings),
        images(23),
        BatchSchedule(2, 5),
        Key(3),
        opt=opt,
        frozen={"own": anchor},
    )
    assert inplace.suits(op)
    before = {name: p.clone() for name, p in model.params.items()}
    first = inplace.train(op)
    equal(first, reference.train(op))
    kept = {name: p.clone() for name, p in first.models["own"].params.items()}
    equal(inplace.train(op), first)  # the same module again, and what it gave before stays
    assert all(torch.equal(model.params[name], p) for name, p in before.items())
    assert all(torch.equal(first.models["own"].params[name], p) for name, p in kept.items())
    assert all((value == 0.01).all() for state in opt.values() for value in state.values())


@pytest.mark.parametrize("archs", [(CONV, OTHER), (CONV, CONV)])
def test_two_that_learn_from_each_other(archs):
    models = {role: Model.init(arch, Key(i)) for i, (role, arch) in enumerate(zip(("own", "guest"), archs, strict=True))}
    op = Train(models, SGD(Mutual("own", "guest"), 0.1, momentum=0.9, clip=1.0), images(11), BatchSchedule(2, 4), Key(3))
    assert inplace.suits(op)
    equal(inplace.train(op), reference.train(op))


def test_everything_else_is_the_references_business():
    split = next(iter(clients((9,)).values())).train
    tied = Arch.named("tied", Twice)
    others = [
        Train({"own": Model.init(NORMALISED, Key(0))}, SGD(CrossEntropy(), 0.1), split, BatchSchedule(1, 4), Key(0)),
        Train({"own": Model.init(tied, Key(0))}, SGD(CrossEntropy(), 0.1), split, BatchSchedule(1, 4), Key(0)),
        Train(
            {"own": Model.init(CONV, Key(0))},
            SGD(CrossEntropy(), 0.1, alternating=True),
            images(5),
            BatchSchedule(1, 4),
            Key(0),
        ),
        Train(
            dict.fromkeys(("theta", "w"), Model.init(CONV, Key(0))),
            Moreau(0.1, 0.1, 1.0, 2),
            images(5),
            BatchSchedule(1, 4),
            Key(0),
        ),
    ]
    for op in others:
        assert not inplace.suits(op)
        equal(inplace.run(op), reference.run(op))
    look = Predict(Model.init(CONV, Key(0)), images(5))
    assert torch.equal(inplace.run(look), reference.run(look))


def test_the_plain_reference_stays_what_it_is(monkeypatch):
    op = Train({"own": Model.init(CONV, Key(0))}, SGD(CrossEntropy(), 0.1), images(5), BatchSchedule(1, 4), Key(0))
    taken = []
    monkeypatch.setattr(inplace, "train", lambda op: taken.append(op) or reference.train(op))
    for path in ("reference", "workers"):
        Dispatcher(path=path)([op])
    assert len(taken) == 1
