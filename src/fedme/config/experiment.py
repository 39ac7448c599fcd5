"""Experiments: reading them from TOML files and presets, and overriding keys with ``key=value``.

Defaults are in the dataclasses of the tables. Unknown keys, wrong types and invalid values are errors that name the key.
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
from fedme.core.callbacks import Callback, Metric
from fedme.core.data import ClientId
from fedme.core.key import Key
from fedme.core.method import Method
from fedme.core.typed import TypedError, build, nearest
from fedme.datasets import DATASETS
from fedme.datasets.dataset import Dataset
from fedme.datasets.federated_dataset import DataOptions
from fedme.datasets.partitioners import PARTITIONS
from fedme.datasets.several import Several
from fedme.datasets.user_data import FileDataset, ObjectDataset
from fedme.federation.client_work import AnyMethod
from fedme.federation.malicious_clients import Attack
from fedme.learning.training_settings import Training
from fedme.methods import METHODS
from fedme.networks import ArchError, Entry, require_known

PRESETS = importlib.resources.files("fedme") / "presets"
DEMO = "digits-fedme"
NATURAL = (
    "synthetic",
    "images",
    "femnist",
    "shakespeare",
    "several",
    "clients",
    "given",
    "sites",
)  # data sets with their own clients


class ConfigError(ValueError):
    """An experiment is invalid; the message names the file and the key."""


@dataclass(frozen=True, eq=False)
class Supplied:
    """Objects passed by a Python program: samples, networks by the names that the experiment uses, metrics and callbacks."""

    dataset: Dataset
    archs: Mapping[str, Entry]
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    callbacks: Sequence[Callback] = ()


@dataclass(frozen=True)
class Experiment:
    """A valid experiment with all settings; no data is loaded yet."""

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
        supplied = self.supplied is not None and self.supplied.dataset.unlabeled is not None
        return bool(self.data.unlabeled or supplied or getattr(self.dataset, "unlabeled_file", None))

    @property
    def partition_key(self) -> Key:
        """The source of randomness of the partition and of the splits."""
        return Key(self.settings.seed if self.partition.seed is None else self.partition.seed).at("partition")

    @property
    def own_models(self) -> dict[ClientId, Spec]:
        """The architectures set in the tables of single clients, outside the pool."""
        return {client: table.model for client, table in self.settings.clients.items() if table.model is not None}

    @property
    def train(self) -> Training:
        """The settings of local training."""
        return self.settings.train

    def plain(self) -> dict[str, Any]:
        """All settings including defaults as plain data, the content of `config.toml` in a run directory."""
        config: dict[str, Any] = _plain(self.settings)
        config["method"] = {"name": self.method_name, **_plain(self.method)}
        config["method"].pop("train")
        config["method"].pop("defence", None)
        config["data"] = {"name": self.data_name, **_plain(self.dataset), **_plain(self.data)}
        config["data"].pop("clients", None)
        if not self.settings.clients:
            del config["clients"]
        config["partition"] = {"name": self.partition_name, **_plain(self.partition)}
        return config


def parse(raw: Mapping[str, Any], origin: str = "", methods: Mapping[str, type[Any]] | None = None) -> Experiment:
    """Build an experiment from plain data that comes from `origin`. A program may supply classes of `methods`."""
    try:
        return _parse(raw, METHODS | dict(methods or {}))
    except TypedError as error:
        raise ConfigError(f"{origin}: {error}" if origin else str(error)) from None  # one error, once


def _parse(raw: Mapping[str, Any], methods: Mapping[str, type[Any]]) -> Experiment:
    settings: Settings = build(Settings, raw)
    method_name, method = _build_named(
        "method", methods, settings.method, "fedme", train=settings.train, defence=settings.defence
    )
    if method.own_step and settings.train.optimizer != Training().optimizer:
        raise TypedError(
            "train.optimizer",
            f"method '{method_name}' defines its own step; train.optimizer = '{settings.train.optimizer}' has no meaning there",
        )
    if settings.train.class_weights is not None and method.own_step:
        raise TypedError("train.class_weights", f"method '{method_name}' defines its own step, which has no class weights")
    if settings.train.class_weights is not None and settings.privacy is not None:
        message = "are computed from the numbers of samples per class, which [privacy] does not protect; remove one of the two"
        raise TypedError("train.class_weights", message)
    default_data = "clients" if settings.clients else "digits"
    data_name, dataset_class, table = _select_class("data", DATASETS, settings.data, default_data)
    _check_clients(settings, dataset_class, data_name)
    common_keys = {f.name for f in dataclasses.fields(DataOptions)}
    dataset_keys = {f.name for f in dataclasses.fields(dataset_class) if f.init and f.name != "clients"}
    for key in table:
        if key not in common_keys | dataset_keys:
            raise TypedError(f"data.{key}", f"unknown key{nearest(key, sorted(common_keys | dataset_keys))}")
    dataset = build(dataset_class, {k: v for k, v in table.items() if k in dataset_keys}, "data")
    if isinstance(dataset, FileDataset):
        dataset = dataclasses.replace(dataset, clients=settings.clients)
    data = build(DataOptions, {k: v for k, v in table.items() if k in common_keys}, "data")
    if isinstance(dataset, Several):
        data = dataclasses.replace(data, groups={**dataset.groups, **data.groups})
    default_partition = "natural" if data_name in NATURAL else "iid"
    partition_name, partition = _build_named("partition", PARTITIONS, settings.partition, default_partition)
    if data_name == "sites" and settings.attack != Attack():
        raise TypedError("attack", "is only for simulations, not for deployments; remove the table")
    if partition_name == "natural" and data_name not in NATURAL:
        raise TypedError("partition.name", f"data set '{data_name}' has no natural clients; use iid, dirichlet, shards ...")
    if data_name == "several" and partition_name != "natural":
        raise TypedError("partition.name", f"data set 'several' has one client per data set; remove '{partition_name}'")
    _check_networks(settings)
    return Experiment(settings, method_name, method, data_name, dataset, data, partition_name, partition)


def _check_networks(settings: Settings) -> None:
    """Refuse names of networks that do not exist, before any data is loaded."""
    named = [("models.pool", spec) for spec in settings.models.pool]
    named += [("models.shared", settings.models.shared)] if settings.models.shared is not None else []
    named += [(f"clients.{client}.model", table.model) for client, table in settings.clients.items() if table.model is not None]
    for at, spec in named:
        try:
            require_known(spec)
        except ArchError as error:
            raise TypedError(at, str(error)) from None


def _check_clients(settings: Settings, dataset_class: type[Any], data_name: str) -> None:
    """Check that the data set and the `[clients]` tables fit each other."""
    if not issubclass(dataset_class, FileDataset | ObjectDataset):
        if settings.clients:
            message = f"these tables are for user data, but data.name is '{data_name}'; remove either"
            raise TypedError("clients", message)
        return
    if not settings.clients:
        raise TypedError("clients", "no clients; add a table [clients.NAME] with `data` for each client")
    for client, table in settings.clients.items():
        if issubclass(dataset_class, FileDataset) and table.data is None:
            raise TypedError(f"clients.{client}.data", "is missing; set the file or folder with the client's samples")
    partition_name = settings.partition.get("name", "natural")
    if partition_name != "natural":
        message = f"'{partition_name}' divides a common data set, but every client has its own data; remove the key"
        raise TypedError("partition.name", message)


def _select_class(
    table: str, classes: Mapping[str, type[Any]], given: Mapping[str, Any], default: str
) -> tuple[str, type[Any], dict[str, Any]]:
    """The name and class that a table selects, and the remaining keys of the table."""
    name = given.get("name", default)
    if table == "method" and isinstance(name, str) and ":" in name and name not in classes:
        classes = {**classes, name: import_method(name)}
    if not isinstance(name, str) or name not in classes:
        raise TypedError(f"{table}.name", f"unknown {table} '{name}'{nearest(str(name), classes)}")
    chosen = classes[name]
    if table == "method" and "shared" in given and "shared" not in {field.name for field in dataclasses.fields(chosen)}:
        raise TypedError("method.shared", f"the weights that travel cannot be named with '{name}': {chosen.not_by_name}")
    return name, chosen, {key: value for key, value in given.items() if key != "name"}


def import_method(path: str) -> type[Any]:
    """The method class that local configuration names as "module:Class"."""
    method = _import_function(path, "method.name")
    if not (isinstance(method, type) and issubclass(method, Method) and dataclasses.is_dataclass(method)):
        raise TypedError("method.name", f"'{path}' is not a method: a frozen dataclass that inherits from fedme.Method")
    if missing := sorted(getattr(method, "__abstractmethods__", ())):
        raise TypedError("method.name", f"'{path}' does not define {', '.join(missing)}")
    return method


def _build_named(
    table: str, classes: Mapping[str, type[Any]], given: Mapping[str, Any], default: str, **shared: Any
) -> tuple[str, Any]:
    """The name and value of a table. `shared` are settings from other tables that the class may take as fields."""
    name, selected, keys = _select_class(table, classes, given, default)
    shared = {key: value for key, value in shared.items() if key in {f.name for f in dataclasses.fields(selected)}}
    for key in shared:
        if key in keys:
            raise TypedError(f"{table}.{key}", f"unknown key; these settings belong to the table [{key}]")

    def leaf(annotation: Any, value: Any, at: str) -> Any:
        return next((item for item in shared.values() if value is item), _function(annotation, value, at))

    return name, build(selected, {**keys, **shared}, table, leaf)


def _function(annotation: Any, value: Any, at: str) -> Any:
    """The function named by "module:function", if the setting accepts functions; else NotImplemented."""
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    accepts_functions = any(get_origin(option) is collections.abc.Callable for option in options)
    if accepts_functions and callable(value):  # given by a program
        return value
    if not accepts_functions or not isinstance(value, str) or ":" not in value:
        return NotImplemented
    return _import_function(value, at)


def _import_function(path: str, at: str) -> Callable[..., Any]:
    """Import "module:function" from local configuration."""
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs user code
        raise TypedError(at, f"cannot import '{path}': {error or type(error).__name__}") from error
    if not callable(function):
        raise TypedError(at, f"'{path}' is not a function")
    return function  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """Dataclasses as tables and functions as import paths. A field that is None by default is left out while it is None."""
    if dataclasses.is_dataclass(value):
        pairs = {f.name: (getattr(value, f.name), f.default) for f in dataclasses.fields(value)}
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
    """Load an experiment from a file or preset (the demo by default) with overrides. Also returns notes for the user."""
    path = Path(source) if source is not None else None
    if path is not None and (path.suffix == ".toml" or path.exists()):
        raw, origin = read_toml(path), str(path)
        _resolve_paths(raw, path.parent)
    else:
        raw, origin = read_preset(str(source) if source is not None else DEMO)
    notes = override(raw, overrides)
    _resolve_paths(raw, Path())
    return parse(raw, f"{origin} with {' '.join(overrides)}" if overrides else origin), notes


def _resolve_paths(raw: dict[str, Any], folder: Path) -> None:
    """Make the paths of data files absolute, relative to `folder`."""
    tables, data = raw.get("clients", {}), raw.get("data")
    files = [(table, key) for table in (tables.values() if isinstance(tables, dict) else ()) for key in ("data", "val", "test")]
    if (
        isinstance(data, dict) and data.get("name") != "sites"
    ):  # all sites share the file, but only the server has these samples
        files += [(data, "unlabeled_file"), (data, "public_file")]
    for table, key in files:
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = str((folder / table[key]).resolve())


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as plain data."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `fedme list presets` shows the built-in experiments") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: invalid TOML or UTF-8, or a number of 5000 digits
        raise ConfigError(f"{path}: {error}") from error


def presets() -> dict[str, str]:
    """The names of the presets and their descriptions, the first comment line of each file."""
    files = sorted(file.name for file in PRESETS.iterdir() if file.name.endswith(".toml"))
    return {name.removesuffix(".toml"): (PRESETS / name).read_text().splitlines()[0].lstrip("# ") for name in files}


def read_preset(name: str) -> tuple[dict[str, Any], str]:
    """The plain data of a preset, and its origin for error messages."""
    names = presets()
    if name not in names:
        raise ConfigError(f"'{name}' is neither a file nor a preset{nearest(name, names)}")
    return tomllib.loads((PRESETS / f"{name}.toml").read_text()), f"preset {name}"


def override(raw: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Apply ``key=value`` overrides to plain data, in place. Returns notes about settings that a new `name` drops."""
    notes = []
    for word in sorted(overrides, key=lambda word: not word.split("=")[0].endswith("name")):
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"'{word}': overrides have the form key=value, for example rounds=5 or method.name=fml")
        path = key.split(".")
        value = _parse_value(text)
        if path[0] in ("method", "data", "partition", "engine") and len(path) == 1 and isinstance(value, str):
            path = [path[0], "name"]
        if path[0] in ("method", "data", "partition") and path[1:] == ["name"]:
            notes += _drop_settings(raw, path[0], value)
        table = raw
        for part in path[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"'{word}': {part} is not a table")
        table[path[-1]] = value
    return notes


def _drop_settings(raw: dict[str, Any], table: str, name: Any) -> list[str]:
    """Remove the settings that do not apply to the new `name` of a table. Returns a note if there are any."""
    classes: Mapping[str, type[Any]] = {"method": METHODS, "data": DATASETS, "partition": PARTITIONS}[table]
    old = raw.get(table, {})
    if not isinstance(name, str) or not isinstance(old, dict) or old.get("name") == name:
        return []
    if name not in classes and table != "method":
        return []
    fields = {f.name for f in dataclasses.fields(classes[name])} if name in classes else set()
    fields |= {f.name for f in dataclasses.fields(DataOptions)} if table == "data" else set()
    # Methods use the same names for different settings, so a new method keeps none.
    kept = {key: old[key] for key in old if table != "method" and key in fields}
    dropped = sorted(old.keys() - kept.keys() - {"name"})
    raw[table] = kept
    return [f"{table}.name={name}: dropped {', '.join(dropped)} of {old.get('name', 'the file')}"] if dropped else []


def _parse_value(text: str) -> Any:
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
