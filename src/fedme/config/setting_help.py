"""What every setting means: the comment beside its default, which is where it is written down."""

import dataclasses
import inspect
import json
import re
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """One setting: its name, its default as text, and what it is."""

    name: str
    default: str
    about: str


def settings_of(kind: type[Any]) -> list[Setting]:
    """The settings of a method, data set or partition, in order; those of training are in a table of their own."""
    comments: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if dataclasses.is_dataclass(each):
            comments |= _comments(each)
    fields = [field for field in dataclasses.fields(kind) if field.init and field.name not in ("train", "defence")]
    return [Setting(field.name, _default(field), comments.get(field.name, "")) for field in fields]


def _comments(kind: type[Any]) -> dict[str, str]:
    found = {}
    for line in inspect.getsource(kind).splitlines():
        match = re.match(r"    (\w+): (.+?)(?:  # (.*))?$", line)
        if match and match[1] in kind.__annotations__:
            choices = re.match(r"Literal\[(.*?)\]", match[2])
            one_of = " | ".join(choices[1].replace('"', "").split(", ")) if choices else ""
            found[match[1]] = "; ".join(part for part in (one_of, match[3] or "") if part)
    return found


def _default(field: "dataclasses.Field[Any]") -> str:
    if dataclasses.is_dataclass(field.default):
        return "{}"
    if field.default is not dataclasses.MISSING:
        return "" if field.default is None else json.dumps(field.default)
    return "{}" if field.default_factory is not dataclasses.MISSING else "(required)"
