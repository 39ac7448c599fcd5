"""Where a run's numbers go besides `metrics.jsonl`: TensorBoard and MLflow, asked for by ``log = "tensorboard"``.

Both receive the same: means over clients of every round. They are extras, imported when they are asked for.
"""

import importlib
import json
import logging
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
MLFLOW_RUN = "mlflow.txt"  # the number of the run in the store, so that a resumed run goes on there


class Sink(Protocol):
    """Somebody who is told the numbers of every round."""

    def write(self, t: int, values: Mapping[str, float]) -> None:
        """The numbers of round `t`."""
        ...


class Logs:
    """All that a run writes to."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = sinks

    def write(self, t: int, rows: Sequence[Row]) -> None:
        """Hand on the means of a round."""
        for sink in self.sinks:
            sink.write(t, means(rows))


def means(rows: Sequence[Row]) -> dict[str, float]:
    """What a round comes to: "personal/test/accuracy" and the like, bytes, and the share of guests that were adopted."""
    found: dict[str, list[float]] = defaultdict(list)
    traffic: dict[str, Row] = {}
    adopted: list[bool] = []
    for row in rows:
        traffic.setdefault(row["client"], row)
        model = row["model"] if row["stage"] != "finetuned" else f"{row['model']}-finetuned"
        place = f"{model or 'model'}/{row['stage'] if row['stage'] in ('training', 'trained') else row['split']}"
        for measure in MEASURES[task_type_of_row(row)]:
            if row[measure.key] is not None:
                found[f"{place}/{measure.key}"].append(row[measure.key])
        notes = row.get("notes") or {}
        adopted += [bool(notes["adopts"])] if notes.get("lender") else []
    values = {name: statistics.fmean(each) for name, each in found.items()}
    values |= {name: float(sum(row[name] for row in traffic.values())) for name in ("bytes_up", "bytes_down")}
    return values | ({"adopted": statistics.fmean(adopted)} if adopted else {})


@contextmanager
def opened(names: str | Sequence[str], folder: Path, config: Mapping[str, Any], first: int) -> Iterator[Logs]:
    """Everything that `log` names, from round `first` on; closed whatever happens."""
    openers = {"tensorboard": _tensorboard, "mlflow": _mlflow}
    wanted = [names] if isinstance(names, str) else list(dict.fromkeys(names))
    with ExitStack() as all_of_them:
        yield Logs([all_of_them.enter_context(openers[name](folder, config, first)) for name in wanted])


def require_packages(names: str | Sequence[str]) -> None:
    """Refuse what is not installed before anything is trained."""
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
    """Event files in the run directory; rounds that are computed again after a stop replace the old ones."""
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
    logging.getLogger("mlflow.store").setLevel(logging.WARNING)  # it tells of every table it makes
    client = mlflow.MlflowClient(tracking_uri=store)
    mark = folder / MLFLOW_RUN
    if not mark.exists():
        entities = importlib.import_module("mlflow.entities")
        there = client.get_experiment_by_name("fedme")
        experiment = there.experiment_id if there else client.create_experiment("fedme")
        run = client.create_run(experiment, run_name=f"{config['name']}-{config['seed']}", tags={"folder": str(folder)})
        params = [entities.Param(key, str(value)[:500]) for key, value in flattened(config).items()]
        for start in range(0, len(params), 100):  # as many as MLflow takes at once
            client.log_batch(run.info.run_id, params=params[start : start + 100])
        write_text(mark, run.info.run_id)
    number = mark.read_text().strip()
    client.update_run(number, status="RUNNING")
    ended: Literal["FINISHED", "KILLED"] = "KILLED"
    try:
        yield _Mlflow(client, number)
        ended = "FINISHED"
    finally:
        client.set_terminated(number, ended)
