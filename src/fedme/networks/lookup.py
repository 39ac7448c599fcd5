"""From what a user writes to an architecture: a name of a table, or the import path of one's own network, and options.

The name of the architecture says everything that was asked for, as in "cnn-2(width=0.25)[classes=2]", and reads back as
itself: ``resolve(table, arch.name, schema) == arch``.
"""

import ast
import difflib
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedme.core.data import Inputs, Schema
from fedme.core.model import Arch, Option, output_of
from fedme.networks.input_sizes import ArchError

OUTPUTS = {"classification": "classes", "multi-label": "labels", "regression": "numbers to predict"}
LAST = "; change its last layer (a parameter called `classes` is filled in)"
GIVEN = ("shape", "classes", "vocabulary")  # decided by the task, so never an option
FAMILY = "dnn-<hidden>"  # one line of the table for hidden layers of any sizes
LONGEST = 500  # characters of a name with its options: it may come from a file of somebody else


@dataclass(frozen=True)
class Entry:
    """One line of a table of architectures; `fixed` are the arguments that the name stands for."""

    factory: Callable[..., nn.Module]
    about: str
    source: str
    fixed: Mapping[str, Option] = field(default_factory=dict)
    inputs: Literal["numbers", "symbols", "unknown"] = "numbers"

    @functools.cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """What its factory takes."""
        return inspect.signature(self.factory).parameters

    @property
    def options(self) -> Mapping[str, inspect.Parameter]:
        """What a user may set by name."""
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        taken = {*GIVEN, *self.fixed}
        return {name: p for name, p in self.parameters.items() if p.kind in named and name not in taken}

    @property
    def takes_any(self) -> bool:
        """Whether its factory takes options of any name."""
        return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self.parameters.values())


class Row(NamedTuple):
    """A line of the list of architectures."""

    name: str
    about: str
    source: str
    options: str


def rows(table: Mapping[str, Entry]) -> list[Row]:
    """The table, for people to read."""

    def shown(p: inspect.Parameter) -> str:
        return p.name if p.default is p.empty else f"{p.name}={p.default!r}"

    return [Row(name, e.about, e.source, ", ".join(map(shown, e.options.values()))) for name, e in table.items()]


def user_entry(name: str, factory: object, about: str = "", source: str = "") -> Entry:
    """A line for a network of the user's own: a module class, or a function that returns a module."""
    if not callable(factory) or (isinstance(factory, type) and not issubclass(factory, nn.Module)):
        what = f"the class {factory.__qualname__}" if isinstance(factory, type) else f"a {type(factory).__name__}"
        raise ArchError(f"architecture '{name}' must be an nn.Module class or a function that returns one, not {what}")
    entry = Entry(factory, about, source, inputs="unknown")
    try:
        _ = entry.parameters
    except (TypeError, ValueError) as error:
        raise ArchError(f"architecture '{name}': the arguments of its factory cannot be read ({error})") from error
    return entry


def resolve(
    table: Mapping[str, Entry],
    spec: str | Mapping[str, Any],
    schema: Schema,
    classes: int | None = None,
    imports: bool = True,
) -> Arch:
    """The architecture that `spec` asks for, fitted to a task; `classes` are the schema's unless given."""
    name, asked, suffix = _read(spec)
    if suffix is not None and classes not in (None, suffix):
        raise ArchError(f"architecture '{spec}' says {suffix} classes where {classes} are wanted")
    expected = len(schema.classes)
    outputs = next(count for count in (classes, suffix, expected) if count is not None)
    if outputs < 1:
        raise ArchError(f"architecture '{name}' needs at least one class, not {outputs}")

    entry = _find(table, name, imports)
    if entry.inputs == "numbers" and schema.vocabulary is not None:
        symbols = ", ".join(key for key, other in table.items() if other.inputs == "symbols")
        raise ArchError(f"architecture '{name}' takes numbers, but the inputs are symbols: use one of {symbols}")
    options = _fitted(name, entry, asked)
    given = {"shape": schema.shape, "classes": outputs, "vocabulary": schema.vocabulary}
    given = {key: value for key, value in given.items() if key in entry.parameters and value is not None}
    arguments: dict[str, Any] = {**entry.fixed, **options, **given}
    _require_all(name, entry, arguments)

    shown = ", ".join(f"{key}={value!r}" for key, value in sorted(options.items()))
    full = name + (f"({shown})" if shown else "")
    full += f"[classes={outputs}]" if "classes" in given and outputs != expected else ""
    if entry.inputs != "unknown":
        _build_without_weights(full, entry, arguments)
    return Arch.named(full, entry.factory, **arguments)


