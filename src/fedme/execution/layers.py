"""Networks as layers in a row, which is what the compiled code runs: convolutions and pooling first, dense layers then."""

import functools
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from fedme.core.dropout import KeyedDropout
from fedme.core.model import Arch, template
from fedme.execution.dense_networks import ACTIVATIONS, is_hooked, leaves

Pair = tuple[int, int]
ONCE = (1, 1)
NONE = (0, 0)


@dataclass(frozen=True)
class Layer:
    """One layer, by the names of its weights, with the activation after it and the dropout after that."""

    kind: Literal["linear", "convolution", "pool"]
    weight: str | None = None
    bias: str | None = None
    window: Pair = ONCE
    padding: Pair = NONE
    activation: type[nn.Module] | None = None
    dropout: str = ""  # its name, if there is one
    p: float = 0.0


@functools.lru_cache(maxsize=256)
def layers(arch: Arch) -> tuple[Layer, ...] | None:
    """The layers that `arch` is made of; None if it is something else."""
    network = template(arch, True)
    found: list[Layer] = []
    flat = False
    for name, module in leaves(network):
        if module is None or is_hooked(module):
            return None
        if isinstance(module, nn.Flatten) and module.start_dim == 1 and module.end_dim == -1:
            flat = True
        elif type(module) is nn.Identity or (isinstance(module, KeyedDropout) and not module.p):
            pass
        elif (layer := _begun(name, module)) is not None:
            dense = not found or found[-1].kind == "linear"
            fits = (dense or flat) if layer.kind == "linear" else not flat and (not dense or not found)
            if not fits or (layer.kind == "pool" and not found):
                return None
            found.append(layer)
        elif found and (more := _continued(found[-1], name, module)) is not None:
            found[-1] = more
        else:
            return None
    used = [name for layer in found for name in (layer.weight, layer.bias) if name]
    trained = [name for name, p in network.named_parameters() if p.requires_grad]
    own = sorted(used) == sorted(trained)  # false for tied or frozen weights
    ends = bool(found) and found[-1] == Layer("linear", found[-1].weight, found[-1].bias)
    return tuple(found) if own and ends else None


def _begun(name: str, module: nn.Module) -> Layer | None:
    bias = f"{name}.bias" if getattr(module, "bias", None) is not None else None
    if type(module) is nn.Linear:
        return Layer("linear", f"{name}.weight", bias)
    if type(module) is nn.Conv2d and isinstance(module.padding, tuple):
        plain = (module.stride, module.dilation, module.groups, module.padding_mode) == (ONCE, ONCE, 1, "zeros")
        window, padding = _pair(module.kernel_size), _pair(module.padding)
        return Layer("convolution", f"{name}.weight", bias, window, padding) if plain else None
    if type(module) is nn.MaxPool2d:
        window = _pair(module.kernel_size)
        plain = (_pair(module.stride), _pair(module.padding), _pair(module.dilation)) == (window, NONE, ONCE)
        return Layer("pool", window=window) if plain and not module.ceil_mode and not module.return_indices else None
    return None


def _continued(layer: Layer, name: str, module: nn.Module) -> Layer | None:
    """The layer with what comes after it: an activation, then dropout."""
    if layer.dropout:
        return None
    if isinstance(module, KeyedDropout):
        return replace(layer, dropout=name, p=module.p)
    return replace(layer, activation=type(module)) if type(module) in ACTIVATIONS and layer.activation is None else None


def _pair(size: int | tuple[int, ...]) -> Pair:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
