"""Trained models: predict, evaluate, export, join."""

import contextlib
import csv
import io
import json
import sys
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedme.artifacts import export as exporting, model_choice, personal_model, unseen_clients
from fedme.cli import completion
from fedme.cli.app import Imports, Json, Quiet, Style, app, err, examples, next_step, out, print_note, quoted
from fedme.config.named_code import load_saved
from fedme.core.atomic_files import RunError, finite, write_text
from fedme.core.metrics import MEASURES, Metrics
from fedme.core.task_types import TASK_LOSSES, TaskType
from fedme.datasets.data_files import Label
from fedme.datasets.python_objects import read_object
from fedme.datasets.raw_samples import RawSamples, Table
from fedme.datasets.user_data import ClientSamples, FileDataset
from fedme.results import summary, verdicts
from fedme.results.classification_details import Details
from fedme.results.run_directory import similar_run
from fedme.results.tables import Format, print_prose, render
from fedme.running import assembly
from fedme.running.progress import Display

Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="A run directory, or the folder of one client's models.", autocompletion=completion.runs
    ),
]
Client = Annotated[
    str | None, typer.Option("--client", "-c", help="The client whose model to use.", autocompletion=completion.clients)
]
Finetuned = Annotated[bool, typer.Option("--finetuned", help="Use the fine-tuned model.")]
Own = Annotated[bool, typer.Option("--own", help="Use the personal model, not the one chosen on the validation part.")]
Labels = Annotated[list[str] | None, typer.Option("--label", help="The label column; repeat the option for several.")]
DATA = "A .csv, .tsv, .parquet or .npz file, or a folder of images."


def _open_model(run: Path, client: str | None, finetuned: bool, own: bool, imports: bool) -> personal_model.Personal:
    if finetuned and own:
        raise RunError("--finetuned and --own name two models; give one of them")
    name = "finetuned" if finetuned else model_choice.OWN if own else None
    model = personal_model.Personal(personal_model.find(run, client), name, imports=imports)
    if model.note:
        print_note(model.note)
    if name is None and model.name != model_choice.OWN and model.choice is not None:
        print_note(f"client {model.client} uses the {model_choice.TITLES[model.name]}: {model.choice.why}")
    return model


@app.command(
    epilog=examples(
        "fedme predict runs/first new.csv --client hospital-a",
        "fedme predict runs/first new.csv --client hospital-a --output predictions.csv",
    )
)
def predict(
    run: Run,
    data: Annotated[Path, typer.Argument(metavar="INPUT", help=DATA)],
    client: Client = None,
    finetuned: Finetuned = False,
    own: Own = False,
    imports: Imports = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write a CSV file instead of printing.")] = None,
    as_json: Json = False,
) -> None:
    """Predict with a client's personal model: classes or labels with probabilities, or regression targets.

    Columns of the input that the model does not use are copied. A row that cannot be used has no prediction but a problem.
    """
    model = _open_model(run, client, finetuned, own, imports)
    raw = read_object(data, _label_of_run(run), "the samples", labelled=False)
    for column, other in model.preparation.unknown_categories(raw).items():
        print_note(f"'{column}' has categories that the model does not know: {', '.join(other[:5])}; they are taken as other")
    unusable = model.preparation.unusable(raw)
    if unusable:
        first, reason = min(unusable.items())
        print_note(f"{len(unusable)} of {len(raw)} rows cannot be used and have no prediction; row {first}, from 0, {reason}")
    names, copied = _other_columns(model, raw)
    header, predicted = _predictions(model, raw, unusable)
    if as_json:
        objects = [_as_object(model, row, unusable.get(number, "")) for number, row in enumerate(predicted)]
        print(json.dumps([dict(zip(names, cells, strict=True)) | o for cells, o in zip(copied, objects, strict=True)]))
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, *header, *(["problem"] if unusable else [])])
    for number, (cells, row) in enumerate(zip(copied, predicted, strict=True)):
        values = [""] * len(header) if row is None else [*row[0], *(f"{p:.6f}" for p in row[1])]
        writer.writerow([*cells, *values, *([unusable.get(number, "")] if unusable else [])])
    if output is None:
        sys.stdout.write(text.getvalue())
        next_step("`--output predictions.csv` writes them to a file")
    else:
        write_text(output, text.getvalue())
        next_step(f"the predictions are in {output}; `fedme evaluate {quoted(run)} DATA` compares with labels")


