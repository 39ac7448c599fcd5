"""Networks of several widths: a narrow one has the leading part of every layer of the widest."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedme.core.method import TaskError
from fedme.core.model import Arch, Model, template
from fedme.learning.partial_model import head_of


def region(value: Tensor) -> tuple[slice, ...]:
    """Where a narrow weight is in the widest one."""
    return tuple(slice(0, size) for size in value.shape)


def narrowed(widest: Model, arch: Arch) -> Model:
    """The leading part of every weight and buffer, as wide as in `arch`."""
    if arch == widest.arch:
        return widest
    network = template(arch, False)
    shapes = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    params, buffers = (
        {name: value[region(shapes[name])].clone() for name, value in of.items()} for of in (widest.params, widest.buffers)
    )
    return Model(arch, params, buffers)


def require_slice(arch: Arch, widest: Arch, client: str) -> None:
    """Raise a TaskError that names the weight if a network is no slice of the widest one."""
    narrow_shapes, wide_shapes = (_shapes(network) for network in (arch, widest))
    for name in {**wide_shapes, **narrow_shapes}:
        small, large = narrow_shapes.get(name), wide_shapes.get(name)
        fits = small is not None and large is not None and len(small) == len(large)
        if not fits or any(a > b for a, b in zip(small or (), large or (), strict=True)):
            if small is None or large is None:
                differ = f"is in {(widest if small is None else arch).name} only"
            else:
                differ = f"has shape {small}, there {large}"
            raise TaskError(
                f"client {client}: {arch.name} is no slice of the widest network, {widest.name}: {name} {differ}; "
                "use one network in several widths, such as dnn-16 and dnn-8, or cnn-2 and cnn-2(width=0.5)"
            )


def _shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    network = template(arch, False)
    return {name: tuple(value.shape) for name, value in (*network.named_parameters(), *network.named_buffers())}


def rates(arch: Arch, widest: Arch) -> dict[str, float]:
    """The part of the widest network's units that every hidden layer has; layers that have all are left out."""
    layers, head = dict(template(widest, False).named_modules()), head_of(arch).removesuffix(".")
    result = {}
    for name, layer in template(arch, False).named_modules():
        if isinstance(layer, nn.Linear | _ConvNd) and name != head and len(layer.weight) < len(layers[name].weight):
            result[name] = len(layer.weight) / len(layers[name].weight)
    return result


@dataclass(frozen=True)
class WithScalers:
    """Builds a network whose hidden layers divide their outputs by their rates; it is used for training only."""

    factory: Callable[..., nn.Module]
    rates: tuple[tuple[str, float], ...]

    def __call__(self, **options: Any) -> nn.Module:
        network = self.factory(**options)
        for name, rate in self.rates:
            layer = network.get_submodule(name)
            layer.forward = functools.partial(_divided, rate, layer.forward)  # not by a hook: those are not batched
        return network


def _divided(rate: float, forward: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    return forward(inputs) / rate


def scaled(model: Model, rates: Mapping[str, float]) -> Model:
    """The same model with scalers. It exists while it is trained, and is in no state and no message."""
    arch = model.arch
    if not rates:
        return model
    factory, name = WithScalers(arch.factory, tuple(rates.items())), f"{arch.name} with scalers"
    return Model(Arch.named(name, factory, **dict(arch.options)), model.params, model.buffers)
