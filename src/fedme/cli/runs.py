"""Experiments: run, resume, config."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedme.cli.app import FileArgument, Json, Overrides, Quiet, app, err, out, source
from fedme.experiment import run, views
from fedme.experiment.config import load, to_toml
from fedme.experiment.progress import Display
from fedme.learn.schedule import most
from fedme.methods.fedme import FedMe


@app.command("run")
def run_command(
    file: FileArgument = None,
    overrides: Overrides = None,
    quiet: Quiet = False,
    as_json: Json = False,
    explain: Annotated[bool, typer.Option("--explain-engine", help="Say how operations were run, and why.")] = False,
) -> None:
    """Run an experiment. Without a file: FedMe with four architectures on the bundled digits."""
    experiment, notes = load(*source(file, overrides))
    notes += _hints(experiment)
    with Display(err, quiet) as display:
        for note in notes:
            display.note(f"note: {note}", always=True)
        folder = run.start(experiment, display, notes)
    if explain:
        err.print((folder / run.ENGINE).read_text(), end="", markup=False, highlight=False)
    views.results(folder, "table", out, as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="A run directory.")], quiet: Quiet = False, as_json: Json = False
) -> None:
    """Continue a run that was stopped; it ends as if it had never been."""
    with Display(err, quiet) as display:
        if not run.resume(folder, display):
            display.note(f"{folder}: finished already", always=True)
    views.results(folder, "table", out, as_json)


@app.command()
def config(file: FileArgument = None, overrides: Overrides = None) -> None:
    """Print an experiment as TOML, every default filled in, and check it. Nothing is run."""
    experiment, notes = load(*source(file, overrides))
    for note in [*notes, *_hints(experiment)]:
        err.print(f"note: {note}", markup=False, highlight=False)
    print(to_toml(experiment.plain()), end="")


def _hints(experiment: Any) -> list[str]:
    """What a reader of the results should know about settings that are there but not used."""
    hints = []
    settings = experiment.settings
    if experiment.method_name in ("pfedme", "pfml") and (settings.train.momentum or settings.train.clip):
        hints.append(f"{experiment.method_name} takes plain gradient steps: train.momentum and train.clip are not used")
    if isinstance(experiment.method, FedMe) and most(experiment.method.clusters) > 1 and not experiment.data.unlabeled:
        hints.append("without unlabeled data all models are in one cluster, whatever method.clusters says; set data.unlabeled")
    shares = experiment.method_name not in ("local", "fedme", "fedmd")
    if shares and settings.models.shared is None and len(settings.models.pool) > 1:
        hints.append(f"the shared model is {settings.models.pool[0]}, the first of the pool; models.shared chooses another")
    if not experiment.method.own_architectures and settings.models.assign != "round-robin":
        hints.append(f"all clients of {experiment.method_name} have the shared model: models.assign is not used")
    return hints
