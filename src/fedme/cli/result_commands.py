"""Results: show, compare."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedme.cli.app import Json, Style, app, out
from fedme.core.atomic_files import RunError
from fedme.results import summary, views


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="A run directory, finished or not.")],
    clients: Annotated[bool, typer.Option("--clients", "-c", help="Every client's personal model.")] = False,
    everything: Annotated[bool, typer.Option("--all", "-a", help="All metrics, however wide the terminal is.")] = False,
    style: Style = "table",
    as_json: Json = False,
) -> None:
    """Show the results of a run."""
    if clients:
        views.clients(folder, style, out, as_json)
    else:
        views.results(folder, style, out, as_json, everything)


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Run directories.")],
    style: Style = "table",
    split: Annotated[Literal["test", "val"], typer.Option(help="Which part.")] = "test",
    best: Annotated[bool, typer.Option("--best", help="The best round by validation instead of the last round.")] = False,
    as_json: Json = False,
) -> None:
    """Compare runs; those that differ only in their seed become one line, mean ± std (ddof = 1) over seeds."""
    selection = "best round by validation" if best else "last round"
    lines = summary.compare(folders, split, selection)
    if not lines:
        raise RunError(f"no results for {split}, {selection}: settings without a validation part have the last round only")
    if as_json:
        print(json.dumps([dataclasses.asdict(line) for line in lines], indent=2))
        return
    views.comparison(lines, style, out)
