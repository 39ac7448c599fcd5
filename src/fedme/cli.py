"""The command line: run, resume, show, compare, list, data, demo."""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import fedme
from fedme import zoo
from fedme.core.method import TaskError
from fedme.core.typed import TypedError
from fedme.datasets import DATASETS
from fedme.datasets.errors import DataError, PartitionError
from fedme.datasets.federation import Federation
from fedme.datasets.partition import PARTITIONS
from fedme.experiment import assemble, run, summary
from fedme.experiment.config import ConfigError, load, presets
from fedme.experiment.files import RunError
from fedme.experiment.progress import Display
from fedme.experiment.tables import Format, render
from fedme.methods import METHODS

app = typer.Typer(
    help="Personalised federated learning where every client keeps its own model, of its own architecture.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Look at data before anything is trained.", no_args_is_help=True)
app.add_typer(data_app, name="data")

FileArgument = Annotated[str | None, typer.Argument(metavar="[FILE]", help="A TOML file, or the name of a preset.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the file's.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Style = Annotated[Format, typer.Option("--format", "-f", help="How to print the table.")]

out = Console(width=None if sys.stdout.isatty() else 140)
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
    except run.Interrupted:
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


@app.command("run")
def run_command(file: FileArgument = None, overrides: Overrides = None, quiet: Quiet = False, as_json: Json = False) -> None:
    """Run an experiment. Without a file: FedMe with four architectures on the bundled digits."""
    experiment, notes = load(*_source(file, overrides))
    with Display(err, quiet) as display:
        for note in [*notes, *_hints(experiment)]:
            display.note(f"note: {_literal(note)}")
        folder = _watched(lambda: run.start(experiment, display), display)
    _show(folder, "table", as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="A run directory.")], quiet: Quiet = False, as_json: Json = False
) -> None:
    """Continue a run that was stopped; it ends as if it had never been."""
    with Display(err, quiet) as display:

        def go() -> Path:
            if not run.resume(folder, display):
                display.note(f"{folder}: finished already")
            return folder

        _watched(go, display)
    _show(folder, "table", as_json)


def _watched(work: Callable[[], Path], display: Display) -> Path:
    """Do the work; when it is interrupted, say where it stands."""
    try:
        return work()
    except run.Interrupted:
        display.note("stopped; everything finished is saved. `fedme resume` with the run directory continues.")
        raise


def _hints(experiment: Any) -> list[str]:
    """What a reader of the results should know about settings that are there but not used."""
    hints = []
    settings = experiment.settings
    if experiment.method_name in ("pfedme", "pfml") and (settings.train.momentum or settings.train.clip):
        hints.append(f"{experiment.method_name} takes plain gradient steps: train.momentum and train.clip are not used")
    shares = experiment.method_name not in ("local", "fedme", "fedmd")
    if shares and settings.models.shared is None and len(settings.models.pool) > 1:
        hints.append(f"the shared model is {settings.models.pool[0]}, the first of the pool; models.shared chooses another")
    if not experiment.method.own_architectures and settings.models.assign != "round-robin":
        hints.append(f"all clients of {experiment.method_name} have the shared model: models.assign is not used")
    return hints


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="A run directory.")], style: Style = "table", as_json: Json = False
) -> None:
    """Show the results of a run."""
    _show(folder, style, as_json)


def _show(folder: Path, style: Format, as_json: bool) -> None:
    result = summary.read(folder)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    header = (
        "model",
        "stage",
        "split",
        "round",
        "accuracy %",
        "std",
        "pooled %",
        "balanced %",
        "macro F1",
        "AUROC",
        "ECE",
        "loss",
    )
    rows = []
    for r in result["results"]:
        t = f"{r['round'] + 1} ({'last' if r['selection'] == 'last round' else 'best by validation'})"
        about = [r["model"], r["stage"], r["split"], t]
        percents = [r["accuracy"]["client_mean"], r["accuracy"]["client_std"], r["accuracy"]["pooled"]]
        percents.append(r["balanced_accuracy"]["client_mean"])
        others = [r[name]["client_mean"] for name in ("macro_f1", "auroc", "ece", "loss")]
        rows.append(about + [_number(p, 100, 2) for p in percents] + [_number(o, 1, 3) for o in others])
    clients = max((r["clients"] for r in result["results"]), default=0)
    title = f"{result['name']}: {result['method']}, seed {result['seed']}, {clients} clients, in {folder}"
    render(title, header, rows, style, out)
    if style == "table":
        mega = (result["bytes_up"] + result["bytes_down"]) / 1e6
        out.print("Means over clients (accuracy with its standard deviation); pooled counts every sample the same.")
        seconds = f"{result['client_seconds']:.1f} s at clients, {result['server_seconds']:.1f} s at the server"
        out.print(f"Sent {mega:.1f} MB in all; {seconds}.")


