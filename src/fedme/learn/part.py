"""The part of a model that clients share: the weights whose names start with a prefix. The rest stays where it is."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedme.core import tree
from fedme.core.method import TaskError
from fedme.core.model import Model


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


def fork(model: Model, part: Part) -> Model:
    """`model` with the shared weights replaced."""
    return Model(model.arch, {**model.params, **part.params}, {**model.buffers, **part.buffers})


def merge(parts: Sequence[Part], shares: Sequence[float]) -> Part:
    """The weighted mean of parts."""
    total = sum(shares)
    weights = [share / total for share in shares]
    buffers = tree.average([part.buffers for part in parts], weights) if parts[0].buffers else {}
    return Part(tree.average([part.params for part in parts], weights), buffers)
