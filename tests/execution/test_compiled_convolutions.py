"""Convolutions in compiled code equal the reference, and what is not such a chain goes elsewhere."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from fedme.core.data import Arrays, Split
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, Evaluate, Predict, Train
from fedme.execution import reference
from fedme.execution.dispatcher import Dispatcher
from fedme.execution.memory_format import formatted
from fedme.learning.objectives import CrossEntropy, Mutual
from fedme.learning.optimizers import SGD, Moreau, MutualMoreau
from fedme.networks import convolutional
from fedme.networks.two_part import two_parts
from fedme_test_support import needs_compiled_code, same

pytestmark = needs_compiled_code
SHAPE, CLASSES = (2, 9, 8), 4
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "none": nn.Identity}
numbers = itertools.count()


def network(stages, hidden, shape=SHAPE, classes=CLASSES):
    """`stages`: (outputs, kernel, padding, bias, activation, dropout, pooling, activation and dropout after that)."""
    channels, rows, columns = shape
    features = []
    for outputs, kernel, padding, bias, activation, p, window, second, second_p in stages:
        features += [nn.Conv2d(channels, outputs, kernel, padding=padding, bias=bias), ACTIVATIONS[activation](), nn.Dropout(p)]
        channels = outputs
        rows, columns = rows + 2 * padding[0] - kernel[0] + 1, columns + 2 * padding[1] - kernel[1] + 1
        if window:
            features += [nn.MaxPool2d(window), ACTIVATIONS[second](), nn.Dropout(second_p)]
            rows, columns = rows // window[0], columns // window[1]
    widths = [channels * rows * columns, *(width for width, _, _ in hidden)]
    dense = [nn.Flatten()]
    for inputs, (width, activation, p) in zip(widths, hidden, strict=False):
        dense += [nn.Linear(inputs, width), ACTIVATIONS[activation](), nn.Dropout(p)]
    return two_parts(nn.Sequential(*features), nn.Sequential(*dense, nn.Linear(widths[-1], classes)))


kinds, chances = st.sampled_from(sorted(ACTIVATIONS)), st.sampled_from([0.0, 0.0, 0.3, 1.0])


@st.composite
def archs(draw):
    (_, rows, columns), stages = SHAPE, []
    for _ in range(draw(st.integers(1, 3))):
        padding = draw(st.tuples(st.integers(0, 3), st.integers(0, 2)))
        room = rows + 2 * padding[0], columns + 2 * padding[1]
        kernel = tuple(draw(st.integers(1, min(5, size))) for size in room)
        rows, columns = (size - k + 1 for size, k in zip(room, kernel, strict=True))
        window = tuple(draw(st.integers(1, min(3, size))) for size in (rows, columns)) if draw(st.booleans()) else ()
        if window:
            rows, columns = rows // window[0], columns // window[1]
        outputs, bias = draw(st.integers(1, 19)), draw(st.booleans())
        stages.append((outputs, kernel, padding, bias, draw(kinds), draw(chances), window, draw(kinds), draw(chances)))
    hidden = draw(st.lists(st.tuples(st.integers(1, 11), kinds, chances), max_size=2))
    return Arch.named(f"drawn-{next(numbers)}", lambda: network(stages, hidden))


def images(samples, shape=SHAPE, classes=CLASSES, seed=0):
    draw = Key(seed).torch()
    x = torch.randn(2 * samples, *shape, generator=draw, dtype=torch.float64)
    y = torch.randint(0, classes, (2 * samples,), generator=draw)
    return Split(Arrays(x, y), torch.randperm(2 * samples, generator=draw)[:samples])


def operation(roles, optimizer, data, local, dtype=torch.float64, seed=0):
    draw = Key(seed).at("momentum").torch()
    models, frozen = ({r: Model.init(a, Key(seed).at(what, r), dtype) for r, a in roles.items()} for what in ("own", "frozen"))
    opt = {r: {n: torch.randn(p.shape, generator=draw, dtype=dtype) for n, p in m.params.items()} for r, m in models.items()}
    return Train(
        models, optimizer, data, local, Key(seed).at("train"), opt if getattr(optimizer, "momentum", 0) else {}, frozen
    )


def equal(op, tolerance=1e-9):
    batched = Dispatcher()
    ((got, _),) = batched([op])
    assert batched.explain() == ["train: 1 operations compiled"]
    want = reference.run(op)
    assert want.models.keys() == got.models.keys()
    assert want.opt.keys() == got.opt.keys()
    for role, model in want.models.items():
        for name, value in model.params.items():
            assert torch.allclose(got.models[role].params[name], value, rtol=tolerance, atol=tolerance), (role, name)
        for name, value in want.opt.get(role, {}).items():
            assert torch.allclose(got.opt[role][name], value, rtol=tolerance, atol=tolerance), (role, name)
    assert dict(got.losses) == pytest.approx(dict(want.losses), rel=tolerance, abs=tolerance)


locals_ = st.builds(BatchSchedule, epochs=st.integers(1, 2), batch=st.integers(1, 7), shuffle=st.booleans())


@settings(max_examples=100, deadline=None)
@given(
    pair=st.tuples(archs(), st.one_of(st.none(), archs())),
    samples=st.integers(1, 16),
    local=locals_,
    mutual=st.booleans(),
    momentum=st.sampled_from([0.0, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    prox=st.sampled_from([0.0, 0.5]),
    clip=st.sampled_from([None, 0.5, 100.0]),
    seed=st.integers(0, 1000),
)
def test_training_equals_the_reference(pair, samples, local, mutual, momentum, weight_decay, prox, clip, seed):
    roles = {role: arch for role, arch in zip("ab", pair, strict=True) if arch is not None}
    objective = Mutual("a", "b", (0.7, 1.0), (1.0, 0.4)) if mutual and len(roles) == 2 else CrossEntropy()
    optimizer = SGD(objective, 0.02, momentum, weight_decay, clip, prox)
    equal(operation(roles, optimizer, images(samples, seed=seed), local, seed=seed))


def wide(channels, outputs, size, padding, bias, last):
    """Windows of 3 x 3 over many channels, which Winograd's method computes: with and without ReLU, and their gradients."""
    rows, columns = (n + 2 * p - 2 for n, p in zip(size, padding, strict=True))
    return nn.Sequential(
        nn.Conv2d(1, channels, 1),
        nn.Conv2d(channels, outputs, 3, padding=padding, bias=bias),
        nn.ReLU(),
        nn.Conv2d(outputs, last, 3, padding=1),
        nn.Flatten(),
        nn.Linear(last * rows * columns, CLASSES),
    )


