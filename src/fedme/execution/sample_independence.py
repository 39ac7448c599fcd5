"""Refuse networks that mix the samples of a batch: private training must bound the gradient of a single sample."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedme.core.data import Inputs
from fedme.core.dropout import at_draw
from fedme.core.key import Key
from fedme.core.model import Arch, Model, dropout_layers, template
from fedme.execution.reference import cast, seeded_generator
from fedme.learning.accountant import PrivacyError


def require_separate(arch: Arch, three: Inputs) -> None:
    """Refuse a network that mixes samples or keeps statistics of them; `three` are inputs to try it on."""
    if reason := _mixing(arch, three):
        raise PrivacyError(
            f"[privacy] cannot be used with {arch.name}: {reason}; use GroupNorm or LayerNorm, which normalise single samples"
        )


def _mixing(arch: Arch, three: Inputs) -> str:
    for name, module in template(arch, True).named_modules():
        # Instance normalisation derives from _BatchNorm, but mixes samples only if it keeps statistics.
        if isinstance(module, _BatchNorm) and (not isinstance(module, _INSTANCE) or module.track_running_stats):
            return f"its layer {name} ({type(module).__name__}) normalises by other samples, or keeps statistics of them"
    model = Model.init(arch, Key(0))
    masks = {layer: at_draw(torch.tensor(7), number) for number, layer in enumerate(dropout_layers(arch))}
    before = {name: value.clone() for name, value in model.buffers.items()}
    logits, buffers = _run(model, three, masks)
    if any(not torch.equal(buffers[name], value) for name, value in before.items()):
        return "training changes its buffers"
    for place in range(len(logits)):
        repeated, _ = _run(model, _repeated(three, place), masks)
        if not torch.allclose(logits[place], repeated[place], rtol=1e-4, atol=1e-5, equal_nan=True):
            return "its output for a sample depends on the other samples of the batch"
    return ""


_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def _run(model: Model, x: Inputs, masks: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
    copy = Model(model.arch, model.params, {name: value.clone() for name, value in model.buffers.items()})
    with seeded_generator(Key(0)), torch.no_grad():
        return copy(cast(x, copy), training=True, masks=masks), copy.buffers


def _repeated(x: Inputs, place: int) -> Inputs:
    """A batch of the same size that repeats one sample."""
    if isinstance(x, Mapping):
        return {name: _repeated(value, place) for name, value in x.items()}
    return x[torch.full((len(x),), place)]
