"""The best that one client could do alone, and the verdict on its model of the federation beside it.

Alone, a client trains every architecture of the federation on its own samples, and keeps the one that is best on its validation
part. The model is saved as "local" with the client's others.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedme.artifacts import model_cards, model_choice, outputs as model_outputs, saved_models
from fedme.core.atomic_files import RunError
from fedme.core.data import ClientData, Schema, Split
from fedme.core.key import Key
from fedme.core.metrics import MEASURES, Metrics, measure
from fedme.core.model import Arch, Model
from fedme.core.operations import Computation, Score, in_parallel, predict
from fedme.core.task_types import TaskType
from fedme.federation.client_work import ModelScore
from fedme.learning.architecture_selection import best_local
from fedme.learning.own_statistics import with_better_statistics, with_own_statistics
from fedme.learning.training_settings import Training
from fedme.results import verdicts
from fedme.results.verdicts import Verdict

FILE = "local"  # of a model trained alone, in the folder of its client


@dataclass(frozen=True)
class LocalModel:
    """What a client could do alone."""

    model: Model
    scores: Mapping[str, Score]  # on the validation part, by architecture
    metrics: tuple[ModelScore, ...]
    outputs: Mapping[str, Tensor]


def train_client(
    data: ClientData,
    pool: Sequence[Arch],
    training: Training,
    rounds: int,
    key: Key,
    dtype: torch.dtype,
    update_bn: bool,
    unit: Sequence[float],
) -> Computation[LocalModel]:
    """Train every architecture of `pool` on the client's training part; the best on its validation part stays.

    Without a validation part there is no choice: the first architecture, the client's own, is trained.
    """
    work = best_local(pool if len(data.val) else pool[:1], data, training, rounds, key, dtype, keep=True)
    choice = yield from (with_own_statistics(work, data) if update_bn else work)
    model = choice.model
    assert model is not None
    if update_bn:
        model = yield from with_better_statistics(model, data)
    splits = {name: split for name, split in (("val", data.val), ("test", data.test)) if len(split)}
    answers = yield from in_parallel([predict(model, split) for split in splits.values()])
    scores = [
        ModelScore("personal", model.arch.name, FILE, name, measure(answer, split.y, unit))
        for (name, split), answer in zip(splits.items(), answers, strict=True)
    ]
    outputs = {f"{name}/{FILE}": answer for name, answer in zip(splits, answers, strict=True)}
    outputs |= {f"{name}/targets": split.y for name, split in splits.items()}
    return LocalModel(model, choice.scores, tuple(scores), outputs)


def save(folder: Path, data: ClientData, local: LocalModel, schema: Schema, classes: Sequence[str], rounds: int) -> None:
    """Save a client's model trained alone, and its outputs beside those that are there."""
    about = model_cards.about(data, FILE, "local", rounds, local.metrics, None, schema.task_type)
    regression = schema.task_type == "regression"
    about["tried"] = {name: score.loss if regression else score.accuracy for name, score in local.scores.items()}
    saved_models.save(folder, FILE, local.model, schema, list(classes), about)
    present = model_outputs.read(folder) if model_outputs.exist(folder) else {}
    model_outputs.write(folder, {**present, **local.outputs})


def verdict_of(here: Path, there: Path, data: ClientData, schema: Schema) -> Verdict:
    """The verdict for one client: its model of the federation in the folder `here` beside its model alone in `there`.

    The client's choice is made again, now with the model trained alone among the candidates.
    """
    ours, theirs = model_outputs.read(here), model_outputs.read(there)
    ours = {name: value for name, value in ours.items() if not name.endswith(f"/{FILE}")}
    tested, targets = model_outputs.of_split(ours, "test")
    other, same = model_outputs.of_split(theirs, "test")
    if targets is None or same is None or not torch.equal(targets, same):
        raise RunError(f"{here}: its test samples are not those of {there}; did the data change after the run?")
    validated, labels = model_outputs.of_split(ours, "val")
    federated = model_choice.choose(validated, labels) if labels is not None else model_choice.choose({}, None)
    name = federated.name
    about = saved_models.describe(here, name if saved_models.exists(here, name) else model_choice.OWN)
    local_about = saved_models.describe(there, FILE)
    if labels is not None:
        beside = model_outputs.of_split(theirs, "val")[0]
        choice = model_choice.choose({**validated, FILE: beside[FILE]}, labels)
        if choice.name == FILE and there != here:
            _copy(there, here)
        model_choice.write(here, choice)
    task, unit = schema.task_type, schema.unit
    key = MEASURES[task][0].key
    return Verdict(
        client=data.id,
        task=task,
        model=name,
        arch=about["arch"],
        local_arch=local_about["arch"],
        samples=len(targets),
        value=getattr(measure(tested[name], targets, unit), key),
        local=getattr(measure(other[FILE], targets, unit), key),
        constant=getattr(constant_metrics(data, schema), key),
        gains=verdicts.gains(task, tested[name], other[FILE], targets, unit),
        trained=len(data.train),
        tested=split_fingerprint(data.test)[:16],
    )


def split_fingerprint(split: Split) -> str:
    """A fingerprint of the samples and targets of a split."""
    inputs = split.inputs()
    tensors = [inputs[name] for name in sorted(inputs)] if isinstance(inputs, Mapping) else [inputs]
    digest = hashlib.sha256()
    for tensor in [*tensors, split.y]:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _copy(source: Path, target: Path) -> None:
    """Copy a model trained alone to the client's other models."""
    target.mkdir(parents=True, exist_ok=True)
    saved_models.copy(source, FILE, target)
    card = saved_models.CARDS[FILE]
    (target / card).write_bytes((source / card).read_bytes())


def constant_metrics(data: ClientData, schema: Schema) -> Metrics:
    """The metrics on the test part of always answering the most frequent class, labels, or mean of the training part."""
    return measure(
        constant_outputs(data.train.y, len(data.test), len(schema.classes), schema.task_type), data.test.y, schema.unit
    )


def constant_outputs(y: Tensor, samples: int, width: int, task: TaskType) -> Tensor:
    """The same answer for every sample: the most frequent class, the labels that most samples have, or the mean."""
    if task == "classification":
        frequent = torch.bincount(y, minlength=width)
        return torch.nn.functional.one_hot(frequent.argmax(), len(frequent)).double().expand(samples, -1)
    answer = (y.double().mean(0) - 0.5) if task == "multi-label" else y.double().mean(0)
    return answer.expand(samples, -1)