def print_line(text: str) -> None:
    """Print a sentence below a table."""
    print_prose([text], out)


Predicted = tuple[list[Any], list[float]]  # of one sample: predictions, and the probability of every class or label


def _other_columns(model: personal_model.Personal, raw: RawSamples) -> tuple[list[str], list[list[Any]]]:
    """The columns of the file that are no inputs of the model, such as the number of a patient: names and rows."""
    if not model.preparation.columns or not isinstance(raw.inputs, Table):
        return [], [[] for _ in range(len(raw))]
    inputs = {column.name for column in model.preparation.columns}
    others = {name: values.tolist() for name, values in raw.inputs.columns.items() if name not in inputs}
    return list(others), [[values[row] for values in others.values()] for row in range(len(raw))]


def _predictions(
    model: personal_model.Personal, raw: RawSamples, unusable: Collection[int]
) -> tuple[list[str], list[Predicted | None]]:
    """The columns, and per sample one class, a 0 or 1 per label, or a number per target; None for a row without prediction."""
    usable = np.array([row for row in range(len(raw)) if row not in unusable], dtype=np.int64)
    columns = [f"p({name})" for name in model.classes]
    header = {
        "classification": ["prediction", *columns],
        "multi-label": [*model.classes, *columns],
        "regression": list(model.classes),
    }[model.task]
    predicted: list[Predicted | None] = [None] * len(raw)
    if not len(usable):
        return header, predicted
    logits = model.logits_of(raw.take(usable))
    if model.task == "regression":
        rows: list[Predicted] = [(row, []) for row in logits.tolist()]
    else:
        probabilities = TASK_LOSSES[model.task].mean(logits.double())
        names = [[name] for name in model.named(probabilities.argmax(1)).tolist()]
        decisions = names if model.task == "classification" else (probabilities > 0.5).long().tolist()
        rows = list(zip(decisions, probabilities.tolist(), strict=True))
    for row, values in zip(usable.tolist(), rows, strict=True):
        predicted[row] = values
    return header, predicted


def _as_object(model: personal_model.Personal, row: Predicted | None, problem: str) -> dict[str, Any]:
    if row is None:
        return {"prediction": None, "problem": problem}
    predictions, probabilities = row
    prediction = predictions[0] if model.task == "classification" else dict(zip(model.classes, predictions, strict=True))
    if not probabilities:
        return {"prediction": prediction}
    return {"prediction": prediction, "probabilities": dict(zip(model.classes, probabilities, strict=True))}


@app.command(
    epilog=examples(
        "fedme evaluate runs/first --client hospital-a --details",
        "fedme evaluate runs/first --client hospital-a --by sex",
    )
)
def evaluate(
    run: Run,
    data: Annotated[Path | None, typer.Argument(metavar="DATA", help=f"{DATA} By default the client's test part.")] = None,
    client: Client = None,
    label: Labels = None,
    by: Annotated[str | None, typer.Option("--by", help="Evaluate every subgroup, by the values of this column.")] = None,
    detailed: Annotated[
        bool, typer.Option("--details", help="Confusion matrix, sensitivity, specificity, Brier score and calibration.")
    ] = False,
    finetuned: Finetuned = False,
    own: Own = False,
    imports: Imports = False,
    style: Style = "table",
    as_json: Json = False,
) -> None:
    """Evaluate a client's model on labelled data, as a whole or by subgroup."""
    model = _open_model(run, client, finetuned, own, imports)
    columns = _label_option(label) or _label_of_run(run)
    where = f"client {model.client} on {data or 'its test part'}"
    if data is not None and _is_training_file(run, model.client, data):
        print_note(
            f"{data} has the samples that client {model.client} was trained on, so the results are too good; without DATA, its "
            "test part is used"
        )
    if detailed and by is not None:
        raise RunError("--details and --by are two tables; ask for one of them")
    if detailed:
        _print_details(where, model.details(data, columns), style, as_json)
        next_step("`--by COLUMN` evaluates subgroups, instead of `--details`")
        return
    if data is None:
        measured = model.about["metrics"].get("test")
        if measured is None:
            raise RunError(f"client {model.client} has no test samples; give labelled samples as DATA")
        if by is not None:
            parts = model.evaluate_by(_own_test_samples(run, model.client, imports), by)
        else:
            parts = {"": Metrics(**{"correct": 0, "classes_present": 0, **measured})}
    else:
        parts = {"": model.evaluate(data, columns)} if by is None else model.evaluate_by(data, by, columns)
    if as_json:
        plain = {name: metrics.plain(model.task) for name, metrics in parts.items()}
        print(json.dumps(finite(plain[""] if by is None else plain), indent=2))
        return
    title = where if by is None else f"{where}, by {by}"
    render(title, *_metrics_table(list(parts.items()), model.task, by or "model"), style, out)
    details = "`--details` adds the confusion matrix, " if model.task == "classification" else ""
    next_step(f"{details}`fedme export {quoted(run)} --client {quoted(model.client)} --to onnx` takes the model elsewhere")