def check(arch: Arch, schema: Schema, classes: int | None = None, inputs: Inputs | None = None) -> None:
    """Run `arch` in evaluation mode on two samples and refuse an output that is not one number a class.

    The samples are zeros shaped by the schema; hand in `inputs` where samples are more than one tensor.
    """
    if inputs is None:
        dtype = torch.float32 if schema.vocabulary is None else torch.int64
        inputs = torch.zeros((2, *schema.shape), dtype=dtype)
    shapes = {key: tuple(x.shape) for key, x in inputs.items()} if isinstance(inputs, Mapping) else tuple(inputs.shape)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            module = arch.factory(**dict(arch.options))
        except Exception as error:  # whatever a user's code raises
            raise ArchError(f"architecture '{arch.name}' cannot be built: {_said(error)}") from error
        if not isinstance(module, nn.Module):
            raise ArchError(f"architecture '{arch.name}' must give an nn.Module, but gives a {type(module).__name__}")
        try:
            output = module.eval()(**inputs) if isinstance(inputs, Mapping) else module.eval()(inputs)
        except Exception as error:
            raise ArchError(
                f"architecture '{arch.name}' fails on inputs of shape {shapes}, two samples: {_said(error)}; let it take them "
                "(a parameter called `shape` is filled in)"
            ) from error
    expected = (2, len(schema.classes) if classes is None else classes)
    if not isinstance(output, Tensor) and isinstance(getattr(output, "logits", None), Tensor):
        output = output_of(output)
    if not isinstance(output, Tensor):
        raise ArchError(
            f"architecture '{arch.name}' gives a {type(output).__name__}; let its forward return a tensor, or an object whose "
            f"`logits` is one: two samples by {expected[1]} {OUTPUTS[schema.task_type]}"
        )
    if tuple(output.shape) != expected:
        raise ArchError(
            f"architecture '{arch.name}' gives shape {tuple(output.shape)} for inputs of shape {shapes}; expected shape "
            f"{expected}: two samples by {expected[1]} {OUTPUTS[schema.task_type]}"
            f"{LAST if len(output.shape) == 2 else '; leave a squeeze out' if len(output.shape) == 1 else ''}"
        )
    if not output.is_floating_point():
        raise ArchError(f"architecture '{arch.name}' gives {output.dtype}; expected floating-point logits")


def _read(spec: str | Mapping[str, Any]) -> tuple[str, dict[str, Any], int | None]:
    """Name, options and, where it is part of the name, the number of classes."""
    if isinstance(spec, Mapping):
        if not isinstance(spec.get("name"), str):
            raise ArchError(f"an architecture needs a name, as in {{name = 'dnn-64'}}, but this is {dict(spec)}")
        name, options, suffix = _read(spec["name"])
        return name, options | {key: value for key, value in spec.items() if key != "name"}, suffix
    if len(spec) > LONGEST:
        raise ArchError(f"the name of an architecture has {len(spec)} characters; at most {LONGEST} are read")
    parts = re.fullmatch(r"([^()\[\]\s]+)(\(.*\))?(?:\[classes=(\d+)\])?", spec.strip())
    if not parts:
        raise ArchError(f"cannot read the architecture '{spec}': write it like 'dnn-64' or 'cnn-2(width=0.25)'")
    name, options_text, suffix_text = parts.groups()
    return name, _options(spec, options_text or "()"), int(suffix_text) if suffix_text else None


