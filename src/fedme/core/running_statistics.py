"""Running statistics of normalisation layers, and their estimation from samples.

`nn.BatchNorm1d` and its relatives (any `_NormBase` with ``track_running_stats``) normalise by the statistics of the batch in
training and by running statistics in evaluation. `estimated` replaces these by the statistics of given samples, as
`torch.optim.swa_utils.update_bn` does.
"""

import functools
from collections.abc import Iterable

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from fedme.core.data import Inputs
from fedme.core.model import Arch, Model, build_template, default_dtype, has_ties, template


@functools.lru_cache(maxsize=256)
def running_statistics(arch: Arch) -> tuple[str, ...]:
    """The names of the buffers with the running mean and variance of every normalisation layer; empty if there are none."""
    layers = _layers(template(arch, False))
    return tuple(f"{name}.{of}".removeprefix(".") for name, _ in layers for of in ("running_mean", "running_var"))


def estimated(model: Model, batches: Iterable[Inputs]) -> Model:
    """The model with running statistics that are the means of the statistics of the batches, all of about one size.

    Normalisation layers normalise by the batch, as in training. All other layers are in evaluation mode, because the
    statistics are for evaluation: dropout is off. Variances are unbiased, as those that PyTorch keeps. A layer that is called
    several times gets the mean over its calls. Nothing else of the model changes, counters of batches included.
    """
    network, names = _estimating(model.arch), running_statistics(model.arch)
    for _, layer in _layers(network):
        layer.calls = 0  # type: ignore[assignment]
    scratch = {name: torch.zeros_like(value) if name in names else value.clone() for name, value in model.buffers.items()}
    weights = {**model.params, **scratch}
    with torch.no_grad(), default_dtype(model.dtype):
        for x in batches:
            given = ((), dict(x)) if isinstance(x, dict) else ((x,), {})
            functional_call(network, weights, *given, tie_weights=has_ties(model.arch))
    return model.with_buffers({name: scratch[name] if name in names else value for name, value in model.buffers.items()})


@functools.lru_cache(maxsize=256)
def _estimating(arch: Arch) -> nn.Module:
    """A network in evaluation mode whose normalisation layers keep the means of the statistics of all their calls."""
    network = build_template(arch, training=False)
    for _, layer in _layers(network):
        layer.train()
        layer.register_forward_pre_hook(_count)
    return network


def _count(layer: nn.Module, inputs: object) -> None:
    layer.calls += 1  # type: ignore[operator,assignment]
    layer.momentum = 1.0 / layer.calls  # type: ignore[assignment,operator]


def _layers(network: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, m) for name, m in network.named_modules() if isinstance(m, _NormBase) and m.running_mean is not None]
