"""The command line: run, resume, show, compare, list, data, demo."""

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
from fedme.experiment import assemble, records, run, summary
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
    _show(folder, "table", as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="A run directory.")], quiet: Quiet = False, as_json: Json = False
) -> None:
    """Continue a run that was stopped; it ends as if it had never been."""
    with Display(err, quiet) as display:
        if not run.resume(folder, display):
            display.note(f"{folder}: finished already", always=True)
    _show(folder, "table", as_json)


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
        _show_clients(folder, style, as_json)
    else:
        _show(folder, style, as_json, everything)


def _show(folder: Path, style: Format, as_json: bool, everything: bool = False) -> None:
    result = summary.so_far(folder)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    wide = everything or style != "table" or out.width >= 110
    header = ["model", "split", "round", "accuracy %", "std", "pooled %"]
    header += ["balanced %", "macro F1", "AUROC", "ECE", "loss"] if wide else []
    rows = []
    for r in _distinct(result["results"]):
        label = r["model"] if r["stage"] == "round" else f"{r['model']}, fine-tuned"
        t = f"{r['round']} {'last' if r['selection'] == 'last round' else 'best'}"
        percents = [r["accuracy"]["client_mean"], r["accuracy"]["client_std"], r["accuracy"]["pooled"]]
        percents += [r["balanced_accuracy"]["client_mean"]] if wide else []
        others = [r[name]["client_mean"] for name in ("macro_f1", "auroc", "ece", "loss")] if wide else []
        rows.append([label, r["split"], t] + [_number(p, 100, 2) for p in percents] + [_number(o, 1, 3) for o in others])
    count = max((r["clients"] for r in result["results"]), default=0)
    state = f", UNFINISHED: {result['unfinished']}" if "unfinished" in result else ""
    render(
        f"{result['name']}: {result['method']}, seed {result['seed']}, {count} clients, in {folder}{state}",
        header,
        rows,
        style,
        out,
    )
    if style == "table":
        mega = (result["bytes_up"] + result["bytes_down"]) / 1e6
        out.print(
            "Means over clients, with the standard deviation (ddof = 1) of accuracy; pooled counts every sample the same."
        )
        out.print("Rounds count from 0; best is the best round by validation accuracy.")
        seconds = f"{result['client_seconds']:.1f} s at clients, {result['server_seconds']:.1f} s at the server"
        out.print(f"Sent {mega:.1f} MB in all; {seconds}.")


def _distinct(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without a best round that is the last one, and with a global model that is everybody's personal model said once."""

    def numbers(r: dict[str, Any]) -> Any:
        return r["stage"], r["split"], r["selection"], r["round"], r["accuracy"], r["loss"]

    personal = [numbers(r) for r in results if r["model"] == "personal"]
    last = {(r["model"], r["stage"], r["split"]): r["round"] for r in results if r["selection"] == "last round"}
    found = []
    for r in results:
        if r["selection"] != "last round" and last[r["model"], r["stage"], r["split"]] == r["round"]:
            continue
        if r["model"] == "global" and numbers(r) in personal:
            continue
        twin = r["model"] == "personal" and any(o["model"] == "global" and numbers(o) == numbers(r) for o in results)
        found.append(r | {"model": "personal = global"} if twin else r)
    return found


def _show_clients(folder: Path, style: Format, as_json: bool) -> None:
    """The personal model of every client after the last evaluated round."""
    rows = [r for r in records.read(folder) if r["model"] == "personal"]
    last = max((r["round"] for r in rows), default=-1)
    clients: dict[str, dict[str, Any]] = {}
    for r in rows:
        if r["round"] == last:
            mine = clients.setdefault(r["client"], {"client": r["client"], "arch": r["arch"]})
            key = f"{r['split']}{', fine-tuned' if r['stage'] == 'finetuned' else ''}"
            mine[key] = r["accuracy"]
            if r["split"] == "test":
                mine["samples"] = r["samples"]
    if as_json:
        print(json.dumps(list(clients.values()), indent=2))
        return
    header = list(dict.fromkeys(key for each in clients.values() for key in each))
    cells = [[_cell(each.get(key), key) for key in header] for each in clients.values()]
    render(f"personal models after round {last}, accuracy in %, in {folder}", header, cells, style, out)


def _cell(value: Any, key: str) -> str:
    return str(value) if isinstance(value, str) or key.endswith("samples") else _number(value, 100, 2)


def _number(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{factor * value:.{digits}f}"


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
    if style == "csv":
        words = ["run", "method", "model", "stage", "split", "selection", "differs", "seeds"]
        numbers = ["accuracy_mean", "accuracy_std", "pooled_mean", "pooled_std", "bytes"]
        render("", [*words, *numbers], [_record(line) for line in lines], "csv", out)
        return
    names = _run_names(lines)
    header = ["run", "method", "model", "accuracy %", "pooled %", "seeds", "MB sent"]
    rows = [
        [
            names[line.config],
            line.method,
            label,
            _spread(line.client_mean),
            _spread(line.pooled),
            str(len(line.seeds)),
            f"{line.bytes / 1e6:.1f}",
        ]
        for line, label in _labelled(lines)
    ]
    if style == "table" and out.width < 100:  # the run's name has to do for the method
        header, rows = [header[0], *header[2:6]], [[row[0], *row[2:6]] for row in rows]
    title = f"{split} accuracy of the {selection}: mean over clients, and pooled over samples; ± is over seeds (ddof = 1)"
    render(title, header, rows, style, out)
    if style == "table":
        for config, name in names.items():
            if "#" in name:
                differs = next(line.differs for line in lines if line.config == config)
                out.print(f"{name}: {_settings(differs)}", highlight=False, markup=False)


def _run_names(lines: list[summary.Line]) -> dict[str, str]:
    """A name for every family of runs; those of the same name and method are numbered."""
    families = {line.config: (line.name, line.method) for line in lines}
    names = {}
    for config, family in families.items():
        twins = [each for each, other in families.items() if other == family]
        names[config] = family[0] if len(twins) == 1 else f"{family[0]} #{twins.index(config) + 1}"
    return names


def _spread(values: tuple[float, ...]) -> str:
    mean, std = summary.spread([100 * value for value in values])
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def _record(line: summary.Line) -> list[str]:
    numbers = [*summary.spread(line.client_mean), *summary.spread(line.pooled), line.bytes]
    words = [line.name, line.method, line.model, line.stage, line.split, line.selection, _settings(line.differs)]
    return [*words, str(len(line.seeds)), *("" if number is None else repr(number) for number in numbers)]


def _settings(differs: Mapping[str, Any]) -> str:
    """The settings in which a run differs from the others; paths of many are cut."""
    text = ", ".join(f"{key}={json.dumps(value)}" for key, value in differs.items())
    return text if len(text) <= 120 else text[:117] + "..."


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