def _print_details(where: str, detail: Details, style: Format, as_json: bool) -> None:
    if as_json:
        print(json.dumps(finite(detail.plain()), indent=2))
        return

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}"

    names = [c.name for c in detail.classes]
    header = ["class", "samples", "sensitivity %", "specificity %", "precision %", *(f"as {name}" for name in names)]
    rows = [
        [c.name, str(c.samples), percent(c.sensitivity), percent(c.specificity), percent(c.precision), *map(str, row)]
        for c, row in zip(detail.classes, detail.confusion, strict=True)
    ]
    render(f"{where}: every class, and how often its samples are taken for which", header, rows, style, out)
    bins = [
        [f"{100 * b.low:.0f} to {100 * b.high:.0f}", str(b.samples), percent(b.confidence), percent(b.accuracy)]
        for b in detail.calibration
    ]
    title = f"calibration (Brier score {detail.brier:.4f}): how often predictions are right, by their probability"
    render(title, ["probability %", "samples", "mean probability %", "right %"], bins, style, out)


def _own_test_samples(run: Path, client: str, imports: bool) -> RawSamples:
    """The test part of a client, with all columns of its file."""
    remedy = "give a file with the column as DATA"
    if not (run / summary.CONFIG).exists():
        raise RunError(f"{run}: this is no run directory, so it does not say which samples are the test part; {remedy}")
    experiment = load_saved(run / summary.CONFIG, imports)
    if not isinstance(experiment.dataset, FileDataset):
        raise RunError(f"{run}: the samples of client {client} are not in a file of the experiment; {remedy}")
    federation = assembly.gather(experiment)
    start = int((federation.dataset.owners or {})[client][0][0])  # a client's files follow one another
    rows = federation.clients[client].test.rows.numpy() - start
    samples = experiment.dataset.clients[client].read(client, experiment.dataset.label)
    for raw in (samples.train, samples.val, samples.test):
        if raw is not None:
            if ((rows >= 0) & (rows < len(raw))).all():
                return raw.take(rows)
            rows = rows - len(raw)
    raise RunError(f"{run}: the test part of client {client} is in several files; {remedy}")


def _is_training_file(run: Path, client: str, data: Path) -> bool:
    """Whether the run names this file as the training samples of the client."""
    try:
        table = summary.config_of(run).get("clients", {}).get(client, {})
    except RunError:  # the folder of one client, without its run
        return False
    named = table.get("data")
    return isinstance(named, str) and Path(named).exists() and data.exists() and Path(named).samefile(data)


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


def _metrics_table(rows: list[tuple[str, Metrics]], task: TaskType, names: str = "model") -> tuple[list[str], list[list[str]]]:
    header = ([names] if rows[0][0] else []) + ["samples", *(measure.heading for measure in MEASURES[task])]
    cells = []
    for name, metrics in rows:
        numbers = [measure.text(getattr(metrics, measure.key)) for measure in MEASURES[task]]
        cells.append([*([name] if name else []), str(metrics.samples), *numbers])
    return header, cells


