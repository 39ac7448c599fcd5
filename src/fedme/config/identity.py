"""What makes two runs the same: fingerprints of the configuration and of the user-defined code that it names."""

import functools
import hashlib
import importlib
import inspect
import json
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedme.core.typed import build
from fedme.federation.failures import Faults
from fedme.federation.malicious_clients import Attack
from fedme.learning.robust_aggregation import Defence

# Tables that came later: with default values they do not change a fingerprint, so old results stay valid.
LATER: dict[str, type[Any]] = {"faults": Faults, "defence": Defence, "attack": Attack}
LATER_KEYS: dict[str, dict[str, Any]] = {
    "models": {"update_bn": True},
    "data": {"stratify": False},
    "method": {"shared": []},
}  # the same for single keys: their value before they came
LATER_TOP_KEYS: dict[str, Any] = {"evaluate_trained": False}
IMPORT_PATH = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)(\(.*\))?")
LIBRARIES = {"fedme", "torch", *sys.stdlib_module_names}  # their versions are in `environment.json`

# Keys of [engine] that say where a run is computed; results stay the same.
MACHINE = ("workers", "memory", "address", "device", "device_memory")

Sources = Mapping[str, str]  # a fingerprint of the source code of every module, by its name


def digest(config: Mapping[str, Any], sources: Sources | None = None) -> str:
    """A fingerprint of everything that decides the results; a configuration without user-defined code has no `sources`."""
    deciding = {key: value for key, value in config.items() if key not in ("output", "name", "checkpoint_every", "log", "save")}
    for table, table_type in LATER.items():
        if table in deciding and build(table_type, deciding[table], table) == table_type():
            del deciding[table]
    for table, defaults in LATER_KEYS.items():
        if isinstance(deciding.get(table), Mapping):
            deciding[table] = {key: v for key, v in deciding[table].items() if (key, v) not in defaults.items()}
    models = deciding.get("models")
    if isinstance(models, Mapping) and models.get("assign") != "best-local":  # nothing is chosen with this rate
        deciding["models"] = {key: value for key, value in models.items() if key != "selection_lr"}
    deciding = {key: value for key, value in deciding.items() if (key, value) not in LATER_TOP_KEYS.items()}
    deciding |= {"sources": sources} if sources else {}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def identity(config: Mapping[str, Any]) -> str:
    """A fingerprint of all settings that can change results, and so not of the machine."""
    return digest({**config, "engine": {key: value for key, value in config["engine"].items() if key not in MACHINE}})


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The dotted names of the settings in which two configurations differ."""
    names = []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            names += [f"{key}.{name}" for name in changed_keys(old, new)]
        elif old != new:
            names.append(key)
    return names


def family_digest(config: Mapping[str, Any], sources: Sources | None = None) -> str:
    """The fingerprint that runs share if they differ only in their seed."""
    return digest({key: value for key, value in config.items() if key != "seed"}, sources)


def source_digests(config: Mapping[str, Any]) -> dict[str, str]:
    """A fingerprint of every module that defines a method, network or function that a configuration names as "module:name".

    The modules of base classes count, libraries and modules imported by these modules do not. Of a main program, which is
    edited for many reasons, only the source of the named object counts. What cannot be imported is left out.
    """
    digests = {}
    for module, name in _import_paths(config):
        try:
            named: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        except Exception:  # the run itself reports what a user's code raises
            continue
        if module == "__main__":
            sources = {f"{module}:{name}": functools.partial(inspect.getsource, named)}
        else:
            definitions = inspect.getmro(named) if isinstance(named, type) else (named,)
            modules = {module, *(getattr(definition, "__module__", module) for definition in definitions)}
            user_modules = sorted(module for module in modules if module.partition(".")[0] not in LIBRARIES)
            sources = {module: functools.partial(_read, module) for module in user_modules}
        for key, read in sources.items():
            try:
                digests[key] = hashlib.sha256(read().encode()).hexdigest()
            except (OSError, TypeError):  # no source file
                continue
    return digests


def user_files(config: Mapping[str, Any]) -> list[Path]:
    """The files and package folders of the user's modules that a configuration names, and of others loaded from beside them.

    Other machines get these. Installed packages are left out: they must be installed there too.
    """
    installed = [Path(path).resolve() for path in sysconfig.get_paths().values()]
    named = {key.partition(":")[0].partition(".")[0] for key in source_digests(config)} - {"__main__"}
    places = {name: place for name in list(sys.modules) if "." not in name and (place := _place(sys.modules[name])) is not None}
    own = {name: place for name, place in places.items() if not any(place.is_relative_to(path) for path in installed)}
    folders = {own[name].parent for name in named if name in own}
    apart = LIBRARIES | {"__main__"}
    return sorted({place for name, place in own.items() if place.parent in folders and name not in apart})


def _place(module: Any) -> Path | None:
    """The file of a module, or the folder of a package; one without `__init__.py` has no file."""
    file = getattr(module, "__file__", None)
    if file is None and (folders := list(getattr(module, "__path__", ()))):
        return Path(folders[0]).resolve()
    if file is None or not str(file).endswith(".py"):
        return None
    path = Path(file).resolve()
    return path.parent if path.name == "__init__.py" else path


def changed_files(recorded: Sources, config: Mapping[str, Any]) -> list[str]:
    """The source files that differ from a record of `source_digests`."""
    now = source_digests(config)
    return [file_of(key) for key, before in recorded.items() if now.get(key, before) != before]


def file_of(key: str) -> str:
    """The file of a module in `source_digests`."""
    return str(getattr(sys.modules.get(key.partition(":")[0]), "__file__", None) or key)


def _read(module: str) -> str:
    return Path(file_of(module)).read_bytes().decode(errors="backslashreplace")


def _import_paths(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The module and the name of every import path in a configuration."""
    models, clients = config.get("models", {}), config.get("clients", {})
    specs = [*models.get("pool", ()), models.get("shared"), *(table.get("model") for table in clients.values())]
    names = [spec.get("name") if isinstance(spec, Mapping) else spec for spec in specs]
    # A text in the method's table is an import path only if reading the configuration has imported its module.
    settings = [text for text in texts(config["method"]) if text.partition(":")[0] in sys.modules]
    for text in dict.fromkeys([*settings, *names]):
        if isinstance(text, str) and (match := IMPORT_PATH.fullmatch(text)):
            yield match[1], match[2]


def texts(value: Any) -> Iterator[str]:
    """Every text in a table or list of a configuration, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(item)
