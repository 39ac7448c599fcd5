"""Strict construction of typed values from plain data: configuration, checkpoints and messages all go through `build`.

`build` follows type annotations, so the data never decides what is constructed. Errors name the place in the data. Neither
msgspec (ignores unknown keys of dataclasses, has no unions of them) nor cattrs (turns "3" and true into integers) is as strict.
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from fedme.core.foreign_text import one_line

Leaf = Callable[[Any, Any, str], Any]  # (annotation, value, place) -> a value, or NotImplemented


class TypedError(ValueError):
    """Data does not match its type annotation; `at` is the place in the data, such as ``train.lr``."""

    def __init__(self, at: str, message: str) -> None:
        super().__init__(one_line(f"{at}: {message}" if at else message))
        self.at = at


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """The end of an error message: the most similar known word, or all known words."""
    words = list(known)
    close = difflib.get_close_matches(word, words, 1, 0.6)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(words)}" if words else ""


def build(annotation: Any, value: Any, at: str = "", leaf: Leaf | None = None) -> Any:
    """Convert `value` to the annotated type, or raise a TypedError. `leaf` handles additional types, such as tensors."""
    if leaf is not None and (result := leaf(annotation, value, at)) is not NotImplemented:
        return result
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return value
    if annotation is None or annotation is types.NoneType:
        return _require(value is None, value, at, "none")
    if annotation in _SCALARS:
        return _scalar(annotation, value, at)
    if origin is Literal:
        fits = any(value == option and type(value) is type(option) for option in args)  # true is not 1
        return _require(fits, value, at, f"one of {', '.join(map(str, args))}", _close(value, args))
    if origin in (Union, types.UnionType):
        if value == "none" and types.NoneType in args and str not in args:  # TOML has no null
            return None
        return _union(args, value, at, leaf)
    if origin is tuple:
        return _tuple(args, value, at, leaf)
    if origin in (list, Sequence):
        _require(isinstance(value, list | tuple), value, at, "a list")
        return [build(args[0], item, f"{at}[{i}]", leaf) for i, item in enumerate(value)]
    if origin in (dict, Mapping):
        _require(isinstance(value, Mapping), value, at, "a table")
        return _table(args, value, at, leaf)
    if dataclasses.is_dataclass(annotation):
        return _dataclass(annotation, value, at, leaf)
    raise TypedError(at, f"unsupported type {getattr(annotation, '__name__', annotation)}")


_SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def _scalar(scalar: Any, value: Any, at: str) -> Any:
    if scalar is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) >= 2**1023:
            raise TypedError(at, "is too large for a float")
        return float(value)
    fits = isinstance(value, scalar) and (scalar is bool or not isinstance(value, bool))
    return _require(fits, value, at, _SCALARS[scalar])


def _union(options: tuple[Any, ...], value: Any, at: str, leaf: Leaf | None) -> Any:
    errors = []
    for option in options:
        try:
            return build(option, value, at, leaf)
        except TypedError as error:
            errors.append(error)
    if len(deeper := [error for error in errors if error.at != at]) == 1:  # the one option of the right shape
        raise deeper[0]
    messages = dict.fromkeys(str(error).removeprefix(f"{at}: ") for error in errors)
    got = f", got {_shown(value)}"
    if all(message.startswith("must be ") and message.endswith(got) for message in messages):
        expected = " or ".join(message.removeprefix("must be ").removesuffix(got) for message in messages)
        raise TypedError(at, f"must be {expected}{got}")
    raise TypedError(at, " or ".join(messages))


def _tuple(args: tuple[Any, ...], value: Any, at: str, leaf: Leaf | None) -> tuple[Any, ...]:
    _require(isinstance(value, list | tuple), value, at, "a list")
    if len(args) == 2 and args[1] is Ellipsis:
        args = (args[0],) * len(value)
    if len(args) != len(value):
        raise TypedError(at, f"must have {len(args)} values, got {len(value)}")
    return tuple(build(arg, item, f"{at}[{i}]", leaf) for i, (arg, item) in enumerate(zip(args, value, strict=True)))


def _table(args: tuple[Any, ...], value: Mapping[Any, Any], at: str, leaf: Leaf | None) -> dict[Any, Any]:
    table: dict[Any, Any] = {}
    for name, item in value.items():
        key = _key(args[0], name, at)
        if key in table:  # "1" and "01"
            raise TypedError(_below(at, name), "duplicate key")
        table[key] = build(args[1], item, _below(at, name), leaf)
    return table


def _key(annotation: Any, value: Any, at: str) -> Any:
    if annotation is int and isinstance(value, str):  # keys of JSON and TOML tables are strings
        if not re.fullmatch(r"-?[0-9]{1,18}", value):
            raise TypedError(_below(at, value), "this key must be an integer")
        return int(value)
    return build(annotation, value, at)


def _dataclass(cls: Any, value: Any, at: str, leaf: Leaf | None) -> Any:
    _require(isinstance(value, Mapping), value, at, "a table")
    hints = typing.get_type_hints(cls)
    known = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for name in value:
        if name not in known:
            raise TypedError(_below(at, name), f"unknown key{nearest(str(name), known)}")
    for name, field in known.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in value:
            raise TypedError(_below(at, name), "is missing")
    arguments = {name: build(hints[name], item, _below(at, name), leaf) for name, item in value.items()}
    try:
        return cls(**arguments)
    except TypedError:
        raise
    except ValueError as error:  # raised by the class itself; the message begins with the name of the field
        raise TypedError("", _below(at, str(error))) from error


def _require(fits: bool, value: Any, at: str, expected: str, hint: str = "") -> Any:
    if not fits:
        raise TypedError(at, f"must be {expected}, got {_shown(value)}{hint}")
    return value


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 40 else text[:37] + "..."


def _close(value: Any, options: tuple[Any, ...]) -> str:
    close = difflib.get_close_matches(str(value), [str(option) for option in options], 1, 0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def _below(at: str, name: Any) -> str:
    return f"{at}.{name}" if at else str(name)
