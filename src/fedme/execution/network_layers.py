"""The layers of a network in the order they run: the one place that recognises networks, for every backend.

A network is recognised if it is nested plain `nn.Sequential`s of known layers. Everything else is left to autograd.
"""

import functools
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fedme.core.dropout import KeyedDropout
from fedme.core.model import Arch, template

Pair = tuple[int, int]


@dataclass(frozen=True)
class Linear:
    """A linear layer, by the names of its parameters."""

    weight: str
    bias: str | None


@dataclass(frozen=True)
class Convolution:
    """A two-dimensional convolution of stride 1, by the names of its parameters."""

    weight: str
    bias: str | None
    window: Pair
    padding: Pair


@dataclass(frozen=True)
class MaxPool:
    """The maximum of disjoint windows."""

    window: Pair


@dataclass(frozen=True)
class Activation:
    """An elementwise function."""

    function: Literal["relu", "tanh", "sigmoid"]


@dataclass(frozen=True)
class Dropout:
    """A dropout layer, by its name."""

    name: str
    p: float


@dataclass(frozen=True)
class Flatten:
    """Samples of any shape become vectors."""


Layer = Linear | Convolution | MaxPool | Activation | Dropout | Flatten
ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.ReLU: Activation("relu"),
    nn.Tanh: Activation("tanh"),
    nn.Sigmoid: Activation("sigmoid"),
}


@functools.lru_cache(maxsize=256)
def network_layers(arch: Arch) -> tuple[Layer, ...] | str:
    """The layers of `arch`, or why they are not known."""
    network = template(arch, True)
    layers: list[Layer] = []
    for name, module in _leaves(network):
        if _is_hooked(module):
            return f"hooks or parametrizations on {type(module).__name__}"
        if type(module) is nn.Identity or (isinstance(module, KeyedDropout) and not module.p):
            continue
        layer = _layer(name, module)
        if isinstance(layer, Flatten) and any(isinstance(before, Linear) for before in layers):
            continue  # backends run a linear layer on vectors only
        if layer is None:
            shown = module if isinstance(module, nn.Conv2d | nn.MaxPool2d | nn.Flatten) else type(module).__name__
            return f"unsupported layer {shown}"
        layers.append(layer)
    used = [name for layer in layers if isinstance(layer, Linear | Convolution) for name in (layer.weight, layer.bias) if name]
    if sorted(used) != sorted(name for name, p in network.named_parameters() if p.requires_grad):
        return "tied or frozen weights"
    return tuple(layers) if layers and isinstance(layers[-1], Linear) else "the last layer is not linear"


def _leaves(module: nn.Module, name: str = "") -> list[tuple[str, nn.Module]]:
    """The modules of nested sequences in the order they run; a module that stands in several places runs in each."""
    if type(module) is not nn.Sequential or _is_hooked(module):
        return [(name, module)]
    prefix = f"{name}." if name else ""
    return [leaf for child_name, child in module._modules.items() if child for leaf in _leaves(child, prefix + child_name)]


def _is_hooked(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or is_parametrized(module)


def _layer(name: str, module: nn.Module) -> Layer | None:
    bias = f"{name}.bias" if getattr(module, "bias", None) is not None else None
    if type(module) is nn.Linear:
        return Linear(f"{name}.weight", bias)
    if type(module) is nn.Conv2d and isinstance(module.padding, tuple):
        plain = (module.stride, module.dilation, module.groups, module.padding_mode) == ((1, 1), (1, 1), 1, "zeros")
        return Convolution(f"{name}.weight", bias, _pair(module.kernel_size), _pair(module.padding)) if plain else None
    if type(module) is nn.MaxPool2d:
        window = _pair(module.kernel_size)
        plain = (_pair(module.stride), _pair(module.padding), _pair(module.dilation)) == (window, (0, 0), (1, 1))
        return MaxPool(window) if plain and not module.ceil_mode and not module.return_indices else None
    if isinstance(module, nn.Flatten):
        return Flatten() if (module.start_dim, module.end_dim) == (1, -1) else None
    return Dropout(name, module.p) if isinstance(module, KeyedDropout) else ACTIVATIONS.get(type(module))


def _pair(size: int | tuple[int, ...]) -> Pair:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
