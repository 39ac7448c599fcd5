"""What is available: methods, datasets, models, partitions, presets and settings; and how data is partitioned."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import typer

from fedme import networks
from fedme.cli import completion
from fedme.cli.app import (
    Commands,
    FileArgument,
    Json,
    Overrides,
    Seed,
    app,
    examples,
    literal,
    next_step,
    out,
    print_note,
    print_table,
    quoted,
    source,
)
from fedme.config.experiment import ConfigError, import_method, load, presets
from fedme.config.setting_help import TABLES, settings_of
from fedme.core.atomic_files import finite
from fedme.core.typed import nearest
from fedme.datasets import DATASETS
from fedme.datasets.column_summary import ColumnSummary
from fedme.datasets.data_errors import DataError
from fedme.datasets.partitioners import PARTITIONS
from fedme.methods import METHODS
from fedme.running import assembly

data_app = typer.Typer(
    cls=Commands,
    help="Inspect data before training.",
    no_args_is_help=True,
    epilog=examples("fedme data show digits-fedme", "fedme data show my.toml --column age"),
)
app.add_typer(data_app, name="data")

REGISTRIES: Mapping[str, Mapping[str, type[Any]]] = {
    "methods": METHODS,
    "datasets": DATASETS,
    "partitions": PARTITIONS,
    "settings": TABLES,
}
WIDE = 120  # columns of a terminal in which lists have defaults too


NEXT = {  # what to do with a list
    "methods": "`fedme run digits-fedme method.name=NAME` tries it",
    "datasets": "`fedme data show data.name=NAME` shows it",
    "models": "`fedme run digits-fedme models.pool='[\"NAME\"]'` uses it",
    "partitions": "`fedme data show partition.name=NAME` shows it",
    "presets": "`fedme run NAME` runs it, `fedme config NAME` prints it",
    "settings": "`fedme run digits-fedme NAME.KEY=VALUE` changes a setting",
}


@app.command("list", epilog=examples("fedme list methods", "fedme list settings train"))
def list_command(
    what: Annotated[
        Literal["methods", "datasets", "models", "partitions", "presets", "settings"],
        typer.Argument(metavar="WHAT", help="One of methods, datasets, models, partitions, presets, settings."),
    ],
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Show only this one, with its settings.", autocompletion=completion.listed),
    ] = None,
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
        values = as_json or out.width >= WIDE
        rows = [(key, _first_line(entry), _settings(entry, values)) for key, entry in REGISTRIES[what].items()]
    else:
        user_defined = what == "methods" and ":" in name  # named by its import path
        entry = import_method(name) if user_defined else REGISTRIES[what][_checked(name, what, REGISTRIES[what])]
        header, title = ("setting", "default", "about"), f"{name}: {_first_line(entry)}"
        rows = [tuple(setting) for setting in settings_of(entry)]
    if name is not None and what not in REGISTRIES:
        pattern = "dnn-<hidden>" if what == "models" and re.fullmatch(r"dnn-\d+", name) else name
        shown = _checked(pattern, what, [row[0] for row in rows])
        rows = [row for row in rows if row[0] == shown]
    print_table(title, header, rows, "table", as_json)
    more = f"`fedme list {what} NAME` explains its settings, " if name is None and what in REGISTRIES else ""
    next_step((more + NEXT[what]).replace("NAME", quoted(name) if name is not None else "NAME"))


def _checked(name: str, what: str, known: Collection[str]) -> str:
    if name not in known:
        raise ConfigError(f"there is no '{name}' among the {what}{nearest(name, known)}")
    return name


def _first_line(entry: type[Any]) -> str:
    return (entry.__doc__ or "").splitlines()[0]


def _settings(entry: type[Any], values: bool) -> str:
    return ", ".join(f"{s.name} = {s.default}" if s.default and values else s.name for s in settings_of(entry))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


@data_app.command("show", epilog=examples("fedme data show digits-fedme --first 5", "fedme data show my.toml --column age"))
def data_show(
    file: FileArgument = None,
    overrides: Overrides = None,
    seed: Seed = None,
    first: Annotated[int | None, typer.Option(help="Show only the first N clients.")] = None,
    column: Annotated[str | None, typer.Option(help="Show this column of a table at every client.")] = None,
    as_json: Json = False,
) -> None:
    """Show the data of an experiment before training: samples per client and label; for tables, ranges and gaps too."""
    experiment, notes = load(*source(file, overrides, seed=seed))
    for note in notes:
        print_note(note)
    try:
        federation = assembly.gather(experiment)
    except DataError as error:  # what the tables contain is what helps to correct it
        if error.columns and not as_json and column is None:
            print_table(COLUMNS, *_columns_table(error.columns), "table", False)
        elif error.columns and column is not None:
            _show_column(error.columns, column)
        raise
    summaries = federation.dataset.columns
    if as_json:
        print(json.dumps(finite(federation.label_counts() | {"columns": [summary.plain() for summary in summaries]})))
        return
    if column is not None:
        _show_column(summaries, column)
        return
    counts, caption = federation.table(first)
    print_table(f"samples of every client, by class; {caption}", *counts, "table", False)
    if summaries:
        print_table(COLUMNS, *_columns_table(summaries), "table", False)
    for note in federation.notes:
        out.print(f"note: {literal(note)}")
    number = experiment.partition_key.seed
    out.print(f"partition {experiment.partition_name}, seed {number}, digest {federation.partition.digest()}", highlight=False)
    next_step(f"`{quoted('fedme', 'run', *filter(None, [file, *(overrides or [])]))}` trains on it")


def _show_column(summaries: Sequence[ColumnSummary], column: str) -> None:
    known = {summary.name: summary for summary in summaries}
    if column not in known:
        raise ConfigError(f"there is no column '{column}'{nearest(column, known)}")
    chosen = known[column]
    rows = [(client, str(c.samples), str(c.gaps), c.text()) for client, c in chosen.clients.items()]
    print_table(f"{column} ({chosen.kind})", ("client", "samples", "missing", "range (median)"), rows, "table", False)


COLUMNS = "columns: smallest to largest number (median), or the texts"
SIDE_BY_SIDE = 3  # clients that fit side by side in a terminal


def _columns_table(summaries: Sequence[ColumnSummary]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Every column at every client, or, for many clients, over all of them with the clients that have the most gaps."""
    clients = list(summaries[0].clients)
    if len(clients) <= SIDE_BY_SIDE:
        header = ("column", "type", *clients)
        return header, [(s.name, s.kind, *(s.clients[c].text() if c in s.clients else "" for c in clients)) for s in summaries]
    rows: list[tuple[str, ...]] = []
    for summary in summaries:
        total = replace(summary.total(), gaps=0).text()
        worst = sorted(summary.clients.items(), key=lambda item: -item[1].gaps / max(1, item[1].samples))
        most = ", ".join(f"{name} {column.gaps} of {column.samples}" for name, column in worst[:3] if column.gaps)
        rows.append((summary.name, summary.kind, total, str(summary.total().gaps), most))
    return ("column", "type", "range", "missing", "most at (`--column NAME` shows all)"), rows
