"""Means, sums, maxima, variances and running sums over dimensions: their nodes in a program."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fedme.execution.layout import Layout, of_any
from fedme.execution.lowering_functions import SELECTION, add, apply, combined
from fedme.execution.lowering_layers import pool
from fedme.execution.tracing import BATCH, Traced, TraceError

Dimensions = Sequence[int] | None


def _mean(layout: Layout, x: Traced, dimensions: Dimensions = None, keep: bool = False, dtype: Any = None) -> Tensor:
    return _reduced(layout, layout.addresses_of(x), dimensions, keep, 0)


def _sum(layout: Layout, x: Traced, dimensions: Dimensions = None, keep: bool = False, dtype: Any = None) -> Tensor:
    return _reduced(layout, layout.addresses_of(x), dimensions, keep, 1)


def _amax(layout: Layout, x: Traced, dimensions: Dimensions = None, keep: bool = False) -> Tensor:
    return _reduced(layout, layout.addresses_of(x), dimensions, keep, None)


def _max(layout: Layout, x: Traced, dimension: int | None = None, keep: bool = False) -> list[Tensor]:
    if not isinstance(dimension, int):
        raise TraceError("a maximum of two tensors, or over samples")
    return [_reduced(layout, layout.addresses_of(x), [dimension], keep, None)]


def _var(
    layout: Layout, x: Traced, dimensions: Dimensions = None, correction: float | None = 1, keepdim: bool = False
) -> Tensor:
    offset = layout.addresses_of(x)
    mean = _reduced(layout, offset, dimensions, True, 0)
    squares = apply(layout, combined(layout, offset, mean, 0, -1.0), "square")
    total = _reduced(layout, squares, dimensions, keepdim, 1)
    count = offset.numel() // total.numel() - (1 if correction is None else correction)
    if count <= 0:
        raise TraceError("a variance of so few numbers that there is none")
    return apply(layout, total, "affine", 1.0 / count)


def _std(
    layout: Layout, x: Traced, dimensions: Dimensions = None, correction: float | None = 1, keepdim: bool = False
) -> Tensor:
    return _root(layout, _var(layout, x, dimensions, correction, keepdim))


def _root(layout: Layout, squares: Tensor) -> Tensor:
    """The square root; at zero it has no derivative, and torch gives these numbers the gradient zero."""
    root = apply(layout, add(layout, squares, apply(layout, squares, "equal")), "sqrt")
    return combined(layout, root, squares, SELECTION, 0.0)


def _norm(
    layout: Layout, x: Traced, order: float = 2, dimensions: Dimensions = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    if order not in (1, 2):
        raise TraceError(f"a norm of order {order}")
    sizes = apply(layout, layout.addresses_of(x), "square" if order == 2 else "abs")
    total = _reduced(layout, sizes, dimensions, keepdim, 1)
    return _root(layout, total) if order == 2 else total


def _var_mean(
    layout: Layout, x: Traced, dimensions: Dimensions = None, correction: float | None = 1, keepdim: bool = False
) -> list[Tensor]:
    return [_var(layout, x, dimensions, correction, keepdim), _mean(layout, x, dimensions, keepdim)]


def _cumsum(layout: Layout, x: Traced, dimension: int, dtype: Any = None) -> Tensor:
    return _running_sum(layout, layout.addresses_of(x), dimension)


def _running_sum(layout: Layout, addresses: Tensor, dimension: int) -> Tensor:
    """Every number is the sum in a window that begins at the first."""
    if layout.is_alone(addresses):
        return of_any(_running_sum(layout, layout.every(addresses), dimension % addresses.dim() + 1))
    offset = addresses.movedim(dimension, -1)
    rows, order = _by_sample(layout, offset, offset.shape[-1])
    windows = [range(end + 1) for end in range(rows.shape[2])]
    sums = pool(layout, rows, windows, [range(1)], [1] * len(windows))
    return sums.flatten(0, 1)[order.argsort()].view(offset.shape).movedim(-1, dimension)


def _reduced(layout: Layout, offset: Tensor, dimensions: Dimensions, keep: bool, divisor: int | None) -> Tensor:
    """The mean (divisor 0), sum (1) or maximum (None) over dimensions."""
    reduced = sorted(d % offset.dim() for d in (dimensions or range(offset.dim())))
    if layout.is_alone(offset):
        return of_any(_reduced(layout, layout.every(offset), [d + 1 for d in reduced], keep, divisor))
    kept = [d for d in range(offset.dim()) if d not in reduced]
    rows, order = _by_sample(layout, offset.permute(*kept, *reduced), math.prod(offset.shape[d] for d in reduced))
    divisors = [] if divisor is None else [divisor or rows.shape[2]]
    pooled = pool(layout, rows, [range(rows.shape[2])], [range(1)], divisors).flatten()
    shape = [1 if d in reduced else size for d, size in enumerate(offset.shape) if keep or d not in reduced]
    return pooled[order.argsort()].reshape(shape)


def _by_sample(layout: Layout, addresses: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Rows of so many numbers as samples x rows x width x 1, and the order that they have there."""
    rows, samples = addresses.reshape(-1, width), layout.batch(addresses).reshape(-1, width)
    if not bool((samples == samples[:, :1]).all()):
        raise TraceError("a mean, sum or maximum over samples")
    order = samples[:, 0].argsort(stable=True)
    return rows[order].reshape(BATCH, -1, width, 1), order


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "mean": _mean,
    "sum": _sum,
    "amax": _amax,
    "max": _max,
    "var": _var,
    "std": _std,
    "var_mean": _var_mean,
    "cumsum": _cumsum,
    "linalg_vector_norm": _norm,
}
