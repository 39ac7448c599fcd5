"""A saved personal model: it takes raw samples, as a client gives them, and returns predictions by class name."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedme.artifacts import export, model_cards, model_choice, outputs as model_outputs, saved_models
from fedme.core.atomic_files import RunError
from fedme.core.data import ClientId, Inputs
from fedme.core.metrics import MEASURES, Metrics, measure
from fedme.core.model import default_dtype, output_of
from fedme.core.task_types import TASK_LOSSES, TaskType
from fedme.core.typed import nearest
from fedme.datasets.data_files import Label
from fedme.datasets.preprocessing import Preparation
from fedme.datasets.python_objects import read_object
from fedme.datasets.raw_samples import RawSamples, Table, gaps, renamed
from fedme.datasets.targets import NO_OTHER_CLASSES, Targets
from fedme.networks import Entry
from fedme.results.classification_details import Details, details
from fedme.results.run_directory import similar_run

CHUNK = 1024  # samples at a time
MOST_GROUPS = 20  # of `evaluate_by`
MISSING = "(missing)"  # the subgroup of samples with a gap in the column


class Personal:
    """A client's saved model: ``predict(x)``, ``predict_proba(x)``, ``score(x, y)``, ``export(path)``, `module`.

    `name` is "model" (its personal model), "finetuned", "global", "best" or "local"; by default the one that the client chose
    on its validation part, and `choice` says why.
    """

    def __init__(
        self, folder: Path, name: str | None = None, imports: bool = False, more: Mapping[str, Entry] | None = None
    ) -> None:
        self.choice = model_choice.read(folder)
        name = name or (model_choice.OWN if self.choice is None else self.choice.name)
        self.folder, self.name = folder, name
        self.about = saved_models.describe(folder, name)
        self.client: ClientId = self.about["client"]
        self.classes: tuple[str, ...] = tuple(self.about["classes"])
        self.preparation = Preparation.read(self.about["preprocessing"])
        self.schema = saved_models.schema_of(self.about)
        self.note = ""
        if "graph" in self.about.get("network", {}) and not saved_models.is_at_hand(self.about, more):
            self.note = "the network was given as an object, so its saved graph is used"
        self._network: nn.Module = saved_models.read(folder, name, imports=imports, more=more)[0]

    def __repr__(self) -> str:
        measure = MEASURES[self.task][0]
        tested = self.about["metrics"].get("test")
        score = f", test {measure.title} {measure.text(tested[measure.key])}{' %' * measure.percent}" if tested else ""
        what = f"{len(self.classes)} {'targets' if self.task == 'regression' else 'classes'}"
        return f"Personal({self.client!r}, {model_choice.TITLES[self.name]}: {self.about['arch']}, {what}{score})"

    @property
    def module(self) -> nn.Module:
        """An `nn.Module` that takes unscaled tensors; it scales them itself."""
        return export.deployable(self._network, self.preparation)

    @property
    def card(self) -> str:
        """The model card, as Markdown."""
        path = self.folder / saved_models.CARDS[self.name]
        return path.read_text(encoding="utf-8") if path.exists() else model_cards.markdown(self.about)

    @property
    def task(self) -> TaskType:
        """The task type: classification, multi-label or regression."""
        return self.schema.task_type

    def logits(self, x: Any, label: Label = None) -> Tensor:
        """Logits per class or label for every sample; for regression, the predicted values in the unit of the targets.

        `x` has any of the forms that a client may give; a column `label` in it is ignored.
        """
        return self.logits_of(read_object(x, label, "the samples", labelled=False))

    def predict_proba(self, x: Any, label: Label = None) -> np.ndarray:
        """Probabilities for every sample: of the classes (softmax), or of every label independently (sigmoid).

        The columns are those of `classes`.
        """
        if self.task == "regression":
            raise RunError(f"{self.folder}: a regression model has no probabilities; use predict")
        return TASK_LOSSES[self.task].mean(self.logits(x, label).double()).numpy()

    def predict(self, x: Any, label: Label = None) -> np.ndarray:
        """The prediction for every sample.

        Classification: the most probable class, an integer if all classes are integers, else text. Multi-label: a matrix of 0
        and 1 with one column per label. Regression: a vector, or a matrix for several targets, in the unit of the targets.
        """
        z = self.logits(x, label)
        if self.task == "classification":
            return self.named(z.argmax(1))
        values = (z > 0).long() if self.task == "multi-label" else z
        return (values[:, 0] if self.task == "regression" and len(self.classes) == 1 else values).numpy()

    def named(self, places: Tensor) -> np.ndarray:
        """Classes by their indices."""
        names: list[Any] = [int(name) for name in self.classes] if self.preparation.whole_labels else list(self.classes)
        return np.array([names[i] for i in places.tolist()])

    def evaluate(self, data: Any, label: Label = None) -> Metrics:
        """Metrics on labelled samples, in any of the forms that a client may give."""
        return self._measured(*self._answers(data, label)[1:])

    def score(self, x: Any, y: Any) -> float:
        """The main score, as in scikit-learn: accuracy; for several labels, the fraction of samples without error; or R²."""
        name = {"classification": "accuracy", "multi-label": "exact_match", "regression": "r2"}[self.task]
        value = getattr(self.evaluate((x, y)), name)
        return math.nan if value is None else float(value)

    def evaluate_by(self, data: Any, column: str, label: Label = None) -> dict[str, Metrics]:
        """Metrics of every subgroup of labelled samples, by the values of a column, which need not be an input."""
        given, outputs, y = self._answers(data, label)
        if not isinstance(given.inputs, Table):
            raise RunError(f"{given.where}: subgroups need a table with named columns, got samples without names")
        columns = given.inputs.columns
        if column not in columns:
            raise RunError(f"{given.where}: there is no column '{column}'{nearest(column, columns)}")
        values, groups = _subgroups(columns[column])
        if len(groups) > MOST_GROUPS:
            raise RunError(
                f"column '{column}' has {len(groups)} values; subgroups need at most {MOST_GROUPS}: group the values"
            )
        rows = {group: torch.from_numpy(values == group) for group in groups}
        return {group: self._measured(outputs[inside], y[inside]) for group, inside in rows.items()}

    def details(self, data: Any = None, label: Label = None) -> Details:
        """Confusion matrix, sensitivity, specificity, Brier score and calibration of a classifier.

        Without `data`, on the client's own test part, as it was after the last round.
        """
        if self.task != "classification":
            raise RunError(f"{self.folder}: a confusion matrix is for classes, but the task is {self.task}; use evaluate")
        if data is not None:
            return details(*self._answers(data, label)[1:], self.classes)
        tested, targets = model_outputs.of_split(model_outputs.read(self.folder), "test")
        if targets is None or self.name not in tested:
            raise RunError(f"{self.folder}: there are no outputs of its {self.name} on test samples; give labelled samples")
        return details(tested[self.name], targets, self.classes)

    def _answers(self, data: Any, label: Label) -> tuple[RawSamples, Tensor, Tensor]:
        """Labelled samples, the outputs, and the targets."""
        raw = data if isinstance(data, RawSamples) else read_object(data, label, "the samples")
        given = renamed(raw, self.preparation.rename)
        return given, self.logits_of(given), Targets(self.task, self.classes, NO_OTHER_CLASSES).encode(given)

    def _measured(self, outputs: Tensor, y: Tensor) -> Metrics:
        standard = self.preparation.scale_targets
        return measure(standard(outputs), standard(y), self.schema.unit)

    def export(self, path: Path | str, to: export.Target | None = None) -> Path:
        """Export the model as ONNX, torch.export (.pt2) or safetensors; by default the suffix decides."""
        target = Path(path)
        wanted = to if to is not None else export.target_of(target)
        if wanted is None:
            suffixes = ", ".join(export.SUFFIXES.values())
            raise RunError(f"{target}: unknown format; use a name that ends in {suffixes}, or pass `to`")
        target.parent.mkdir(parents=True, exist_ok=True)
        facts = {"classes": json.dumps(list(self.classes)), "preprocessing": json.dumps(self.preparation.plain())}
        facts |= {"client": self.client, "architecture": self.about["arch"], "task": self.task}
        if wanted == "safetensors":
            saved_models.copy(self.folder, self.name, target.parent, target.stem)
        elif wanted == "onnx":
            export.to_onnx(self.module, self.preparation, target, facts)
        else:
            export.to_torch_export(self.module, self.preparation, target, facts)
        return target

    def logits_of(self, given: RawSamples) -> Tensor:
        """The same for samples that have been read."""
        numbers = self.preparation.fill(self.preparation.to_tensors(given))
        return torch.cat([self._outputs(_rows_of(numbers, rows)) for rows in torch.arange(len(given)).split(CHUNK)])

    def _outputs(self, numbers: Inputs) -> Tensor:
        scale = self.preparation.scale
        x = scale.scaling()(numbers) if scale is not None and isinstance(numbers, Tensor) else numbers
        dtype = next((p.dtype for p in self._network.parameters()), torch.float32)
        with torch.inference_mode(), default_dtype(dtype):  # a network may make tensors in its forward pass
            x = _cast(x, dtype)
            output = output_of(self._network(**x) if isinstance(x, Mapping) else self._network(x))
        return self.preparation.unscale_targets(output.clone())


def _subgroups(values: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """The subgroup of every sample, and all subgroups: numbers by size, texts by the alphabet, gaps at the end."""
    missing = gaps(values)
    numbers = values.dtype != object
    present = sorted(set(values[~missing].tolist()))
    names = {value: str(int(value)) if numbers and float(value).is_integer() else str(value) for value in present}
    named = [MISSING if gap else names[value] for value, gap in zip(values.tolist(), missing.tolist(), strict=True)]
    return np.array(named), [*dict.fromkeys(names.values()), *([MISSING] if missing.any() else [])]


def _rows_of(numbers: Inputs, rows: Tensor) -> Inputs:
    return {name: value[rows] for name, value in numbers.items()} if isinstance(numbers, Mapping) else numbers[rows]


def _cast(x: Inputs, dtype: torch.dtype) -> Inputs:
    if isinstance(x, Mapping):
        return {name: _cast(value, dtype) for name, value in x.items()}
    return x.to(dtype) if x.is_floating_point() else x


def find(run: Path, client: ClientId | None) -> Path:
    """The folder of a client's models in a run, or `run` itself if it is such a folder."""
    if client is None:
        if saved_models.exists(run):
            return run
        raise RunError(f"{run}: give the name of a client (--client); there are {_shortened(clients_of(run))}")
    for group in (saved_models.CLIENTS, saved_models.UNSEEN):
        folder = saved_models.folder_of(run, client, group)
        if saved_models.exists(folder):
            return folder
    known = clients_of(run)
    if not run.is_dir():
        raise RunError(f"{run}: no such directory{similar_run(run)}")
    if not known:
        raise RunError(
            f'{run}: no saved models; a run saves them at its end unless save = "none", and `fedme resume` continues a run'
        )
    raise RunError(f"{run}: unknown client '{client}'{nearest(client, known)}")


def clients_of(run: Path) -> list[ClientId]:
    """The clients with a saved model: those of the run, then those that joined later."""
    names = []
    for group in (saved_models.CLIENTS, saved_models.UNSEEN):
        names += [saved_models.client_of(folder) for folder in saved_models.folders(run / group)]
    return names


def _shortened(names: list[ClientId]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "") if names else "none"
