"""The memory format of images and convolutions: channels-last where it is faster on a processor.

Convolutions whose windows overlap are faster in channels-last format: 1.1 to 1.6 times for whole networks. Networks whose
convolutions only cut images into patches (vision transformers), and those without convolutions, are faster in the ordinary
format. The choice depends on the architecture alone, so that a result does not depend on where it is computed.
"""

import functools

import torch
from torch import Tensor, nn

from fedme.core.data import Arrays, Split
from fedme.core.model import Arch, Model, build_template, template

Shape = tuple[int, ...]


def sample_shape(data: Split) -> Shape | None:
    """The shape of an input; None if there is none, or if it is not one tensor."""
    x = (
        data.source.x
        if isinstance(data.source, Arrays)
        else data.inputs(torch.zeros(1, dtype=torch.int64))
        if len(data)
        else None
    )
    return tuple(x.shape[1:]) if isinstance(x, Tensor) else None


@functools.lru_cache(maxsize=256)
def prefers_channels_last(arch: Arch, shape: Shape | None) -> bool:
    """Whether the network has a two-dimensional convolution whose windows overlap, and works in this format.

    Not all do: `view` of a feature map fails. Group normalisation is slow in this format, and the backward pass of torch 2.13
    crashes if its inputs need no gradient.
    """
    if shape is None or len(shape) != 3:
        return False
    modules = list(template(arch, True).modules())
    layers = [m for m in modules if isinstance(m, nn.Conv2d | nn.ConvTranspose2d)]
    overlapping = any(size > stride for m in layers for size, stride in zip(m.kernel_size, m.stride, strict=True))
    return overlapping and not any(isinstance(m, nn.GroupNorm) for m in modules) and _works(arch, shape)


def _works(arch: Arch, shape: Shape) -> bool:
    network = build_template(arch, False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.zeros((2, *shape), dtype=next(network.parameters()).dtype)
    try:
        with torch.inference_mode():
            network(_channels_last(x))
    except Exception:  # a user's network may raise anything; what is wrong in any format is said where it runs
        return False
    return True


def formatted(model: Model, shape: Shape | None) -> Model:
    """The model with its weights in the memory format of its architecture for inputs of this shape."""
    if not prefers_channels_last(model.arch, shape):
        return model
    return model.with_params({name: _channels_last(p) for name, p in model.params.items()})


def formatted_inputs(x: Tensor, arch: Arch) -> Tensor:
    """Inputs in the memory format of the architecture."""
    return _channels_last(x) if prefers_channels_last(arch, tuple(x.shape[1:])) else x.contiguous()


def _channels_last(x: Tensor) -> Tensor:
    if x.dim() != 4:
        return x
    if x.shape[1] == 1 and x.is_contiguous():  # it has both formats at once: make the strides say which one is meant
        return x.as_strided(x.shape, (x.shape[2] * x.shape[3], 1, x.shape[3], 1))
    return x.contiguous(memory_format=torch.channels_last)
