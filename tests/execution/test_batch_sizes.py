"""Networks that do something else with another number of samples: every path computes what the module itself computes."""

import math

import pytest
import torch
from torch import nn

from fedme.core.data import Arrays, Split
from fedme.core.flat_params import flat_copy
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, GaussianMechanism, Predict, Train
from fedme.execution import reference
from fedme.execution.batch_sizes import BY_SIZE, same_for, sizes_of
from fedme.execution.dispatcher import Dispatcher
from fedme.execution.routing import effort
from fedme.learning.objectives import CrossEntropy, Mutual
from fedme.learning.optimizers import SGD
from fedme_test_support import needs_compiled_code, same

CLASSES = 3
X = torch.randn(700, 6, generator=Key(0).torch(), dtype=torch.float64)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, x):
        return self.net(x)


def changed(change):
    """A network whose inputs are changed in another way for other batches."""

    class Changed(Plain):
        def forward(self, x):
            return self.net(change(self, x))

    return Changed


class SharedOut(Plain):
    """A part of the batch for every network."""

    def forward(self, x):
        return torch.cat([self.net(x[:8]), self.net(2 * x[8:])])


class InParts(Plain):
    def forward(self, x):
        return torch.cat([self.net(part * number) for number, part in enumerate(x.split(16), 1)])


class RowByRow(Plain):
    def forward(self, x):
        return torch.stack([self.net(row * factor) for row, factor in zip(x, [1.0] * 8 + [2.0] * 1000, strict=False)])


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.last(self.normalised(self.first(x)).relu())

    def normalised(self, x):
        return self.norm(x)


class NotForOne(Normalised):
    def normalised(self, x):
        return self.norm(x) if x.shape[0] > 1 else x


class NotForFew(Normalised):
    def normalised(self, x):
        return self.norm(x) if x.shape[0] > 5 else x


class SmallParts(Normalised):
    """Batch normalisation of parts of a batch, as TabNet has it."""

    def normalised(self, x):
        if not self.training:
            return self.norm(x)
        return torch.cat([self.norm(part) for part in x.chunk(math.ceil(len(x) / 5))])


def ninth(network, x):
    for number in range(x.shape[0]):
        x = 2 * x if number == 9 else x
    return x


def first_nine(network, x):
    x = x.clone()
    x[:9] *= 2
    return x


ODD = {
    "if the shape": changed(lambda network, x: 2 * x if x.shape[0] > 8 else x),
    "if the length is one": changed(lambda network, x: 3 * x if len(x) == 1 else x),
    "if the length": changed(lambda network, x: 3 * x if len(x) > 100 else x),
    "if it evaluates": changed(lambda network, x: 3 * x if not network.training and x.size(0) >= 512 else x),
    "if it trains": changed(lambda network, x: 3 * x if network.training and x.size(0) >= 10 else x),
    "divided": changed(lambda network, x: x / x.size(0)),
    "mean": changed(lambda network, x: x - x.sum(0) / x.size(0)),
    "numbers": changed(lambda network, x: 2 * x if x.numel() > 48 else x),
    "bytes": changed(lambda network, x: 2 * x if x.nbytes > 9 * 48 else x),
    "tuple": changed(lambda network, x: 2 * x if tuple(x.shape) == (10, 6) else x),
    "text": changed(lambda network, x: x * len(str(x.shape[0]))),
    "list": changed(lambda network, x: x * ([1.0] * 10 + [3.0] * 1000)[x.shape[0]]),
    "dictionary": changed(lambda network, x: x * {10: 3.0}.get(x.shape[0], 1.0)),
    "steps": changed(ninth),
    "slice": changed(first_nine),
    "numbered": changed(lambda network, x: x * (1 + (torch.arange(len(x)) >= 9).to(x).unsqueeze(1))),
    "tens": changed(lambda network, x: x * (x.shape[0] % 10 == 0 or 2)),
    "counted": changed(lambda network, x: x * min(8.0, float(x.new_ones(x.shape[0]).sum()))),
    "sent elsewhere": SharedOut,
    "in parts": InParts,
    "row by row": RowByRow,
    "not normalised for one": NotForOne,
    "not normalised for few": NotForFew,
    "normalised in parts": SmallParts,
    "evaluated less the mean": changed(lambda network, x: x if network.training else x - x.mean(0)),
    "evaluated with the first": changed(lambda network, x: x if network.training else x + x[:1]),
}
PARTS = dict(zip("abcd", torch.randperm(700, generator=Key(5).torch()).split([23, 41, 540, 96]), strict=True))


def split(part):
    return Split(Arrays(X, torch.arange(700) % CLASSES), PARTS[part])


SOURCE = split("a").source


def operations(factory, parts="ab"):
    arch = Arch.named(f"batch sizes {factory.__qualname__} {id(factory)}", factory)
    models = {part: Model.init(arch, Key(1).at(part), torch.float64) for part in "abcd"}
    ops = []
    for part in parts:
        own = Train({"own": models[part]}, SGD(CrossEntropy(), 0.1, 0.9), split_of(part), BatchSchedule(2, 10), Key(2))
        pair = {"a": models[part], "b": models["d"]}
        mutual = Train(pair, SGD(Mutual("a", "b"), 0.1, 0.9), split_of(part), BatchSchedule(1, 10), Key(3))
        ops += [own, mutual]
    # One model on many parts, and other models on parts of their own.
    return ops, [Predict(models[model], split_of(part)) for model, part in ("aa", "ab", "ac", "ad", "bb", "cc", "dd")]