@app.command(
    epilog=examples(
        "fedme export runs/first --client hospital-a --to onnx",
        "fedme export runs/first --client hospital-a --output a.safetensors",
    )
)
def export(
    run: Run,
    client: Client = None,
    finetuned: Finetuned = False,
    own: Own = False,
    imports: Imports = False,
    to: Annotated[
        exporting.Target | None,
        typer.Option(
            "--to", metavar="FORMAT", help="onnx, torch-export or safetensors; by default the suffix of --output decides."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file to write; CLIENT.SUFFIX by default.")] = None,
) -> None:
    """Export a client's model for other programs. It takes samples as they are in tables and includes their preprocessing."""
    if to is None:
        to = exporting.target_of(output) if output is not None else None
    if to is None:
        suffixes = ", ".join(f"{name} ({suffix})" for name, suffix in exporting.SUFFIXES.items())
        where = "no format is given" if output is None else f"{output}: no format has this suffix"
        raise RunError(f"{where}; pass --to, or an --output with the suffix of a format: {suffixes}")
    model = _open_model(run, client, finetuned, own, imports)
    target = output or Path(f"{model.folder.name}{exporting.SUFFIXES[to]}")
    print(model.export(target, to))
    next_step("docs/use-models.md has a program that loads it")


@app.command(
    epilog=examples(
        "fedme join runs/first --data new.csv --name hospital-c",
        "fedme join runs/first --data new.csv --name hospital-c --epochs 5 --json",
    )
)
def join(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run directory.", autocompletion=completion.runs)],
    data: Annotated[Path, typer.Option("--data", help=f"The samples of the new client. {DATA}")],
    name: Annotated[str, typer.Option("--name", help="The name of the new client.")] = "newcomer",
    label: Labels = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of fine-tuning; by default those of the run, or 2.")] = None,
    per_cluster: Annotated[bool, typer.Option("--per-cluster", help="Try one model per cluster instead of all.")] = False,
    compare: Annotated[bool, typer.Option(help="Train the client alone too, and say whether joining helps it.")] = True,
    imports: Imports = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Give a client that did not take part in training the model that fits its data best, fine-tune it, and say if it helps."""
    if not (run / summary.CONFIG).exists():
        raise RunError(f"{run}: not a run directory{similar_run(run)}")
    experiment = load_saved(run / summary.CONFIG, imports)
    piece = ClientSamples(read_object(data, _label_option(label) or _label_of_run(run), f"client {name}"))
    with Display(err, quiet) as display:
        display.note(f"selecting the model that fits {name} best" + (", and training it alone to compare" if compare else ""))
        with contextlib.closing(assembly.executor(experiment.settings.engine, display.tick)) as execute:
            joined = unseen_clients.join(
                run,
                experiment,
                name,
                piece,
                epochs=epochs,
                per_cluster=per_cluster,
                imports=imports,
                execute=execute,
                compare=compare,
            )
    if as_json:
        scores = [asdict(score) | {"metrics": score.metrics.plain(joined.task_type)} for score in joined.scores]
        judged = None if joined.verdict is None else verdicts.plain(joined.verdict)
        about: dict[str, Any] = {"chosen": asdict(joined.choice), "verdict": judged}
        about |= {"client": name, "started_from": joined.taken, "offers": joined.offers, "folder": str(joined.folder)}
        print(json.dumps(finite(about | {"scores": scores}), indent=2))
        return
    stages = {"round": "before fine-tuning", "finetuned": "fine-tuned"}
    rows = [(f"{stages[score.stage]}, {score.split}", score.metrics) for score in joined.scores]
    title = f"{name} starts from {joined.taken} (of {joined.offers} models), in {joined.folder}"
    render(title, *_metrics_table(rows, joined.task_type), "table", out)
    print_line(f"{name} uses its {model_choice.TITLES[joined.choice.name]}: {joined.choice.why}.")
    if joined.verdict is not None:
        local = joined.verdict
        print_line(f"Beside training alone ({local.local_arch}, {local.measure.with_title(local.local)}): {local.words()}.")
        for line in verdicts.alarms([local]):
            print_line(line)
    next_step(f"`fedme predict {quoted(run)} INPUT --client {quoted(name)}` uses its model")
