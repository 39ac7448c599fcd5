"""Other networks over stacked weights, by `torch.vmap` and autograd.

A network is tried once, on two models and a few samples, and taken only if it gives the same outputs and gradients as alone.
"""

import functools
import re
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedme.core.global_generators import states
from fedme.core.key import Key
from fedme.core.model import Arch, Model, begin, dropout_layers, hooks_obstacle, output_of, template
from fedme.core.tree import Params
from fedme.execution.batch_sizes import changes_weights

LOOP = "There is a performance drop because we have not yet implemented the batching rule"  # torch then loops over the models
COMPUTE_BOUND = (nn.modules.conv._ConvNd, nn.RNNBase, nn.Transformer)


def logits(arch: Arch, weights: Mapping[str, Tensor], x: Tensor, seeds: Mapping[str, Tensor] | None, first: int = 0) -> Tensor:
    """Outputs (models x batch x classes) of stacked weights; `seeds` as in `dense_pass`, None means evaluation.

    `first` is the position of `x` in its batch.
    """
    module = template(arch, seeds is not None)
    begin(module, seeds or {}, first)
    named = {f"{layer}.seed": seed for layer, seed in (seeds or {}).items()}

    def one(params: dict[str, Tensor], masks: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return output_of(functional_call(module, {**params, **masks}, (inputs,)))

    return torch.vmap(one, randomness="error")(dict(weights), named, x)


class VmapPass:
    """A forward pass: the logits (models x batch x classes) and what its gradients need."""

    def __init__(self, arch: Arch, weights: Params, x: Tensor, seeds: Mapping[str, Tensor]) -> None:
        self.arch, self.x, self.seeds = arch, x, seeds
        self.leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        self.outputs = logits(arch, self.leaves, x, seeds)
        self.logits = self.outputs.detach()

    def gradients(self, logit_gradients: Tensor) -> dict[str, Tensor]:
        """The gradients of all weights, summed over the batch."""
        return self._backward(self.outputs, logit_gradients)

    def squared_norms(self, logit_gradients: Tensor) -> Tensor:
        """The squared norm of the gradient of every sample (models x batch)."""
        self.per_sample = []
        for i in range(self.x.shape[1]):
            sample = slice(i, i + 1)
            outputs = logits(self.arch, self.leaves, self.x[:, sample], self.seeds, i)
            self.per_sample.append(self._backward(outputs, logit_gradients[:, sample]))
        squares = [[g.square().flatten(1).sum(1) for g in gradients.values()] for gradients in self.per_sample]
        return torch.stack([torch.stack(parts).sum(0) for parts in squares], 1)

    def weighted_sum(self, logit_gradients: Tensor, factors: Tensor, finite: bool) -> dict[str, Tensor]:
        """The sum of the gradients of all samples, each times its factor (models x batch); after `squared_norms`."""
        total: dict[str, Tensor] = {}
        for gradients, factor in zip(self.per_sample, factors.unbind(1), strict=True):
            for name, gradient in gradients.items():
                weight = factor.view(-1, *[1] * (gradient.dim() - 1))
                part = torch.where(weight > 0, gradient * weight, 0.0)
                total[name] = total[name] + part if name in total else part
        return total

    def _backward(self, outputs: Tensor, logit_gradients: Tensor) -> dict[str, Tensor]:
        leaves = list(self.leaves.values())
        gradients = torch.autograd.grad(outputs, leaves, logit_gradients, allow_unused=True, materialize_grads=True)
        return dict(zip(self.leaves, gradients, strict=True))


def is_compute_bound(arch: Arch) -> bool:
    """Whether one client after another is faster than a stack of them, on a processor."""
    return any(isinstance(module, COMPUTE_BOUND) for module in template(arch, True).modules())


@functools.lru_cache(maxsize=256)
def vmap_obstacle(arch: Arch, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Why a network without buffers cannot be stacked for inputs of this shape and type; empty if it can."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", LOOP)
        return _obstacle_in_trial(arch, shape, dtype)


def _obstacle_in_trial(arch: Arch, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    if reason := hooks_obstacle(arch):
        return reason
    if changes_weights(arch, shape, not dtype.is_floating_point, torch.float64):
        return f"{arch.name} changes its weights in its forward pass"
    dtype = torch.float64 if dtype.is_floating_point else dtype
    models = [Model.init(arch, Key(i), torch.float64) for i in range(2)]
    x = torch.rand((2, 3, *shape), generator=Key(0).torch(), dtype=torch.float64).to(dtype)
    layers = dropout_layers(arch)
    try:
        generators = states()
        weights = {name: torch.stack([m.params[name] for m in models]) for name in models[0].params}
        stacked = VmapPass(arch, weights, x.clone(), {layer: torch.tensor([3, 4]) for layer in layers})
        if states() != generators:
            return f"{arch.name} draws from a global random generator"
        if stacked.logits.dtype != torch.float64:
            return f"{arch.name} computes in another type than that of its weights"
        gradients = stacked.gradients(2 * stacked.logits)  # of the sum of squares
        predicted = logits(arch, weights, x.clone(), None)
        for i, model in enumerate(models):
            leaves = {name: p.clone().requires_grad_() for name, p in model.params.items()}
            masks = {layer: torch.tensor(3 + i) for layer in layers}
            expected = Model(arch, leaves, {})(x[i].clone(), training=True, masks=masks)
            with torch.inference_mode():
                evaluated = model(x[i].clone())
            more = torch.cat([x[i], x[i, :1]])
            if not torch.allclose(
                Model(arch, leaves, {})(more, training=True, masks=masks)[:-1], expected, rtol=1e-9, atol=1e-9
            ):
                return f"{arch.name} has dropout where the batch is not the first dimension, and batches of a stack are padded"
            for sample in (0, -1):
                itself = x[i, [sample]].expand_as(x[i])
                beside_itself = Model(arch, leaves, {})(itself.clone(), training=True, masks=masks)
                with torch.inference_mode():
                    both = (expected, beside_itself), (evaluated, model(itself.clone()))
                if not all(torch.allclose(y[sample], z[sample], rtol=1e-9, atol=1e-9) for y, z in both):
                    return f"{arch.name} mixes the samples of a batch, and batches of a stack are padded"
            own = torch.autograd.grad(expected.square().sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
            pairs = [
                (stacked.logits[i], expected),
                (predicted[i], evaluated),
                *((gradients[name][i], g) for name, g in zip(leaves, own, strict=True)),
            ]
            if not all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in pairs):
                return f"{arch.name} gives other results in a stack"
    except UserWarning as warning:
        return f"{arch.name} has operations that torch cannot stack ({re.findall('aten::([a-z0-9_]+)|$', str(warning))[0]})"
    except Exception as error:  # vmap or a user's network may raise anything; the network then runs alone
        return f"{arch.name} cannot be stacked ({type(error).__name__})"
    return ""
