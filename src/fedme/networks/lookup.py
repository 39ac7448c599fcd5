"""Resolve an architecture from its specification: a name in a table, or the import path of a user-defined network, and options.

The name of the architecture contains all options, as in "cnn-2(width=0.25)[classes=2]", and resolves to the same
architecture: ``resolve(table, arch.name, schema) == arch``.
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
from fedme.core.key import Key
from fedme.core.model import Arch, Model, Option, output_of
from fedme.networks.input_sizes import ArchError

OUTPUT_NAMES = {"classification": "classes", "multi-label": "labels", "regression": "targets"}
SHAPE_HINTS = {1: "; do not squeeze the output", 2: "; change the last layer (a parameter called `classes` is filled in)"}
TASK_PARAMETERS = ("shape", "classes", "vocabulary")  # set by the task, never by the user
DENSE_FAMILY = "dnn-<hidden>"  # one entry for dense networks with hidden layers of any sizes
MAX_LENGTH = 500  # characters of a name with its options, which may come from an untrusted file


@dataclass(frozen=True)
class Entry:
    """An entry of a table of architectures; `fixed` are the arguments that the name implies."""

    factory: Callable[..., nn.Module]
    about: str
    source: str
    fixed: Mapping[str, Option] = field(default_factory=dict)
    inputs: Literal["numbers", "symbols", "unknown"] = "numbers"

    @functools.cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the factory."""
        return inspect.signature(self.factory).parameters

    @property
    def options(self) -> Mapping[str, inspect.Parameter]:
        """The parameters that a user may set."""
        keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        reserved = {*TASK_PARAMETERS, *self.fixed}
        return {name: p for name, p in self.parameters.items() if p.kind in keywords and name not in reserved}

    @property
    def takes_any(self) -> bool:
        """Whether the factory accepts arbitrary keyword arguments."""
        return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self.parameters.values())


class Row(NamedTuple):
    """A row of the list of architectures."""

    name: str
    about: str
    source: str
    options: str


def rows(table: Mapping[str, Entry]) -> list[Row]:
    """The table for display."""

    def text(p: inspect.Parameter) -> str:
        return p.name if p.default is p.empty else f"{p.name}={p.default!r}"

    return [Row(name, e.about, e.source, ", ".join(map(text, e.options.values()))) for name, e in table.items()]


def user_entry(name: str, factory: object, about: str = "", source: str = "") -> Entry:
    """An entry for a user-defined network: an nn.Module class, or a function that returns an nn.Module."""
    if not callable(factory) or (isinstance(factory, type) and not issubclass(factory, nn.Module)):
        got = f"the class {factory.__qualname__}" if isinstance(factory, type) else type(factory).__name__
        raise ArchError(f"architecture '{name}' must be an nn.Module class or a function that returns one, got {got}")
    entry = Entry(factory, about, source, inputs="unknown")
    try:
        _ = entry.parameters
    except (TypeError, ValueError) as error:
        raise ArchError(f"architecture '{name}': the factory has no readable signature ({error})") from error
    return entry


def resolve(
    table: Mapping[str, Entry],
    spec: str | Mapping[str, Any],
    schema: Schema,
    classes: int | None = None,
    imports: bool = True,
) -> Arch:
    """The architecture named by `spec`, for the inputs and outputs of a task; `classes` defaults to those of the schema."""
    name, requested, suffix = _read(spec)
    if suffix is not None and classes not in (None, suffix):
        raise ArchError(f"architecture '{spec}' must have {classes} classes, got {suffix}")
    expected = len(schema.classes)
    outputs = next(count for count in (classes, suffix, expected) if count is not None)
    if outputs < 1:
        raise ArchError(f"architecture '{name}' needs at least one class, got {outputs}")

    entry = _find(table, name, imports)
    if entry.inputs == "numbers" and schema.vocabulary is not None:
        symbols = ", ".join(key for key, other in table.items() if other.inputs == "symbols")
        raise ArchError(
            f"architecture '{name}' takes numbers, but the inputs are symbols (integers); use one of {symbols}, or, if they "
            "are quantities, set data.scale = 'standard' or convert them to floats"
        )
    options = _checked_options(name, entry, requested)
    filled_in = {"shape": schema.shape, "classes": outputs, "vocabulary": schema.vocabulary}
    filled_in = {key: value for key, value in filled_in.items() if key in entry.parameters and value is not None}
    arguments: dict[str, Any] = {**entry.fixed, **options, **filled_in}
    _require_all(name, entry, arguments)

    options_text = ", ".join(f"{key}={value!r}" for key, value in sorted(options.items()))
    full_name = name + (f"({options_text})" if options_text else "")
    full_name += f"[classes={outputs}]" if "classes" in filled_in and outputs != expected else ""
    if entry.inputs != "unknown":
        _build_without_weights(full_name, entry, arguments)
    return Arch.named(full_name, entry.factory, **arguments)