def _number(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{factor * value:.{digits}f}"


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Run directories.")],
    style: Style = "table",
    split: Annotated[str, typer.Option(help="test or val")] = "test",
    best: Annotated[bool, typer.Option("--best", help="The best round by validation instead of the last round.")] = False,
    as_json: Json = False,
) -> None:
    """Compare runs; those that differ only in their seed become one line, mean ± std (ddof = 1) over seeds."""
    if split not in ("test", "val"):
        raise ConfigError(f"--split: '{split}' is neither test nor val")
    selection = "best round by validation" if best else "last round"
    lines = summary.compare([summary.read(folder) for folder in folders], split, selection)
    if not lines:
        raise RunError(f"no results for {split}, {selection}: settings without a validation part have the last round only")
    if as_json:
        print(json.dumps([dataclasses.asdict(line) for line in lines], indent=2))
        return
    header = ("run", "method", "model", "accuracy %", "pooled %", "seeds", "MB sent")
    rows = [
        (
            line.name,
            line.method,
            label,
            summary.spread(line.client_mean),
            summary.spread(line.pooled),
            str(len(line.seeds)),
            f"{line.megabytes:.1f}",
        )
        for line, label in _labelled(lines)
    ]
    title = f"{split} accuracy of the {selection}: mean over clients, and pooled over samples; ± is over seeds"
    render(title, header, rows, style, out)


def _labelled(lines: list[summary.Line]) -> list[tuple[summary.Line, str]]:
    """What each line is about; a global model that is everybody's personal model is said once."""
    rounds = {(line.config, line.model): line for line in lines if line.stage == "round"}

    def twin(line: summary.Line, model: str) -> bool:
        other = rounds.get((line.config, model))
        same = other is not None and (other.client_mean, other.pooled) == (line.client_mean, line.pooled)
        return line.stage == "round" and same

    found = []
    for line in lines:
        if line.model == "global" and twin(line, "personal"):
            continue
        label = "personal = global" if line.model == "personal" and twin(line, "global") else line.model
        found.append((line, label if line.stage == "round" else f"{label}, fine-tuned"))
    return found


@app.command()
def demo(quiet: Quiet = False) -> None:
    """FedMe with four architectures against Local and FedAvg, with and without fine-tuning, on the bundled digits."""
    folders = []
    for name in DEMO:
        experiment, _ = load(name)
        with Display(err, quiet) as display:
            display.note(f"{name} ({list(DEMO).index(name) + 1} of {len(DEMO)})")
            folders.append(_watched(lambda: run.start(experiment, display), display))  # noqa: B023
    compare(folders, "table", "test", False, False)
    out.print(f"The runs are in {', '.join(str(folder) for folder in folders)}; `fedme show` looks into one.")


@app.command("list")
def list_command(
    what: Annotated[str, typer.Argument(help="methods, datasets, models, partitions or presets")], as_json: Json = False
) -> None:
    """List what there is."""
    listings: Mapping[str, Callable[[], tuple[tuple[str, ...], list[tuple[str, ...]]]]] = {
        "methods": lambda: _classes(METHODS),
        "datasets": lambda: _classes(DATASETS),
        "partitions": lambda: _classes(PARTITIONS),
        "models": lambda: (("name", "what it is", "from", "options"), [tuple(map(_text, row)) for row in zoo.describe()]),
        "presets": lambda: (("name", "what it is"), list(presets().items())),
    }
    if what not in listings:
        raise ConfigError(f"'{what}' cannot be listed; known: {', '.join(listings)}")
    header, rows = listings[what]()
    if as_json:
        print(json.dumps([dict(zip(header, row, strict=True)) for row in rows], indent=2))
    else:
        render(what, header, [tuple(_literal(cell) for cell in row) for row in rows], "table", out)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _classes(table: Mapping[str, type[Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows: list[tuple[str, ...]] = []
    for name, kind in table.items():
        fields = [field for field in dataclasses.fields(kind) if field.init and field.name != "train"]
        options = ", ".join(f"{field.name}{_default(field)}" for field in fields)
        rows.append((name, (kind.__doc__ or "").splitlines()[0], options))
    return ("name", "what it is", "options"), rows


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {json.dumps(field.default)}" if field.default is not None else ""
    return " = {}" if field.default_factory is not dataclasses.MISSING else " (required)"


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


@app.command()
def version() -> None:
    """Print the version."""
    print(fedme.__version__)
