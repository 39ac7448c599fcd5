"""Arithmetic over named tensors, and the size of any value that travels.

Everything here is elementwise except `norm`, so it runs unchanged on one client's weights or on a stack of many clients'
weights; `norm` (and `clip`, which needs it) takes `lead`, the number of leading axes that count clients (0 or 1).
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

Params = Mapping[str, Tensor]
Combine = Callable[[Sequence[Params], Sequence[float]], dict[str, Tensor]]  # trees and their shares, which add up to 1


def zeros(a: Params) -> dict[str, Tensor]:
    """Zeros shaped like `a`."""
    return {name: torch.zeros_like(value) for name, value in a.items()}


def scale(a: Params, factor: float) -> dict[str, Tensor]:
    """`a` times `factor`."""
    return dict(zip(a, torch._foreach_mul(list(a.values()), factor), strict=True)) if a else {}


def add(a: Params, b: Params, factor: float = 1.0) -> dict[str, Tensor]:
    """`a` plus `factor` times `b`, for the names of `a`."""
    if not a:
        return {}
    return dict(zip(a, torch._foreach_add(list(a.values()), [b[name] for name in a], alpha=factor), strict=True))


def sub(a: Params, b: Params) -> dict[str, Tensor]:
    """`a` minus `b`."""
    return add(a, b, -1.0)


def mix(a: Params, b: Params, share: float) -> dict[str, Tensor]:
    """`share` of `a` and the rest of `b`."""
    return add(scale(a, share), b, 1.0 - share)


def norm(a: Params, lead: int = 0) -> Tensor:
    """The L2 norm of all of `a` together: one number, or one a client when a leading axis counts clients."""
    if not lead:
        return torch.stack(torch._foreach_norm(list(a.values()))).norm() if a else torch.zeros(())
    # A weight may be a single number, and a stack may have no client left.
    squares = [v.square().flatten(lead).sum(-1) if v.dim() > lead else v.square() for v in a.values()]
    return torch.stack(squares).sum(0).sqrt() if squares else torch.zeros(())


def clip(a: Params, limit: float, lead: int = 0) -> dict[str, Tensor]:
    """`a` shrunk, client by client, so that its norm is at most `limit`."""
    factor = (limit / (norm(a, lead) + 1e-6)).clamp(max=1.0)
    if not lead and bool(factor == 1.0):
        return dict(a)
    return {name: value * factor.reshape(factor.shape + (1,) * (value.dim() - lead)) for name, value in a.items()}


def average(trees: Sequence[Params], weights: Sequence[float]) -> dict[str, Tensor]:
    """The weighted mean of floating tensors; integer tensors (counters) are taken from the first."""
    names = [name for name, value in trees[0].items() if value.is_floating_point()]
    total = scale({name: trees[0][name] for name in names}, weights[0])
    for tree, share in zip(trees[1:], weights[1:], strict=True):
        total = add(total, tree, share)
    return {name: total.get(name, value) for name, value in trees[0].items()}


def leaves(value: Any, at: str = "", whole: tuple[type, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every tensor, number and text of a message, and its place; what is of a type in `whole` is not taken apart."""
    if isinstance(value, whole):
        yield at, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from leaves(item, f"{at}.{name}" if at else str(name), whole)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from leaves(item, f"{at}[{i}]", whole)
    elif dataclasses.is_dataclass(value) and not hasattr(value, "__wire__"):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{at}.{field.name}" if at else field.name, whole)
    else:
        yield at, value


def not_finite(value: Any) -> Iterator[str]:
    """The places of a message that hold a number which is none: not a number, or infinite."""
    for at, leaf in leaves(value):
        if isinstance(leaf, Tensor):
            if leaf.is_floating_point() and not _is_finite(leaf):
                yield at
        elif isinstance(leaf, float) and not math.isfinite(leaf):
            yield at


def _is_finite(x: Tensor) -> bool:
    """A sum is finite only if all numbers are, and several times faster; that of large numbers may be infinite all the same."""
    return math.isfinite(x.sum().item()) or bool(x.isfinite().all())


def nbytes(value: Any) -> int:
    """Bytes a message takes: its tensors, 8 bytes a number, the text of its names."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, bytes):
        return len(value)
    if value is None or isinstance(value, bool):
        return 1
    if isinstance(value, int | float):
        return 8
    if isinstance(value, Mapping):
        return sum(nbytes(k) + nbytes(v) for k, v in value.items())
    if isinstance(value, Sequence | Set):
        return sum(nbytes(item) for item in value)
    if hasattr(value, "__wire__"):  # an architecture travels as its name
        return nbytes(value.__wire__())
    if dataclasses.is_dataclass(value):
        return sum(nbytes(getattr(value, field.name)) for field in dataclasses.fields(value))
    raise TypeError(f"a message cannot hold a {type(value).__name__}")
