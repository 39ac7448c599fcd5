"""Linear layers, convolutions, normalisation and pooling: their nodes in a program."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedme.execution.layout import PLACE, VALUE_BITS, ZERO, Layout, samples_of
from fedme.execution.lowering_functions import add
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


def linear(layout: Layout, offset: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Rows of samples times a matrix of weights (inputs x outputs)."""
    if offset.dim() != 2:
        raise TraceError("a product of tensors that are not matrices")
    transposed = not layout.in_order(matrix.t()) and layout.in_order(matrix)  # inputs x outputs, as in `x @ weight`
    parts = _parts(layout, matrix if transposed else matrix.t(), bias)
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
        layout.add(Node("dense", (value,), result, numbers=(outputs, 0, int(transposed)), table=tuple(table), **parts))
    else:
        offset = layout.rows(offset)
        value = layout.value_of(offset)
        result, places = layout.new_rows(per_sample, outputs)
        padded = layout.padded(inputs)
        geometry = (inputs, 1, per_sample, 1, per_sample * padded, padded, outputs, 1, 1, 0, 0, 1, 1, 1, 1)
        numbers = (*geometry, 0, 1, int(transposed))
        layout.add(Node("convolution", (value,), result, numbers=numbers, **parts))
    row = (offset[:, 0] & PLACE) // layout.padded(inputs) if per_sample > 1 else torch.zeros(len(offset), dtype=torch.int64)
    return places[samples[:, 0], row]


def _addmm(layout: Layout, bias: Traced, x: Traced, weight: Traced, beta: float = 1, alpha: float = 1) -> Tensor:
    if (beta, alpha) != (1, 1):
        raise TraceError("a scaled matrix product")
    return linear(layout, *(layout.addresses_of(tensor) for tensor in (x, weight, bias)))


def _mm(layout: Layout, x: Traced, weight: Traced) -> Tensor:
    return linear(layout, layout.addresses_of(x), layout.addresses_of(weight), None)


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
    if windows.dim() not in (3, 4):
        raise TraceError("a three-dimensional convolution")
    in_one_dimension = windows.dim() == 3
    if in_one_dimension:  # a map of one row
        offset, windows = offset.unsqueeze(2), windows.unsqueeze(2)
        stride, padding, dilation = ((given, *values) for given, values in ((1, stride), (0, padding), (1, dilation)))
        output_padding = (0, *output_padding)
    if transposed:
        if groups > 1:
            raise TraceError("a transposed convolution with groups")
        maps = _transposed(layout, offset, windows, shift, tuple(zip(stride, padding, dilation, output_padding, strict=True)))
        return maps.squeeze(2) if in_one_dimension else maps
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


def _transposed(
    layout: Layout, offset: Tensor, windows: Tensor, bias: Tensor | None, geometry: tuple[tuple[int, ...], ...]
) -> Tensor:
    """A transposed convolution: a product for every number of the window, and the sums of those that meet."""
    channels, outputs, *window = windows.shape
    products = linear(layout, offset.movedim(1, -1).reshape(-1, channels), windows.reshape(channels, -1), None)
    products = products.view(BATCH, *offset.shape[2:], outputs, *window)
    meeting = [_meeting(n, k, *given) for n, k, given in zip(offset.shape[2:], window, geometry, strict=True)]
    total = None
    for rows in _layers(meeting[0]):
        for columns in _layers(meeting[1]):
            part = torch.full((BATCH, outputs, len(rows), len(columns)), ZERO << VALUE_BITS)
            for r, row in enumerate(rows):
                for c, column in enumerate(columns):
                    if row and column:
                        part[:, :, r, c] = products[:, row[0], column[0], :, row[1], column[1]]
            part = layout.with_samples(part)
            total = part if total is None else add(layout, total, part)
    assert total is not None
    return total if bias is None else add(layout, total, bias.view(-1, 1, 1))


def _meeting(n: int, window: int, stride: int, padding: int, dilation: int, more: int) -> list[list[tuple[int, int]]]:
    """The places of the inputs and of the window that meet at every place of the output of a transposed convolution."""
    size = (n - 1) * stride - 2 * padding + dilation * (window - 1) + more + 1
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    for place in range(n):
        for tap in range(window):
            if 0 <= (to := place * stride + tap * dilation - padding) < size:
                pairs[to].append((place, tap))
    return pairs


def _layers(pairs: list[list[tuple[int, int]]]) -> list[list[tuple[int, int] | None]]:
    """The first pair of every place, the second, and so on."""
    return [[own[i] if i < len(own) else None for own in pairs] for i in range(max(map(len, pairs)))]


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
    numbers = (channels, rows, columns, *steps, outputs, *shape[2:], *padding, *stride, *dilation, 0, natural, 0)
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


def _channel_norm(
    layout: Layout, x: Tensor, parameters: tuple[str | None, ...], groups: int, reals: tuple[float, float]
) -> Tensor:
    rows = layout.channels_last(x)
    result = layout.new_value(rows.shape[1], rows.shape[2])
    numbers = (rows.shape[1], rows.shape[2], groups, 0, int(len(parameters) > 2 and parameters[2] is not None))
    layout.add(Node("channel_norm", (layout.value_of(rows),), result, parameters, numbers, reals))
    return layout.like(rows, result).transpose(1, 2).reshape(x.shape)


