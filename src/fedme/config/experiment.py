"""One strict TOML file describes an experiment; ``key=value`` on the command line overrides any key of it.

Every default is written once, in the dataclass that uses it. Unknown keys, wrong types and impossible values are errors that
name the key.
"""

import collections.abc
import dataclasses
import importlib
import importlib.resources
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import tomli_w

from fedme.config.settings import Settings, Spec
from fedme.core.data import ClientId
from fedme.core.method import Method
from fedme.core.typed import TypedError, build, nearest
from fedme.datasets import DATASETS
from fedme.datasets.dataset import Dataset
from fedme.datasets.federated_dataset import DataOptions
from fedme.datasets.partitioners import PARTITIONS
from fedme.datasets.user_data import Clients, Given
from fedme.federation.client_work import AnyMethod
from fedme.federation.malicious_clients import Attack
from fedme.learning.local_training import Training
from fedme.methods import METHODS
from fedme.networks import Entry

PRESETS = importlib.resources.files("fedme") / "presets"
DEMO = "digits-fedme"


class ConfigError(ValueError):
    """An experiment cannot be read; the message names file and key."""


@dataclass(frozen=True, eq=False)
class Supplied:
    """What a program hands over that no file can name: samples, and networks by the names that the experiment uses."""

    dataset: Dataset
    archs: Mapping[str, Entry]


@dataclass(frozen=True)
class Experiment:
    """An experiment as values: everything is known, nothing has been loaded."""

    settings: Settings
    method_name: str
    method: AnyMethod
    data_name: str
    dataset: Any
    data: DataOptions
    partition_name: str
    partition: Any
    supplied: Supplied | None = None

    @property
    def has_unlabeled(self) -> bool:
        """Whether the server has unlabeled samples."""
        here = self.supplied is not None and self.supplied.dataset.unlabeled is not None
        return bool(self.data.unlabeled or here or getattr(self.dataset, "unlabeled_file", None))

    @property
    def own_models(self) -> dict[ClientId, Spec]:
        """The architectures of clients that have one of their own, outside the pool."""
        return {client: table.model for client, table in self.settings.clients.items() if table.model is not None}

    @property
    def train(self) -> Training:
        """The settings of local training."""
        return self.settings.train

    def plain(self) -> dict[str, Any]:
        """Everything with every default filled in, as plain data: what `config.toml` of a run holds."""
        whole: dict[str, Any] = _plain(self.settings)
        whole["method"] = {"name": self.method_name, **_plain(self.method)}
        whole["method"].pop("train")
        whole["method"].pop("defence", None)
        whole["data"] = {"name": self.data_name, **_plain(self.dataset), **_plain(self.data)}
        whole["data"].pop("clients", None)
        if not self.settings.clients:
            del whole["clients"]
        whole["partition"] = {"name": self.partition_name, **_plain(self.partition)}
        return whole


def parse(raw: Mapping[str, Any], origin: str = "", methods: Mapping[str, type[Any]] | None = None) -> Experiment:
    """The experiment that plain data describes. `methods` are classes that a program supplies, by name."""
    try:
        return _parse(raw, METHODS | dict(methods or {}))
    except TypedError as error:
        raise ConfigError(f"{origin}: {error}" if origin else str(error)) from error


def _parse(raw: Mapping[str, Any], methods: Mapping[str, type[Any]]) -> Experiment:
    settings: Settings = build(Settings, raw)
    method_name, method = _named("method", methods, settings.method, "fedme", train=settings.train, defence=settings.defence)
    data_name, kind, table = _pick("data", DATASETS, settings.data, "clients" if settings.clients else "digits")
    options = {f.name for f in dataclasses.fields(DataOptions)}
    own = {f.name for f in dataclasses.fields(kind) if f.init and f.name != "clients"}
    _check_clients(settings, kind, data_name)
    for key in table:
        if key not in options | own:
            raise TypedError(f"data.{key}", f"unknown key{nearest(key, sorted(options | own))}")
    dataset = build(kind, {k: v for k, v in table.items() if k in own}, "data")
    if isinstance(dataset, Clients):
        dataset = dataclasses.replace(dataset, clients=settings.clients)
    data = build(DataOptions, {k: v for k, v in table.items() if k in options}, "data")
    default = "natural" if data_name in NATURAL else "iid"
    partition_name, partition = _named("partition", PARTITIONS, settings.partition, default)
    if data_name == "sites" and settings.attack != Attack():
        raise TypedError("attack", "is for simulations: real sites do what they do; leave the table out")
    if partition_name == "natural" and data_name not in NATURAL:
        raise TypedError("partition.name", f"data set '{data_name}' has no natural clients; use iid, dirichlet, shards ...")
    return Experiment(settings, method_name, method, data_name, dataset, data, partition_name, partition)


