"""Trained models: predict, evaluate, export, join."""

import csv
import io
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedme.artifacts import export as exporting, personal_model, unseen_clients
from fedme.cli.app import Json, Quiet, Style, app, err, out, print_note
from fedme.config.experiment import load
from fedme.core.atomic_files import RunError, finite, write_text
from fedme.core.metrics import MEASURES, Metrics
from fedme.core.task_types import TaskType
from fedme.datasets.data_files import Label
from fedme.datasets.python_objects import read_object
from fedme.datasets.user_data import ClientSamples
from fedme.results import summary
from fedme.results.tables import render
from fedme.running.progress import Display

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or the folder of one client's models.")]
Client = Annotated[str | None, typer.Option("--client", "-c", help="The client whose model to use.")]
Finetuned = Annotated[bool, typer.Option("--finetuned", help="Use the fine-tuned model.")]
Imports = Annotated[bool, typer.Option("--imports", help="Import user-defined networks; only for folders you trust.")]
Labels = Annotated[list[str] | None, typer.Option("--label", help="The label column; repeat the option for several.")]
DATA = "A .csv, .tsv, .parquet or .npz file, or a folder of images."


def _open_model(run: Path, client: str | None, finetuned: bool, imports: bool) -> personal_model.Personal:
    model = personal_model.Personal(personal_model.find(run, client), "finetuned" if finetuned else "model", imports=imports)
    if model.note:
        print_note(model.note)
    return model


@app.command()
def predict(
    run: Run,
    data: Annotated[Path, typer.Argument(metavar="INPUT", help=DATA)],
    client: Client = None,
    finetuned: Finetuned = False,
    imports: Imports = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write a CSV file instead of printing.")] = None,
    as_json: Json = False,
) -> None:
    """Predict with a client's personal model: classes or labels with probabilities, or regression targets."""
    model = _open_model(run, client, finetuned, imports)
    header, rows = _predictions(model, data, _label_of_run(run))
    if as_json:
        print(json.dumps([_as_object(model, row) for row in rows]))
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for predictions, probabilities in rows:
        writer.writerow([*predictions, *(f"{p:.6f}" for p in probabilities)])
    if output is None:
        sys.stdout.write(text.getvalue())
    else:
        write_text(output, text.getvalue())


Predicted = tuple[list[Any], list[float]]  # of one sample: predictions, and the probability of every class or label


def _predictions(model: personal_model.Personal, data: Path, label: Label) -> tuple[list[str], list[Predicted]]:
    """The columns, and per sample one class, a 0 or 1 per label, or a number per target."""
    if model.task == "regression":
        return list(model.classes), [(row, []) for row in model.logits(data, label).tolist()]
    probabilities = model.probabilities(data, label)
    columns = [f"p({name})" for name in model.classes]
    if model.task == "classification":
        predictions = [[name] for name in model.named(probabilities.argmax(1)).tolist()]
        return ["prediction", *columns], list(zip(predictions, probabilities.tolist(), strict=True))
    predictions = (probabilities > 0.5).long().tolist()
    return [*model.classes, *columns], list(zip(predictions, probabilities.tolist(), strict=True))


def _as_object(model: personal_model.Personal, row: Predicted) -> dict[str, Any]:
    predictions, probabilities = row
    prediction = predictions[0] if model.task == "classification" else dict(zip(model.classes, predictions, strict=True))
    if not probabilities:
        return {"prediction": prediction}
    return {"prediction": prediction, "probabilities": dict(zip(model.classes, probabilities, strict=True))}


@app.command()
def evaluate(
    run: Run,
    data: Annotated[Path, typer.Argument(metavar="DATA", help=DATA)],
    client: Client = None,
    label: Labels = None,
    finetuned: Finetuned = False,
    imports: Imports = False,
    style: Style = "table",
    as_json: Json = False,
) -> None:
    """Evaluate a client's personal model on labelled data."""
    model = _open_model(run, client, finetuned, imports)
    metrics = model.evaluate(data, _label_option(label) or _label_of_run(run))
    if as_json:
        print(json.dumps(finite(metrics.plain(model.task)), indent=2))
        return
    render(f"client {model.client} on {data}", *_metrics_table([("", metrics)], model.task), style, out)


def _label_option(labels: list[str] | None) -> Label:
    return None if not labels else labels[0] if len(labels) == 1 else tuple(labels)


def _label_of_run(run: Path) -> Label:
    """The label columns that the run was trained with, if they are known."""
    try:
        config = summary.config_of(run)
    except RunError:  # the folder of one client, without its run
        return None
    named = [config.get("data", {}).get("label"), *(table.get("label") for table in config.get("clients", {}).values())]
    labels = {tuple(label) if isinstance(label, list) else label for label in named if label is not None}
    return named[0] if isinstance(named[0], str) else labels.pop() if len(labels) == 1 else None


def _metrics_table(rows: list[tuple[str, Metrics]], task: TaskType) -> tuple[list[str], list[list[str]]]:
    header = (["model"] if rows[0][0] else []) + ["samples", *(measure.heading for measure in MEASURES[task])]
    cells = []
    for name, metrics in rows:
        numbers = [measure.text(getattr(metrics, measure.key)) for measure in MEASURES[task]]
        cells.append([*([name] if name else []), str(metrics.samples), *numbers])
    return header, cells


@app.command()
def export(
    run: Run,
    to: Annotated[exporting.Target, typer.Option("--to", help="Format of the exported model.")],
    client: Client = None,
    finetuned: Finetuned = False,
    imports: Imports = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file to write; CLIENT.SUFFIX by default.")] = None,
) -> None:
    """Export a client's personal model for other programs. It takes numeric samples and includes their preprocessing."""
    model = _open_model(run, client, finetuned, imports)
    target = output or Path(f"{model.folder.name}{exporting.SUFFIXES[to]}")
    print(model.export(target, to))


@app.command()
def join(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run directory.")],
    data: Annotated[Path, typer.Option("--data", help=f"The samples of the new client. {DATA}")],
    name: Annotated[str, typer.Option("--name", help="The name of the new client.")] = "newcomer",
    label: Labels = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of fine-tuning; by default those of the run, or 2.")] = None,
    per_cluster: Annotated[bool, typer.Option("--per-cluster", help="Try one model per cluster instead of all.")] = False,
    imports: Imports = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Give a client that did not take part in training the model that fits its data best, and fine-tune it."""
    experiment, _ = load(run / summary.CONFIG) if (run / summary.CONFIG).exists() else (None, [])
    if experiment is None:
        raise RunError(f"{run}: not a run directory (no {summary.CONFIG})")
    piece = ClientSamples(read_object(data, _label_option(label) or _label_of_run(run), f"client {name}"))
    with Display(err, quiet) as display:
        display.note(f"selecting the model that fits {name} best")
        joined = unseen_clients.join(run, experiment, name, piece, epochs=epochs, per_cluster=per_cluster, imports=imports)
    if as_json:
        scores = [asdict(score) | {"metrics": score.metrics.plain(joined.task_type)} for score in joined.scores]
        about = {"client": name, "started_from": joined.taken, "offers": joined.offers, "folder": str(joined.folder)}
        print(json.dumps(finite(about | {"scores": scores}), indent=2))
        return
    stages = {"round": "before fine-tuning", "finetuned": "fine-tuned"}
    rows = [(f"{stages[score.stage]}, {score.split}", score.metrics) for score in joined.scores]
    title = f"{name} starts from {joined.taken} (of {joined.offers} models), in {joined.folder}"
    render(title, *_metrics_table(rows, joined.task_type), "table", out)
