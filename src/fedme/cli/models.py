"""Saved models in use: predict, evaluate, export, join."""

import csv
import io
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedme.cli.app import Json, Quiet, Style, app, err, out
from fedme.core.metrics import Metrics
from fedme.datasets.given import raw
from fedme.datasets.own import Piece
from fedme.experiment import export as exporting
from fedme.experiment import newcomers, personal, summary
from fedme.experiment.config import load
from fedme.experiment.files import RunError, finite, write_text
from fedme.experiment.progress import Display
from fedme.experiment.tables import render

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or the folder of one client's models.")]
Client = Annotated[str | None, typer.Option("--client", "-c", help="Whose model.")]
Finetuned = Annotated[bool, typer.Option("--finetuned", help="The model after fine-tuning.")]
Imports = Annotated[bool, typer.Option("--imports", help="Import the network that the model names, if you trust the folder.")]
Label = Annotated[str | None, typer.Option("--label", help="The column with the labels.")]
DATA = "A .csv, .tsv, .parquet or .npz file, or a folder of images."


def _opened(run: Path, client: str | None, finetuned: bool, imports: bool) -> personal.Personal:
    model = personal.Personal(personal.find(run, client), "finetuned" if finetuned else "model", imports=imports)
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
    """Predict with a client's personal model: the class of every sample, and the probability of each class."""
    model = _opened(run, client, finetuned, imports)
    probabilities = model.probabilities(data, _label(run))
    named = model.named(probabilities.argmax(1)).tolist()
    if as_json:
        rows = [
            {"prediction": name, "probabilities": dict(zip(model.classes, each, strict=True))}
            for name, each in zip(named, probabilities.tolist(), strict=True)
        ]
        print(json.dumps(rows))
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["prediction", *(f"p({name})" for name in model.classes)])
    for name, each in zip(named, probabilities.tolist(), strict=True):
        writer.writerow([name, *(f"{p:.6f}" for p in each)])
    if output is None:
        sys.stdout.write(text.getvalue())
    else:
        write_text(output, text.getvalue())


@app.command()
def evaluate(
    run: Run,
    data: Annotated[Path, typer.Argument(metavar="DATA", help=DATA)],
    client: Client = None,
    label: Label = None,
    finetuned: Finetuned = False,
    imports: Imports = False,
    style: Style = "table",
    as_json: Json = False,
) -> None:
    """See how a client's personal model does on samples with labels."""
    model = _opened(run, client, finetuned, imports)
    found = model.evaluate(data, label or _label(run))
    if as_json:
        print(json.dumps(finite(asdict(found)), indent=2))
        return
    render(f"client {model.client} on {data}", *_metrics([("", found)]), style, out)


def _label(run: Path) -> str | None:
    """The column that the run itself was trained with, if there is one."""
    try:
        config = summary.config_of(run)
    except RunError:  # the folder of one client, without its run
        return None
    labels = {table.get("label") for table in config.get("clients", {}).values()} - {None}
    return config.get("data", {}).get("label") or (labels.pop() if len(labels) == 1 else None)


def _metrics(rows: list[tuple[str, Metrics]]) -> tuple[list[str], list[list[str]]]:
    header = ["model"] if rows[0][0] else []
    header += ["samples", "accuracy %", "balanced %", "macro F1", "AUROC", "ECE", "loss"]
    cells = []
    for name, m in rows:
        numbers = [_number(m.accuracy, 100, 2), _number(m.balanced_accuracy, 100, 2)]
        numbers += [_number(value, 1, 3) for value in (m.macro_f1, m.auroc, m.ece, m.loss)]
        cells.append([*([name] if name else []), str(m.samples), *numbers])
    return header, cells


def _number(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{factor * value:.{digits}f}"


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
    label: Label = None,
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
    piece = Piece(raw(data, label or _label(run), f"client {name}"))
    with Display(err, quiet) as display:
        display.note(f"looking for the model that fits {name} best")
        joined = newcomers.join(run, experiment, name, piece, epochs=epochs, per_cluster=per_cluster, imports=imports)
    if as_json:
        scores: list[dict[str, Any]] = [asdict(score) for score in joined.scores]
        about = {"client": name, "started_from": joined.taken, "offers": joined.offers, "folder": str(joined.folder)}
        print(json.dumps(finite(about | {"scores": scores}), indent=2))
        return
    words = {"round": "as it came", "finetuned": "fine-tuned"}
    rows = [(f"{words[score.stage]}, {score.split}", score.metrics) for score in joined.scores]
    title = f"{name} starts from {joined.taken} (of {joined.offers}), in {joined.folder}"
    render(title, *_metrics(rows), "table", out)
