"""Dense networks as chains: which networks are chains of dense layers, and their forward and backward over stacked weights.

A stack holds the weights of many models of one architecture with a leading axis that counts models. Gradients are written
by hand; a loss enters only as its slope, dL/dlogits.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fedme.core.dropout import KeyedDropout, uniform
from fedme.core.model import Arch, template


@dataclass(frozen=True)
class Linear:
    """A linear layer, by the names of its weights."""

    weight: str
    bias: str | None


@dataclass(frozen=True)
class Activation:
    """An elementwise function and its slope as a function of its output."""

    call: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]  # (output, gradient of the output) -> gradient of the input


@dataclass(frozen=True)
class Dropout:
    """A dropout layer, by its name."""

    name: str
    p: float


Layer = Linear | Activation | Dropout

ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.ReLU: Activation(torch.relu, lambda out, grad: grad * (out > 0)),
    nn.Tanh: Activation(torch.tanh, lambda out, grad: grad * (1 - out * out)),
    nn.Sigmoid: Activation(torch.sigmoid, lambda out, grad: grad * out * (1 - out)),
}


@dataclass(frozen=True)
class Chain:
    """A dense network; `flattens` says that it takes samples of any shape."""

    layers: tuple[Layer, ...]
    flattens: bool


@functools.lru_cache(maxsize=256)
def chain(arch: Arch) -> Chain | None:
    """The chain that `arch` is, or None if it is something else."""
    network = template(arch, True)
    layers: list[Layer] = []
    flattens = False
    for name, module in leaves(network):
        if module is None or is_hooked(module):
            return None
        kind = type(module)
        if isinstance(module, nn.Flatten) and module.start_dim == 1 and module.end_dim == -1:
            flattens = flattens or not any(isinstance(layer, Linear) for layer in layers)
        elif kind is nn.Linear:
            layers.append(Linear(f"{name}.weight", f"{name}.bias" if module.bias is not None else None))
        elif isinstance(module, KeyedDropout):
            layers.append(Dropout(name, module.p))
        elif kind in ACTIVATIONS:
            layers.append(ACTIVATIONS[kind])
        elif kind is not nn.Identity:
            return None
    used = [n for layer in layers if isinstance(layer, Linear) for n in (layer.weight, layer.bias) if n]
    trained = [n for n, p in network.named_parameters() if p.requires_grad]
    own = sorted(used) == sorted(trained)  # false for tied or frozen weights
    return Chain(tuple(layers), flattens) if own and layers and isinstance(layers[-1], Linear) else None


def leaves(module: nn.Module, name: str = "") -> list[tuple[str, nn.Module | None]]:
    """The modules of nested sequences in the order they run; None for anything that is not a plain sequence."""
    if type(module) is not nn.Sequential or is_hooked(module):
        return [(name, None)]
    found: list[tuple[str, nn.Module | None]] = []
    for child_name, child in module._modules.items():  # a module that stands in several places runs in each
        full = f"{name}.{child_name}" if name else child_name
        found += leaves(child, full) if isinstance(child, nn.Sequential) else [(full, child)]
    return found


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or is_parametrized(module)


Weights = Mapping[str, Tensor]


def forward(chain: Chain, weights: Weights, x: Tensor, seeds: Mapping[str, Tensor] | None) -> tuple[Tensor, list[Tensor]]:
    """Logits (models x batch x classes) and what `backward` needs: the input of every layer, and its output for activations.

    `x` is models x batch x features; `seeds` gives each dropout layer one seed a model, None means evaluation.
    """
    kept = []
    for layer in chain.layers:
        if isinstance(layer, Linear):
            kept.append(x)
            weight = weights[layer.weight].transpose(1, 2)
            x = torch.baddbmm(weights[layer.bias].unsqueeze(1), x, weight) if layer.bias else torch.bmm(x, weight)
        elif isinstance(layer, Activation):
            x = layer.call(x)
            kept.append(x)
        elif seeds is not None and layer.p > 0:
            mask = uniform(seeds[layer.name], x.shape[1] * x.shape[2]).reshape(x.shape) >= layer.p
            mask = mask.to(x.dtype) / (1.0 - layer.p) if layer.p < 1 else torch.zeros_like(x)
            kept.append(mask)
            x = x * mask
        else:
            kept.append(x.new_empty(0))
    return x, kept


def backward(
    chain: Chain, weights: Weights, kept: list[Tensor], slope: Tensor, use: Callable[[Linear, Tensor, Tensor], None]
) -> None:
    """Hand every linear layer, last first, to `use` with its slope and input: its gradient is ``slope^T input``.

    `use` may change the layer's weights: the gradient of what lies below has been computed from them already.
    """
    first = next(i for i, layer in enumerate(chain.layers) if isinstance(layer, Linear))
    for i in range(len(chain.layers) - 1, first - 1, -1):
        layer = chain.layers[i]
        if isinstance(layer, Linear):
            below = torch.bmm(slope, weights[layer.weight]) if i > first else slope
            use(layer, slope, kept[i])
            slope = below
        elif isinstance(layer, Activation):
            slope = layer.slope(kept[i], slope)
        elif kept[i].numel():
            slope = slope * kept[i]


def gradients(chain: Chain, weights: Weights, kept: list[Tensor], slope: Tensor) -> dict[str, Tensor]:
    """The gradient of every weight, written out."""
    grads: dict[str, Tensor] = {}

    def use(layer: Linear, slope: Tensor, x: Tensor) -> None:
        grads[layer.weight] = torch.bmm(slope.transpose(1, 2), x)
        if layer.bias:
            grads[layer.bias] = slope.sum(1)

    backward(chain, weights, kept, slope, use)
    return {name: grads[name] for name in weights}
