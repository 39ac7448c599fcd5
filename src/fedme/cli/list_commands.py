"""What is available: methods, datasets, models, partitions, presets and settings; and how data is partitioned."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from fedme import networks
from fedme.cli.app import FileArgument, Json, Overrides, app, literal, out, print_note, print_table, source
from fedme.config.experiment import ConfigError, import_method, load, presets
from fedme.config.setting_help import TABLES, settings_of
from fedme.core.typed import nearest
from fedme.datasets import DATASETS
from fedme.datasets.partitioners import PARTITIONS
from fedme.methods import METHODS
from fedme.running import assembly

data_app = typer.Typer(help="Inspect data before training.", no_args_is_help=True)
app.add_typer(data_app, name="data")

REGISTRIES: Mapping[str, Mapping[str, type[Any]]] = {
    "methods": METHODS,
    "datasets": DATASETS,
    "partitions": PARTITIONS,
    "settings": TABLES,
}


@app.command("list")
def list_command(
    what: Annotated[
        Literal["methods", "datasets", "models", "partitions", "presets", "settings"], typer.Argument(help="What to list.")
    ],
    name: Annotated[str | None, typer.Argument(help="Explain every setting of this one.")] = None,
    as_json: Json = False,
) -> None:
    """List what is available; with a name, its settings."""
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    title: str = what
    if what == "models":
        header, rows = ("name", "about", "source", "options"), [tuple(map(_text, row)) for row in networks.describe()]
    elif what == "presets":
        header, rows = ("name", "about"), list(presets().items())
    elif name is None:
        header, title = ("name", "about", "settings"), f"{what} (`fedme list {what} NAME` explains one)"
        rows = [(key, _first_line(entry), _settings(entry)) for key, entry in REGISTRIES[what].items()]
    else:
        user_defined = what == "methods" and ":" in name  # named by its import path
        if not user_defined and name not in REGISTRIES[what]:
            raise ConfigError(f"there is no '{name}' among the {what}{nearest(name, REGISTRIES[what])}")
        entry = import_method(name) if user_defined else REGISTRIES[what][name]
        header, title = ("setting", "default", "about"), f"{name}: {_first_line(entry)}"
        rows = [tuple(setting) for setting in settings_of(entry)]
    print_table(title, header, rows, "table", as_json)


def _first_line(entry: type[Any]) -> str:
    return (entry.__doc__ or "").splitlines()[0]


def _settings(entry: type[Any]) -> str:
    return ", ".join(f"{s.name} = {s.default}" if s.default else s.name for s in settings_of(entry))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


@data_app.command("show")
def data_show(
    file: FileArgument = None,
    overrides: Overrides = None,
    first: Annotated[int | None, typer.Option(help="Show only the first N clients.")] = None,
    as_json: Json = False,
) -> None:
    """Show how the data of an experiment is partitioned: samples per client and label."""
    experiment, notes = load(*source(file, overrides))
    for note in notes:
        print_note(note)
    federation = assembly.gather(experiment)
    if as_json:
        print(json.dumps(federation.label_counts()))
        return
    out.print(federation.table(first))
    for note in federation.notes:
        out.print(f"note: {literal(note)}")
    out.print(f"partition {experiment.partition_name}, seed {experiment.settings.seed}, digest {federation.partition.digest()}")
