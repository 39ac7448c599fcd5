"""Dense networks over stacked weights: logits and gradients in closed form.

A stack holds the weights of many models of one architecture; its first axis counts models.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedme.core.dropout import uniform
from fedme.core.model import Arch
from fedme.core.tree import Params
from fedme.execution.network_layers import Activation, Dropout, Flatten, Linear, network_layers

DenseLayer = Linear | Activation | Dropout
FORWARD: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}
BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # (output, gradient of the output) -> gradient of the input
    "relu": lambda out, grad: grad * (out > 0),
    "tanh": lambda out, grad: grad * (1 - out * out),
    "sigmoid": lambda out, grad: grad * out * (1 - out),
}


@functools.lru_cache(maxsize=256)
def dense_layers(arch: Arch) -> tuple[DenseLayer, ...] | str:
    """The layers of a network without convolutions, or why it is none."""
    layers = network_layers(arch)
    if isinstance(layers, str):
        return layers
    dense = tuple(layer for layer in layers if isinstance(layer, Linear | Activation | Dropout))
    convolutions = len(dense) + sum(isinstance(layer, Flatten) for layer in layers) < len(layers)
    return f"{arch.name} has convolutions" if convolutions else dense


@dataclass(frozen=True)
class DensePass:
    """A forward pass: the logits (models x batch x classes) and what its gradients need.

    `saved` has the input of every linear layer, the output of every activation and the mask of every dropout.
    """

    layers: tuple[DenseLayer, ...]
    weights: Params
    logits: Tensor
    saved: list[Tensor]

    def gradients(self, logit_gradients: Tensor) -> dict[str, Tensor]:
        """The gradients of all weights, summed over the batch."""
        gradients: dict[str, Tensor] = {}
        for layer, output_gradients, x in self._backward(logit_gradients):
            gradients[layer.weight] = torch.bmm(output_gradients.transpose(1, 2), x)
            if layer.bias:
                gradients[layer.bias] = output_gradients.sum(1)
        return {name: gradients[name] for name in self.weights}

    def squared_norms(self, logit_gradients: Tensor) -> Tensor:
        """The squared norm of the gradient of every sample (models x batch).

        The gradient of one sample is the outer product of output gradient and input, so its norm is the product of theirs.
        """
        squares = logit_gradients.new_zeros(logit_gradients.shape[:2])
        for layer, output_gradients, x in self._backward(logit_gradients):
            inputs = x.square().sum(-1)
            squares += output_gradients.square().sum(-1) * (inputs + 1.0 if layer.bias else inputs)
        return squares

    def weighted_sum(self, logit_gradients: Tensor, factors: Tensor, finite: bool) -> dict[str, Tensor]:
        """The sum of the gradients of all samples, each times its factor (models x batch).

        Unless all gradients are `finite`, samples of factor 0 are masked: NaN * 0 is NaN.
        """
        weighted = logit_gradients * factors.unsqueeze(-1)
        if finite:
            return self.gradients(weighted)
        left_out = (factors == 0).unsqueeze(-1)
        saved = [value.masked_fill(left_out, 0.0) if value.numel() else value for value in self.saved]
        return replace(self, saved=saved).gradients(weighted.masked_fill(left_out, 0.0))

    def _backward(self, gradients: Tensor) -> list[tuple[Linear, Tensor, Tensor]]:
        """Every linear layer with the gradients of its outputs and its inputs, the last layer first."""
        passed = []
        first = next(i for i, layer in enumerate(self.layers) if isinstance(layer, Linear))
        for i in range(len(self.layers) - 1, first - 1, -1):
            layer, saved = self.layers[i], self.saved[i]
            if isinstance(layer, Linear):
                passed.append((layer, gradients, saved))
                gradients = torch.bmm(gradients, self.weights[layer.weight]) if i > first else gradients
            elif isinstance(layer, Activation):
                gradients = BACKWARD[layer.function](saved, gradients)
            elif saved.numel():
                gradients = gradients * saved
        return passed


def dense_pass(layers: tuple[DenseLayer, ...], weights: Params, x: Tensor, seeds: Mapping[str, Tensor] | None) -> DensePass:
    """Run stacked `weights` on `x` (models x batch x features).

    `seeds` has one seed per model for each dropout layer; None means evaluation.
    """
    saved = []
    for layer in layers:
        if isinstance(layer, Linear):
            saved.append(x)
            weight = weights[layer.weight].transpose(1, 2)
            x = torch.baddbmm(weights[layer.bias].unsqueeze(1), x, weight) if layer.bias else torch.bmm(x, weight)
        elif isinstance(layer, Activation):
            x = FORWARD[layer.function](x)
            saved.append(x)
        elif seeds is not None:
            mask = uniform(seeds[layer.name], x.shape[1] * x.shape[2]).reshape(x.shape) >= layer.p
            mask = mask.to(x.dtype) / (1.0 - layer.p) if layer.p < 1 else torch.zeros_like(x)
            saved.append(mask)
            x = x * mask
        else:
            saved.append(x.new_empty(0))
    return DensePass(layers, weights, x, saved)
