"""Plain values that a forward pass keeps in attributes of its modules, such as a number of calls.

All models of an architecture run in the same module, so these values belong to no model: they are not sent, not saved, and
different in every process. A value that belongs to a model is a buffer.
"""

from collections import deque
from collections.abc import Callable, Mapping, Set
from typing import Any

from torch import nn

from fedme.core.dropout import KeyedDropout

DEPTH = 4  # of containers in containers


def changing_attribute(module: nn.Module, forward: Callable[[], Any], before: Mapping[str, Any] | None = None) -> str:
    """An attribute with another value after every forward pass; empty if there is none.

    One that is set once and then keeps its value, such as a size, does not count. With the values `before` the latest forward
    pass, one more is made at most, otherwise two at most.
    """
    if before is None:
        before = plain_attributes(module)
        forward()
    first = plain_attributes(module)
    if first == before:
        return ""
    forward()
    second = plain_attributes(module)
    return next((name for name in sorted(first.keys() | second.keys()) if first.get(name) != second.get(name)), "")


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The numbers, strings and containers among the attributes of a module and its parts, by name."""
    values = {}
    for part, child in module.named_modules():
        if isinstance(child, KeyedDropout):  # its own attributes are set before every forward pass
            continue
        for name, value in vars(child).items():
            if not name.startswith("_") or name not in _OF_TORCH:
                values[f"{part}.{name}" if part else name] = _plain(value, DEPTH)
    return values


_OF_TORCH = frozenset(vars(nn.Module()))


def _plain(value: Any, depth: int) -> Any:
    """A copy of a value that can be compared; of what is not plain, only the type."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value if value == value else "nan"
    if depth and isinstance(value, list | tuple | deque):
        return [type(value).__name__, *(_plain(item, depth - 1) for item in value)]
    if depth and isinstance(value, Mapping):
        return [type(value).__name__, *((repr(key), _plain(item, depth - 1)) for key, item in value.items())]
    if depth and isinstance(value, Set):
        return [type(value).__name__, *sorted(map(repr, value))]
    return type(value).__name__
