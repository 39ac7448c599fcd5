"""What there is: methods, datasets, models, partitions, presets, and what is in the data."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from fedme import networks
from fedme.cli.app import FileArgument, Json, Overrides, app, err, literal, out, source
from fedme.config.experiment import ConfigError, import_method, load, presets
from fedme.config.setting_help import settings_of
from fedme.core.typed import nearest
from fedme.datasets import DATASETS
from fedme.datasets.partitioners import PARTITIONS
from fedme.methods import METHODS
from fedme.results.tables import render
from fedme.running import assembly

data_app = typer.Typer(help="Look at data before anything is trained.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@app.command("list")
def list_command(
    what: Annotated[Literal["methods", "datasets", "models", "partitions", "presets"], typer.Argument(help="What to list.")],
    name: Annotated[str | None, typer.Argument(help="Only this one, with every setting explained.")] = None,
    as_json: Json = False,
) -> None:
    """List what there is; with a name, its settings one by one."""
    tables: Mapping[str, Mapping[str, type[Any]]] = {"methods": METHODS, "datasets": DATASETS, "partitions": PARTITIONS}
    if name is not None and what in tables:
        own = what == "methods" and ":" in name  # a user's method, by import path
        if not own and name not in tables[what]:
            raise ConfigError(f"there is no '{name}' among the {what}{nearest(name, tables[what])}")
        kind = import_method(name) if own else tables[what][name]
        header: tuple[str, ...] = ("setting", "default", "about")
        rows: list[tuple[str, ...]] = [tuple(setting) for setting in settings_of(kind)]
        title = f"{name}: {(kind.__doc__ or '').splitlines()[0]}"
    else:
        header, rows = _listing(what, tables)
        title = f"{what} (`fedme list {what} NAME` explains one)" if what in tables else what
    if as_json:
        print(json.dumps([dict(zip(header, row, strict=True)) for row in rows], indent=2))
    else:
        render(title, header, rows, "table", out)


def _listing(what: str, tables: Mapping[str, Mapping[str, type[Any]]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    if what == "models":
        return ("name", "about", "source", "options"), [tuple(map(_text, row)) for row in networks.describe()]
    if what == "presets":
        return ("name", "about"), list(presets().items())
    rows: list[tuple[str, ...]] = []
    for name, kind in tables[what].items():
        options = ", ".join(f"{s.name} = {s.default}" if s.default else s.name for s in settings_of(kind))
        rows.append((name, (kind.__doc__ or "").splitlines()[0], options))
    return ("name", "about", "settings"), rows


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


@data_app.command("show")
def data_show(
    file: FileArgument = None,
    overrides: Overrides = None,
    first: Annotated[int | None, typer.Option(help="Only so many clients.")] = None,
    as_json: Json = False,
) -> None:
    """Show how an experiment's data is divided: samples of every label at every client."""
    experiment, notes = load(*source(file, overrides))
    for note in notes:
        err.print(f"note: {literal(note)}")
    federation = assembly.gather(experiment)
    if as_json:
        print(json.dumps(federation.division()))
        return
    out.print(federation.table(first))
    for note in federation.notes:
        out.print(f"note: {literal(note)}")
    out.print(f"partition {experiment.partition_name}, seed {experiment.settings.seed}, digest {federation.partition.digest()}")