def _check_clients(settings: Settings, kind: type[Any], data_name: str) -> None:
    """Tables of clients and the data set must suit each other."""
    if not issubclass(kind, Clients | Given):
        if settings.clients:
            raise TypedError(
                "clients", f"these tables are for samples of one's own, but data.name is '{data_name}'; leave one out"
            )
        return
    if not settings.clients:
        raise TypedError("clients", "no client is described; add a table [clients.NAME] with `data` for each")
    for client, table in settings.clients.items():
        if issubclass(kind, Clients) and table.data is None:
            raise TypedError(f"clients.{client}.data", "is missing: where are its samples?")
    named = settings.partition.get("name", "natural")
    if named != "natural":
        raise TypedError("partition.name", f"'{named}' divides one data set, but every client has its own; leave it out")


NATURAL = ("synthetic", "images", "femnist", "shakespeare", "clients", "given", "sites")  # data sets that come cut into clients


def _pick(
    table: str, known: Mapping[str, type[Any]], given: Mapping[str, Any], default: str
) -> tuple[str, type[Any], dict[str, Any]]:
    name = given.get("name", default)
    if table == "method" and isinstance(name, str) and ":" in name and name not in known:  # a user's, in this local file
        known = {**known, name: user_method(name)}
    if not isinstance(name, str) or name not in known:
        raise TypedError(f"{table}.name", f"unknown {table} '{name}'{nearest(str(name), known)}")
    return name, known[name], {key: value for key, value in given.items() if key != "name"}


def user_method(name: str) -> type[Any]:
    """The method class that local configuration names as "module:Class"."""
    found = imported(name, "method.name")
    if not (isinstance(found, type) and issubclass(found, Method) and dataclasses.is_dataclass(found)):
        raise TypedError("method.name", f"'{name}' is not a method: a frozen dataclass that inherits from fedme.Method")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise TypedError("method.name", f"'{name}' does not define {', '.join(missing)}")
    return found


def _named(table: str, known: Mapping[str, type[Any]], given: Mapping[str, Any], default: str, **fixed: Any) -> tuple[str, Any]:
    name, kind, rest = _pick(table, known, given, default)
    fixed = {key: value for key, value in fixed.items() if key in {f.name for f in dataclasses.fields(kind)}}
    for key in fixed:
        if key in rest:
            raise TypedError(f"{table}.{key}", f"unknown key; these settings are in a table of their own, [{key}]")

    def leaf(kind: Any, value: Any, at: str) -> Any:
        return next((v for k, v in fixed.items() if value is v), _function(kind, value, at))

    return name, build(kind, {**rest, **fixed}, table, leaf)


def _function(kind: Any, value: Any, at: str) -> Any:
    """A setting that may be a function can name it, as "module:function", in this local file."""
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    wants = any(get_origin(option) is collections.abc.Callable for option in options)
    if wants and callable(value):  # given by a program
        return value
    if not wants or not isinstance(value, str) or ":" not in value:
        return NotImplemented
    return imported(value, at)


