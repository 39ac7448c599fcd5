"""Networks in which the samples of a batch meet: no gradient there belongs to one sample, so none can be bounded."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedme.core.data import Inputs
from fedme.core.dropout import at_draw
from fedme.core.key import Key
from fedme.core.model import Arch, Model, dropout_layers, template
from fedme.execution.reference import cast, own_randomness
from fedme.learning.accountant import PrivacyError


def require_separate(arch: Arch, three: Inputs) -> None:
    """Refuse a network that mixes samples or gathers statistics of them; `three` are inputs to try it on."""
    if reason := _mixing(arch, three):
        raise PrivacyError(
            f"[privacy] cannot be kept with {arch.name}: {reason}; GroupNorm and LayerNorm look at one sample only"
        )


def _mixing(arch: Arch, three: Inputs) -> str:
    for name, module in template(arch, True).named_modules():
        if isinstance(module, _BatchNorm):  # also instance normalisation that keeps statistics
            tracks = not isinstance(module, _INSTANCE) or module.track_running_stats
            if tracks:
                return f"its layer {name} ({type(module).__name__}) normalises by other samples, or keeps statistics of them"
    model = Model.init(arch, Key(0))
    masks = {layer: at_draw(torch.tensor(7), number) for number, layer in enumerate(dropout_layers(arch))}
    before = {name: value.clone() for name, value in model.buffers.items()}
    together, buffers = _run(model, three, masks)
    beside, _ = _run(model, _repeated(three), masks)
    if any(not torch.equal(buffers[name], value) for name, value in before.items()):
        return "it keeps something of the samples it is trained on (its buffers change)"
    if not torch.allclose(together[0], beside[0], rtol=1e-4, atol=1e-5, equal_nan=True):
        return "its output for a sample depends on the others of the batch"
    return ""


_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def _run(model: Model, x: Inputs, masks: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
    copy = Model(model.arch, model.params, {name: value.clone() for name, value in model.buffers.items()})
    with own_randomness(Key(0)), torch.no_grad():
        return copy(cast(x, copy), training=True, masks=masks), copy.buffers


def _repeated(x: Inputs) -> Inputs:
    """The first sample in everybody's place."""
    return {name: _repeated(value) for name, value in x.items()} if isinstance(x, Mapping) else x[torch.zeros(len(x)).long()]