def _native_batch_norm(
    layout: Layout, x: Traced, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> list[Tensor]:
    if not training:
        raise TraceError("batch normalisation with fixed statistics")
    if x.shape[0] == 1 and BATCH > 1:
        return [_instance_norm(layout, x, weight, bias, mean, eps)]
    if mean is None:
        raise TraceError("batch normalisation without running statistics, which mixes samples in evaluation too")
    parameters = tuple(layout.parameter(name) for name in (weight, bias, mean, variance))
    return [_channel_norm(layout, layout.addresses_of(x), parameters, 0, (eps, momentum))]


def _instance_norm(layout: Layout, x: Traced, weight: Any, bias: Any, mean: Any, eps: float) -> Tensor:
    """Torch normalises the channels of all samples as if they were channels of one: groups of one channel each."""
    offset, channels = layout.addresses_of(x), x.shape[1] // BATCH
    by_sample = offset.reshape(BATCH, channels, -1)
    if mean is not None or not bool((layout.batch(by_sample) == torch.arange(BATCH).view(-1, 1, 1)).all()):
        raise TraceError("samples of a batch are mixed")
    parameters: list[str | None] = []
    for repeated in (None if tensor is None else layout.addresses_of(tensor) for tensor in (weight, bias)):
        if repeated is None:
            parameters.append(None)
            continue
        name, start = layout.part_of_weight(repeated[:channels])
        if start or math.prod(layout.shapes[name]) != channels or not torch.equal(repeated, repeated[:channels].repeat(BATCH)):
            raise TraceError(f"a part of the weight {name} is used")
        parameters.append(name)
    return _channel_norm(layout, by_sample, tuple(parameters), channels, (eps, 0.0)).reshape(offset.shape)


def _native_group_norm(
    layout: Layout, x: Traced, weight: Any, bias: Any, samples: int, channels: int, positions: int, groups: int, eps: float
) -> list[Tensor]:
    parameters = (layout.parameter(weight), layout.parameter(bias))
    return [_channel_norm(layout, layout.addresses_of(x), parameters, groups, (eps, 0.0))]


def _native_layer_norm(layout: Layout, x: Traced, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> list[Tensor]:
    flat = layout.addresses_of(x).flatten(-len(shape))
    rows = layout.rows(flat)
    value, width = layout.value_of(rows), flat.shape[-1]
    result = layout.new_value(layout.values[value].elements // width, width)
    parameters = (layout.parameter(weight), layout.parameter(bias))
    numbers = (layout.values[value].elements // width, width)
    layout.add(Node("row_norm", (value,), result, parameters, numbers, (eps,)))
    return [layout.like(rows, result).view(x.shape)]


def _by_place(layout: Layout, x: Traced, *arguments: Any, name: str, dimensions: int) -> Tensor:
    """An operation that copies numbers of the last dimensions to places that depend on nothing else."""
    offset = layout.addresses_of(x)
    places = torch.arange(math.prod(offset.shape[-dimensions:]), dtype=torch.float64).view(1, 1, *offset.shape[-dimensions:])
    copied: Tensor = getattr(torch.ops.aten, name).default(places, *arguments).long()
    moved = offset.flatten(-dimensions)[..., copied.flatten()]
    return moved.view(*offset.shape[:-dimensions], *copied.shape[2:])


def pool(layout: Layout, x: Tensor, rows: list[range], columns: list[range], divisors: list[int]) -> Tensor:
    """The mean or the maximum in windows of samples x channels x rows x columns; no divisors: the maximum."""
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
    return [pool(layout, maps, lines[0][0], lines[1][0], []).reshape(_pooled_shape(layout, x, lines))]


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
    return pool(layout, maps, rows, columns, divisors).reshape(_pooled_shape(layout, x, lines))


def _pooled_shape(layout: Layout, x: Traced, lines: Sequence[tuple[list[range], list[int]]]) -> tuple[int, ...]:
    return (*x.shape[:-2], len(lines[0][0]), len(lines[1][0]))


def _adaptive_avg_pool2d(layout: Layout, x: Traced, size: Sequence[int]) -> Tensor:
    maps = _as_maps(layout.addresses_of(x))
    lines = [_adaptive_windows(n, out) for n, out in zip(maps.shape[2:], size, strict=True)]
    divisors = [len(r) * len(c) for r in lines[0] for c in lines[1]]
    return pool(layout, maps, lines[0], lines[1], divisors).reshape(*x.shape[:-2], *size)


def _adaptive_max_pool2d(layout: Layout, x: Traced, size: Sequence[int]) -> list[Tensor]:
    maps = _as_maps(layout.addresses_of(x))
    lines = [_adaptive_windows(n, out) for n, out in zip(maps.shape[2:], size, strict=True)]
    return [pool(layout, maps, lines[0], lines[1], []).reshape(*x.shape[:-2], *size)]


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


BY_PLACE = {
    f"{kind}{dimensions}d": dimensions
    for kind in ("upsample_nearest", "_upsample_nearest_exact", "reflection_pad", "replication_pad")
    for dimensions in (1, 2)
}
LAYERS: dict[str, Callable[..., Any]] = {
    **{name: partial(_by_place, name=name, dimensions=dimensions) for name, dimensions in BY_PLACE.items()},
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
}
