"""A network of standard layers as data: an `nn.Sequential` (or one layer) with the arguments of its layers, as JSON holds them.

A network is rebuilt from such data with the classes in `LAYERS` only. Nothing in the data is imported or evaluated.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fedme.core.model import HOOKS
from fedme.networks.input_sizes import ArchError
from fedme.networks.lookup import SkipNormalInit

_1D, _2D, _3D = "1d", "2d", "3d"
_BY_DIMENSION = (
    "Conv", "ConvTranspose", "MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "BatchNorm", "InstanceNorm", "Dropout",
    "ZeroPad", "ConstantPad", "ReflectionPad", "ReplicationPad", "CircularPad",
)  # fmt: skip
_NAMES = (
    *(name + dimension for name in _BY_DIMENSION for dimension in (_1D, _2D, _3D)),
    "Linear", "Embedding", "Identity", "Flatten", "Unflatten", "Upsample", "PixelShuffle", "PixelUnshuffle", "ChannelShuffle",
    "LayerNorm", "GroupNorm", "RMSNorm", "LocalResponseNorm", "LPPool1d", "LPPool2d",
    "Dropout", "AlphaDropout", "FeatureAlphaDropout",
    "ReLU", "ReLU6", "LeakyReLU", "PReLU", "RReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "GLU", "Threshold",
    "Softplus", "Softsign", "Softshrink", "Hardshrink", "Hardtanh", "Hardsigmoid", "Hardswish", "Sigmoid", "LogSigmoid", "Tanh",
    "Tanhshrink", "Softmax", "Softmin", "LogSoftmax", "Softmax2d",
)  # fmt: skip
LAYERS: Mapping[str, type[nn.Module]] = {name: getattr(nn, name) for name in _NAMES}
SEQUENTIAL = "Sequential"
WHOLE = ""  # the name of a layer that is a network by itself
NOT_DATA = {"device", "dtype", "args", "kwargs", "_weight", "_freeze"}  # arguments that say nothing about the structure
MAX_DEPTH = 50  # of nested Sequentials, in data that may come from an untrusted file

Layer = list[Any]  # [name, class, arguments], or [name, "Sequential", layers]


def layers_of(module: nn.Module) -> list[Layer] | None:
    """The layers of an `nn.Sequential`, or a layer by itself, from which `from_layers` makes an equal network.

    None if the network consists of anything else.
    """
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    if len({id(tensor) for _, tensor in tensors}) < len(tensors):  # tied weights
        return None
    try:
        layers = _listed(module)
        with torch.device("meta"), SkipNormalInit():  # no memory, no weights
            rebuilt = from_layers(layers)
    except ArchError:
        return None
    # Whoever changed a layer after it was made (another forward, another weight) has no network of standard layers.
    return layers if _parts(rebuilt) == _parts(module) and _listed(rebuilt) == layers else None


def from_layers(layers: Any) -> nn.Module:
    """The network with these layers, as `layers_of` lists them; its weights are random. ArchError if they are invalid."""
    is_layer = isinstance(layers, list) and len(layers) == 1 and isinstance(layers[0], list) and len(layers[0]) == 3
    return _layer(*layers[0][1:]) if is_layer and layers[0][0] == WHOLE else _sequential(layers, 0)


def without_weights(build: Callable[[], nn.Module]) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights and buffers of the network that `build` makes; no memory is allocated for them."""
    with torch.device("meta"), SkipNormalInit():
        module = build()
    return {name: tuple(tensor.shape) for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def _listed(module: nn.Module) -> list[Layer]:
    return _layers(module) if type(module) is nn.Sequential else [_described(WHOLE, module)]


def _layers(sequential: nn.Module) -> list[Layer]:
    listed: list[Layer] = []
    for name, layer in sequential._modules.items():  # `named_children` would leave out a layer that is used twice
        if isinstance(layer, nn.Sequential) and type(layer) is nn.Sequential:
            listed.append([name, SEQUENTIAL, _layers(layer)])
        else:
            listed.append(_described(name, layer))
    return listed


def _described(name: str, layer: Any) -> Layer:
    if LAYERS.get(type(layer).__name__) is not type(layer):
        raise ArchError(f"layer '{name}' is a {type(layer).__name__}, which is not a standard layer")
    return [name, type(layer).__name__, _arguments(layer)]


def _arguments(layer: nn.Module) -> dict[str, Any]:
    """The arguments that the layer was made with, from its attributes."""
    arguments = {}
    for name, parameter in _parameters(type(layer).__name__).items():
        value = getattr(layer, name, parameter.default)
        value = value is not None if name == "bias" else value
        if isinstance(value, float) and not math.isfinite(value):
            raise ArchError(f"'{name}' of a layer is {value}, which JSON cannot hold")
        arguments[name] = list(value) if isinstance(value, tuple) else value
        _check(type(layer).__name__, name, arguments[name])
    return arguments


@functools.cache
def _parameters(kind: str) -> dict[str, inspect.Parameter]:
    given = inspect.signature(LAYERS[kind]).parameters.items()
    return {name: parameter for name, parameter in given if name not in NOT_DATA}


def _parts(module: nn.Module) -> list[Any]:
    """What `layers_of` compares: the attributes, hooks, and shapes of every layer."""
    parts: list[Any] = []
    for name, child in module.named_modules(remove_duplicate=False):
        tensors = {**child._parameters, **child._buffers}
        shapes = {key: None if tensor is None else tuple(tensor.shape) for key, tensor in tensors.items()}
        parts.append((name, type(child), sorted(vars(child)), [len(vars(child).get(hooks, ())) for hooks in HOOKS], shapes))
    return parts


def _sequential(layers: Any, depth: int) -> nn.Sequential:
    if not isinstance(layers, list):
        raise ArchError(f"the layers of a network must be a list, got {type(layers).__name__}")
    if depth > MAX_DEPTH:
        raise ArchError(f"Sequentials may be nested {MAX_DEPTH} deep, got more")
    sequential = nn.Sequential()
    for layer in layers:
        if not isinstance(layer, list) or len(layer) != 3 or not isinstance(layer[0], str):
            raise ArchError(f"a layer must be [name, class, arguments], got {str(layer)[:100]}")
        name, kind, arguments = layer
        if name in sequential._modules:
            raise ArchError(f"two layers are called {name!r}")
        made = _sequential(arguments, depth + 1) if kind == SEQUENTIAL else _layer(kind, arguments)
        try:
            sequential.add_module(name, made)
        except KeyError as error:
            raise ArchError(f"invalid name of a layer: {name!r}") from error
    return sequential


def _layer(kind: Any, arguments: Any) -> nn.Module:
    if not isinstance(kind, str) or kind not in LAYERS:
        raise ArchError(f"{str(kind)[:50]!r} is not a standard layer")
    if not isinstance(arguments, dict):
        raise ArchError(f"the arguments of {kind} must be a table, got {type(arguments).__name__}")
    known = _parameters(kind)
    for name, value in arguments.items():
        if name not in known:
            raise ArchError(f"{kind} has no argument '{str(name)[:50]}'")
        _check(kind, name, value)
    try:
        return LAYERS[kind](**{key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()})
    except (
        TypeError,
        ValueError,
        RuntimeError,
        AssertionError,
        OverflowError,
        ZeroDivisionError,
        NotImplementedError,
    ) as error:
        raise ArchError(f"{kind} cannot be made with {str(arguments)[:100]}: {error}") from error


def _check(kind: str, name: str, value: Any) -> None:
    """Check that an argument is a number, a text, true, false, nothing, or a list of numbers."""
    if value is None or isinstance(value, bool | int | float | str):
        return
    if not isinstance(value, list) or not all(item is None or isinstance(item, bool | int | float) for item in value):
        raise ArchError(f"argument '{name}' of {kind} must be a number, text or a list of numbers, got {str(value)[:50]}")
