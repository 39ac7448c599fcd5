"""Dense networks over stacked weights: logits and gradients in closed form.

A stack holds the weights of many models of one architecture; its first axis counts models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from fedme.core.dropout import uniform
from fedme.core.tree import Params


@dataclass(frozen=True)
class Linear:
    """A linear layer, by the names of its parameters."""

    weight: str
    bias: str | None


@dataclass(frozen=True)
class Activation:
    """An elementwise function."""

    function: str


@dataclass(frozen=True)
class Dropout:
    """A dropout layer, by its name."""

    name: str
    p: float


DenseLayer = Linear | Activation | Dropout
FORWARD: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}
BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # (output, gradient of the output) -> gradient of the input
    "relu": lambda out, grad: grad * (out > 0),
    "tanh": lambda out, grad: grad * (1 - out * out),
    "sigmoid": lambda out, grad: grad * out * (1 - out),
}


@dataclass(frozen=True)
class DensePass:
    """A forward pass: the logits (models x batch x classes) and what its gradients need.

    `trained` names the weights that get gradients. `saved` has the input of every linear layer, the output of every activation
    and the mask of every dropout.
    """

    layers: tuple[DenseLayer, ...]
    weights: Params
    trained: tuple[str, ...]
    logits: Tensor
    saved: list[Tensor]

    def gradients(self, logit_gradients: Tensor) -> dict[str, Tensor]:
        """The gradients of the trained weights, summed over the batch."""
        gradients: dict[str, Tensor] = {}
        for layer, output_gradients, x in self._backward(logit_gradients):
            if layer.weight in self.trained:
                gradients[layer.weight] = torch.bmm(output_gradients.transpose(1, 2), x)
            if layer.bias in self.trained:
                gradients[layer.bias] = output_gradients.sum(1)
        return {name: gradients[name] for name in self.trained}

    def squared_norms(self, logit_gradients: Tensor) -> Tensor:
        """The squared norm of the gradient of every sample (models x batch).

        The gradient of one sample is the outer product of output gradient and input, so its norm is the product of theirs.
        """
        squares = logit_gradients.new_zeros(logit_gradients.shape[:2])
        for layer, output_gradients, x in self._backward(logit_gradients):
            inputs = x.square().sum(-1) if layer.weight in self.trained else 0.0
            squares += output_gradients.square().sum(-1) * (inputs + 1.0 if layer.bias in self.trained else inputs)
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
        """The linear layers with the gradients of their outputs and their inputs, from the last to the first trained one."""
        passed = []
        first = next(i for i, layer in enumerate(self.layers) if isinstance(layer, Linear) and self._trains(layer))
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

    def _trains(self, layer: Linear) -> bool:
        return layer.weight in self.trained or layer.bias in self.trained


def dense_pass(
    layers: tuple[DenseLayer, ...],
    trained: Params,
    x: Tensor,
    seeds: Mapping[str, Tensor] | None,
    fixed: Params = MappingProxyType({}),
) -> DensePass:
    """Run stacked weights on `x` (models x batch x features); the `fixed` ones get no gradients.

    `seeds` has one seed per model for each dropout layer; None means evaluation.
    """
    weights, saved = {**trained, **fixed}, []
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
    return DensePass(layers, weights, tuple(trained), x, saved)