def imported(path: str, at: str) -> Callable[..., Any]:
    """The function that local configuration names as "module:function"."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs a user's code
        raise TypedError(at, f"cannot import '{path}': {error or type(error).__name__}") from error
    if not callable(found):
        raise TypedError(at, f"'{path}' is not a function")
    return found  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """Dataclasses as tables, functions as import paths, without what is not set."""
    if dataclasses.is_dataclass(value):
        pairs = {f.name: (getattr(value, f.name), f.default) for f in dataclasses.fields(value)}
        # What is not set is left out, unless its default is something else.
        return {name: _plain(item) for name, (item, default) in pairs.items() if item is not None or default is not None}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None:
        return "none"
    if callable(value):
        return f"{value.__module__}:{value.__qualname__}"
    return value


def load(source: str | Path | None, overrides: Sequence[str] = ()) -> tuple[Experiment, list[str]]:
    """The experiment in a file, or a preset by its name (the demo's FedMe by default), with overrides; and notes to show."""
    path = Path(source) if source is not None else None
    if path is not None and (path.suffix == ".toml" or path.exists()):
        raw, origin = read_toml(path), str(path)
    else:
        raw, origin = read_preset(str(source) if source is not None else DEMO)
    if path is not None and origin == str(path):
        _anchor(raw, path.parent)
    notes = override(raw, overrides)
    _anchor(raw, Path())
    return parse(raw, f"{origin} with {' '.join(overrides)}" if overrides else origin), notes


def _anchor(raw: dict[str, Any], folder: Path) -> None:
    """Samples are looked for beside the file that names them, wherever the command is given."""
    tables, data = raw.get("clients", {}), raw.get("data")
    files = [(table, key) for table in (tables.values() if isinstance(tables, dict) else ()) for key in ("data", "val", "test")]
    if isinstance(data, dict) and data.get("name") != "sites":  # all sites have the same file, and the server alone its samples
        files += [(data, "unlabeled_file"), (data, "public_file")]
    for table, key in files:
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = str((folder / table[key]).resolve())


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as plain data."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `fedme list presets` shows what is built in") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not TOML, not UTF-8, or a number of 5000 digits
        raise ConfigError(f"{path}: {error}") from error


def presets() -> dict[str, str]:
    """The names of the built-in experiments and their first line of comment."""
    files = sorted(file.name for file in PRESETS.iterdir() if file.name.endswith(".toml"))
    return {name.removesuffix(".toml"): (PRESETS / name).read_text().splitlines()[0].lstrip("# ") for name in files}


def read_preset(name: str) -> tuple[dict[str, Any], str]:
    """The plain data of a built-in experiment, and what to call it in messages."""
    known = presets()
    if name not in known:
        raise ConfigError(f"'{name}' is neither a file nor a preset{nearest(name, known)}")
    return tomllib.loads((PRESETS / f"{name}.toml").read_text()), f"preset {name}"


def override(raw: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Apply ``key=value`` words to plain data. Another method leaves the settings of the old one behind, and says so."""
    notes = []
    for word in sorted(overrides, key=lambda word: not word.split("=")[0].endswith("name")):
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"'{word}': overrides look like key=value, for example rounds=5 or method.name=fml")
        path = key.split(".")
        value = _value(text)
        if path[0] in ("method", "data", "partition", "engine") and len(path) == 1 and isinstance(value, str):
            path = [path[0], "name"]
        if path[0] in ("method", "data", "partition") and path[1:] == ["name"]:
            notes += _change_name(raw, path[0], value)
        table = raw
        for part in path[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"'{word}': {part} is not a table")
        table[path[-1]] = value
    return notes


def _change_name(raw: dict[str, Any], table: str, name: Any) -> list[str]:
    known: Mapping[str, type[Any]] = {"method": METHODS, "data": DATASETS, "partition": PARTITIONS}[table]
    old = raw.get(table, {})
    if not isinstance(name, str) or not isinstance(old, dict) or old.get("name") == name:
        return []
    if name not in known and table != "method":
        return []
    fields = {f.name for f in dataclasses.fields(known[name])} if name in known else set()
    fields |= {f.name for f in dataclasses.fields(DataOptions)} if table == "data" else set()
    # Methods use the same letters for different things, so nothing of another method is kept.
    keep = {key: old[key] for key in old if table != "method" and key in fields}
    dropped = sorted(old.keys() - keep.keys() - {"name"})
    raw[table] = keep
    return [f"{table}.name={name}: left out {', '.join(dropped)} of {old.get('name', 'the file')}"] if dropped else []


def _value(text: str) -> Any:
    """A TOML value, or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        if text[:1] in ("[", "{"):
            raise ConfigError(f"'{text}' is not TOML; text in lists and tables needs quotes, as in '[\"mlr\"]'") from None
        return text


def to_toml(plain: Mapping[str, Any]) -> str:
    """Plain data as TOML."""
    return tomli_w.dumps(plain)
