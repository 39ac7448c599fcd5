"""Softmax, products of values, attention, embeddings and recurrent layers: their nodes in a program."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedme.execution.layout import PLACE, Layout, of_any
from fedme.execution.lowering_functions import add
from fedme.execution.lowering_layers import linear
from fedme.execution.program import Node
from fedme.execution.tracing import BATCH, Traced, TraceError


def _softmax_rows(layout: Layout, addresses: Tensor, dimension: int, logarithm: bool = False, causal: int = 0) -> Tensor:
    if layout.is_alone(addresses):
        return of_any(_softmax_rows(layout, layout.every(addresses), dimension % addresses.dim() + 1, logarithm))
    rows = layout.rows(addresses.movedim(dimension, -1))
    value, width = layout.value_of(rows), rows.shape[-1]
    count = layout.values[value].elements // width
    result = layout.new_value(count, width)
    layout.add(Node("softmax", (value,), result, numbers=(count, width, int(logarithm), causal)))
    return layout.like(rows, result).movedim(-1, dimension)


def _log_softmax(layout: Layout, x: Traced, dimension: int, dtype: Any = None) -> Tensor:
    return _softmax_rows(layout, layout.addresses_of(x), dimension, True)


def _softmax(layout: Layout, x: Traced, dimension: int, dtype: Any = None) -> Tensor:
    return _softmax_rows(layout, layout.addresses_of(x), dimension)


def _bmm(layout: Layout, x: Traced, y: Traced) -> Tensor:
    first, second = layout.addresses_of(x), layout.addresses_of(y)
    if layout.is_alone(first) and _has_rows_of_all_samples(layout, second.transpose(1, 2)):
        by_row = _linear_by_matrix(layout, second.transpose(1, 2), first.transpose(1, 2))
        return by_row.transpose(1, 2)
    if layout.is_alone(second) and _has_rows_of_all_samples(layout, first):
        return _linear_by_matrix(layout, first, second)
    return _product(layout, first, second, 1.0)


def _has_rows_of_all_samples(layout: Layout, matrices: Tensor) -> bool:
    """Whether the matrices are not of one sample each, as in ``torch.einsum("bi,ij->bj", x, weight)``."""
    if layout.is_alone(matrices):
        return False
    samples = layout.batch(matrices).flatten(1)
    return not bool((samples == samples[:, :1]).all())


def _linear_by_matrix(layout: Layout, x: Tensor, weights: Tensor) -> Tensor:
    return torch.stack([linear(layout, rows, weight, None) for rows, weight in zip(x, weights, strict=True)])


def _baddbmm(layout: Layout, bias: Any, x: Traced, y: Traced, beta: float = 1, alpha: float = 1) -> Tensor:
    if beta != 1:
        raise TraceError("a scaled sum with a matrix product")
    return add(
        layout, _product(layout, layout.addresses_of(x), layout.addresses_of(y), float(alpha)), layout.addresses_of(bias)
    )


def _product(layout: Layout, x: Tensor, y: Tensor, factor: float) -> Tensor:
    """Matrices x rows x inner times matrices x inner x columns."""
    first, second = _matrices(layout, x, True), _matrices(layout, y, False)
    groups, rows, inner = len(x) // BATCH, *x.shape[1:]
    result, places = layout.new_rows(groups * rows, y.shape[2])
    numbers = (groups, rows, y.shape[2], inner, *first[1][:3], *second[1])
    layout.add(Node("matrix_product", (first[0], second[0]), result, numbers=numbers, reals=(factor,)))
    layout.partly_read.add(second[0])  # its gradients are always added
    if inner % layout.lanes or first[1] != (0, rows * inner, inner, 1) or layout.values[first[0]].size != groups * rows * inner:
        layout.partly_read.add(first[0])
    samples = layout.batch(x)[:, 0, 0]
    group = torch.stack([(samples[:i] == samples[i]).sum() for i in range(len(x))])
    by_matrix: Tensor = places.unflatten(1, (groups, rows))
    return by_matrix[samples, group]


def _matrices(layout: Layout, addresses: Tensor, contiguous: bool) -> tuple[int, tuple[int, int, int, int]]:
    """The value that matrices are in: the place of the first, and the distances of matrices, rows and columns."""
    for attempt in (addresses, None):
        known = attempt if attempt is not None else layout.copied(addresses, addresses.shape[-1])
        samples = layout.batch(known)[:, 0, 0]
        if not bool((samples.bincount(minlength=BATCH) == len(known) // BATCH).all()):
            raise TraceError("samples of a batch are mixed")
        value, own = layout.value_of(known), known[samples == 0] & PLACE
        steps = [int(own.select(d, 1).flatten()[0] - own.flatten()[0]) if own.shape[d] > 1 else 0 for d in range(3)]
        grids = [torch.arange(size).view([-1 if d == i else 1 for i in range(3)]) for d, size in enumerate(own.shape)]
        expected = own.flatten()[0] + torch.stack([s * grid.expand_as(own) for s, grid in zip(steps, grids, strict=True)]).sum(
            0
        )
        alike = all(torch.equal(known[samples == b] & PLACE, own) for b in range(BATCH))
        if value >= 0 and alike and torch.equal(own, expected) and (not contiguous or steps[2] in (0, 1)):
            return value, (int(own.flatten()[0]), *steps)  # type: ignore[return-value]
    raise TraceError("a product of matrices that are not regular")


def _attention(
    layout: Layout,
    query: Traced,
    key: Traced,
    value: Traced,
    dropout: float = 0.0,
    causal: bool = False,
    attn_mask: Any = None,
    scale: float | None = None,
) -> list[Tensor]:
    if dropout:
        raise TraceError("attention with dropout")
    q, k, v = (layout.addresses_of(x).flatten(0, 1) for x in (query, key, value))
    scores = _product(layout, q, k.transpose(1, 2), scale if scale is not None else query.shape[-1] ** -0.5)
    if attn_mask is not None:
        mask = torch.broadcast_to(layout.addresses_of(attn_mask), (*query.shape[:-1], key.shape[-2]))
        scores = add(layout, scores, mask.flatten(0, 1))
    chances = _softmax_rows(layout, scores, -1, causal=query.shape[-2] if causal else 0)
    return [_product(layout, chances, v, 1.0).view(query.shape[:-1] + value.shape[-1:])]


def _embedding(
    layout: Layout, weight: Traced, symbols: Traced, padding: int = -1, scale: bool = False, sparse: bool = False
) -> Tensor:
    if isinstance(symbols, Tensor):  # rows that are always the same
        if bool((symbols == padding).any()):
            raise TraceError("an embedding of a constant padding symbol")
        return layout.addresses_of(weight)[symbols]
    places = layout.addresses_of(symbols)
    if symbols is not layout.network.input:
        raise TraceError("an embedding of something else than the inputs")
    length = math.prod(symbols.shape[1:])
    known, width = weight.shape
    result, addresses = layout.new_rows(length, width)
    layout.add(Node("embedding", (0,), result, (layout.parameter(weight),), (length, width, known, padding)))
    return addresses.view(*places.shape, width)


def _of_symbols(layout: Layout, symbols: Traced, table: Tensor) -> Tensor:
    """A function of single symbols: an embedding in its results, which are constants."""
    values = layout.addresses_of(table.unsqueeze(1))
    name, _ = layout.part_of_weight(values)
    length = math.prod(symbols.shape[1:])
    result, addresses = layout.new_rows(length, 1)
    layout.add(Node("embedding", (0,), result, (name,), (length, 1, len(table), -1)))
    return addresses.view(symbols.shape)


def _mkldnn_rnn_layer(
    layout: Layout,
    x: Traced,
    input_weight: Traced,
    recurrent_weight: Traced,
    input_bias: Any,
    recurrent_bias: Any,
    hidden: Any,
    cell: Any,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    units: int,
    layers: int,
    biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> list[Tensor]:
    zeros = all(isinstance(state, Tensor) and not bool(state.any()) for state in (hidden, cell))
    if batch_sizes or mode != 2 or not zeros:
        raise TraceError("a recurrent layer that is not a plain LSTM")
    by_sample = layout.addresses_of(x).transpose(0, 1)
    by_sample = by_sample.flip(1) if reverse else by_sample
    inputs_of_network = not layout.value_of(by_sample)
    steps = layout.copied(by_sample, x.shape[2]) if inputs_of_network else layout.channels_last(by_sample.transpose(1, 2))
    length, inputs = steps.shape[1:]
    result, places = layout.new_rows(length, units)
    given = (input_weight, recurrent_weight, input_bias, recurrent_bias)
    parameters = tuple(layout.parameter(weight) if biases or i < 2 else None for i, weight in enumerate(given))
    layout.add(Node("lstm", (layout.value_of(steps),), result, parameters, (length, inputs, units)))
    outputs = places.transpose(0, 1)
    return [outputs.flip(0) if reverse else outputs, outputs[-1]]


def _gru(
    layout: Layout,
    x: Traced,
    weights: Sequence[Traced],
    units: int,
    biases: bool,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> list[Tensor]:
    """Layers of a GRU that begin with zeros. A layer has two weights, then its biases; directions follow one another."""
    by_sample = layout.addresses_of(x) if batch_first else layout.addresses_of(x).transpose(0, 1)
    per_layer, last = 4 if biases else 2, []
    for number in range(layers):
        directions = []
        for direction in range(1 + bidirectional):
            first = (number * (1 + bidirectional) + direction) * per_layer
            parameters = tuple(layout.parameter(weight) for weight in weights[first : first + per_layer])
            ordered = by_sample.flip(1) if direction else by_sample
            steps = layout.channels_last(ordered.transpose(1, 2)) if layout.value_of(ordered) else layout.copied(ordered)
            result, places = layout.new_rows(steps.shape[1], units)
            layout.add(Node("gru", (layout.value_of(steps),), result, parameters, (*steps.shape[1:], units)))
            directions.append(places.flip(1) if direction else places)
            last.append(places[:, -1])
        by_sample = torch.cat(directions, 2)
    return [by_sample if batch_first else by_sample.transpose(0, 1), torch.stack(last)]


SEQUENCES: dict[str, Callable[..., Any]] = {
    "_log_softmax": _log_softmax,
    "_softmax": _softmax,
    "_safe_softmax": _softmax,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "embedding": _embedding,
    "of_symbols": _of_symbols,
    "mkldnn_rnn_layer": _mkldnn_rnn_layer,
    "gru": _gru,
}