def _options(spec: str, text: str) -> dict[str, Any]:
    """The values of "(width=0.25, hidden=64)": literals only, nothing is evaluated."""
    try:
        call = ast.parse(f"_{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("every option needs a name")
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ArchError(f"cannot read the options of architecture '{spec}': write them like '(width=0.25)'") from error


def _find(table: Mapping[str, Entry], name: str, imports: bool) -> Entry:
    if name in table and name != FAMILY:
        return table[name]
    if FAMILY in table and re.fullmatch(r"dnn(-[1-9]\d*)+", name):
        return replace(table[FAMILY], fixed={"hidden": tuple(int(size) for size in name.split("-")[1:])})
    if ":" in name:
        if not imports:
            raise ArchError(f"architecture '{name}' is an import path, which only a local configuration may name")
        return user_entry(name, _imported(name))
    stems = {key.partition("-<")[0]: key for key in table}
    near = [stems[stem] for stem in difflib.get_close_matches(name.partition("-<")[0], stems, n=3, cutoff=0.5)]
    raise ArchError(
        f"no architecture is called '{name}'."
        + (f" Did you mean {' or '.join(near)}?" if near else "")
        + f" There are: {', '.join(table)}; or the import path of your own, 'module:Name'."
    )


def _imported(path: str) -> object:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs a user's code
        raise ArchError(f"architecture '{path}': cannot import the module '{module_name}': {_said(error)}") from error
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        near = difflib.get_close_matches(attribute, dir(module), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ArchError(f"architecture '{path}': the module '{module_name}' has no '{attribute}'{hint}") from error


def _fitted(name: str, entry: Entry, asked: Mapping[str, Any]) -> dict[str, Option]:
    """The options that were asked for, without those that are the default anyway."""
    options: dict[str, Option] = {}
    for key, value in asked.items():
        if key in GIVEN or (key not in entry.options and not entry.takes_any):
            valid = ", ".join(entry.options) or "none"
            why = "is decided by the task and is not an option" if key in GIVEN else "is not an option"
            raise ArchError(f"'{key}' {why} of architecture '{name}'; its options: {valid}")
        default = entry.options[key].default if key in entry.options else inspect.Parameter.empty
        option = _plain(name, key, value)
        if type(option) is int and type(default) is float:
            option = float(option)
        if entry.inputs != "unknown" and type(option) is not type(default):
            wanted = type(default).__name__
            raise ArchError(f"option '{key}' of architecture '{name}' must be of type {wanted}, not {value!r}")
        if type(option) is not type(default) or option != default:
            options[key] = option
    return options


def _plain(name: str, key: str, value: Any) -> Option:
    """A value that can be part of a name."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and all(type(item) is int for item in value):
        return tuple(value)
    wanted = "a number, a text, true, false or a list of integers"
    raise ArchError(f"option '{key}' of architecture '{name}' must be {wanted}, not {value!r}")


def _require_all(name: str, entry: Entry, arguments: Mapping[str, Any]) -> None:
    """Refuse a call that leaves out an argument."""
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for key, p in entry.parameters.items():
        if p.kind in optional or p.default is not p.empty or (key in arguments and p.kind is not p.POSITIONAL_ONLY):
            continue
        if key == "vocabulary":
            raise ArchError(f"architecture '{name}' needs sequences of symbols, but the inputs have no vocabulary")
        raise ArchError(f"architecture '{name}' needs a value for its option '{key}'")


def _build_without_weights(name: str, entry: Entry, arguments: Mapping[str, Any]) -> None:
    """Find out now, at no cost, whether the network fits its inputs."""
    try:
        with torch.device("meta"), _Undrawn():
            entry.factory(**arguments)
    except ArchError as error:
        raise ArchError(f"architecture '{name}' {error}") from error


class _Undrawn(TorchFunctionMode):
    """No normal numbers for weights that do not exist: to draw them, torch would load its compiler, for a second."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return kwargs["tensor"] if func is nn.init.normal_ else func(*args, **(kwargs or {}))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
