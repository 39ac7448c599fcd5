"""The networks have the sizes, layers and first weights of the papers they are from."""

import math

import pytest
import torch
from torch import nn

from fedme.core.data import Schema
from fedme.core.key import Key
from fedme.core.model import Model
from fedme.networks import ARCHS, arch, check


def task(*shape: int, classes: int = 10, vocabulary: int | None = None) -> Schema:
    return Schema(shape, tuple(str(label) for label in range(classes)), {}, vocabulary)


SYNTHETIC = task(60)
MNIST = task(1, 28, 28)
PADDED_MNIST = task(1, 32, 32)
CIFAR = task(3, 32, 32)
DIGITS = task(1, 8, 8)
FEMNIST = task(1, 28, 28, classes=62)
SHAKESPEARE = task(80, classes=90, vocabulary=90)


@pytest.mark.parametrize(
    ("name", "schema", "weights"),
    [
        ("mlr", SYNTHETIC, 610),
        ("mlr", MNIST, 7_850),
        ("dnn-20", SYNTHETIC, 1_430),
        ("dnn-100", MNIST, 79_510),
        ("dnn-64-32", DIGITS, 64 * 64 + 64 + 64 * 32 + 32 + 32 * 10 + 10),
        ("mlp", PADDED_MNIST, 247_210),
        ("mlp", MNIST, 199_210),
        ("cnn-1", FEMNIST, 700_670),
        ("cnn-2", FEMNIST, 1_206_590),
        ("cnn-3", FEMNIST, 2_083_262),
        ("cnn-4", FEMNIST, 3_672_766),
        ("cnn-2-linear", FEMNIST, 1_206_590),
        ("cnn-small", DIGITS, 2_730),
        ("vgg11", CIFAR, 9_750_922),
        ("vgg13", CIFAR, 9_935_434),
        ("vgg16", CIFAR, 15_245_130),
        ("vgg19", CIFAR, 20_554_826),
        ("lstm-1", SHAKESPEARE, 296_234),
        ("lstm-2", SHAKESPEARE, 822_570),
        ("lstm-3", SHAKESPEARE, 1_348_906),
        ("lstm-4", SHAKESPEARE, 1_875_242),
        ("lenet5", CIFAR, 62_006),
        ("lenet5", PADDED_MNIST, 61_706),
        ("fml-cnn1", CIFAR, 38_626),
        ("fml-cnn2", CIFAR, 303_882),
    ],
)
def test_number_of_weights(name: str, schema: Schema, weights: int) -> None:
    assert arch(name, schema).parameters == weights


def small(name: str) -> tuple[str, Schema]:
    """Each line of the table in its smallest size, with a task it fits."""
    if name.startswith("lstm"):
        return f"{name}(hidden=8)", task(5, classes=7, vocabulary=11)
    if name.startswith("vgg"):
        return f"{name}(width=0.05)", CIFAR
    if name.startswith("cnn-") and name != "cnn-small":
        return f"{name}(width=0.1)", task(3, 12, 15, classes=4)
    if name == "fml-cnn2":
        return f"{name}(channels=8)", task(1, 22, 30)
    return ("dnn-7-5" if "<" in name else name), task(1, 16, 19, classes=3)


