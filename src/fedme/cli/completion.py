"""What a shell offers after TAB: presets, settings and their values, methods, run directories and clients.

`fedme --install-completion` installs it. Nothing here trains, loads data or prints.
"""

import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from fedme.artifacts import personal_model
from fedme.config.experiment import DEMO, ConfigError, override, presets, read_preset, read_toml
from fedme.config.named_code import CONFIG
from fedme.config.setting_help import TABLES
from fedme.config.settings import Settings
from fedme.core.atomic_files import RunError
from fedme.datasets import DATASETS
from fedme.datasets.federated_dataset import DataOptions
from fedme.datasets.partitioners import PARTITIONS
from fedme.methods import METHODS

Offer = str | tuple[str, str]  # a word, or a word and what it means
NAMED: Mapping[str, Mapping[str, type[Any]]] = {"method": METHODS, "data": DATASETS, "partition": PARTITIONS}


def experiments(ctx: click.Context, args: list[str], incomplete: str) -> list[Offer]:
    """Presets and experiment files; a setting may stand there too."""
    files = [str(path) for path in sorted(Path().glob("*.toml"))]
    return [*presets().items(), *files, *settings(ctx, args, incomplete)]


def settings(ctx: click.Context, args: list[str], incomplete: str) -> list[Offer]:
    """Settings as KEY=, and the values of a setting that has a few."""
    words = [ctx.params.get("file"), *(ctx.params.get("overrides") or ())]
    if words[-1] == "=" and len(words) > 1:  # bash divides words at "="
        return list(_values(str(words[-2])))
    key, equals, _ = incomplete.partition("=")
    if equals:
        return [f"{key}={value}" for value in _values(key)]
    return [(f"{name}=", about) for name, about in _keys(words).items()]


def _keys(words: Iterable[str | None]) -> dict[str, str]:
    """All settings of an experiment with its method, data set and partition, with what they mean."""
    chosen = _chosen([word for word in words if word])
    keys: dict[str, str] = {}
    tables: dict[str, Any] = {name: table for name, table in TABLES.items() if name not in NAMED}
    for field in dataclasses.fields(Settings):
        if field.name in NAMED:
            keys[f"{field.name}.name"] = field.metadata.get("help", "")
        elif field.name not in tables and field.name != "clients":
            keys[field.name] = field.metadata.get("help", "")
    for name, table in [*tables.items(), *chosen.items(), ("data", DataOptions)]:
        for field in dataclasses.fields(table):
            if field.init and field.name not in ("train", "defence", "clients"):
                keys[f"{name}.{field.name}"] = field.metadata.get("help", "")
    return keys


def _chosen(words: Sequence[str]) -> dict[str, type[Any]]:
    """The classes of method, data set and partition of an experiment. User-defined ones are not imported."""
    file = words[0] if words and "=" not in words[0] else DEMO
    try:
        raw = read_toml(Path(file)) if Path(file).exists() else read_preset(file)[0]
        override(raw, [word for word in words if word.partition("=")[0] in ("method.name", "data.name", "partition.name")])
    except ConfigError:
        raw = {}
    names = {table: raw.get(table, {}) for table in NAMED}
    return {
        table: NAMED[table][given["name"]]
        for table, given in names.items()
        if isinstance(given, dict) and given.get("name") in NAMED[table]
    }


def _values(key: str) -> Iterable[str]:
    """The values of a setting that has a few: names, or true and false."""
    table, _, name = key.rpartition(".")
    if key in NAMED or (table in NAMED and name == "name"):
        return NAMED[table or key]
    classes: list[type[Any]] = [Settings] if not table else [TABLES[table]] if table in TABLES else []
    classes += [*NAMED.get(table, {}).values(), *([DataOptions] if table == "data" else [])]
    offers: dict[str, None] = {}
    for settings_class in classes:
        annotation = typing.get_type_hints(settings_class).get(name)
        for option in (annotation, *get_args(annotation)):
            if get_origin(option) is Literal:
                offers |= dict.fromkeys(map(str, get_args(option)))
            elif option is bool:
                offers |= dict.fromkeys(("true", "false"))
    return offers


def runs(ctx: click.Context, args: list[str], incomplete: str) -> list[Offer]:
    """Run directories here and in `runs`, and below the folder that is typed already."""
    folders = {Path(), Path("runs"), Path(incomplete), Path(incomplete).parent}
    paths = {str(path.parent) for folder in folders if folder.is_dir() for path in folder.glob(f"*/{CONFIG}")}
    return sorted(paths)


def clients(ctx: click.Context, args: list[str], incomplete: str) -> list[Offer]:
    """The clients of the run that stands before."""
    words = [ctx.params.get("run"), *ctx.args]  # an option without its value leaves the arguments where they are
    run = next((word for word in words if word is not None), None)
    try:
        return list(personal_model.clients_of(Path(run))) if run is not None else []
    except (RunError, OSError):
        return []


def listed(ctx: click.Context, args: list[str], incomplete: str) -> list[Offer]:
    """The names of `fedme list WHAT`."""
    names: Mapping[str, Iterable[str]] = {
        "settings": TABLES,
        "methods": METHODS,
        "datasets": DATASETS,
        "partitions": PARTITIONS,
    }
    return list(names.get(ctx.params.get("what") or "", ()))
