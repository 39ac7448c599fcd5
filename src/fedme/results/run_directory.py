"""What a run directory says about itself in `environment.json`: its format, and the user-defined code behind its results."""

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedme import __version__
from fedme.config.identity import Sources, changed_files
from fedme.config.named_code import CONFIG
from fedme.core.atomic_files import RunError, unsealed
from fedme.core.foreign_text import safe_name
from fedme.core.typed import TypedError, build

ENVIRONMENT = "environment.json"
FORMAT = 2  # of a run directory; format 1 has no number and is recognised by the names of its settings

RENAMED = {
    ("train", "decay"): "train.lr_decay",
    ("train", "decay_at"): "train.lr_decay_at",
    ("privacy", "noise"): "privacy.noise_multiplier",
}
RENAMED_VALUES = {("engine", "path", "alone"): "reference", ("attack", "kind", "not-a-number"): "non-finite"}


def similar_run(folder: Path) -> str:
    """The end of an error message: a run of this or of a similar name in `runs`, where `fedme run` puts them."""
    if folder.exists() or folder.is_absolute():
        return ""
    runs = sorted(path.parent for path in [*Path().glob(f"*/{CONFIG}"), *Path("runs").glob(f"*/{CONFIG}")])
    names = {path.name: path for path in runs}
    close = difflib.get_close_matches(folder.name, list(names), 1, 0.6)
    return f"; did you mean {names[close[0]]}?" if close else ""


def _tables(folder: Path) -> dict[str, dict[str, Any]]:
    """The tables of the configuration; none if it cannot be read, which is reported where the file is needed."""
    try:
        config = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {name: table for name, table in config.items() if isinstance(table, dict)}


def deployed(folder: Path) -> bool:
    """Whether the clients of a run are sites of a deployment, which have the samples."""
    return _tables(folder).get("data", {}).get("name") == "sites"


def require_readable(folder: Path) -> None:
    """Refuse a run directory in the format of another version, in one line that says so."""
    tables = _tables(folder)
    changes = [f"setting '{t}.{key}' is now '{new}'" for (t, key), new in RENAMED.items() if key in tables.get(t, {})]
    changes += [
        f"'{old}' of setting '{t}.{key}' is now '{new}'"
        for (t, key, old), new in RENAMED_VALUES.items()
        if tables.get(t, {}).get(key) == old
    ]
    if changes:
        raise RunError(
            f"{folder}: written by an earlier version of FedMe ({changes[0]}); run the experiment again, or use that version"
        )
    number = read_environment(folder, strict=False).get("format", FORMAT)
    if number != FORMAT:
        raise RunError(
            f"{folder}: written by another version of FedMe (format {number}, and this version reads {FORMAT}); "
            "run the experiment again, or use that version"
        )


def read_environment(folder: Path, strict: bool = True) -> dict[str, Any]:
    """The content of `environment.json`; empty if there is no such file."""
    path = folder / ENVIRONMENT
    try:
        return unsealed(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        if not strict:
            return {}
        raise RunError(f"{path}: cannot be read: {error}") from error


def version_note(folder: Path) -> str:
    """A sentence if the run was begun with another version of FedMe than this one; else empty."""
    begun = read_environment(folder, strict=False).get("fedme", __version__)
    if begun == __version__:
        return ""
    return f"this run was begun with FedMe {safe_name(str(begun))} and continues with {__version__}"


def earlier_rounds(folder: Path) -> list[int]:
    """The numbers of rounds that the run had before it was extended."""
    try:
        return build(list[int], read_environment(folder).get("earlier_rounds", []), "earlier_rounds")  # type: ignore[no-any-return]
    except TypedError as error:
        raise RunError(f"{folder / ENVIRONMENT}: {error}") from error


def recorded_sources(folder: Path) -> Sources:
    """The fingerprints of user-defined code with which a run began; none in runs of earlier versions."""
    try:
        return build(Mapping[str, str], read_environment(folder).get("sources", {}), "sources")  # type: ignore[no-any-return]
    except TypedError as error:
        raise RunError(f"{folder / ENVIRONMENT}: {error}") from error


def require_same_sources(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse to continue a run whose user-defined code has changed since it began."""
    if files := changed_files(recorded_sources(folder), config):
        raise RunError(
            f"{folder}: {', '.join(files)} changed after the run began, so its results would mix two versions of the code; "
            "restore the file, or start a new run"
        )
