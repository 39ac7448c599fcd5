"""Networks other than chains over stacked weights, by `torch.vmap`: which ones it can batch, and their logits.

A network is tried once, on two models and a few samples, and taken only if it gives the outputs and gradients it gives alone.
"""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedme.core.key import Key
from fedme.core.model import Arch, Model, begin, dropout_layers, output_of, template

# Compute-bound on a processor: one client after another is faster than a stack of them.
HEAVY = (nn.modules.conv._ConvNd, nn.RNNBase, nn.Transformer)


def logits(arch: Arch, weights: Mapping[str, Tensor], x: Tensor, seeds: Mapping[str, Tensor] | None, first: int = 0) -> Tensor:
    """Outputs (models x batch x classes) of stacked weights; `seeds` as in `dense.forward`, None means evaluation.

    `first` is where in its batch `x` begins.
    """
    module = template(arch, seeds is not None)
    begin(module, seeds or {}, first)
    named = {f"{layer}.seed": seed for layer, seed in (seeds or {}).items()}

    def one(params: dict[str, Tensor], masks: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return output_of(functional_call(module, {**params, **masks}, (inputs,)))

    return torch.vmap(one, randomness="error")(dict(weights), named, x)


def obstacle(arch: Arch, sample: Tensor) -> str:
    """Why a network without buffers cannot be batched; empty if it can. `sample` is one input."""
    if any(isinstance(module, HEAVY) for module in template(arch, True).modules()):
        return f"{arch.name} has layers that gain nothing from stacking"
    return _tried(arch, tuple(sample.shape), sample.dtype)


@functools.lru_cache(maxsize=256)
def _tried(arch: Arch, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    kind = torch.float64 if dtype.is_floating_point else dtype
    models = [Model.init(arch, Key(i), torch.float64) for i in range(2)]
    draw = Key(0).torch()
    x = torch.rand((2, 3, *shape), generator=draw, dtype=torch.float64).to(kind)
    layers = dropout_layers(arch)
    seeds = {layer: torch.tensor([3, 4]) for layer in layers}
    try:
        stacked = {name: torch.stack([m.params[name] for m in models]).requires_grad_() for name in models[0].params}
        before = torch.default_generator.get_state()
        together = logits(arch, stacked, x, seeds)
        if not torch.equal(before, torch.default_generator.get_state()):
            return f"{arch.name} draws random numbers of its own"
        grads = torch.autograd.grad(together.square().sum(), list(stacked.values()), allow_unused=True, materialize_grads=True)
        for i, model in enumerate(models):
            leaves = {name: p.clone().requires_grad_() for name, p in model.params.items()}
            alone = Model(arch, leaves, {})(x[i], training=True, masks={layer: torch.tensor(3 + i) for layer in layers})
            own = torch.autograd.grad(alone.square().sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
            pairs = [(together[i], alone), *zip([g[i] for g in grads], own, strict=True)]
            if not all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in pairs):
                return f"{arch.name} gives something else in a stack"
    except Exception as error:  # whatever vmap or a user's network raises: it then runs alone
        return f"{arch.name} cannot be batched ({type(error).__name__})"
    return ""
