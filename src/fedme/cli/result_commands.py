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
    clients: Annotated[bool, typer.Option("--clients", "-c", help="Show every client's personal model.")] = False,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Show all metrics, even in a narrow terminal.")] = False,
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
    split: Annotated[Literal["test", "val"], typer.Option(help="Compare results on test or on validation data.")] = "test",
    best: Annotated[bool, typer.Option("--best", help="Use the best round by validation instead of the last round.")] = False,
    as_json: Json = False,
) -> None:
    """Compare runs. Runs that differ only in their seed become one line: mean ± std (ddof = 1) over seeds."""
    selection = "best round by validation" if best else "last round"
    lines = summary.compare(folders, split, selection)
    if not lines:
        raise RunError(f"no results for {split}, {selection}: runs without validation data have only the last round")
    if as_json:
        print(json.dumps([dataclasses.asdict(line) for line in lines], indent=2))
    else:
        views.comparison(lines, style, out)
