"""Networks of standard layers as data: equal networks come back, and nothing else can be made from data."""

import json
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fedme.networks import ArchError
from fedme.networks.layers_as_data import LAYERS, from_layers, layers_of

IMAGE = (2, 4, 8, 8)
SHARED = nn.ReLU()
NETWORKS = {
    "alone": (nn.Linear(6, 3), (2, 6)),
    "dense": (nn.Sequential(nn.Linear(6, 5, bias=False), SHARED, nn.Linear(5, 5), SHARED, nn.Linear(5, 3)), (2, 6)),
    "named": (nn.Sequential(OrderedDict(inner=nn.Linear(6, 5), act=nn.Tanh(), rest=nn.Sequential(nn.Linear(5, 2)))), (2, 6)),
    "convolutions": (
        nn.Sequential(
            nn.Conv2d(4, 6, 3, stride=2, padding="valid", padding_mode="reflect"),
            nn.BatchNorm2d(6, eps=1e-3, momentum=None),
            nn.PReLU(6),
            nn.AvgPool2d(2, ceil_mode=True),
            nn.Sequential(nn.ConvTranspose2d(6, 4, 2, groups=2), nn.GroupNorm(2, 4, affine=False), nn.GELU("tanh")),
            nn.Upsample(scale_factor=2.0, mode="bilinear", align_corners=True),
            nn.AdaptiveAvgPool2d((None, 1)),
            nn.Flatten(),
        ),
        IMAGE,
    ),
    "normalised": (
        nn.Sequential(nn.LayerNorm((8, 8), bias=False), nn.InstanceNorm2d(4, affine=True), nn.RMSNorm(8), nn.Dropout2d(0.3)),
        IMAGE,
    ),
    "padded": (nn.Sequential(nn.ConstantPad2d((1, 2, 0, 1), 0.5), nn.MaxPool2d(3, 2, dilation=2), nn.Softmax(dim=1)), IMAGE),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_standard_layers_comes_back(name):
    network, shape = NETWORKS[name]
    layers = layers_of(network)
    rebuilt = from_layers(json.loads(json.dumps(layers)))
    rebuilt.load_state_dict(network.state_dict())
    x = torch.randn(shape)
    assert torch.equal(rebuilt.eval()(x), network.eval()(x))
    assert repr(rebuilt) == repr(network)
    assert layers_of(rebuilt) == layers


def test_symbols_come_back():
    network = nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 2))
    rebuilt = from_layers(layers_of(network))
    rebuilt.load_state_dict(network.state_dict())
    x = torch.randint(0, 9, (5, 3))
    assert torch.equal(rebuilt(x), network(x))


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_can_be_described_with_its_defaults(name):
    """Its arguments are all among its attributes."""
    needed = {
        "Conv": (4, 6, 3), "ConvT": (4, 6, 3), "MaxP": (2,), "AvgP": (2,), "Adapt": (2,), "Batch": (4,), "Inst": (4,),
        "ZeroP": (1,),
        "Const": (1, 0.5), "Reflec": (1,), "Replic": (1,), "Circular": (1,), "Linear": (3, 2), "Embed": (9, 4),
        "Unfl": (1, (2, 2)), "PixelS": (2,), "PixelU": (2,), "Channel": (2,), "LayerN": (4,), "Group": (2, 4), "RMS": (4,),
        "LocalR": (2,), "LPP": (2, 2), "Thresh": (0.1, 20.0),
    }  # fmt: skip
    arguments = next((given for start, given in needed.items() if name.startswith(start)), ())
    network = nn.Sequential(LAYERS[name](*arguments))
    layers = layers_of(network)
    assert layers is not None
    assert repr(from_layers(layers)) == repr(network)


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def _changed_forward():
    network = nn.Sequential(nn.Linear(3, 3))
    network[0].forward = lambda x: x
    return network


def _tied():
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    network[1].weight = network[0].weight
    return network


def _hooked():
    network = nn.Sequential(nn.Linear(3, 3))
    network[0].register_forward_hook(lambda module, given, output: output + 1)
    return network


def _wider():
    network = nn.Sequential(nn.Linear(3, 3))
    network[0].weight = nn.Parameter(torch.zeros(4, 3))
    return network


@pytest.mark.parametrize(
    "network",
    [
        Twice(3, 3), nn.Sequential(Twice(3, 3)), nn.Sequential(nn.LSTM(3, 3)), _changed_forward(), _tied(), _hooked(), _wider(),
        nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3))), nn.Sequential(nn.Hardtanh(max_val=float("inf"))),
    ],
)  # fmt: skip
def test_other_networks_are_not_described(network):
    assert layers_of(network) is None


NESTED = [["0", "Sequential", []]]
for _ in range(100):
    NESTED = [["0", "Sequential", NESTED]]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("Linear", "must be a list"),
        ([["0", "Linear"]], r"must be \[name, class, arguments\]"),
        ([["0", "os.system", {}]], "not a standard layer"),
        ([["0", "Module", {}]], "not a standard layer"),
        ([["0", ["Linear"], {}]], "not a standard layer"),
        ([["0", "Linear", ["x"]]], "must be a table"),
        ([["0", "Linear", {"device": "cuda"}]], "has no argument 'device'"),
        ([["0", "Linear", {"in_features": {"a": 1}}]], "must be a number"),
        ([["0", "Linear", {"in_features": "x", "out_features": 1}]], "cannot be made"),
        ([["0", "Linear", {"in_features": -1, "out_features": 1}]], "cannot be made"),
        ([["0", "ReLU", {}], ["0", "ReLU", {}]], "two layers are called"),
        ([["a.b", "ReLU", {}]], "invalid name"),
        ([["forward", "ReLU", {}]], "invalid name"),
        (NESTED, "nested"),
    ],
)
def test_invalid_layers_are_refused(layers, message):
    with pytest.raises(ArchError, match=message):
        from_layers(layers)
