"""Sharing a part of a model: the weights whose names start with a prefix travel, the others stay at the client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedme.core import tree
from fedme.core.data import ClientId
from fedme.core.method import TaskError
from fedme.core.model import Arch, Model, template


@dataclass(frozen=True)
class Part:
    """Some weights and buffers of a model, by name."""

    params: tree.Params
    buffers: tree.Params


def cut(model: Model, prefix: str) -> Part:
    """The weights and buffers of `model` whose names start with `prefix`."""
    params = {name: value for name, value in model.params.items() if name.startswith(prefix)}
    if not params:
        there = sorted({name.split(".")[0] + "." for name in model.params})
        raise TaskError(f"no weight of {model.arch.name} has a name starting with '{prefix}'; it has {', '.join(there)}")
    return Part(params, {name: value for name, value in model.buffers.items() if name.startswith(prefix)})


def rest(model: Model, prefix: str) -> Part:
    """The weights and buffers that `cut` leaves."""
    params = {name: value for name, value in model.params.items() if not name.startswith(prefix)}
    return Part(params, {name: value for name, value in model.buffers.items() if not name.startswith(prefix)})


def fork(arch: Arch, kept: Part, shared: Part) -> Model:
    """A model made of the part a client kept and the part it received."""
    return Model(arch, {**kept.params, **shared.params}, {**kept.buffers, **shared.buffers})


def require_same_part(archs: Mapping[ClientId, Arch], shared: Arch, prefix: str) -> None:
    """Raise a TaskError for clients whose architecture has other shapes in the shared part."""

    def shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in template(arch, False).named_parameters() if name.startswith(prefix)}

    expected = shapes(shared)
    for client, arch in archs.items():
        odd = [name for name, shape in shapes(arch).items() if expected.get(name) != shape]
        if odd:
            raise TaskError(
                f"client {client} cannot share '{prefix}' of {shared.name}: {odd[0]} depends on its number of classes; "
                f"choose a prefix without it"
            )


def merge(parts: Sequence[Part], weights: Sequence[float], combine: tree.Combine = tree.average) -> Part:
    """The weighted mean of parts; `combine` replaces the mean, for example by a robust one."""
    total = sum(weights)
    weights = [weight / total for weight in weights]
    buffers = combine([part.buffers for part in parts], weights) if parts[0].buffers else {}
    return Part(combine([part.params for part in parts], weights), buffers)