@pytest.mark.parametrize("name", ARCHS)
def test_every_line_of_the_table_gives_logits_and_learns(name: str) -> None:
    spec, schema = small(name)
    recipe = arch(spec, schema)
    check(recipe, schema)
    module = recipe.build(Key(0))
    x = torch.randint(1, 11, (4, 5)) if schema.vocabulary else torch.rand(4, *schema.shape)
    module(x).logsumexp(1).sum().backward()
    assert [n for n, p in module.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


@pytest.mark.parametrize(
    ("name", "side"),
    [("cnn-3", 8), ("lenet5", 16), ("fml-cnn1", 10), ("fml-cnn2", 22), ("vgg11", 32), ("cnn-small", 2)],
)
def test_the_smallest_image_that_is_accepted_works(name: str, side: int) -> None:
    spec = {"name": name, "width": 0.05} if name == "vgg11" else name
    schema = task(1, side, side + 1)
    check(arch(spec, schema), schema)


@pytest.mark.parametrize("name", ["mlr", "dnn-16", "dnn-64-32", "mlp(dropout=0.3)"])
def test_dense_networks_are_plain_chains(name: str) -> None:
    module = arch(name, MNIST).build(Key(0))
    assert type(module) is nn.Sequential
    assert {type(layer) for layer in module} <= {nn.Flatten, nn.Linear, nn.ReLU, nn.Dropout}
    assert isinstance(module[-1], nn.Linear)
    assert sum(type(layer) is nn.Dropout for layer in module) == (2 if "dropout" in name else 0)


@pytest.mark.parametrize("name", [name for name in ARCHS if name[:3] not in ("mlr", "dnn", "mlp")])
def test_other_networks_have_features_and_a_classifier(name: str) -> None:
    spec, schema = small(name)
    names = [n for n, _ in arch(spec, schema).build(Key(0)).named_parameters()]
    parts = [n.split(".")[0] for n in names]
    assert set(parts) == {"features", "classifier"}
    assert parts == sorted(parts, reverse=True)


def test_clients_with_other_labels_can_share_the_features_of_fml_cnn2() -> None:
    first, second = (arch("fml-cnn2(channels=8)", CIFAR, classes) for classes in (10, 100))
    shapes = [{n: p.shape for n, p in Model.init(a, Key(0)).params.items()} for a in (first, second)]
    same = {n for n in shapes[0] if shapes[0][n] == shapes[1][n]}
    assert same == {n for n in shapes[0] if n.startswith("features.")}


def test_vgg_convolutions_start_with_the_variance_of_their_outputs() -> None:
    module = arch("vgg11(width=0.5)", CIFAR).build(Key(3))
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == 8
    for layer in convolutions[1:]:
        assert layer.bias is not None
        assert not layer.bias.any()
        assert float(layer.weight.detach().std()) == pytest.approx(math.sqrt(2 / (9 * layer.out_channels)), rel=0.05)


@pytest.mark.parametrize(("name", "depth"), [("vgg11", 11), ("vgg13", 13), ("vgg16", 16), ("vgg19", 19)])
def test_vgg_has_as_many_layers_as_its_name_says(name: str, depth: int) -> None:
    module = arch(f"{name}(width=0.02)", CIFAR).build(Key(0))
    assert sum(isinstance(layer, nn.Conv2d) for layer in module.modules()) == depth - 3
    assert sum(isinstance(layer, nn.Linear) for layer in module.modules()) == 3
    assert sum(isinstance(layer, nn.Dropout) for layer in module.modules()) == 2
    assert not any("Norm" in type(layer).__name__ for layer in module.modules())


def test_convolutions_without_relu_are_linear_up_to_the_pooling() -> None:
    counts = {
        name: sum(type(layer) is nn.ReLU for layer in arch(name, FEMNIST).build(Key(0)).get_submodule("features"))  # type: ignore[attr-defined]
        for name in ("cnn-2", "cnn-2-linear", "cnn-2(conv_relu=False)")
    }
    assert counts == {"cnn-2": 2, "cnn-2-linear": 0, "cnn-2(conv_relu=False)": 0}


def test_width_shrinks_channels_and_the_dense_layer() -> None:
    module = arch("cnn-2(width=0.25)", FEMNIST).build(Key(0))
    shapes = [tuple(p.shape) for p in module.parameters() if p.dim() > 1]
    assert shapes == [(8, 1, 3, 3), (16, 8, 3, 3), (32, 16 * 12 * 12), (62, 32)]


def test_lstm_predicts_from_the_last_time_step_only() -> None:
    module = arch("lstm-2(hidden=6)", task(5, classes=7, vocabulary=11)).build(Key(0))
    x = torch.tensor([[1, 2, 3, 4, 5]])
    features = module.get_submodule("features")
    states = features.lstm(features.embedding(x))[0]  # type: ignore[operator]
    assert torch.equal(module(x), module.get_submodule("classifier")(states[:, -1]))
    assert torch.equal(module(x), module(x.to(torch.uint8)))  # symbols may be kept small
    assert not features.embedding.weight[0].any()  # type: ignore[union-attr, index]
