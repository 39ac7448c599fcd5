"""Graphs of networks as data: they compute what the network computes, from a closed list of operators."""

import json
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedme.core.model import load, output_of
from fedme.networks import ArchError
from fedme.networks.graph_as_data import COMPOSITE, FURTHER, GraphNetwork, NotTraceable, _operator, graph_of


class Images(nn.Module):
    """In-place operations, a residual connection, a branch, a constant, several branches of shapes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.drop, self.head = nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)), inplace=True)
        y = self.second(x)
        y += x
        y = F.adaptive_avg_pool2d(y, 1) if y.shape[-1] > 4 else y
        y = self.drop(y.view(x.shape[0], -1))
        y = y / (y.norm(dim=1, keepdim=True) + 1e-3)
        return self.head(y) * torch.tensor([1.0, 2.0, 3.0])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.outer.weight = self.inner.weight
        self.register_buffer("scale", torch.full((6,), 0.5), persistent=False)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(F.gelu(self.outer(torch.relu(self.inner(x))) * self.scale).clamp(max=float("inf")))


class Symbols(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.read = nn.Embedding(9, 8), nn.LSTM(8, 8, batch_first=True)
        self.encode, self.head = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.encode(self.read(self.embed(x))[0])[:, -1])


class Named(nn.Module):
    """Several inputs, an object as output."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)

    def forward(self, ids, mask):
        weights = mask.unsqueeze(-1).to(torch.float32)
        logits = self.head((self.embed(ids) * weights).sum(1) / weights.sum(1))
        return type("Output", (), {"logits": logits})()


def symbols(count):
    return torch.randint(0, 9, (count, 5))


CASES = {
    "images": (Images, lambda count: torch.randn(count, 1, 6, 6)),
    "tied": (Tied, lambda count: torch.randn(count, 6)),
    "symbols": (Symbols, symbols),
    "named": (Named, lambda count: {"mask": torch.ones(count, 5, dtype=torch.int64), "ids": symbols(count)}),
}


def call(network, x):
    return output_of(network(**x) if isinstance(x, dict) else network(x))


def rebuilt(network, graph):
    copy = GraphNetwork(json.loads(json.dumps(graph)))
    return load(copy, {**dict(network.named_parameters()), **dict(network.named_buffers())})


@pytest.mark.parametrize("name", CASES)
def test_a_graph_computes_what_the_network_computes(name):
    make, samples = CASES[name]
    network = make().eval()
    for buffer in network.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2.0)
    copy = rebuilt(network, graph_of(network, samples(2)))
    for count in (1, 7):
        x = samples(count)
        assert torch.allclose(call(copy, x), call(network, x), atol=1e-6)
    assert dict(copy.named_parameters()).keys() == dict(network.named_parameters()).keys()
    trained = [name for name, p in network.named_parameters() if p.requires_grad]
    assert [name for name, p in copy.named_parameters() if p.requires_grad] == trained


def test_a_graph_has_gradients_and_can_be_exported():
    network = Tied().eval()
    copy = rebuilt(network, graph_of(network, torch.zeros(2, 6)))
    x = torch.randn(4, 6)
    for each in (network, copy):
        each(x).sum().backward()
    assert torch.allclose(copy.inner.weight.grad, network.inner.weight.grad)
    program = torch.export.export(copy, (x,), dynamic_shapes=(({0: torch.export.Dim("n", min=1)},),))
    assert torch.allclose(program.module()(x[:3]), network(x[:3]))


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(x) if x.sum() > 0 else -self.head(x)


def test_a_network_that_decides_by_values_is_not_traced():
    with pytest.raises(NotTraceable, match="torch cannot trace it"):
        graph_of(Deciding(), torch.zeros(2, 6))


def test_all_listed_operators_exist_and_change_nothing():
    for name in COMPOSITE | FURTHER:
        assert not _operator(name)._schema.is_mutable


@pytest.mark.parametrize(
    "name",
    [
        "aten.from_file.default", "aten.save.default", "aten.add_.Tensor", "aten.set_.default", "aten.rand.default",
        "aten.empty.memory_format", "aten.atan2.out", "aten.__class__.__init__", "aten.__dict__.keys", "prim.device.default",
        "torch.ops.aten.add.Tensor", "os.system", "add.Tensor", "eval", "",
    ],
)  # fmt: skip
def test_other_operators_are_refused(name):
    graph = {"inputs": [], "weights": [], "constants": [], "nodes": [[name, [{"value": 0}], {}]], "output": 1}
    with pytest.raises(ArchError, match="not an operator of saved graphs"):
        GraphNetwork(graph)


VALID = {"inputs": [], "weights": [["w", "parameter", "float32", [2]]], "constants": [["float32", [1], "AACAPw=="]]}
VALID |= {
    "nodes": [["aten.mul.Tensor", [{"value": 0}, {"value": 1}], {}], ["aten.add.Tensor", [{"value": 3}, {"value": 2}], {}]]
}
VALID |= {"output": 4}


def test_a_graph_by_hand():
    network = load(GraphNetwork(VALID), {"w": torch.tensor([2.0, 3.0])})
    assert network(torch.ones(4, 2)).tolist() == [[3.0, 4.0]] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": 1}, "must have inputs"),
        ({"nodes": {}}, "must be a list"),
        ({"inputs": [1]}, "must be names"),
        ({"output": 5}, "number of a value"),
        ({"output": "4"}, "number of a value"),
        ({"weights": [["w", "parameter", ["float32"], [2]]]}, "a weight of a graph"),
        ({"weights": [["w", "other", "float32", [2]]]}, "a weight of a graph"),
        ({"weights": [["w", "parameter", "float32", [-2]]]}, "is invalid"),
        ({"weights": [["w", "parameter", "float32", [2]], ["w", "buffer", "float32", [2]]]}, "used twice"),
        ({"weights": [["a..b", "parameter", "float32", [2]]]}, "is invalid"),
        ({"weights": [["w", "parameter", "int64", [2]]]}, "is invalid"),
        ({"constants": [["float32", [2], "AACAPw=="]]}, "invalid constant"),
        ({"constants": [["float32", [1], "!"]]}, "invalid constant"),
        ({"nodes": [["aten.relu.default", [{"value": 3}], {}]]}, "invalid argument"),
        ({"nodes": [["aten.relu.default", [{"value": -1}], {}]]}, "invalid argument"),
        ({"nodes": [["aten.relu.default", [{"dtype": ["x"]}], {}]]}, "invalid argument"),
        ({"nodes": [["aten.relu.default", {}, {}]]}, "a node of a graph"),
    ],
)
def test_invalid_graphs_are_refused(change, message):
    with pytest.raises(ArchError, match=message):
        GraphNetwork(VALID | change)


@pytest.mark.parametrize("name", ["output", "inputs", "nodes", "places", "constants", "unused", "steps", "_add"])
def test_layers_of_a_network_may_have_any_name(name):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            setattr(self, name, nn.Linear(3, 2))
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return self._modules[name](x).relu() * self.scale

    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    network = Net()
    copy = load(GraphNetwork(json.loads(json.dumps(graph_of(network, x)))), dict(network.named_parameters()))
    assert list(copy.state_dict()) == list(network.state_dict())
    assert torch.equal(copy(x), network(x))
    twin = deepcopy(copy)
    with torch.no_grad():
        twin.scale.zero_()
    assert torch.equal(copy(x), network(x))
    assert not twin(x).any()
