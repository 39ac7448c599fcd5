"""What comes out of ``fit``: every client's personal model, and how it does beside one trained on its own data alone."""

import atexit
import contextlib
import dataclasses
import functools
import importlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from fedme.api import measurements
from fedme.api.client import Client
from fedme.api.display import Table, optional
from fedme.api.measurements import Scores
from fedme.artifacts import model_choice, personal_model, saved_models, unseen_clients
from fedme.artifacts.personal_model import Personal
from fedme.config.experiment import Experiment
from fedme.config.named_code import CONFIG, load_saved
from fedme.core.atomic_files import RunError
from fedme.core.data import ClientId
from fedme.core.metrics import MEASURES, Measure
from fedme.networks import Entry
from fedme.results import records, summary, verdicts, views
from fedme.results.tables import Format, print_prose, render, wide
from fedme.results.verdicts import MARGIN, Verdict
from fedme.running import assembly, fold_verdicts, local_baseline
from fedme.running.progress import Display

MOST_ROWS = 50  # clients that a notebook shows


def display_for(quiet: bool) -> Display:
    """Progress and notes on standard error, or nothing at all."""
    return Display(Console(stderr=True, quiet=quiet), quiet)


class Result(Mapping[ClientId, Personal]):
    """A finished run: ``result["hospital-a"]`` is a client's personal model. `folder` is the run directory."""

    def __init__(
        self, folder: Path | str, experiment: Experiment | None = None, passing: bool = False, imports: bool = False
    ) -> None:
        self.folder = Path(folder)
        self.experiment = experiment or load_saved(self.folder / CONFIG, imports)
        self._imports = imports or experiment is not None  # a program that gives the experiment has imported its code
        self._clients = personal_model.clients_of(self.folder)
        if not self._clients:
            raise RunError(f"{self.folder}: there are no saved models; a run saves them at its end")
        self._passing = passing
        if passing:
            weakref.finalize(self, shutil.rmtree, self.folder.parent, ignore_errors=True)

    def __getitem__(self, client: ClientId) -> Personal:
        return self.model(client)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

    def __repr__(self) -> str:
        scores = self.scores()
        score = f"{scores.split} {scores.measure.title} {scores.measure.text(scores.mean)}{' %' * scores.measure.percent}, "
        about = f"{self.experiment.method_name}, {len(self)} clients, {self.experiment.settings.rounds} rounds"
        return f"Result({about}, {score if len(scores) else ''}{str(self.folder)!r})"

    def _repr_html_(self) -> str:
        measure, known = self.measure, {verdict.client: verdict for verdict in verdicts.strongest(self.folder) or ()}
        rows = measurements.client_rows(self.folder)
        finetuned = any(f"{measure.key}_finetuned" in row for row in rows)
        header = ["client", "network", "samples", measure.heading, *(["fine-tuned"] if finetuned else [])]
        header += ["alone", "gain", "verdict"] if known else []
        cells = []
        for row in rows[:MOST_ROWS]:
            line = [row["client"], row["arch"], str(row["samples"]), measure.text(row[measure.key])]
            line += [measure.text(row.get(f"{measure.key}_finetuned"))] if finetuned else []
            if known:
                v = known.get(row["client"])
                line += ["-"] * 3 if v is None else [measure.text(v.local), verdicts.signed(measure, v.main.gain), v.decision]
            cells.append(line)
        lines = [] if len(rows) <= MOST_ROWS else [f"and {len(rows) - MOST_ROWS} more clients; to_frame() has all"]
        return Table(
            repr(self), header, cells, [*lines, *(views.verdict_lines(list(known.values())) if known else [])]
        )._repr_html_()

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.experiment.settings.seed

    @property
    def accuracy(self) -> Scores:
        """The accuracy of every client's personal model on its test part: ``.mean`` over clients, and ``["hospital-a"]``."""
        if self.measure.key != "accuracy":
            raise AttributeError(f"the task is regression, which has no accuracy; use result.scores('{self.measure.key}')")
        return self.scores()

    def scores(
        self, metric: str | None = None, split: str | None = None, stage: Literal["round", "finetuned"] = "round"
    ) -> Scores:
        """A metric of every client's personal model after the last round, by default the main one, on the test part.

        Without any test samples it is that on the validation part. ``stage="finetuned"`` is after fine-tuning.
        """
        for part in ("test", "val") if split is None else (split,):
            scores = measurements.scores(self.folder, metric, part, stage)
            if len(scores.samples):
                break
        return scores

    @property
    def history(self) -> Any:
        """All measurements as a pandas frame: round (from 0), client, model, stage, split, metric and value.

        The stages are explained in docs/experiments.md: "training" has losses, "round" is after a round.
        """
        return measurements.history(self.folder)

    def to_frame(self, gains: bool = False) -> Any:
        """A pandas frame with a row per client: architecture, test samples, and all metrics of its personal model.

        With `gains`, the columns of `rows` are added, for which every client is trained alone the first time.
        """
        pandas = optional("pandas", "result.to_frame()")
        frame = pandas.DataFrame(measurements.client_rows(self.folder)).set_index("client")
        if not gains:
            return frame
        more = pandas.DataFrame(self.rows()).set_index("client")
        return frame.join(more[[column for column in more.columns if column not in ("model", "samples", "personal")]])

    def plot(self, metric: str | None = None, split: str | None = None, ax: Any = None) -> Any:
        """Draw a metric of the personal models against the rounds: every client, and the mean. Returns matplotlib's axes."""
        scores = self.scores(metric, split)
        title = f"{self.experiment.method_name}, {len(scores.samples)} clients"
        ax = measurements.axes(ax, scores.measure, scores.split, title)
        by_round = measurements.curves(self.folder, scores.measure.key, scores.split)
        measurements.draw_clients(ax, by_round, 100 if scores.measure.percent else 1)
        return ax

    def summary(self) -> Table:
        """Means over clients of every model and split, as `fedme show` prints them."""
        return Table(*views.result_table(self.folder, summary.so_far(self.folder), everything=True))

    def model(self, client: ClientId, name: str | None = None) -> Personal:
        """The model that a client chose on its validation part.

        ``name="model"`` is its personal model, ``name="finetuned"`` the same after fine-tuning, if there was any.
        """
        if client not in self._clients:
            raise KeyError(f"there is no client '{client}'; they are {', '.join(self._clients[:10])}")
        return Personal(personal_model.find(self.folder, client), name, imports=self._imports, more=self._more)

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

    def verdicts(self, quiet: bool = False, folds: int | None = None, margin: float = MARGIN) -> list[Verdict]:
        """For every client: does joining help? Its model of the federation beside the best that it could train alone.

        The first time, every client is trained alone, with every architecture of the federation. Results on the same samples
        with the same training settings share these models, if their run directories have the same parent.

        With ``folds=5``, the federation is trained five times more, so that every sample is a test sample once; these runs are
        kept in the run directory. Two models are equivalent if they differ by less than `margin` in accuracy, or by less than
        this share of the RMSE alone.
        """
        if self.experiment.method.isolated:
            raise RunError(f"{self.folder}: the clients trained alone, so there is nothing to compare with")
        with display_for(quiet) as display:
            cache = _passing_cache() if self._passing else None
            if folds is None:
                judged = local_baseline.judge(self.folder, self.experiment, display, cache)
            else:
                judged = fold_verdicts.judge(self.folder, self.experiment, folds, display, cache)
        return [dataclasses.replace(verdict, margin=margin) for verdict in judged]

    def rows(self, quiet: bool = False, folds: int | None = None, margin: float = MARGIN) -> list[dict[str, Any]]:
        """For every client: architecture, test samples, scores of its models, the gain over training alone, and the verdict.

        `folds` and `margin` are those of `verdicts`. `chosen` is the model that the client chose on its validation part;
        `federated` is the score of the one that it would choose without having been trained alone, which the gain is of.
        With folds, all scores are over folds, and those on the run's own test part are left out. `constant` always answers
        with the most frequent class or the mean. The measure is accuracy, or RMSE for regression; a positive gain is better
        in both cases.
        """
        scores = _tested(self.folder, self.measure)
        judged = {} if self.experiment.method.isolated else {v.client: v for v in self.verdicts(quiet, folds, margin)}
        rows = []
        for client, row in scores.items():
            line = {"client": client, "model": row["arch"], "samples": row["samples"]}
            if folds is None:
                line |= {"personal": row["round"]} | ({"fine-tuned": row["finetuned"]} if "finetuned" in row else {})
            if client in judged:
                verdict = judged[client]
                choice = model_choice.read(personal_model.find(self.folder, client))
                line |= {"samples": verdict.samples, "chosen": model_choice.OWN if choice is None else choice.name}
                line |= {
                    "federated": verdict.value,
                    "local": verdict.local,
                    "local model": verdict.local_arch,
                    "constant": verdict.constant,
                }
                line |= {"gain": verdict.main.gain, "low": verdict.main.low, "high": verdict.main.high}
                line |= {"verdict": verdict.decision, "equivalent": verdict.equivalent}
            rows.append(line)
        return rows

    def table(self, style: Format = "table", quiet: bool = False, folds: int | None = None, margin: float = MARGIN) -> None:
        """Print `rows`, accuracy in percent, and a summary. The first time, it trains every client alone to compare with."""
        rows = self.rows(quiet, folds, margin)
        measure = self.measure
        for row in rows:
            if row.pop("equivalent", False) and row["verdict"] == "cannot tell":
                row["verdict"] += f", within {verdicts.margin_text(measure, margin)}"
        header = list(rows[0])
        cells = [[_cell(key, row.get(key), measure) for key in header] for row in rows]
        what = f"{measure.title} in %" if measure.percent else f"{measure.title} (less is better)"
        title = f"test {what} of {self.experiment.method_name}'s models, and of the best that each client could train alone"
        out = wide()
        render(title, header, cells, style, out)
        if style == "table" and not self.experiment.method.isolated:
            print_prose(views.verdict_lines(self.verdicts(quiet, folds, margin)), out)

    def join(self, client: Client, epochs: int | None = None, per_cluster: bool = False, compare: bool = True) -> Personal:
        """The model of a client that was not there: what fits its validation part best, then fine-tuned.

        With `compare`, it is also trained alone, and uses that model if it is clearly better on its validation part.
        ``result.model(client.id, "model")`` is the same as it came, before fine-tuning.
        """
        with contextlib.closing(assembly.executor(self.experiment.settings.engine)) as execute:
            unseen_clients.join(
                self.folder,
                self.experiment,
                client.id,
                client.piece(),
                epochs=epochs,
                per_cluster=per_cluster,
                imports=self._imports,
                more=self._more,
                execute=execute,
                compare=compare,
            )
        self._clients = personal_model.clients_of(self.folder)
        return self.model(client.id)

    def report(self, path: Path | str) -> Path:
        """Write a report that can be read in a browser."""
        try:
            write = importlib.import_module("fedme.report").write
        except ImportError as error:
            raise RunError("this installation of fedme has no reports; install a newer one") from error
        write([self.folder], Path(path))
        return Path(path)


