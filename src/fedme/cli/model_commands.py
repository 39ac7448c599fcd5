"""Saved models in use: predict, evaluate, export, join."""

import csv
import io
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedme.artifacts import export as exporting
from fedme.artifacts import personal_model, unseen_clients
from fedme.cli.app import Json, Quiet, Style, app, err, out
from fedme.config.experiment import load
from fedme.core.atomic_files import RunError, finite, write_text
from fedme.core.metrics import MEASURES, Metrics
from fedme.core.task_types import TaskType
from fedme.datasets.data_files import Label
from fedme.datasets.python_objects import raw
from fedme.datasets.user_data import Piece
from fedme.results import summary
from fedme.results.tables import render
from fedme.running.progress import Display

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or the folder of one client's models.")]
Client = Annotated[str | None, typer.Option("--client", "-c", help="Whose model.")]
Finetuned = Annotated[bool, typer.Option("--finetuned", help="The model after fine-tuning.")]
Imports = Annotated[bool, typer.Option("--imports", help="Import the network that the model names, if you trust the folder.")]
Labels = Annotated[list[str] | None, typer.Option("--label", help="The column with the labels; again for several.")]
DATA = "A .csv, .tsv, .parquet or .npz file, or a folder of images."


def _opened(run: Path, client: str | None, finetuned: bool, imports: bool) -> personal_model.Personal:
    model = personal_model.Personal(personal_model.find(run, client), "finetuned" if finetuned else "model", imports=imports)
    if model.note:
        err.print(f"note: {model.note}", markup=False, highlight=False)
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
    """Predict with a client's personal model: classes or labels with their probabilities, or numbers."""
    model = _opened(run, client, finetuned, imports)
    header, rows = _predictions(model, data, _label(run))
    if as_json:
        print(json.dumps([_told(model, row) for row in rows]))
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for answers, probabilities in rows:
        writer.writerow([*answers, *(f"{p:.6f}" for p in probabilities)])
    if output is None:
        sys.stdout.write(text.getvalue())
    else:
        write_text(output, text.getvalue())


Predicted = tuple[list[Any], list[float]]  # answers, and the probability of every class or label


def _predictions(model: personal_model.Personal, data: Path, label: Label) -> tuple[list[str], list[Predicted]]:
    """The columns, and what is predicted of every sample: one class, an answer a label, or numbers."""
    if model.task == "regression":
        return list(model.classes), [(row, []) for row in model.logits(data, label).tolist()]
    probabilities = model.probabilities(data, label)
    chances = [f"p({name})" for name in model.classes]
    if model.task == "classification":
        named = model.named(probabilities.argmax(1)).tolist()
        return ["prediction", *chances], [([name], each) for name, each in zip(named, probabilities.tolist(), strict=True)]
    answers = (probabilities > 0.5).long().tolist()
    return [*model.classes, *chances], list(zip(answers, probabilities.tolist(), strict=True))


def _told(model: personal_model.Personal, row: Predicted) -> dict[str, Any]:
    answers, probabilities = row
    prediction = answers[0] if model.task == "classification" else dict(zip(model.classes, answers, strict=True))
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
    """See how a client's personal model does on samples with labels."""
    model = _opened(run, client, finetuned, imports)
    found = model.evaluate(data, _said(label) or _label(run))
    if as_json:
        print(json.dumps(finite(found.plain(model.task)), indent=2))
        return
    render(f"client {model.client} on {data}", *_metrics([("", found)], model.task), style, out)


def _said(labels: list[str] | None) -> Label:
    """One column, or several."""
    return None if not labels else labels[0] if len(labels) == 1 else tuple(labels)


def _label(run: Path) -> Label:
    """The columns that the run itself was trained with, if there are any."""
    try:
        config = summary.config_of(run)
    except RunError:  # the folder of one client, without its run
        return None
    named = [config.get("data", {}).get("label"), *(table.get("label") for table in config.get("clients", {}).values())]
    labels = {tuple(each) if isinstance(each, list) else each for each in named if each is not None}
    return named[0] if isinstance(named[0], str) else labels.pop() if len(labels) == 1 else None


def _metrics(rows: list[tuple[str, Metrics]], kind: TaskType) -> tuple[list[str], list[list[str]]]:
    header = (["model"] if rows[0][0] else []) + ["samples", *(measure.heading for measure in MEASURES[kind])]
    cells = []
    for name, m in rows:
        numbers = [measure.text(getattr(m, measure.key)) for measure in MEASURES[kind]]
        cells.append([*([name] if name else []), str(m.samples), *numbers])
    return header, cells


@app.command()
def export(
    run: Run,
    to: Annotated[exporting.Target, typer.Option("--to", help="What other programs read.")],
    client: Client = None,
    finetuned: Finetuned = False,
    imports: Imports = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file to write; CLIENT.<kind> by default.")] = None,
) -> None:
    """Write a client's personal model for other programs. It takes samples as numbers and scales them itself."""
    model = _opened(run, client, finetuned, imports)
    target = output or Path(f"{model.folder.name}{exporting.SUFFIXES[to]}")
    print(model.export(target, to))


@app.command()
def join(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run directory.")],
    data: Annotated[Path, typer.Option("--data", help=f"The newcomer's samples. {DATA}")],
    name: Annotated[str, typer.Option("--name", help="What to call it.")] = "newcomer",
    label: Labels = None,
    epochs: Annotated[int | None, typer.Option(help="Of fine-tuning; the run's by default, else 2.")] = None,
    per_cluster: Annotated[bool, typer.Option("--per-cluster", help="Try one model a cluster instead of all.")] = False,
    imports: Imports = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Give a client that was not there during training the model that fits it best, and fine-tune it."""
    experiment, _ = load(run / summary.CONFIG) if (run / summary.CONFIG).exists() else (None, [])
    if experiment is None:
        raise RunError(f"{run}: not a run directory (no {summary.CONFIG})")
    piece = Piece(raw(data, _said(label) or _label(run), f"client {name}"))
    with Display(err, quiet) as display:
        display.note(f"looking for the model that fits {name} best")
        joined = unseen_clients.join(run, experiment, name, piece, epochs=epochs, per_cluster=per_cluster, imports=imports)
    if as_json:
        scores: list[dict[str, Any]] = [
            asdict(score) | {"metrics": score.metrics.plain(joined.task_type)} for score in joined.scores
        ]
        about = {"client": name, "started_from": joined.taken, "offers": joined.offers, "folder": str(joined.folder)}
        print(json.dumps(finite(about | {"scores": scores}), indent=2))
        return
    words = {"round": "as it came", "finetuned": "fine-tuned"}
    rows = [(f"{words[score.stage]}, {score.split}", score.metrics) for score in joined.scores]
    title = f"{name} starts from {joined.taken} (of {joined.offers}), in {joined.folder}"
    render(title, *_metrics(rows, joined.task_type), "table", out)
