"""Logging to TensorBoard and MLflow besides `metrics.jsonl`, as in ``log = "tensorboard"``.

Both get the means over clients of every round. They are optional packages, imported only if the setting names them.
"""

import importlib
import json
import logging
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from fedme.config.experiment import ConfigError
from fedme.core.atomic_files import write_text
from fedme.core.metrics import MEASURES, task_type_of_row
from fedme.results.summary import flattened

Row = Mapping[str, Any]
PACKAGES = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow"}
MLFLOW_RUN = "mlflow.txt"  # the id of the MLflow run, which a resumed run continues


class Sink(Protocol):
    """A destination for the values of every round."""

    def write(self, t: int, values: Mapping[str, float]) -> None:
        """Write the values of round `t`."""
        ...


class Logs:
    """All destinations of a run."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = sinks

    def write(self, t: int, rows: Sequence[Row]) -> None:
        """Write the means of a round."""
        for sink in self.sinks:
            sink.write(t, means(rows))


def means(rows: Sequence[Row]) -> dict[str, float]:
    """The means of a round, as in "personal/test/accuracy" or "notes/alpha", its bytes, and the fraction of adopted guests.

    Metrics of a program stand beside the built-in ones, and the numbers of its callbacks under "callbacks/".
    """
    scores: dict[str, list[float]] = defaultdict(list)
    traffic: dict[str, Row] = {}
    adopted: list[bool] = []
    for row in rows:
        traffic.setdefault(row["client"], row)
        model = row["model"] if row["stage"] != "finetuned" else f"{row['model']}-finetuned"
        place = f"{model or 'model'}/{row['stage'] if row['stage'] in ('training', 'trained') else row['split']}"
        for measure in MEASURES[task_type_of_row(row)]:
            if row[measure.key] is not None:
                scores[f"{place}/{measure.key}"].append(row[measure.key])
        for name, value in (row.get("own") or {}).items():
            if _is_number(value):
                scores[f"{place}/{name}"].append(value)
        notes = row.get("notes") or {}
        adopted += [bool(notes["adopts"])] if notes.get("lender") else []
        for name, note in notes.items():  # what a method says about its clients in numbers, such as APFL's alpha
            if _is_number(note):
                scores[f"notes/{name}"].append(note)
    for row in traffic.values():  # all rows of a client repeat the numbers of callbacks
        for name, value in (row.get("callbacks") or {}).items():
            if _is_number(value):
                scores[f"callbacks/{name}"].append(value)
    values = {name: statistics.fmean(numbers) for name, numbers in scores.items()}
    values |= {name: float(sum(row[name] for row in traffic.values())) for name in ("bytes_up", "bytes_down")}
    return values | ({"adopted": statistics.fmean(adopted)} if adopted else {})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@contextmanager
def opened(names: str | Sequence[str], folder: Path, config: Mapping[str, Any], first: int) -> Iterator[Logs]:
    """All destinations that the setting `log` names, from round `first` on."""
    openers = {"tensorboard": _tensorboard, "mlflow": _mlflow}
    wanted = [names] if isinstance(names, str) else list(dict.fromkeys(names))
    with ExitStack() as stack:
        yield Logs([stack.enter_context(openers[name](folder, config, first)) for name in wanted])


def require_packages(names: str | Sequence[str]) -> None:
    """Raise a ConfigError for a package that is not installed, before anything is trained."""
    for name in [names] if isinstance(names, str) else names:
        _package(name)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(PACKAGES[name])
    except ImportError as error:
        raise ConfigError(f"log: '{name}' is not installed ({error}); pip install 'fedme[{name}]'") from error


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def write(self, t: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, t)
        self.writer.flush()


@contextmanager
def _tensorboard(folder: Path, config: Mapping[str, Any], first: int) -> Iterator[Sink]:
    """Event files in the run directory; rounds that are computed again replace the old ones."""
    writer = _package("tensorboard").SummaryWriter(str(folder / "tensorboard"), purge_step=first)
    try:
        if first == 0:
            writer.add_text("config", "```\n" + json.dumps(config, indent=2) + "\n```")
        yield _TensorBoard(writer)
    finally:
        writer.close()


class _Mlflow:
    def __init__(self, client: Any, run: str) -> None:
        self.client, self.run = client, run

    def write(self, t: int, values: Mapping[str, float]) -> None:
        entities = importlib.import_module("mlflow.entities")
        now = int(time.time() * 1000)
        self.client.log_batch(self.run, metrics=[entities.Metric(name, value, now, t) for name, value in values.items()])


@contextmanager
def _mlflow(folder: Path, config: Mapping[str, Any], first: int) -> Iterator[Sink]:
    """A run in the store that MLFLOW_TRACKING_URI names, or in `mlflow.db` beside the run directory."""
    mlflow = _package("mlflow")
    store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve().parent / 'mlflow.db'}"
    logging.getLogger("mlflow.store").setLevel(logging.WARNING)  # it logs every table that it creates
    client = mlflow.MlflowClient(tracking_uri=store)
    run_file = folder / MLFLOW_RUN
    if not run_file.exists():
        entities = importlib.import_module("mlflow.entities")
        existing = client.get_experiment_by_name("fedme")
        experiment = existing.experiment_id if existing else client.create_experiment("fedme")
        run = client.create_run(experiment, run_name=f"{config['name']}-{config['seed']}", tags={"folder": str(folder)})
        params = [entities.Param(key, str(value)[:500]) for key, value in flattened(config).items()]
        for start in range(0, len(params), 100):  # MLflow's limit per call
            client.log_batch(run.info.run_id, params=params[start : start + 100])
        write_text(run_file, run.info.run_id)
    run_id = run_file.read_text().strip()
    client.update_run(run_id, status="RUNNING")
    status: Literal["FINISHED", "KILLED"] = "KILLED"
    try:
        yield _Mlflow(client, run_id)
        status = "FINISHED"
    finally:
        client.set_terminated(run_id, status)