def check(
    arch: Arch,
    schema: Schema,
    classes: int | None = None,
    inputs: Inputs | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Run `arch` in evaluation mode on two samples, and raise an ArchError unless it gives one number per class.

    The default inputs are zeros of the shape of the schema; pass `inputs` if samples consist of several tensors. `dtype` is
    that of the weights in training.
    """
    if inputs is None:
        inputs = torch.zeros((2, *schema.shape), dtype=torch.float32 if schema.vocabulary is None else torch.int64)
    shapes = {key: tuple(x.shape) for key, x in inputs.items()} if isinstance(inputs, Mapping) else tuple(inputs.shape)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            module = arch.factory(**dict(arch.options))
        except Exception as error:  # user code may raise anything
            raise ArchError(f"architecture '{arch.name}' cannot be built: {_error_text(error)}") from error
        if not isinstance(module, nn.Module):
            raise ArchError(f"architecture '{arch.name}' must return an nn.Module, got {type(module).__name__}")
        try:
            output = module.eval()(**inputs) if isinstance(inputs, Mapping) else module.eval()(inputs)
        except Exception as error:
            raise ArchError(
                f"architecture '{arch.name}' fails on two samples of shape {shapes}: {_error_text(error)}; it must accept "
                "these inputs (a parameter called `shape` is filled in)"
            ) from error
    expected = (2, len(schema.classes) if classes is None else classes)
    meaning = f"two samples by {expected[1]} {OUTPUT_NAMES[schema.task_type]}"
    if not isinstance(output, Tensor) and isinstance(getattr(output, "logits", None), Tensor):
        output = output_of(output)
    if not isinstance(output, Tensor):
        raise ArchError(
            f"architecture '{arch.name}' must return a tensor, or an object with a tensor `logits`, of shape {expected}, "
            f"{meaning}, got {type(output).__name__}"
        )
    if tuple(output.shape) != expected:
        raise ArchError(
            f"architecture '{arch.name}' must return shape {expected}, {meaning}, for inputs of shape {shapes}, "
            f"got {tuple(output.shape)}{SHAPE_HINTS.get(len(output.shape), '')}"
        )
    if not output.is_floating_point():
        raise ArchError(f"architecture '{arch.name}' must return floating-point logits, got {output.dtype}")
    if dtype != torch.float32:
        _check_type(arch, inputs, dtype)


def _check_type(arch: Arch, inputs: Inputs, dtype: torch.dtype) -> None:
    """Raise an ArchError unless the network computes with weights and inputs of this type."""

    def converted(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    given = {key: converted(x) for key, x in inputs.items()} if isinstance(inputs, Mapping) else converted(inputs)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            Model.init(arch, Key(0), dtype)(given)
        except Exception as error:  # user code may raise anything
            name = str(dtype).removeprefix("torch.")
            raise ArchError(
                f"architecture '{arch.name}' fails with engine.dtype = '{name}': {_error_text(error)}; use the type of the "
                "inputs in its forward pass (x.dtype), or leave engine.dtype out"
            ) from error


def _read(spec: str | Mapping[str, Any]) -> tuple[str, dict[str, Any], int | None]:
    """The name, the options and, if it is part of the name, the number of classes."""
    if isinstance(spec, Mapping):
        if not isinstance(spec.get("name"), str):
            raise ArchError(f"an architecture needs a name, as in {{name = 'dnn-64'}}, got {dict(spec)}")
        name, options, suffix = _read(spec["name"])
        return name, options | {key: value for key, value in spec.items() if key != "name"}, suffix
    if len(spec) > MAX_LENGTH:
        raise ArchError(f"the name of an architecture must have at most {MAX_LENGTH} characters, got {len(spec)}")
    parts = re.fullmatch(r"([^()\[\]\s]+)(\(.*\))?(?:\[classes=(\d+)\])?", spec.strip())
    if not parts:
        raise ArchError(f"invalid architecture '{spec}'; write it like 'dnn-64' or 'cnn-2(width=0.25)'")
    name, options_text, suffix_text = parts.groups()
    return name, _options(spec, options_text or "()"), int(suffix_text) if suffix_text else None


def _options(spec: str, text: str) -> dict[str, Any]:
    """The values of "(width=0.25, hidden=64)"; only literals are allowed, nothing is evaluated."""
    try:
        call = ast.parse(f"_{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("every option needs a name")
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ArchError(f"invalid options of architecture '{spec}'; write them like '(width=0.25)'") from error


def require_known(table: Mapping[str, Entry], spec: str | Mapping[str, Any]) -> None:
    """Raise an ArchError for a name that is neither in the table nor given by a program; nothing is imported."""
    name = _read(spec)[0]
    if ":" not in name and "#" not in name:  # networks of a program have numbers
        _find(table, name, imports=False)


def _find(table: Mapping[str, Entry], name: str, imports: bool) -> Entry:
    if name in table and name != DENSE_FAMILY:
        return table[name]
    if DENSE_FAMILY in table and re.fullmatch(r"dnn(-[1-9]\d*)+", name):
        return replace(table[DENSE_FAMILY], fixed={"hidden": tuple(int(size) for size in name.split("-")[1:])})
    if ":" in name:
        if not imports:
            raise ArchError(f"architecture '{name}' is an import path, which is allowed only in a local configuration")
        return user_entry(name, _imported(name))
    stems = {key.partition("-<")[0]: key for key in table}
    near = [stems[stem] for stem in difflib.get_close_matches(name.partition("-<")[0], stems, n=3, cutoff=0.5)]
    raise ArchError(
        f"unknown architecture '{name}'."
        + (f" Did you mean {' or '.join(near)}?" if near else "")
        + f" Available: {', '.join(table)}; or the import path of a user-defined network, 'module:Name'."
    )


def _imported(path: str) -> object:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing executes user code
        raise ArchError(f"architecture '{path}': cannot import the module '{module_name}': {_error_text(error)}") from error
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        near = difflib.get_close_matches(attribute, dir(module), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ArchError(f"architecture '{path}': the module '{module_name}' has no '{attribute}'{hint}") from error


def _checked_options(name: str, entry: Entry, requested: Mapping[str, Any]) -> dict[str, Option]:
    """The requested options that differ from the defaults."""
    options: dict[str, Option] = {}
    for key, value in requested.items():
        if key in TASK_PARAMETERS or (key not in entry.options and not entry.takes_any):
            valid = ", ".join(entry.options) or "none"
            reason = "is set by the task and is not an option" if key in TASK_PARAMETERS else "is not an option"
            raise ArchError(f"'{key}' {reason} of architecture '{name}'; its options: {valid}")
        default = entry.options[key].default if key in entry.options else inspect.Parameter.empty
        option = _plain(name, key, value)
        if type(option) is int and type(default) is float:
            option = float(option)
        if entry.inputs != "unknown" and type(option) is not type(default):
            expected = type(default).__name__
            raise ArchError(f"option '{key}' of architecture '{name}' must be of type {expected}, got {value!r}")
        if type(option) is not type(default) or option != default:
            options[key] = option
    return options


def _plain(name: str, key: str, value: Any) -> Option:
    """Check that a value can be part of a name."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and all(type(item) is int for item in value):
        return tuple(value)
    expected = "a number, a string, true, false or a list of integers"
    raise ArchError(f"option '{key}' of architecture '{name}' must be {expected}, got {value!r}")


def _require_all(name: str, entry: Entry, arguments: Mapping[str, Any]) -> None:
    """Raise an ArchError if a required argument is missing."""
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for key, p in entry.parameters.items():
        if p.kind in optional or p.default is not p.empty or (key in arguments and p.kind is not p.POSITIONAL_ONLY):
            continue
        if key == "vocabulary":
            raise ArchError(f"architecture '{name}' needs sequences of symbols, but the inputs have no vocabulary")
        raise ArchError(f"architecture '{name}' needs a value for its option '{key}'")


def _build_without_weights(name: str, entry: Entry, arguments: Mapping[str, Any]) -> None:
    """Check that the network accepts its arguments, without allocating memory."""
    try:
        with torch.device("meta"), SkipNormalInit():
            entry.factory(**arguments)
    except ArchError as error:
        raise ArchError(f"architecture '{name}' {error}") from error


class SkipNormalInit(TorchFunctionMode):
    """Skips `nn.init.normal_`: on the meta device it makes torch load its compiler, which takes a second."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return kwargs["tensor"] if func is nn.init.normal_ else func(*args, **(kwargs or {}))


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
