"""Code that a configuration names: methods, networks and functions as "module:name".

Importing a module runs it. A configuration that a person gives to `fedme run` may name code. A run directory, or an experiment
that an operator sent, may come from somebody else: its code is imported only if the user says so.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedme.config.experiment import ConfigError, Experiment, load, read_toml
from fedme.config.identity import texts

CONFIG = "config.toml"  # the experiment of a run, in its directory


def named_code(config: Mapping[str, Any]) -> list[str]:
    """Every import path in a configuration, in the places where one is imported."""
    models, clients = _table(config.get("models")), _table(config.get("clients"))
    pool = models.get("pool")
    specs = [*(pool if isinstance(pool, list | tuple) else [pool]), models.get("shared"), models.get("assign")]
    specs += [_table(client).get("model") for client in clients.values()]
    method = config.get("method")
    paths = [text.partition("(")[0].strip() for text in texts([method, specs]) if ":" in text.partition("(")[0]]
    return list(dict.fromkeys(paths))


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def command_for(folder: Path, verb: str = "resume", config: Mapping[str, Any] | None = None) -> str:
    """A command for the user's own run, which imports the code that the user has named; `config` is read if it is not given.

    Only for runs whose code this process may import already: nobody should be told to import somebody else's.
    """
    if config is None:
        try:
            config = read_toml(folder / CONFIG)
        except ConfigError:
            config = {}
    return f"fedme {verb} {shlex.quote(str(folder))}" + (" --imports" if named_code(config) else "")


def load_saved(
    path: Path,
    imports: bool,
    remedy: str = "use --imports (in Python: imports=True)",
    overrides: Sequence[str] = (),
) -> Experiment:
    """Read an experiment that may come from somebody else. One that names code is refused unless `imports` allows it."""
    paths = named_code(read_toml(path))
    if paths and not imports:
        shown = ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
        raise ConfigError(f"{path}: names code: {shown}; importing it runs it. If you trust this folder, {remedy}")
    return load(path, overrides)[0]