def load_run(folder: Path | str, *, imports: bool = False) -> Result:
    """The result in a run directory, of the command line or of a program.

    A run may name code of its own: networks, methods or functions by import path. Such code is only imported with
    ``imports=True``: use it for folders that you trust.
    """
    return Result(folder, imports=imports)


def _tested(folder: Path, measure: Measure) -> dict[ClientId, dict[str, Any]]:
    """How every client's personal model did on its test part when last looked at, by stage."""
    rows: dict[ClientId, dict[str, Any]] = {}
    for row in records.read(folder):
        if (row["model"], row["split"]) == ("personal", "test"):
            scores = rows.setdefault(row["client"], {})
            scores |= {"arch": row["arch"], "samples": row["samples"], row["stage"]: row[measure.key]}
    return rows


def _cell(key: str, value: Any, measure: Measure) -> str:
    if key in ("client", "model", "samples", "local model", "verdict"):
        return str(value)
    if key == "chosen":
        return str(verdicts.MODELS.get(value, value))
    if key in ("gain", "low", "high") and value is not None:
        return verdicts.signed(measure, value)
    return measure.text(value)


@functools.cache
def _passing_cache() -> Path:
    """Models trained alone for results without a directory of their own, until the program ends."""
    folder = Path(tempfile.mkdtemp(prefix="fedme-local-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
