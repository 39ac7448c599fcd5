"""What comes out of ``fit``: every client's personal model, and how it does beside one trained on its own data alone."""

import dataclasses
import importlib
import shutil
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from fedme.api.client import Client
from fedme.artifacts import personal_model, saved_models, unseen_clients
from fedme.artifacts.personal_model import Personal
from fedme.config.experiment import Experiment, load, parse
from fedme.core.atomic_files import RunError
from fedme.core.data import ClientId
from fedme.core.metrics import MEASURES, Measure
from fedme.networks import Entry
from fedme.results import records
from fedme.results.summary import CONFIG
from fedme.results.tables import Format, render, wide
from fedme.running import run
from fedme.running.progress import Display


class Result(Mapping[ClientId, Personal]):
    """A finished run: ``result["hospital-a"]`` is a client's personal model. `folder` is the run directory."""

    def __init__(self, folder: Path | str, experiment: Experiment | None = None, passing: bool = False) -> None:
        self.folder = Path(folder)
        self.experiment = experiment or load(self.folder / CONFIG)[0]
        self._clients = personal_model.clients_of(self.folder)
        if not self._clients:
            raise RunError(f"{self.folder}: there are no saved models; a run saves them at its end")
        if passing:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def __getitem__(self, client: ClientId) -> Personal:
        return self.model(client)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

    def __repr__(self) -> str:
        return f"Result({str(self.folder)!r}: {self.experiment.method_name}, {len(self)} clients)"

    def model(self, client: ClientId, name: str = "model") -> Personal:
        """A client's personal model; ``name="finetuned"`` is the one after fine-tuning, if there was any."""
        if client not in self._clients:
            raise KeyError(f"there is no client '{client}'; they are {', '.join(self._clients[:10])}")
        return Personal(personal_model.find(self.folder, client), name, imports=True, more=self._more)

    @property
    def measure(self) -> Measure:
        """The main measure: accuracy, or RMSE for regression."""
        about = saved_models.describe(personal_model.find(self.folder, self._clients[0]))
        return MEASURES[saved_models.schema_of(about).task_type][0]

    @property
    def _more(self) -> Mapping[str, Entry] | None:
        return self.experiment.supplied.archs if self.experiment.supplied else None

    def save(self, folder: Path | str) -> Path:
        """Keep the run: copy it to a directory of its own."""
        target = Path(folder)
        if target.exists():
            raise RunError(f"{target}: exists already; choose another name")
        shutil.copytree(self.folder, target)
        return target

    def local(self, quiet: bool = False) -> "Result":
        """The same clients, each with its own network, trained on its own samples alone. Trained once, when first asked for."""
        folder = self.folder / "local"
        plain = self.experiment.plain() | {"method": {"name": "local"}, "output": str(folder), "name": "local"}
        plain["faults"] = {}  # whoever trains alone needs nobody to reach it
        baseline = dataclasses.replace(parse(plain), supplied=self.experiment.supplied)
        with Display(Console(stderr=True), quiet) as display:
            if not (folder / CONFIG).exists():
                display.note("training every client on its own samples alone, to compare")
                run.start(baseline, display)
            else:
                run.resume(folder, display, baseline)
        return Result(folder, baseline)

    def rows(self, quiet: bool = False) -> list[dict[str, Any]]:
        """For every client: architecture, test samples, how its personal model does on them, local-only, and the gain.

        The measure is accuracy, or RMSE for regression; a positive gain is better in both cases.
        """
        measure = self.measure
        scores = _tested(self.folder, measure)
        baseline = scores if self.experiment.method.isolated else _tested(self.local(quiet).folder, measure)
        rows = []
        for client, row in scores.items():
            other = baseline[client]["round"]
            gain = measure.gain(row["round"], other) if row["round"] is not None and other is not None else None
            line = {"client": client, "model": row["arch"], "samples": row["samples"], "personal": row["round"]}
            line |= {"fine-tuned": row["finetuned"]} if "finetuned" in row else {}
            rows.append(line | {"local-only": other, "gain": gain})
        return rows

    def table(self, style: Format = "table", quiet: bool = False) -> None:
        """Print `rows`, accuracy in percent. The first time, it trains every client alone to compare with."""
        rows = self.rows(quiet)
        header = list(rows[0])
        measure = self.measure
        cells = [[_cell(key, row[key], measure) for key in header] for row in rows]
        what = f"{measure.title} in %" if measure.percent else f"{measure.title} (less is better)"
        title = f"test {what} of {self.experiment.method_name}'s personal models, and of training on one's own samples alone"
        render(title, header, cells, style, wide())

    def join(self, client: Client, epochs: int | None = None, per_cluster: bool = False) -> Personal:
        """The model of a client that was not there: what fits its validation part best, then fine-tuned.

        ``result.model(client.id)`` is the same as it came, before fine-tuning.
        """
        unseen_clients.join(
            self.folder,
            self.experiment,
            client.id,
            client.piece(),
            epochs=epochs,
            per_cluster=per_cluster,
            imports=True,
            more=self._more,
        )
        self._clients = personal_model.clients_of(self.folder)
        return self.model(client.id, "finetuned")

    def report(self, path: Path | str) -> Path:
        """Write a report that can be read in a browser."""
        try:
            write = importlib.import_module("fedme.report").write
        except ImportError as error:
            raise RunError("this installation of fedme has no reports; install a newer one") from error
        write([self.folder], Path(path))
        return Path(path)


def load_run(folder: Path | str) -> Result:
    """The result in a run directory, of the command line or of a program."""
    return Result(folder)


def _tested(folder: Path, measure: Measure) -> dict[ClientId, dict[str, Any]]:
    """How every client's personal model did on its test part when last looked at, by stage."""
    rows: dict[ClientId, dict[str, Any]] = {}
    for row in records.read(folder):
        if (row["model"], row["split"]) == ("personal", "test"):
            scores = rows.setdefault(row["client"], {})
            scores |= {"arch": row["arch"], "samples": row["samples"], row["stage"]: row[measure.key]}
    return rows


def _cell(key: str, value: Any, measure: Measure) -> str:
    if key in ("client", "model", "samples"):
        return str(value)
    return f"{'+' if key == 'gain' and value is not None and value >= 0 else ''}{measure.text(value)}"