def split_of(part):
    return Split(SOURCE, PARTS[part])


def agree(ops, engine):
    for op, (got, _) in zip(ops, engine(ops), strict=True):
        wanted = reference.run(op)
        if isinstance(op, Predict):
            assert torch.allclose(got, wanted, rtol=1e-9, atol=1e-9)
        else:
            assert all(same(got.models[role], model, 1e-9) for role, model in wanted.models.items())


@needs_compiled_code
@pytest.mark.parametrize("path", ["auto", "stacked"])
@pytest.mark.parametrize("name", ODD)
def test_every_path_computes_what_the_module_computes(name, path):
    trainings, predictions = operations(ODD[name])
    agree(trainings, Dispatcher(path=path))
    agree(predictions, Dispatcher(path=path))


@needs_compiled_code
@pytest.mark.parametrize("order", [(23, 41, 540, 41, 101), (540, 101, 23, 41, 540)])
def test_operations_that_are_alike_but_for_their_sizes_are_told_apart(order):
    """Their route is found once for many, but by what their batches are."""
    arch = Arch.named("alike but for sizes", ODD["if the length"])
    rule, engine = SGD(CrossEntropy(), 0.1), Dispatcher()
    models = {size: Model.init(arch, Key(size), torch.float64) for size in order}
    models = {size: Model(arch, flat_copy(model.params), {}) for size, model in models.items()}
    parts = {size: Split(SOURCE, torch.arange(size)) for size in order}
    looks = [Predict(models[size], parts[size]) for size in order]
    trainings = [Train({"own": models[size]}, rule, parts[size], BatchSchedule(1, 120), Key(1)) for size in order]
    for ops in (looks, trainings):
        routes = [engine._route_of(op) for op in ops]
        assert [route.backend.name == "compiled" for route, _ in routes] == [size <= 100 for size in order]
        assert [takes for _, takes in routes] == list(map(effort, ops))
        agree(ops, engine)


class WithoutStatistics(Normalised):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)


@needs_compiled_code
@pytest.mark.parametrize("path", ["auto", "compiled", "stacked"])
def test_batch_normalisation_without_statistics_mixes_the_samples_that_are_evaluated_together(path):
    _, predictions = operations(WithoutStatistics)
    engine = Dispatcher(path=path)
    agree(predictions, engine)
    assert "without running statistics, which mixes samples in evaluation too" in engine.explain()[0] or path == "stacked"


@needs_compiled_code
def test_why_a_network_that_counts_its_samples_is_not_compiled():
    trainings, predictions = operations(ODD["if the length"])
    engine = Dispatcher()
    agree(trainings, engine)
    agree(predictions, engine)
    assert "train: 4 operations compiled" in engine.explain()
    assert BY_SIZE == "its forward pass depends on the number of samples of a batch"
    assert f"predict: 2 operations eager (not compiled or stacked or stacked by vmap: {BY_SIZE})" in engine.explain()


@needs_compiled_code
@pytest.mark.parametrize("samples", [1, 7, 23])
def test_private_training_sees_single_samples(samples):
    factory = ODD["if the length is one"]
    model = Model.init(Arch.named("private by length", factory), Key(1), torch.float64)
    data, mechanism = Split(SOURCE, PARTS["a"][:samples]), GaussianMechanism(0.5, 0.1)
    schedule = BatchSchedule(steps=3, batch=10, poisson=True)
    agree([Train({"own": model}, SGD(CrossEntropy(), 0.1), data, schedule, Key(2), mechanism=mechanism)], Dispatcher())


def test_the_sizes_of_an_operation_are_those_of_the_reference():
    model = Model.init(Arch(Plain), Key(0))

    def trained(samples, schedule):
        return sizes_of(Train({"own": model}, SGD(CrossEntropy(), 0.1), Split(SOURCE, torch.arange(samples)), schedule, Key(0)))

    for samples in range(1, 25):
        for last_batch in ("keep", "drop", "scale"):
            schedule = BatchSchedule(1, 10, last_batch=last_batch)
            made = set(schedule.positions(samples, Key(0))[1].tolist())
            assert set(trained(samples, schedule)) == made
    assert sizes_of(Predict(model, Split(SOURCE, torch.arange(600)))) == (512, 88)
    assert sizes_of(Predict(model, Split(SOURCE, torch.arange(0)))) == ()


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, 0.1, batch_first=True)
        self.conv, self.norm, self.lstm = nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.LSTM(4, 3, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        x = self.norm(self.conv(x.view(len(x), 2, 3))).transpose(1, 2)
        x, _ = self.lstm(self.layer(x * x.shape[1]))
        return self.head(x.reshape(x.shape[0], -1).contiguous())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("samples", [1, 2, 10, 512])
def test_networks_that_only_pass_their_batch_on_are_the_same_for_all_sizes(samples, training):
    for factory in (Plain, Normalised, Attending):
        assert same_for(Arch(factory), (6,), False, torch.float32, training, samples)