@settings(max_examples=40, deadline=None)
@given(
    channels=st.integers(15, 34),
    outputs=st.integers(16, 34),
    last=st.integers(16, 20),
    size=st.tuples(st.integers(4, 11), st.integers(3, 9)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 2)),
    bias=st.booleans(),
    samples=st.integers(1, 9),
    local=locals_,
    seed=st.integers(0, 1000),
)
def test_wide_windows_equal_the_reference(channels, outputs, last, size, padding, bias, samples, local, seed):
    arch = Arch.named(f"wide-{next(numbers)}", lambda: wide(channels, outputs, size, padding, bias, last))
    equal(operation({"a": arch}, SGD(CrossEntropy(), 0.02, 0.9), images(samples, (1, *size), seed=seed), local, seed=seed))


def narrow(shape, layers, pools):
    """Few channels on wide maps. `layers`: (outputs, window, stride, padding, dilation, groups, bias)."""
    channels, modules = shape[0], []
    for outputs, window, stride, padding, dilation, groups, bias in layers:
        modules += [nn.Conv2d(channels, outputs, window, stride, padding, dilation, groups, bias), nn.ReLU()]
        channels = outputs
    features = nn.Sequential(*modules, *([nn.MaxPool2d(2)] if pools else []))
    with torch.no_grad():
        width = features(torch.zeros(1, *shape)).numel()
    return nn.Sequential(features, nn.Flatten(), nn.Linear(width, CLASSES))


