"""Names, defaults and help texts of the settings in a dataclass, for `fedme list` and the reference pages."""

import dataclasses
import inspect
import json
import re
import types
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints


class Setting(NamedTuple):
    """One setting: its name, its default as text, and its help text."""

    name: str
    default: str
    about: str


def settings_of(table: type[Any]) -> list[Setting]:
    """The settings of a dataclass, in order, without the tables `train` and `defence`, which are shared by all methods."""
    fields = [field for field in dataclasses.fields(table) if field.init and field.name not in ("train", "defence")]
    annotations = get_type_hints(table)
    return [Setting(field.name, _default(field), _about(field, annotations[field.name], table)) for field in fields]


def _about(field: "dataclasses.Field[Any]", annotation: Any, table: type[Any]) -> str:
    """The allowed values, if they are listed in the type annotation, and the help text."""
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    choices = [str(value) for option in options if get_origin(option) is Literal for value in get_args(option)]
    text = field.metadata["help"] if "help" in field.metadata else _comment(field.name, table)
    return "; ".join(part for part in (" | ".join(choices), text) if part)


def _comment(name: str, table: type[Any]) -> str:
    """Transitional, to be deleted: the comment beside a field that is not yet declared with `fedme.core.settings.setting`."""
    for owner in table.__mro__:
        if name in inspect.get_annotations(owner):
            match = re.search(rf"^    {name}: .*?  # (.*)$", inspect.getsource(owner), re.MULTILINE)
            return match[1] if match else ""
    return ""


def _default(field: "dataclasses.Field[Any]") -> str:
    if dataclasses.is_dataclass(field.default):
        return "{}"
    if field.default is not dataclasses.MISSING:
        return "" if field.default is None else json.dumps(field.default)
    return "{}" if field.default_factory is not dataclasses.MISSING else "(required)"
