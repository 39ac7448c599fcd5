"""The command line: run, resume, config, show, compare, list, data, demo."""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

import fedme
from fedme import zoo
from fedme.core.method import TaskError
from fedme.core.typed import TypedError, nearest
from fedme.datasets import DATASETS
from fedme.datasets.errors import DataError, PartitionError
from fedme.datasets.federation import Federation
from fedme.datasets.partition import PARTITIONS
from fedme.experiment import assemble, run, summary, views
from fedme.experiment.config import ConfigError, load, presets, to_toml
from fedme.experiment.explain import settings_of
from fedme.experiment.files import RunError
from fedme.experiment.progress import Display
from fedme.experiment.tables import Format, render
from fedme.learn.schedule import most
from fedme.methods import METHODS
from fedme.methods.fedme import FedMe

app = typer.Typer(
    help="Personalised federated learning where every client keeps its own model, of its own architecture.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Look at data before anything is trained.", no_args_is_help=True)
app.add_typer(data_app, name="data")

FileArgument = Annotated[str | None, typer.Argument(metavar="FILE", help="A TOML file, or the name of a preset.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that override the file's.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only notes that bear on the results.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Style = Annotated[Format, typer.Option("--format", "-f", help="How to print the table.")]

out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140)
err = Console(stderr=True)

DEMO = ("digits-local", "digits-fedavg", "digits-fedme")
ERRORS = (ConfigError, RunError, TaskError, DataError, PartitionError, TypedError, zoo.ArchError)


def main() -> None:
    """Entry point: errors that a user can mend are one line, not a traceback."""
    # Networks, methods and functions of one's own are found where the command is given, as with `python -m`.
    sys.path.insert(0, str(Path.cwd()))
    try:
        app()
    except ERRORS as error:
        err.print(f"[bold red]error:[/] {_literal(error)}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except run.Interrupted as stopped:
        err.print(f"{stopped}; everything finished is saved", markup=False, highlight=False, soft_wrap=True)
        sys.exit(130)
    except KeyboardInterrupt:
        err.print("stopped at once; the last checkpoint is whole")
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        sys.exit(0)


def _literal(text: object) -> str:
    return str(text).replace("[", "\\[")


def _source(file: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    words = overrides or []
    if file is not None and "=" in file and not Path(file).exists():
        return None, [file, *words]
    return file, words


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Personalised federated learning where every client keeps its own model, of its own architecture."""
    if version:
        print(fedme.__version__)
        raise typer.Exit


@app.command("run")
def run_command(
    file: FileArgument = None,
    overrides: Overrides = None,
    quiet: Quiet = False,
    as_json: Json = False,
    explain: Annotated[bool, typer.Option("--explain-engine", help="Say how operations were run, and why.")] = False,
) -> None:
    """Run an experiment. Without a file: FedMe with four architectures on the bundled digits."""
    experiment, notes = load(*_source(file, overrides))
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
    experiment, notes = load(*_source(file, overrides))
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


@app.command()
def demo(quiet: Quiet = False) -> None:
    """FedMe with four architectures against Local and FedAvg, with and without fine-tuning, on the bundled digits."""
    folders = []
    for name in DEMO:
        experiment, _ = load(name)
        with Display(err, quiet) as display:
            display.note(f"{name} ({list(DEMO).index(name) + 1} of {len(DEMO)})")
            folders.append(run.start(experiment, display))
    compare(folders, "table", "test", False, False)
    out.print(f"The runs are in {', '.join(str(folder) for folder in folders)}; `fedme show` looks into one.")


@app.command("list")
def list_command(
    what: Annotated[Literal["methods", "datasets", "models", "partitions", "presets"], typer.Argument(help="What to list.")],
    name: Annotated[str | None, typer.Argument(help="Only this one, with every setting explained.")] = None,
    as_json: Json = False,
) -> None:
    """List what there is; with a name, its settings one by one."""
    tables: Mapping[str, Mapping[str, type[Any]]] = {"methods": METHODS, "datasets": DATASETS, "partitions": PARTITIONS}
    if name is not None and what in tables:
        if name not in tables[what]:
            raise ConfigError(f"there is no '{name}' among the {what}{nearest(name, tables[what])}")
        kind = tables[what][name]
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
        return ("name", "about", "source", "options"), [tuple(map(_text, row)) for row in zoo.describe()]
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
    experiment, notes = load(*_source(file, overrides))
    for note in notes:
        err.print(f"note: {_literal(note)}")
    federation = assemble.gather(experiment)
    if as_json:
        print(json.dumps(_division(federation)))
        return
    out.print(federation.table(first))
    for note in federation.notes:
        out.print(f"note: {_literal(note)}")
    out.print(f"partition {experiment.partition_name}, seed {experiment.settings.seed}, digest {federation.partition.digest()}")


def _division(federation: Federation) -> dict[str, Any]:
    """Who has how many samples of what, as plain data."""
    labels, classes = federation.dataset.source.labels, federation.dataset.schema.classes
    counts = federation.partition.counts(labels, len(classes)).tolist()
    clients = {}
    for (client, data), row in zip(federation.clients.items(), counts, strict=True):
        sizes = {part: len(getattr(data, part)) for part in ("train", "val", "test")}
        clients[client] = sizes | {"labels": dict(zip(classes, row, strict=True))}
    return {"digest": federation.partition.digest(), "clients": clients, "notes": list(federation.notes)}
