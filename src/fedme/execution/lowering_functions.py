"""Functions of single numbers, sums, products and dropout: their nodes in a program."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedme.execution.layout import PLACE, VALUE_BITS, Layout, of_any, sample_of
from fedme.execution.program import FUNCTIONS, Node
from fedme.execution.tracing import BATCH, Traced, TraceError

SELECTION = 2  # as in `compiled_elementwise.hpp`
RELU_AT = {"dense": 1, "convolution": 15, "depthwise": 15, "binary": 1, "channel_norm": 3}  # where `numbers` say ReLU follows


def _function(layout: Layout, x: Traced, name: str, a: float = 0.0, b: float = 0.0, c: float = 0.0) -> Tensor:
    return apply(layout, layout.addresses_of(x), name, a, b, c)


def apply(layout: Layout, addresses: Tensor, name: str, a: float = 0.0, b: float = 0.0, c: float = 0.0) -> Tensor:
    """A function of single numbers."""
    if layout.is_alone(addresses):
        return of_any(apply(layout, layout.every(addresses), name, a, b, c))
    offset = layout.natural(addresses)
    source = layout.value_of(offset)
    shape = layout.values[source]
    layout.values.append(replace(shape, gradient=False, sums=False))
    result = len(layout.values) - 1
    numbers = (FUNCTIONS.index(name), shape.width, shape.padded_width)
    layout.add(Node("elementwise", (source,), result, numbers=numbers, reals=(float(a), float(b), float(c))))
    return layout.like(offset, result)


def _gelu(layout: Layout, x: Traced, approximate: str = "none") -> Tensor:
    return _function(layout, x, "gelu_tanh" if approximate == "tanh" else "gelu")


def _leaky_relu(layout: Layout, x: Traced, negative_slope: float = 0.01) -> Tensor:
    return _function(layout, x, "leaky_relu", negative_slope)


def _elu(layout: Layout, x: Traced, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    return _function(layout, x, "elu", alpha * scale, scale, input_scale)


def _hardtanh(layout: Layout, x: Traced, low: float = -1.0, high: float = 1.0) -> Tensor:
    return _function(layout, x, "clamp", low, high)


def _clamp(layout: Layout, x: Traced, low: Any = None, high: Any = None) -> Tensor:
    limits = [infinite if limit is None else _number(limit) for limit, infinite in ((low, -math.inf), (high, math.inf))]
    if limits[0] is None or limits[1] is None:
        raise TraceError("limits that are tensors")
    return _function(layout, x, "clamp", limits[0], limits[1], 1.0)  # unlike hardtanh it has a derivative at its limits


def _softplus(layout: Layout, x: Traced, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    return _function(layout, x, "softplus", beta, threshold)


def _log_sigmoid(layout: Layout, x: Traced) -> list[Tensor]:
    flipped = apply(layout, layout.addresses_of(x), "affine", -1.0)
    return [apply(layout, apply(layout, flipped, "softplus", 1.0, math.inf), "affine", -1.0)]


def _glu(layout: Layout, x: Traced, dimension: int = -1) -> Tensor:
    first, second = layout.addresses_of(x).chunk(2, dimension)
    return combined(layout, first, apply(layout, second, "sigmoid"), 1, 1.0)


def _prelu(layout: Layout, x: Traced, weight: Traced) -> Tensor:
    negative = combined(layout, _function(layout, x, "clamp", -math.inf, 0.0, 1.0), layout.addresses_of(weight), 1, 1.0)
    return add(layout, _function(layout, x, "relu"), negative)


def _softshrink(layout: Layout, x: Traced, limit: float = 0.5) -> Tensor:
    inside = _function(layout, x, "clamp", -limit, limit, 1.0)
    return combined(layout, layout.addresses_of(x), inside, 0, -1.0)


def _celu(layout: Layout, x: Traced, alpha: float = 1.0) -> Tensor:
    return _elu(layout, x, alpha, 1.0, 1.0 / alpha)


def _clamp_max(layout: Layout, x: Traced, high: Any) -> Tensor:
    return _clamp(layout, x, None, high)


def _lerp(layout: Layout, x: Traced, y: Traced, weight: Any) -> Tensor:
    difference = _sum(layout, y, x, -1.0)
    number = _number(weight)
    if number is not None:
        return add(layout, layout.addresses_of(x), apply(layout, difference, "affine", number))
    return add(layout, layout.addresses_of(x), combined(layout, difference, layout.addresses_of(weight), 1, 1.0))


def _pow(layout: Layout, x: Traced, exponent: Any) -> Tensor:
    if isinstance(x, Traced) and exponent in (3, 4):
        square = _function(layout, x, "square")
        return combined(layout, square, layout.addresses_of(x) if exponent == 3 else square, 1, 1.0)
    known = {2.0: "square", 0.5: "sqrt", -1.0: "reciprocal"}
    if not isinstance(x, Traced) or exponent not in known:
        raise TraceError(f"a power with exponent {exponent}")
    return _function(layout, x, known[exponent])


def _rsqrt(layout: Layout, x: Traced) -> Tensor:
    return apply(layout, _function(layout, x, "sqrt"), "reciprocal")


def _neg(layout: Layout, x: Traced) -> Tensor:
    return _function(layout, x, "affine", -1.0)


def _comparison(layout: Layout, x: Traced, y: Any, name: str, mirrored: bool = False) -> Tensor:
    """A comparison as a value of ones and zeros; `mirrored` compares the other way round."""
    sign = -1.0 if mirrored else 1.0
    if (number := _number(y)) is not None:
        return apply(layout, _function(layout, x, "affine", -1.0) if mirrored else layout.addresses_of(x), name, sign * number)
    difference = _sum(layout, x, y, -1.0)
    return apply(layout, apply(layout, difference, "affine", -1.0) if mirrored else difference, name)


def _not(layout: Layout, x: Traced) -> Tensor:
    return _function(layout, x, "choose", 0.0, 1.0)


def _not_equal(layout: Layout, x: Traced, y: Any) -> Tensor:
    return apply(layout, _comparison(layout, x, y, "equal"), "choose", 0.0, 1.0)


def _either(layout: Layout, x: Traced, y: Traced) -> Tensor:
    return apply(layout, _sum(layout, x, y, 1.0), "choose", 1.0, 0.0)


def _where(layout: Layout, condition: Any, x: Any, y: Any) -> Tensor:
    """The numbers of `x` where the condition is true, plus those of `y` where it is not; each side is zero elsewhere."""
    first, second = _number(x), _number(y)
    if first is not None and second is not None and isinstance(condition, Traced):
        return _function(layout, condition, "choose", first, second)
    sides = []
    for side, number, true in ((x, first, True), (y, second, False)):
        if isinstance(condition, Tensor):
            chosen = condition if true else ~condition
            if number is not None:
                sides.append(layout.addresses_of(torch.where(chosen, torch.tensor(number, dtype=torch.float64), 0.0)))
            else:
                sides.append(combined(layout, layout.addresses_of(side), layout.addresses_of(chosen.float()), SELECTION, 0.0))
        elif number is not None:
            sides.append(_function(layout, condition, "choose", *((number, 0.0) if true else (0.0, number))))
        else:
            chosen = layout.addresses_of(condition) if true else _not(layout, condition)
            sides.append(combined(layout, layout.addresses_of(side), chosen, SELECTION, 0.0))
    return add(layout, *sides)


def _masked_fill(layout: Layout, x: Any, mask: Any, value: Any) -> Tensor:
    return _where(layout, mask, value, x)


def _add(layout: Layout, x: Any, y: Any, alpha: float = 1) -> Tensor:
    return _sum(layout, x, y, float(alpha))


def _sub(layout: Layout, x: Any, y: Any, alpha: float = 1) -> Tensor:
    return _sum(layout, x, y, -float(alpha))


def _rsub(layout: Layout, x: Any, y: Any, alpha: float = 1) -> Tensor:
    if (number := _number(y)) is None or alpha != 1:
        raise TraceError("unsupported operation rsub")
    return _function(layout, x, "affine", -1.0, number)


def _div(layout: Layout, x: Any, y: Any) -> Tensor:
    if (number := _number(y)) is not None:
        return _function(layout, x, "affine", 1.0 / number)
    inverse = apply(layout, layout.addresses_of(y), "reciprocal")
    if (number := _number(x)) is not None:
        return apply(layout, inverse, "affine", number)
    return combined(layout, layout.addresses_of(x), inverse, 1, 1.0)


def _mul(layout: Layout, x: Any, y: Any) -> Tensor:
    for tensor, other in ((x, y), (y, x)):
        if (number := _number(other)) is not None:
            return _function(layout, tensor, "affine", number)
    return _binary(layout, x, y, 1, 1.0)


def _sum(layout: Layout, x: Any, y: Any, factor: float) -> Tensor:
    if (number := _number(y)) is not None:
        return _function(layout, x, "affine", 1.0, factor * number)
    if (number := _number(x)) is not None:
        return _function(layout, y, "affine", factor, number)
    return _binary(layout, x, y, 0, factor)


def add(layout: Layout, x: Tensor, y: Tensor) -> Tensor:
    """The sum of the numbers at two addresses."""
    return combined(layout, x, y, 0, 1.0)


def _binary(layout: Layout, x: Traced, y: Traced, operation: int, factor: float) -> Tensor:
    first, second = _broadcast(layout.addresses_of(x), layout.addresses_of(y))
    if operation == 0 and factor == 1.0:
        for numbers, weight in ((first, y), (second, x)):
            if _gives_bias(layout, numbers, weight):
                return numbers
    return combined(layout, first, second, operation, factor)


def _broadcast(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    pair: tuple[Tensor, Tensor] = torch.broadcast_tensors(x, y)
    return pair


def combined(layout: Layout, first: Tensor, second: Tensor, operation: int, factor: float) -> Tensor:
    """A sum, product or selection of numbers at two addresses."""
    first, second = _broadcast(first, second)
    if layout.is_alone(first) and layout.is_alone(second):
        return of_any(combined(layout, layout.every(first), layout.every(second), operation, factor))
    if not layout.is_whole(first) and layout.is_whole(second) and (operation == 1 or factor == 1.0):
        first, second = second, first
    first = layout.natural(first)
    source = layout.value_of(first)
    shape = layout.values[source]
    mask = (1 << VALUE_BITS) - 1
    other = layout.value_of(second)
    alike = other >= 0 and layout.values[other].size == shape.size and torch.equal(first & mask, second & mask)
    if not (alike and layout.is_whole(second)):
        layout.values.append(replace(shape, gradient=False, sums=False))
        other = len(layout.values) - 1
        layout.copy(second, first & mask, other)
    layout.values.append(replace(shape, gradient=False, sums=False))
    result = len(layout.values) - 1
    layout.add(Node("binary", (source, other), result, numbers=(operation, 0), reals=(factor,)))
    return layout.like(first, result)


def _gives_bias(layout: Layout, addresses: Tensor, other: Traced) -> bool:
    """Make a weight the bias of the linear layer that computes these numbers, if it is one without."""
    value, name = layout.value_of(addresses), layout.weight_name(other)
    writer = layout.writer(value) if value > 0 else None
    if not name or writer is None or other.shape != addresses.shape[-1:] or layout.readers(value):
        return False
    node = layout.nodes[writer]
    if node.type not in ("dense", "convolution") or node.parameters[1] or layout.values[value].width != other.shape[0]:
        return False
    column = (addresses & PLACE) % layout.values[value].padded_width
    if not bool((column == torch.arange(addresses.shape[-1])).all()):
        return False
    layout.nodes[writer] = replace(node, parameters=(node.parameters[0], name))
    layout.use(name, 0, other.shape[0])
    return True


def _dropout(layout: Layout, x: Traced, layer: str, p: float) -> Tensor:
    offset = layout.addresses_of(x)
    if not p:
        return offset
    offset = layout.natural(offset)
    batch = [d for d, size in enumerate(offset.shape) if size == BATCH and _counts_samples(offset, d)]
    if not batch:
        raise TraceError("dropout of a tensor without a dimension that is the batch")
    dimension = batch[0]
    own, together = offset.select(dimension, 0).flatten(), math.prod(offset.shape[dimension + 1 :])
    source = layout.value_of(offset)
    shape = layout.values[source]
    order = torch.zeros(shape.size, dtype=torch.int64)
    order[own & PLACE] = torch.arange(len(own))
    layout.values.append(replace(shape, gradient=False, sums=False))
    result = len(layout.values) - 1
    numbers = (layout.calls[layer], len(own), together)
    layout.calls[layer] += 1
    layout.add(Node("dropout", (source,), result, numbers=numbers, reals=(p,), table=tuple(order.tolist()), layer=layer))
    return layout.like(offset, result)


def _counts_samples(addresses: Tensor, dimension: int) -> bool:
    position = torch.arange(BATCH).view([-1 if d == dimension else 1 for d in range(addresses.dim())])
    return bool((sample_of(addresses) == position).all())


def fuse_relu(layout: Layout) -> None:
    """Let the node before a ReLU compute it, if nothing else reads its result."""
    for node in [node for node in layout.nodes if node.type == "elementwise" and node.numbers[0] == FUNCTIONS.index("relu")]:
        source = node.inputs[0]
        writer = layout.writer(source)
        if writer is None or layout.readers(source) > 1 or source in layout.partly_read:
            continue
        before = layout.nodes[writer]
        place = RELU_AT.get(before.type)
        if place is None:
            continue
        numbers = tuple(1 if i == place else number for i, number in enumerate(before.numbers))
        layout.nodes[writer] = replace(before, numbers=numbers, output=node.output)
        layout.nodes.remove(node)


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    return float(value) if isinstance(value, int | float) else None


FUNCTIONS_OF_TORCH: dict[str, Callable[..., Any]] = {
    **{name: partial(_function, name=name) for name in ("relu", "tanh", "sigmoid", "silu", "hardswish", "hardsigmoid")},
    **{name: partial(_function, name=name) for name in ("mish", "exp", "log", "sqrt", "abs", "square", "reciprocal")},
    **{name: partial(_function, name=name) for name in ("sin", "cos")},
    **{name: partial(_comparison, name=how) for name, how in (("gt", "greater"), ("ge", "at_least"), ("eq", "equal"))},
    **{name: partial(_comparison, name=how, mirrored=True) for name, how in (("lt", "greater"), ("le", "at_least"))},
    "ne": _not_equal,
    **dict.fromkeys(("bitwise_not", "logical_not"), _not),
    **dict.fromkeys(("bitwise_or", "logical_or"), _either),
    **dict.fromkeys(("bitwise_and", "logical_and"), _mul),
    "where": _where,
    "masked_fill": _masked_fill,
    "gelu": _gelu,
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "hardtanh": _hardtanh,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp_max,
    "lerp": _lerp,
    "softplus": _softplus,
    "log_sigmoid_forward": _log_sigmoid,
    "pow": _pow,
    "glu": _glu,
    "_prelu_kernel": _prelu,
    "softshrink": _softshrink,
    "celu": _celu,
    "rsqrt": _rsqrt,
    "neg": _neg,
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "div": _div,
    "mul": _mul,
    "dropout": _dropout,
}
