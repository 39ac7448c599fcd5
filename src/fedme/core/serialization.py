"""Typed values as plain data plus named tensors, and back: what checkpoints hold and what messages carry.

Reading follows the annotations of the expected type; architectures are looked up by name in a table that the reader brings.
Nothing that is read is ever unpickled, evaluated or imported.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from fedme.core.model import Arch, Model, WithFrozen, dropout_layers, frozen_weights, template
from fedme.core.typed import Leaf, TypedError, build

T = TypeVar("T")
Packed = Callable[[Any], Any]  # plain data for a value, or NotImplemented


def pack(value: Any, tensors: dict[str, Tensor], at: str = "", leaf: Packed = lambda value: NotImplemented) -> Any:
    """Plain data for `value`; its tensors are put in `tensors` under names made of their place. Equal objects once.

    `leaf` may take over for values of its own kinds.
    """
    return _pack(value, tensors, at, {id(tensor): name for name, tensor in tensors.items()}, leaf)


def _pack(value: Any, tensors: dict[str, Tensor], at: str, seen: dict[int, str], leaf: Packed) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if (taken := leaf(value)) is not NotImplemented:
        return taken
    if isinstance(value, Tensor):
        if id(value) not in seen:
            while at in tensors:  # keys may hold anything: "a/b" beside a table "a" with a key "b"
                at += "'"
            seen[id(value)] = at
            tensors[at] = value
        return seen[id(value)]
    if isinstance(value, Arch):
        return value.name
    if isinstance(value, Mapping):
        return {str(k): _pack(v, tensors, f"{at}/{k}", seen, leaf) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_pack(item, tensors, f"{at}/{i}", seen, leaf) for i, item in enumerate(value)]
    if isinstance(value, Model):  # the reader has the frozen weights of the architecture
        value = Plain(value.arch, value.params, value.own_buffers)
    if dataclasses.is_dataclass(value):
        kind: type = type(value)
        return {name: _pack(getattr(value, name), tensors, f"{at}/{name}", seen, leaf) for name in _names(kind)}
    raise TypeError(f"{at}: cannot be written (a {type(value).__name__})")


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@runtime_checkable
class Sketched(Protocol):
    """Weights that are not in memory yet, but say what they look like."""

    def sketch(self) -> Mapping[str, Tensor]:
        """Tensors of the same types and shapes, without numbers."""
        ...


@dataclass(frozen=True)
class Plain:
    """A model whose weights have not been looked at."""

    arch: Arch
    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def fitting(plain: Plain, at: str) -> Model:
    """The model, if its weights are those of its architecture: the same names and shapes."""
    network = template(plain.arch, False)
    seeds = {f"{layer}.seed" for layer in dropout_layers(plain.arch)}
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    kept = {name: p for name, p in [*network.named_parameters(), *network.named_buffers()] if name not in {*trained, *seeds}}
    sketches = [weights.sketch() if isinstance(weights, Sketched) else weights for weights in (plain.params, plain.buffers)]
    dtype = next((value.dtype for value in sketches[0].values()), torch.float32)
    left_out = {name: value for name, value in frozen_weights(plain.arch, dtype).items() if name not in sketches[1]}
    for wanted, given in ((trained, sketches[0]), (kept, {**sketches[1], **left_out})):
        for name in [*wanted, *given]:
            expected, actual = _looks(wanted.get(name)), _looks(given.get(name))
            if expected != actual:
                raise TypedError(f"{at}.{name}", f"does not fit {plain.arch.name}: {expected} expected, {actual} given")
    return Model(plain.arch, plain.params, WithFrozen(plain.buffers, left_out) if left_out else plain.buffers)


def _looks(tensor: Tensor | None) -> str:
    if tensor is None:
        return "nothing"
    return f"shape {tuple(tensor.shape)}" + ("" if tensor.is_floating_point() else " of whole numbers")


def unpack(
    kind: type[T],
    plain: Any,
    tensors: Mapping[str, Tensor],
    archs: Mapping[str, Arch],
    at: str = "",
    own: Leaf = lambda kind, value, at: NotImplemented,
) -> T:
    """The value of type `kind` that `pack` turned into `plain` and `tensors`; `own` reads what its `leaf` wrote."""

    def leaf(kind: Any, value: Any, at: str) -> Any:
        if (taken := own(kind, value, at)) is not NotImplemented:
            return taken
        if kind is Tensor:
            if not isinstance(value, str) or value not in tensors:
                raise TypedError(at, f"names a tensor that is not there: {value!r}")
            return tensors[value]
        if kind is Model:
            return fitting(build(Plain, value, at, leaf), at)
        if kind is Arch:
            if not isinstance(value, str) or value not in archs:
                raise TypedError(at, f"unknown architecture {value!r}; known: {', '.join(archs)}")
            return archs[value]
        return NotImplemented

    return cast(T, build(kind, plain, at, leaf))
