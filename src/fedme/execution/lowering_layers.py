"""Linear layers, convolutions, normalisation and pooling: their nodes in a program."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedme.execution.layout import PLACE, VALUE_BITS, ZERO, Layout, samples_of
from fedme.execution.program import Node
from fedme.execution.tracing import BATCH, Traced, TraceError


def _constant_pad_nd(layout: Layout, x: Traced, pad: Sequence[int], value: float = 0) -> Tensor:
    if value:
        raise TraceError("padding with other numbers than zero")
    return layout.with_samples(torch.nn.functional.pad(layout.addresses_of(x), list(pad), value=ZERO << VALUE_BITS))


def _parts(layout: Layout, weight: Tensor, bias: Tensor | None) -> dict[str, Any]:
    """The parameters of a node that are these weights."""
    parts = [(None, 0) if part is None else layout.part_of_weight(part) for part in (weight, bias)]
    return {"parameters": tuple(name for name, _ in parts), "starts": tuple(start for _, start in parts)}


def _linear(layout: Layout, x: Traced, weight: Traced, bias: Traced | None) -> Tensor:
    matrix, offset = layout.addresses_of(weight), layout.addresses_of(x)
    parts = _parts(layout, matrix.t(), None if bias is None else layout.addresses_of(bias))
    if offset.dim() != 2:
        raise TraceError("a product of tensors that are not matrices")
    samples = layout.batch(offset)
    if not bool((samples == samples[:, :1]).all()):
        raise TraceError("samples of a batch are mixed")
    inputs, outputs = matrix.shape
    per_sample = len(offset) // BATCH
    if per_sample == 1:
        offset = layout.natural(offset)
        value = layout.value_of(offset)
        table = (offset[samples[:, 0] == 0][0] & PLACE).tolist()
        result, places = layout.new_rows(1, outputs)
        layout.add(Node("dense", (value,), result, numbers=(outputs, 0), table=tuple(table), **parts))
    else:
        offset = layout.rows(offset)
        value = layout.value_of(offset)
        result, places = layout.new_rows(per_sample, outputs)
        padded = layout.padded(inputs)
        numbers = (inputs, 1, per_sample, 1, per_sample * padded, padded, outputs, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1)
        layout.add(Node("convolution", (value,), result, numbers=numbers, **parts))
    row = (offset[:, 0] & PLACE) // layout.padded(inputs) if per_sample > 1 else torch.zeros(len(offset), dtype=torch.int64)
    return places[samples[:, 0], row]


def _addmm(layout: Layout, bias: Traced, x: Traced, weight: Traced, beta: float = 1, alpha: float = 1) -> Tensor:
    if (beta, alpha) != (1, 1):
        raise TraceError("a scaled matrix product")
    return _linear(layout, x, weight, bias)


def _mm(layout: Layout, x: Traced, weight: Traced) -> Tensor:
    return _linear(layout, x, weight, None)


def _convolution(
    layout: Layout,
    x: Traced,
    weight: Traced,
    bias: Traced | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    offset, windows = layout.addresses_of(x), layout.addresses_of(weight)
    shift = None if bias is None else layout.addresses_of(bias)
    if transposed or windows.dim() not in (3, 4):
        raise TraceError("a transposed or three-dimensional convolution")
    in_one_dimension = windows.dim() == 3
    if in_one_dimension:  # a map of one row
        offset, windows = offset.unsqueeze(2), windows.unsqueeze(2)
        stride, padding, dilation = ((given, *values) for given, values in ((1, stride), (0, padding), (1, dilation)))
    if max(stride) > 1 and max(dilation) > 1:
        raise TraceError("a convolution with both stride and dilation")
    geometry = (tuple(stride), tuple(padding), tuple(dilation))
    if groups > 1 and not groups == offset.shape[1] == len(windows):  # every group is a convolution
        shifts = [None] * groups if shift is None else shift.chunk(groups)
        given = zip(offset.chunk(groups, 1), windows.chunk(groups), shifts, strict=True)
        maps = torch.cat([_convolve(layout, *group, *geometry, "convolution") for group in given], 1)
    else:
        maps = _convolve(layout, offset, windows, shift, *geometry, "depthwise" if groups > 1 else "convolution")
    return maps.squeeze(2) if in_one_dimension else maps


def _convolve(
    layout: Layout,
    offset: Tensor,
    windows: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    node_type: str,
) -> Tensor:
    shape = windows.shape
    outputs, channels, rows, columns = shape[0], *offset.shape[1:]
    size = [
        (n + 2 * p - (k - 1) * d - 1) // s + 1
        for n, k, p, s, d in zip((rows, columns), shape[2:], padding, stride, dilation, strict=True)
    ]
    value, steps, natural = layout.value_of(offset), _steps(layout, offset), 0
    if value != 0 or steps is None:
        value, natural = layout.value_of(layout.channels_last(offset)), 1
        steps = (1, columns * layout.padded(channels), layout.padded(channels))
    result, places = layout.new_rows(size[0] * size[1], outputs)
    numbers = (channels, rows, columns, *steps, outputs, *shape[2:], *padding, *stride, *dilation, 0, natural)
    layout.add(Node(node_type, (value,), result, numbers=numbers, **_parts(layout, windows, bias)))
    maps: Tensor = places.transpose(1, 2).unflatten(2, size)
    return maps


def _steps(layout: Layout, addresses: Tensor) -> tuple[int, int, int] | None:
    """The strides of samples x channels x rows x columns, if they begin at place 0."""
    places = addresses[0] & PLACE
    steps = [int(places.select(d, 1).flatten()[0] - places.flatten()[0]) if places.shape[d] > 1 else 0 for d in range(3)]
    grids = [torch.arange(size).view([-1 if d == i else 1 for i in range(3)]) for d, size in enumerate(places.shape)]
    expected = torch.stack([step * grid.expand_as(places) for step, grid in zip(steps, grids, strict=True)]).sum(0)
    same = torch.equal(places, expected) and torch.equal(addresses, addresses[:1] + samples_of((BATCH, 1, 1, 1)))
    return (steps[0], steps[1], steps[2]) if same else None


def _channel_norm(layout: Layout, x: Traced, names: Sequence[Traced | None], groups: int, reals: tuple[float, float]) -> Tensor:
    rows = layout.channels_last(layout.addresses_of(x))
    result = layout.new_value(rows.shape[1], rows.shape[2])
    parameters = tuple(layout.parameter(name) for name in names)
    numbers = (rows.shape[1], rows.shape[2], groups, 0, int(len(parameters) > 2 and parameters[2] is not None))
    layout.add(Node("channel_norm", (layout.value_of(rows),), result, parameters, numbers, reals))
    return layout.like(rows, result).transpose(1, 2).reshape(x.shape)


def _native_batch_norm(
    layout: Layout, x: Traced, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> list[Tensor]:
    if not training:
        raise TraceError("batch normalisation with fixed statistics")
    return [_channel_norm(layout, x, (weight, bias, mean, variance), 0, (eps, momentum))]


def _native_group_norm(
    layout: Layout, x: Traced, weight: Any, bias: Any, samples: int, channels: int, positions: int, groups: int, eps: float
) -> list[Tensor]:
    return [_channel_norm(layout, x, (weight, bias), groups, (eps, 0.0))]


def _native_layer_norm(layout: Layout, x: Traced, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> list[Tensor]:
    flat = layout.addresses_of(x).flatten(-len(shape))
    rows = layout.rows(flat)
    value, width = layout.value_of(rows), flat.shape[-1]
    result = layout.new_value(layout.values[value].elements // width, width)
    parameters = (layout.parameter(weight), layout.parameter(bias))
    numbers = (layout.values[value].elements // width, width)
    layout.add(Node("row_norm", (value,), result, parameters, numbers, (eps,)))
    return [layout.like(rows, result).view(x.shape)]


def _pool(layout: Layout, x: Tensor, rows: list[range], columns: list[range], divisors: list[int]) -> Tensor:
    """Samples x channels x rows x columns; no divisors: the maximum."""
    maps = layout.channels_last(x)
    value = layout.value_of(maps)
    result, places = layout.new_rows(len(rows) * len(columns), x.shape[1])
    numbers = (x.shape[3], x.shape[1], len(rows), len(columns), int(bool(divisors)))
    table = [*(r.start for r in rows), *(r.stop for r in rows), *(c.start for c in columns), *(c.stop for c in columns)]
    layout.add(Node("pool", (value,), result, numbers=numbers, table=(*table, *divisors)))
    pooled: Tensor = places.transpose(1, 2).unflatten(2, (len(rows), len(columns)))
    return pooled


def _max_pool2d_with_indices(
    layout: Layout,
    x: Traced,
    window: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil: bool = False,
) -> list[Tensor]:
    if max(dilation) > 1:
        raise TraceError("max-pooling with dilation")
    maps = _as_maps(layout.addresses_of(x))
    lines = [_windows(*given, ceil) for given in _by_direction(maps, window, stride or window, padding)]
    return [_pool(layout, maps, lines[0][0], lines[1][0], []).reshape(_pooled_shape(layout, x, lines))]


def _avg_pool2d(
    layout: Layout,
    x: Traced,
    window: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    ceil: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Tensor:
    maps = _as_maps(layout.addresses_of(x))
    lines = [_windows(*given, ceil) for given in _by_direction(maps, window, stride or window, padding)]
    (rows, padded_rows), (columns, padded_columns) = lines
    divisors = [
        divisor or (padded_rows[r] * padded_columns[c] if count_include_pad else len(rows[r]) * len(columns[c]))
        for r in range(len(rows))
        for c in range(len(columns))
    ]
    return _pool(layout, maps, rows, columns, divisors).reshape(_pooled_shape(layout, x, lines))


def _pooled_shape(layout: Layout, x: Traced, lines: Sequence[tuple[list[range], list[int]]]) -> tuple[int, ...]:
    return (*x.shape[:-2], len(lines[0][0]), len(lines[1][0]))


def _adaptive_avg_pool2d(layout: Layout, x: Traced, size: Sequence[int]) -> Tensor:
    maps = _as_maps(layout.addresses_of(x))
    lines = [_adaptive_windows(n, out) for n, out in zip(maps.shape[2:], size, strict=True)]
    divisors = [len(r) * len(c) for r in lines[0] for c in lines[1]]
    return _pool(layout, maps, lines[0], lines[1], divisors).reshape(*x.shape[:-2], *size)


def _adaptive_max_pool2d(layout: Layout, x: Traced, size: Sequence[int]) -> list[Tensor]:
    maps = _as_maps(layout.addresses_of(x))
    lines = [_adaptive_windows(n, out) for n, out in zip(maps.shape[2:], size, strict=True)]
    return [_pool(layout, maps, lines[0], lines[1], []).reshape(*x.shape[:-2], *size)]


def _mean(layout: Layout, x: Traced, dimensions: Sequence[int] | None = None, keep: bool = False, dtype: Any = None) -> Tensor:
    return _reduce(layout, x, dimensions, keep, 0)


def _sum(layout: Layout, x: Traced, dimensions: Sequence[int] | None = None, keep: bool = False, dtype: Any = None) -> Tensor:
    return _reduce(layout, x, dimensions, keep, 1)


def _amax(layout: Layout, x: Traced, dimensions: Sequence[int] | None = None, keep: bool = False) -> Tensor:
    return _reduce(layout, x, dimensions, keep, None)


def _max(layout: Layout, x: Traced, dimension: int | None = None, keep: bool = False) -> list[Tensor]:
    if not isinstance(dimension, int):
        raise TraceError("a maximum of two tensors, or over samples")
    return [_reduce(layout, x, [dimension], keep, None)]


def _reduce(layout: Layout, x: Traced, dimensions: Sequence[int] | None, keep: bool, divisor: int | None) -> Tensor:
    """The mean (divisor 0), sum (1) or maximum (None) over dimensions."""
    offset = layout.addresses_of(x)
    reduced = sorted(d % offset.dim() for d in (range(offset.dim()) if dimensions is None else dimensions))
    kept = [d for d in range(offset.dim()) if d not in reduced]
    rows = offset.permute(*kept, *reduced).reshape(math.prod(offset.shape[d] for d in kept), -1)
    samples = layout.batch(offset).permute(*kept, *reduced).reshape(rows.shape)
    if not bool((samples == samples[:, :1]).all()):
        raise TraceError("a mean, sum or maximum over samples")
    order = samples[:, 0].argsort(stable=True)
    moved = rows[order].reshape(BATCH, -1, rows.shape[1], 1)
    divisors = [] if divisor is None else [divisor or rows.shape[1]]
    pooled = _pool(layout, moved, [range(rows.shape[1])], [range(1)], divisors).flatten()
    shape = [1 if d in reduced else size for d, size in enumerate(offset.shape) if keep or d not in reduced]
    return pooled[order.argsort()].reshape(shape)


def _as_maps(addresses: Tensor) -> Tensor:
    """Samples x channels x rows x columns."""
    if addresses.dim() != 4:
        raise TraceError("pooling of tensors that are not samples x channels x rows x columns")
    return addresses


def _by_direction(
    maps: Tensor, window: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    return [(maps.shape[2 + d], *(given[d if len(given) > 1 else 0] for given in (window, stride, padding))) for d in (0, 1)]  # type: ignore[misc]


def _adaptive_windows(n: int, count: int) -> list[range]:
    return [range(i * n // count, -(-(i + 1) * n // count)) for i in range(count)]


def _windows(n: int, window: int, stride: int, padding: int, ceil: bool) -> tuple[list[range], list[int]]:
    """The windows along one direction without padding, and their sizes with it."""
    rest = n + 2 * padding - window
    count = (-(-rest // stride) if ceil else rest // stride) + 1
    if ceil and (count - 1) * stride >= n + padding:
        count -= 1  # no window begins behind the padding
    starts = [i * stride - padding for i in range(count)]
    inside = [range(max(start, 0), min(start + window, n)) for start in starts]
    return inside, [min(start + window, n + padding) - start for start in starts]


LAYERS: dict[str, Callable[..., Any]] = {
    "constant_pad_nd": _constant_pad_nd,
    "addmm": _addmm,
    "mm": _mm,
    "convolution": _convolution,
    "native_batch_norm": _native_batch_norm,
    "native_group_norm": _native_group_norm,
    "native_layer_norm": _native_layer_norm,
    "max_pool2d_with_indices": _max_pool2d_with_indices,
    "avg_pool2d": _avg_pool2d,
    "_adaptive_avg_pool2d": _adaptive_avg_pool2d,
    "adaptive_max_pool2d": _adaptive_max_pool2d,
    "mean": _mean,
    "sum": _sum,
    "amax": _amax,
    "max": _max,
}