@st.composite
def narrow_layers(draw):
    rows, columns = draw(st.integers(3, 15)), draw(st.integers(12, 35))
    groups = draw(st.sampled_from([1, 1, 1, 2]))
    channels = groups * draw(st.integers(1, 4))
    shape, layers = (channels, rows, columns), []
    for _ in range(draw(st.integers(1, 3))):
        padding = draw(st.tuples(st.integers(0, 3), st.integers(0, 4)))
        stride = draw(st.sampled_from([(1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (2, 3)]))
        dilation = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2), (2, 3)])) if max(stride) == 1 else (1, 1)
        room = rows + 2 * padding[0], columns + 2 * padding[1]
        window = tuple(draw(st.integers(1, min(5, (n - 1) // d + 1))) for n, d in zip(room, dilation, strict=True))
        rows, columns = ((n - (k - 1) * d - 1) // s + 1 for n, k, d, s in zip(room, window, dilation, stride, strict=True))
        layers.append((groups * draw(st.integers(1, 9)), window, stride, padding, dilation, groups, draw(st.booleans())))
    return shape, layers, draw(st.booleans()) and min(rows, columns) > 1


@settings(max_examples=120, deadline=None)
@given(
    layers=narrow_layers(),
    samples=st.integers(1, 9),
    local=locals_,
    momentum=st.sampled_from([0.0, 0.9]),
    clip=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 1000),
)
def test_few_channels_equal_the_reference(layers, samples, local, momentum, clip, seed):
    arch = Arch.named(f"narrow-{next(numbers)}", lambda: narrow(*layers))
    optimizer = SGD(CrossEntropy(), 0.02, momentum, clip=clip)
    equal(operation({"a": arch}, optimizer, images(samples, layers[0], seed=seed), local, seed=seed))


def test_wide_windows_in_single_precision():
    arch = Arch.named("wide-single", lambda: wide(24, 16, (32, 31), (1, 1), True, 17))
    op = operation({"a": arch}, SGD(CrossEntropy(), 0.02, 0.9), images(40, (1, 32, 31)), BatchSchedule(1, 20), torch.float32)
    equal(replace(op, data=Split(Arrays(op.data.source.x.float(), op.data.source.labels), op.data.rows)), 1e-4)


@settings(max_examples=25, deadline=None)
@given(arch=archs(), other=archs(), local=locals_, inner=st.integers(1, 3), mutual=st.booleans(), seed=st.integers(0, 1000))
def test_inner_loops_equal_the_reference(arch, other, local, inner, mutual, seed):
    roles = {"aux": arch, "local": other, "theta": arch} if mutual else {"theta": arch, "w": arch}
    optimizer = (MutualMoreau if mutual else Moreau)(0.05, 0.02, 3.0, inner, 0.1)
    equal(operation(roles, optimizer, images(9, seed=seed), local, seed=seed))


@settings(max_examples=40, deadline=None)
@given(
    arch=archs(), samples=st.integers(1, 45), seed=st.integers(0, 1000), dtype=st.sampled_from([torch.float32, torch.float64])
)
def test_outputs_equal_the_reference(arch, samples, seed, dtype):
    model, data = Model.init(arch, Key(seed), dtype), images(samples, seed=seed)
    batched = Dispatcher()
    (logits, _), (score, _) = batched([Predict(model, data), Evaluate(model, data)])
    assert all("compiled" in line for line in batched.explain())
    assert torch.allclose(logits, reference.run(Predict(model, data)), rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-11)
    assert score.samples == samples


ZOO = {
    **{f"cnn-{n}": lambda n=n: convolutional.cnn((1, 12, 13), 5, n, width=0.25) for n in (1, 2, 3, 4)},
    "cnn-2-linear": lambda: convolutional.cnn((3, 12, 12), 5, 2, conv_relu=False, width=0.3),
    "lenet5": lambda: convolutional.lenet5((1, 20, 18), 5),
    "fml-cnn1": lambda: convolutional.fml_cnn1((3, 14, 15), 5),
    "fml-cnn2": lambda: convolutional.fml_cnn2((1, 23, 22), 5, channels=20),
    "cnn-small": lambda: convolutional.cnn_small((1, 8, 8), 5),
}
SHAPES = dict.fromkeys(ZOO, (1, 12, 13)) | {
    "cnn-2-linear": (3, 12, 12),
    "lenet5": (1, 20, 18),
    "fml-cnn1": (3, 14, 15),
    "fml-cnn2": (1, 23, 22),
    "cnn-small": (1, 8, 8),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ZOO)
def test_the_networks_of_the_zoo(name, dtype):
    data = images(13, SHAPES[name], 5)
    optimizer = SGD(CrossEntropy(), 0.05, momentum=0.5, weight_decay=1e-3)
    equal(
        operation({"own": Arch.named(f"zoo-{name}", ZOO[name])}, optimizer, data, BatchSchedule(2, 5), dtype),
        1e-4 if dtype == torch.float32 else 1e-9,
    )


def test_a_convolution_and_a_dense_network_learn_from_each_other():
    dense = nn.Flatten, lambda: nn.Linear(math.prod(SHAPE), 7), nn.ReLU, lambda: nn.Dropout(0.4), lambda: nn.Linear(7, CLASSES)
    roles = {
        "a": Arch.named("one-convolution", lambda: network([(5, (3, 3), (1, 1), True, "relu", 0.2, (2, 2), "none", 0.0)], [])),
        "b": Arch.named("dense-beside", lambda: nn.Sequential(*(make() for make in dense))),
    }
    equal(operation(roles, SGD(Mutual("a", "b"), 0.05, clip=1.0), images(11), BatchSchedule(3, 4)))


def trainings(count=5):
    arch = Arch.named(
        "for-threads", lambda: network([(9, (3, 3), (0, 0), True, "relu", 0.0, (2, 2), "none", 0.3)], [(6, "tanh", 0.5)])
    )
    return [
        operation(
            {"own": arch},
            SGD(CrossEntropy(), 0.1),
            replace(images(9), rows=torch.arange(3 + 2 * i)),
            BatchSchedule(2, 4),
            seed=i,
        )
        for i in range(count)
    ]


def test_results_do_not_depend_on_threads_or_company():
    ops = trainings()
    one, several = Dispatcher(), Dispatcher(workers=3)
    try:
        found = [[done.models["own"] for done, _ in each(ops)] for each in (one, several)]
    finally:
        several.close()
    assert several.paths == one.paths == {("train", "compiled", ""): 5}
    found.append([Dispatcher()([op])[0][0].models["own"] for op in ops])
    assert all(same(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_a_batch_of_all_samples_takes_no_more_memory_than_they_do():
    (op,) = trainings(1)
    whole, vast = (
        Dispatcher()([replace(op, batch_schedule=BatchSchedule(2, batch))])[0][0].models["own"] for batch in (3, 2_000_000)
    )
    assert same(whole, vast)


@pytest.mark.parametrize("workers", [1, 3])
def test_every_operation_ticks_when_it_is_done_and_a_tick_may_stop_the_rest(workers):
    ticks = []

    def tick():
        ticks.append(1)
        if len(ticks) == 7:
            raise KeyboardInterrupt

    batched = Dispatcher(tick, workers=workers)
    try:
        batched(trainings())
        assert len(ticks) == 5
        with pytest.raises(KeyboardInterrupt):
            batched(trainings())
        assert len(ticks) == 7
    finally:
        batched.close()


def test_weights_in_any_order_of_memory_and_left_as_they_are():
    (op,) = trainings(1)
    model = op.models["own"]
    turned = formatted(model, SHAPE)
    before = {name: value.clone() for name, value in turned.params.items()}
    a, b = (Dispatcher()([replace(op, models={"own": each})])[0][0].models["own"] for each in (model, turned))
    assert same(a, b)
    assert all(torch.equal(before[name], value) for name, value in turned.params.items())
    assert all(value.is_contiguous() for value in b.params.values())


@pytest.mark.parametrize(
    "middle",
    [
        nn.Conv2d(2, 3, 3, stride=2, dilation=2),
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        nn.ConvTranspose2d(2, 4, 3, groups=2),
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2, stride=2, dilation=2)),
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.Hardshrink()),
    ],
    ids=str,
)
def test_other_layers_go_elsewhere_with_the_result_of_the_reference(middle):
    with torch.no_grad():
        width = nn.Sequential(middle, nn.Flatten())(torch.zeros(2, *SHAPE)).shape[1]
    arch = Arch.named(
        f"elsewhere {middle}", lambda: nn.Sequential(copy.deepcopy(middle), nn.Flatten(), nn.Linear(width, CLASSES))
    )
    op = operation({"own": arch}, SGD(CrossEntropy(), 0.1), images(7), BatchSchedule(1, 3))
    batched = Dispatcher()
    ((got, _),) = batched([op])
    assert not any(path == "compiled" for _, path, _ in batched.paths)
    assert same(got.models["own"], reference.run(op).models["own"])


def test_what_does_not_fit_is_refused():
    arch = Arch.named("refused", lambda: network([(3, (3, 3), (0, 0), True, "relu", 0.0, (2, 2), "none", 0.0)], []))
    optimizer, local = SGD(CrossEntropy(), 0.1), BatchSchedule(1, 3)
    with pytest.raises(IndexError, match="class numbers must be >= 0 and < 4"):
        Dispatcher(path="compiled")([operation({"own": arch}, optimizer, images(4, classes=9, seed=1), local)])
