"""Arithmetic over named tensors, and the size of messages.

Everything here is elementwise except `norm` and `dot`, so it runs unchanged on one client's weights or on a stack of many
clients' weights; these two (and `clip`, which needs a norm) take `lead`, the number of leading axes that count clients: 0 or 1.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from fedme.core.flat_params import FlatParams, flat_params

Params = Mapping[str, Tensor]
SMALL = 1 << 12  # numbers of a model that are copied beside those of others in less time than an operation of its own takes
TOGETHER = 256  # of these models
Combine = Callable[[Sequence[Params], Sequence[float]], Params]  # trees and their weights, which add up to 1


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


def mix(a: Params, b: Params, weight: float) -> dict[str, Tensor]:
    """``weight * a + (1 - weight) * b``."""
    return add(scale(a, weight), b, 1.0 - weight)


def norm(a: Params, lead: int = 0) -> Tensor:
    """The L2 norm of all tensors together: one number, or one per client if a leading axis counts clients."""
    if not lead:
        return torch.stack(torch._foreach_norm(list(a.values()))).norm() if a else torch.zeros(())
    # A weight may be a scalar, and a stack may be empty.
    squares = [v.square().flatten(lead).sum(-1) if v.dim() > lead else v.square() for v in a.values()]
    return torch.stack(squares).sum(0).sqrt() if squares else torch.zeros(())


def dot(a: Params, b: Params, lead: int = 0) -> Tensor:
    """The dot product of all tensors together: one number, or one per client if a leading axis counts clients."""
    products = [(v * b[name]).flatten(lead).sum(-1) if v.dim() > lead else v * b[name] for name, v in a.items()]
    return torch.stack(products).sum(0) if products else torch.zeros(())


def distance(a: Params, b: Params) -> float:
    """The norm of `a` minus `b` over the floating-point tensors of `a`."""
    flat, other = flat_params(a), flat_params(b)
    if flat is not None and other is not None and flat.layout is other.layout:
        return torch.dist(flat.flat, other.flat).item()
    # One difference at a time: all of them together would take the memory of a model.
    norms = [(value - b[name]).norm() for name, value in a.items() if value.is_floating_point()]
    return float(torch.stack(norms).norm()) if norms else 0.0


def distances(pairs: Sequence[tuple[Params, Params]]) -> list[float]:
    """The distance of every pair, with the same bits; those of small models of one layout in few operations."""
    result = [0.0] * len(pairs)
    alike: dict[Any, list[tuple[int, Tensor, Tensor]]] = {}
    for index, (a, b) in enumerate(pairs):
        flat, other = flat_params(a), flat_params(b)
        if flat is None or other is None or flat.layout is not other.layout or flat.layout.size > SMALL:
            result[index] = distance(a, b)
        else:
            alike.setdefault(flat.layout, []).append((index, flat.flat, other.flat))
    for group in alike.values():
        indices, after, before = zip(*group, strict=True)
        for start in range(0, len(group), TOGETHER):
            some = slice(start, start + TOGETHER)
            norms = torch.linalg.vector_norm(torch.stack(after[some]).sub_(torch.stack(before[some])), dim=1).tolist()
            for index, of_one in zip(indices[some], norms, strict=True):
                result[index] = of_one
    return result


def clip(a: Params, limit: float, lead: int = 0) -> dict[str, Tensor]:
    """`a` scaled, per client, so that its norm is at most `limit`."""
    factor = (limit / (norm(a, lead) + 1e-6)).clamp(max=1.0)
    if not lead and bool(factor == 1.0):
        return dict(a)
    return {name: value * factor.reshape(factor.shape + (1,) * (value.dim() - lead)) for name, value in a.items()}


def average(trees: Sequence[Params], weights: Sequence[float]) -> Params:
    """The weighted mean of floating-point tensors; integer tensors (counters) are taken from the first tree."""
    flats = [flat_params(tree) for tree in trees]
    if flats[0] is not None and all(flat is not None and flat.layout is flats[0].layout for flat in flats):
        return _flat_average(flats, weights)  # type: ignore[arg-type]
    if any(hasattr(tree, "peek") for tree in trees):
        return _average_by_name(trees, weights)
    names = [name for name, value in trees[0].items() if value.is_floating_point()]
    total = scale({name: trees[0][name] for name in names}, weights[0])
    for tree, share in zip(trees[1:], weights[1:], strict=True):
        if names:
            torch._foreach_add_(list(total.values()), [tree[name] for name in names], alpha=share)
    return {name: total.get(name, value) for name, value in trees[0].items()}


def _flat_average(trees: Sequence[FlatParams], weights: Sequence[float]) -> FlatParams:
    if len(trees) == 1 and weights[0] == 1.0:
        return trees[0]
    total = trees[0].flat * weights[0]
    for tree, share in zip(trees[1:], weights[1:], strict=True):
        total.add_(tree.flat, alpha=share)
    return FlatParams(trees[0].layout, total)


def _average_by_name(trees: Sequence[Params], weights: Sequence[float]) -> Params:
    """The same for trees that may be in files: one tensor of each is in memory at a time."""
    result = {}
    for name in trees[0]:
        total = _peek(trees[0], name)
        if total.is_floating_point():
            total = total * weights[0]
            for tree, share in zip(trees[1:], weights[1:], strict=True):
                total.add_(_peek(tree, name), alpha=share)
        result[name] = total
    return result


def _peek(params: Params, name: str) -> Tensor:
    """One tensor, without the others where they are in a file (`running/weight_store.py`)."""
    peek: Callable[[str], Tensor] = getattr(params, "peek", params.__getitem__)
    return peek(name)


def leaves(value: Any, at: str = "", opaque: tuple[type, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every leaf of a message with its place: tensors, numbers, texts, and values of the types in `opaque`."""
    if isinstance(value, (str, int, float, *opaque)):  # in the order in which tests are fast
        yield at, value
    elif (fields := message_fields(type(value))) is not None:
        for name in fields:
            yield from leaves(getattr(value, name), f"{at}.{name}" if at else name, opaque)
    elif isinstance(value, Tensor):
        yield at, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from leaves(item, f"{at}.{name}" if at else str(name), opaque)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from leaves(item, f"{at}[{i}]", opaque)
    else:
        yield at, value


