"""From plain data to typed values, strictly: the one way in for configuration, checkpoints and messages.

`build` follows type annotations, so nothing in the data decides what is constructed. Errors name the place in the data.
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

Leaf = Callable[[Any, Any, str], Any]  # (kind, value, place) -> a value, or NotImplemented


class TypedError(ValueError):
    """Data does not fit its type; `at` names the place."""

    def __init__(self, at: str, message: str) -> None:
        super().__init__(one_line(f"{at}: {message}" if at else message))
        self.at = at


LONGEST = 1000  # characters of an error: what it quotes came from outside


def one_line(text: str) -> str:
    """Text that came from outside, fit to be shown: in one line, without odd signs, and not too long."""
    flat = " ".join(text.split())
    plain = flat if flat.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in flat)
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 204]} ... {plain[-200:]}"


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """The end of an error message: the closest known word, or all of them."""
    words = list(known)
    close = difflib.get_close_matches(word, words, 1, 0.6)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(words)}" if words else ""


def build(kind: Any, value: Any, at: str = "", leaf: Leaf | None = None) -> Any:
    """`value` as a `kind`, or a TypedError. `leaf` may take over for kinds of its own, such as tensors."""
    if leaf is not None and (taken := leaf(kind, value, at)) is not NotImplemented:
        return taken
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if kind is None or kind is types.NoneType:
        return _expect(value is None, None, value, at, "nothing")
    if kind in _SCALARS:
        return _scalar(kind, value, at)
    if origin is Literal:
        if not any(value == each and type(value) is type(each) for each in args):  # true is not 1
            raise TypedError(at, f"'{value}' is not one of {', '.join(map(str, args))}" + _close(value, args))
        return value
    if origin in (Union, types.UnionType):
        if value == "none" and types.NoneType in args and str not in args:  # TOML has no word for nothing
            return None
        return _one_of(args, value, at, leaf)
    if origin is tuple:
        return _tuple(args, value, at, leaf)
    if origin in (list, Sequence):
        _expect(isinstance(value, list | tuple), value, value, at, "a list")
        return [build(args[0], item, f"{at}[{i}]", leaf) for i, item in enumerate(value)]
    if origin in (dict, Mapping):
        _expect(isinstance(value, Mapping), value, value, at, "a table")
        return _table(args, value, at, leaf)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, at, leaf)
    raise TypedError(at, f"cannot be given here (a {getattr(kind, '__name__', kind)})")


_SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _scalar(kind: Any, value: Any, at: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) >= 2**1023:
            raise TypedError(at, "is too large a number")
        return float(value)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    return _expect(fits, value, value, at, _SCALARS[kind])


def _one_of(options: tuple[Any, ...], value: Any, at: str, leaf: Leaf | None) -> Any:
    errors = []
    for option in options:
        try:
            return build(option, value, at, leaf)
        except TypedError as error:
            errors.append(error)
    if len(deeper := [error for error in errors if error.at != at]) == 1:  # the one option of the right shape
        raise deeper[0]
    wanted = [str(error).removeprefix(f"{at}: ") for error in errors]
    raise TypedError(at, " or ".join(dict.fromkeys(wanted)))


def _tuple(args: tuple[Any, ...], value: Any, at: str, leaf: Leaf | None) -> tuple[Any, ...]:
    _expect(isinstance(value, list | tuple), value, value, at, "a list")
    if len(args) == 2 and args[1] is Ellipsis:
        args = (args[0],) * len(value)
    if len(args) != len(value):
        raise TypedError(at, f"needs {len(args)} values, not {len(value)}")
    return tuple(build(kind, item, f"{at}[{i}]", leaf) for i, (kind, item) in enumerate(zip(args, value, strict=True)))


def _table(args: tuple[Any, ...], value: Mapping[Any, Any], at: str, leaf: Leaf | None) -> dict[Any, Any]:
    table: dict[Any, Any] = {}
    for name, item in value.items():
        key = _key(args[0], name, at)
        if key in table:  # "1" and "01"
            raise TypedError(_below(at, name), "is given twice")
        table[key] = build(args[1], item, _below(at, name), leaf)
    return table


def _key(kind: Any, value: Any, at: str) -> Any:
    if kind is int and isinstance(value, str):  # keys of JSON and TOML tables are text
        if not re.fullmatch(r"-?[0-9]{1,18}", value):
            raise TypedError(_below(at, value), "this key must be a whole number")
        return int(value)
    return build(kind, value, at)


def _dataclass(kind: Any, value: Any, at: str, leaf: Leaf | None) -> Any:
    _expect(isinstance(value, Mapping), value, value, at, "a table")
    hints = typing.get_type_hints(kind)
    known = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for name in value:
        if name not in known:
            raise TypedError(_below(at, name), f"unknown key{nearest(str(name), known)}")
    for name, field in known.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in value:
            raise TypedError(_below(at, name), "is missing")
    given = {name: build(hints[name], item, _below(at, name), leaf) for name, item in value.items()}
    try:
        return kind(**given)
    except TypedError:
        raise
    except ValueError as error:  # a check of the class itself; it names the field
        raise TypedError("", _below(at, str(error))) from error


def _expect(fits: bool, result: Any, value: Any, at: str, wanted: str) -> Any:
    if not fits:
        raise TypedError(at, f"must be {wanted}, not {_shown(value)}")
    return result


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 40 else text[:37] + "..."


def _close(value: Any, options: tuple[Any, ...]) -> str:
    close = difflib.get_close_matches(str(value), [str(option) for option in options], 1, 0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def _below(at: str, name: Any) -> str:
    return f"{at}.{name}" if at else str(name)
