"""Experiments: run, resume, config."""

from pathlib import Path
from typing import Annotated

import typer

from fedme.cli.app import FileArgument, Imports, Json, Overrides, Quiet, app, err, out, print_note, source
from fedme.config.experiment import load, to_toml
from fedme.config.hints import hints
from fedme.results import views
from fedme.running import run
from fedme.running.progress import Display


@app.command("run")
def run_command(
    file: FileArgument = None,
    overrides: Overrides = None,
    quiet: Quiet = False,
    as_json: Json = False,
    explain: Annotated[bool, typer.Option("--explain-engine", help="Print how operations were run, and why.")] = False,
) -> None:
    """Run an experiment. Without a file: FedMe with four architectures on the bundled digits."""
    experiment, notes = load(*source(file, overrides))
    notes += hints(experiment)
    with Display(err, quiet) as display:
        for note in notes:
            display.note(f"note: {note}", always=True)
        folder = run.start(experiment, display, notes)
    if explain:
        err.print((folder / run.ENGINE).read_text(), end="", markup=False, highlight=False)
    views.results(folder, "table", out, as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="A run directory.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="engine.workers, memory, address or device, for this part.")
    ] = None,
    imports: Imports = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Continue an interrupted run. The result is identical to an uninterrupted run."""
    with Display(err, quiet) as display:
        if not run.resume(folder, display, imports=imports, overrides=overrides or ()):
            display.note(f"{folder}: already finished", always=True)
    views.results(folder, "table", out, as_json)


@app.command()
def config(file: FileArgument = None, overrides: Overrides = None) -> None:
    """Check an experiment and print it as TOML with all defaults. Nothing is run."""
    experiment, notes = load(*source(file, overrides))
    for note in [*notes, *hints(experiment)]:
        print_note(note)
    print(to_toml(experiment.plain()), end="")