def is_message(value: Any) -> bool:
    """Whether a value has fields that travel. An architecture has fields, but travels as its name."""
    return message_fields(type(value)) is not None


def message_fields(kind: type) -> tuple[str, ...] | None:
    """The names of the fields of values of this type that travel; None if it is no message."""
    if kind not in _message_fields:
        fields: Mapping[str, Any] | None = None if hasattr(kind, "__wire__") else getattr(kind, "__dataclass_fields__", None)
        _message_fields[kind] = None if fields is None else tuple(fields)
    return _message_fields[kind]


_message_fields: dict[type, tuple[str, ...] | None] = {}


def not_finite(value: Any) -> Iterator[str]:
    """The places of a message that hold a NaN or infinite value."""
    for at, leaf in leaves(value):
        if isinstance(leaf, Tensor):
            if leaf.is_floating_point() and not _is_finite(leaf):
                yield at
        elif isinstance(leaf, float) and not math.isfinite(leaf):
            yield at


def is_finite(params: Params) -> bool:
    """Whether no weight is NaN or infinite."""
    flat = flat_params(params)
    return _is_finite(flat.flat) if flat is not None else next(not_finite(params), None) is None


def _is_finite(x: Tensor) -> bool:
    """Whether all values are finite. A finite sum proves it and is faster; a sum of large values may overflow."""
    return math.isfinite(x.sum().item()) or bool(x.isfinite().all())


_SIZES = {type(None): 1, bool: 1, int: 8, float: 8}


def nbytes(value: Any) -> int:
    """The size of a message in bytes: its tensors, 8 bytes per number, and its texts and names."""
    kind = type(value)
    if (size := _SIZES.get(kind)) is not None:
        return size
    if kind is str:
        return len(value) if value.isascii() else len(value.encode())
    if (fields := message_fields(kind)) is not None:
        if hasattr(kind, "nbytes"):  # a model
            return int(value.nbytes)
        total = 0
        for name in fields:
            item = getattr(value, name)
            size = _SIZES.get(type(item))
            total += nbytes(item) if size is None else size
        return total
    if isinstance(value, (int, float)):
        return 8
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, FlatParams):
        return value.layout.nbytes
    if hasattr(value, "__wire__"):  # an architecture travels as its name
        return nbytes(value.__wire__())
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, Mapping):
        value = value.sketch() if hasattr(value, "sketch") else value  # of weights that may be in a file
        flat = flat_params(value)
        return flat.layout.nbytes if flat is not None else sum(nbytes(k) + nbytes(v) for k, v in value.items())
    if isinstance(value, Sequence | Set):
        return sum(nbytes(item) for item in value)
    raise TypeError(f"a message cannot hold a {type(value).__name__}")
