"""Networks without an import path as data, so that their saved weights can be used without their code.

A network of standard layers is a list of layers (`layers_as_data`), any other network is a graph (`graph_as_data`). Either is
made once for all clients whose networks have the same structure.
"""

import functools
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedme.core.data import Inputs
from fedme.core.key import Key
from fedme.core.model import Arch, Model, load, output_of
from fedme.networks.graph_as_data import GraphNetwork, NotTraceable, graph_of
from fedme.networks.in_memory import InMemoryNetwork
from fedme.networks.input_sizes import ArchError
from fedme.networks.layers_as_data import from_layers, layers_of, without_weights

KEPT = 1024  # entries of the latest graphs; clients of one structure share the text
TOLERANCE = 1e-4  # of the outputs of a graph, relative to the largest output of its network
_INTERNAL = {*vars(nn.Module()), "training"}  # attributes that every module has
_graphs: dict[Any, str | NotTraceable] = {}  # by factory, and by structure


@dataclass(frozen=True)
class Description:
    """A network as data: a table with its `layers`, or its `graph` as JSON, or the `reason` why there is neither."""

    layers: Mapping[str, Any] | None = None
    graph: str | None = None
    reason: str = ""


def as_data(model: Model, inputs: Callable[[], Inputs]) -> Description:
    """The network of a model as data; `inputs` gives two samples to trace it with, if that is necessary."""
    layers = _layers(model.arch)
    if layers is not None:
        return Description(layers)
    try:
        return Description(graph=_graph(model, inputs()))
    except NotTraceable as error:
        return Description(reason=str(error))


@functools.lru_cache(maxsize=256)
def _layers(arch: Arch) -> Mapping[str, Any] | None:
    module = arch.build(Key(0))
    layers = layers_of(module)
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    return None if layers is None else {"layers": layers, "frozen": frozen}


def _graph(model: Model, inputs: Inputs) -> str:
    """The graph of the network as JSON, traced once for all networks of its structure."""
    module, factory = model.module(), model.arch.factory
    if isinstance(module, DescribedGraph):
        return module.text
    # The number stands for the factory, which would keep weights in memory.
    keys = [(getattr(factory, "number", factory), model.arch.options, model.dtype), _structure(module, inputs)]
    for key in keys:
        known = _graphs.get(key)
        if isinstance(known, NotTraceable):
            raise known
        if known is not None and _same(module, known, inputs):
            return known
    made: str | NotTraceable
    try:
        made = json.dumps(graph_of(module, inputs))
        if not _same(module, made, inputs):
            made = NotTraceable("the graph that torch traces gives other outputs than the network")
    except NotTraceable as error:
        made = error
    for key in keys:
        _graphs[key] = made
    while len(_graphs) > KEPT:
        _graphs.pop(next(iter(_graphs)))
    if isinstance(made, NotTraceable):
        raise made
    return made


def _structure(module: nn.Module, inputs: Inputs) -> Any:
    """A key that is equal for modules of the same structure: classes, attributes, and the shapes of weights and inputs.

    Attributes that are not plain values count as different, because a trace may depend on them.
    """
    parts: list[Any] = []
    for name, child in module.named_modules(remove_duplicate=False):
        attributes = {key: value for key, value in vars(child).items() if key not in _INTERNAL}
        parts.append((name, type(child), tuple((key, _plain(attributes[key])) for key in sorted(attributes))))
    weights = [*module.named_parameters(), *module.named_buffers()]
    shapes = tuple((name, tensor.dtype, tuple(tensor.shape), tensor.requires_grad) for name, tensor in weights)
    given = inputs if isinstance(inputs, Mapping) else {"": inputs}
    return tuple(parts), shapes, tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in given.items())


def _plain(value: Any) -> Any:
    functions = types.FunctionType | types.BuiltinFunctionType
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | type | functions):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), tuple(_plain(item) for item in value)
    return object()


def _same(module: nn.Module, text: str, inputs: Inputs) -> bool:
    """Whether a graph with the weights of the module gives its outputs, for three samples."""
    graph = GraphNetwork(json.loads(text))
    try:
        load(graph, {**dict(module.named_parameters()), **dict(module.named_buffers())})
        samples = _three(inputs)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            expected, traced = (
                output_of(network(**samples) if isinstance(samples, Mapping) else network(samples))
                for network in (module.eval(), graph.eval())
            )
    except Exception:  # user code may raise anything
        return False
    scale = max(float(expected.abs().max()), 1.0)
    same_shape = expected.shape == traced.shape
    return same_shape and bool(torch.allclose(traced, expected, rtol=0, atol=TOLERANCE * scale, equal_nan=True))


def _three(inputs: Inputs) -> Inputs:
    """Three samples: random numbers, or the symbols of the given ones."""
    if isinstance(inputs, Mapping):
        return {name: _three(tensor) for name, tensor in inputs.items()}
    if inputs.is_floating_point():
        draw = Key(0).at("trace").torch()
        return torch.randn((3, *inputs.shape[1:]), generator=draw, dtype=torch.float64).to(inputs.dtype)
    return inputs[:1].expand(3, *inputs.shape[1:])


def described_arch(name: str, description: Any, graph: str | None, weights: Mapping[str, Tensor]) -> Arch:
    """The architecture that a saved model describes, by its layers or else by its graph, if `weights` fit it."""
    factory = _from_layers(json.dumps(description)) if graph is None else _from_graph(graph)
    expected = without_weights(factory)
    given = {key: tuple(tensor.shape) for key, tensor in weights.items()}
    if expected != given:  # before memory is allocated for weights of any size
        wrong = sorted(key for key in expected.keys() | given.keys() if expected.get(key) != given.get(key))
        raise ArchError(f"the weights do not fit the description of the network: {', '.join(wrong[:5])}")
    return Arch.named(name, factory)


# Equal descriptions get the same factory, so that their architectures are equal.


@functools.lru_cache(maxsize=256)
def _from_layers(text: str) -> InMemoryNetwork:
    description = json.loads(text)
    if not isinstance(description, dict) or description.keys() != {"layers", "frozen"}:
        raise ArchError(f"the description of a network must have 'layers' and 'frozen', got {text[:100]}")

    def build() -> nn.Module:
        module = from_layers(description["layers"])
        weights = dict(module.named_parameters())
        for name in description["frozen"]:
            if name not in weights:
                raise ArchError(f"there is no weight {name!r} to be frozen")
            weights[name].requires_grad_(False)
        return module

    return InMemoryNetwork(build, "layers")


@functools.lru_cache(maxsize=256)
def _from_graph(text: str) -> InMemoryNetwork:
    graph = json.loads(text)
    return InMemoryNetwork(lambda: DescribedGraph(graph, text), "graph")


class DescribedGraph(GraphNetwork):
    """The network of a saved graph; it keeps the graph, so that it can be saved again."""

    def __init__(self, graph: Any, text: str) -> None:
        super().__init__(graph)
        self.text = text
