"""The work of a client in every engine: take part in a round, and evaluate its models."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from torch import Tensor

from fedme.core.data import ClientData
from fedme.core.key import Key
from fedme.core.method import Method, Report, Round, Task
from fedme.core.metrics import Metrics, measure_all
from fedme.core.model import Model, not_finite, surely_finite
from fedme.core.operations import Computation, Role, T, in_parallel, predict, train
from fedme.learning.exchanged_part import ExchangedPart, exchanged_part
from fedme.learning.objectives import CrossEntropy
from fedme.learning.own_statistics import with_better_statistics, with_own_statistics
from fedme.learning.trained_scores import with_trained_scores
from fedme.learning.training_settings import Training

AnyMethod = Method[Any, Any, Any, Any]
GLOBAL = "global"  # the role of the server's model in `Method.models`


@dataclass(frozen=True)
class Finetune:
    """Fine-tuning of the personal model: a few epochs on the client's training part with a fresh optimiser."""

    training: Training
    epochs: int


@dataclass(frozen=True)
class ModelScore:
    """The metrics of one model of a client on one split; `stage` is "round" or, after fine-tuning, "finetuned".

    `own` are the metrics that a program has added (`core/callbacks.py`).
    """

    model: Role
    arch: str
    stage: str
    split: str
    metrics: Metrics
    own: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """A client's state and models, and their scores.

    Also what models are compared by: "val/personal" are a model's outputs on the validation part, and "val/targets" what they
    should be; the same for the test part. Before the last round they are those of the personal model only.
    """

    state: Any
    models: dict[str, Model]  # "personal", "finetuned" if asked for; after the last round also "global" if there is one
    scores: Sequence[ModelScore]
    outputs: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Unscored:
    """An evaluation without its scores, and what they follow from.

    `shown` has for every score its role, architecture, stage, split, and the index of its outputs and targets in `answers`.
    """

    evaluation: Evaluation
    shown: list[tuple[Role, str, str, str, int]]
    answers: list[tuple[Tensor, Tensor]]


def participate(
    method: AnyMethod,
    task: Task,
    state: Any | None,
    down: Any,
    data: ClientData,
    when: Round,
    root: Key,
    update_bn: bool = True,
    score_trained: bool = False,
) -> Computation[tuple[Any, Any, Report]]:
    """One exchange of a round at one client. The state is created at its first participation.

    With `update_bn`, the method compares models with running statistics of the client's samples (`learning/own_statistics.py`).
    With `score_trained`, the report has validation scores of the trained models (`learning/trained_scores.py`).
    """
    part = exchanged_part(method, task)
    if state is None:
        state = yield from _first_state(method, task, data, root, update_bn, part)
    kept = state
    if part is not None:
        state, down = kept.state, part.completed(down, kept)
    round_of_client = method.client_round(state, down, data, when, _clients_of_round(root.seed, root.path, when.t).at(data.id))
    if score_trained:
        round_of_client = with_trained_scores(round_of_client, data)
    state, up, report = yield from _of_method(round_of_client, data, update_bn)
    if part is not None:
        own = method.kept_model(up) if up is not None else None
        state, up = replace(kept, state=state) if own is None else part.keep(state, own), part.stripped(up)
    if not surely_finite(up) and next(not_finite(up), None) is not None:  # the model diverged: nothing is sent, records say so
        return state, None, replace(report, notes={**report.notes, "diverged": True})
    return state, up, report


@functools.lru_cache(maxsize=8, typed=True)
def _clients_of_round(seed: int, path: tuple[int | str, ...], t: int) -> Key:
    """What the keys of all clients begin with."""
    return Key(seed, path).at("round", t, "client")


def evaluate_models(
    method: AnyMethod,
    task: Task,
    state: Any | None,
    delivery: Any,
    data: ClientData,
    when: Round,
    root: Key,
    finetune: Finetune | None = None,
    update_bn: bool = True,
) -> Computation[Unscored]:
    """Evaluate the client's models on its validation and test parts, before and optionally after fine-tuning.

    The scores of many clients are computed together (`scored`).

    With `update_bn`, the personal model gets running statistics of the client's training samples, if it is better with them. It
    is evaluated and saved with them, and they are in no state and no message. The global model is the one that the server sent.
    """
    part = exchanged_part(method, task)
    if state is None:
        state = yield from _first_state(method, task, data, root, update_bn, part)
    whole_state = state
    if part is not None:
        state, delivery = whole_state.state, part.completed(delivery, whole_state)
    key = root.at("assess", when.t, "client", data.id)
    models = dict((yield from _of_method(method.models(state, delivery, data, when, key), data, update_bn)))
    if update_bn:
        models["personal"] = yield from with_better_statistics(models["personal"], data)
    kept = {"personal": models["personal"]}
    shown = [(role, "round", model) for role, model in models.items()]
    if finetune is not None:
        optimizer = finetune.training.local_optimizer(CrossEntropy(), when)
        local = finetune.training.whole_epochs(finetune.epochs)
        tuned = yield from train({"own": models["personal"]}, optimizer, data.train, local, key.at("finetune"))
        kept["finetuned"] = tuned.models["own"]
        if update_bn:
            kept["finetuned"] = yield from with_better_statistics(kept["finetuned"], data)
        shown.append(("personal", "finetuned", kept["finetuned"]))
    splits = {name: split for name, split in (("val", data.val), ("test", data.test)) if len(split)}
    # The global model is often the personal model too: every model is evaluated once.
    different = {id(model): model for _, _, model in shown}
    wanted = [(model_id, name) for model_id in different for name in splits]
    logits = yield from in_parallel([predict(different[model_id], splits[name]) for model_id, name in wanted])
    index = {pair: number for number, pair in enumerate(wanted)}
    listed = [(role, model.arch.name, stage, name, index[id(model), name]) for role, stage, model in shown for name in splits]
    measured = [(answer, splits[name].y) for (_, name), answer in zip(wanted, logits, strict=True)]
    last = when.t + 1 == when.total
    if last:
        kept |= {role: model for role, model in models.items() if role == GLOBAL and model is not models["personal"]}
    answers = dict(zip(wanted, logits, strict=True))
    compared = kept if last else {"personal": kept["personal"]}
    outputs = {f"{name}/{role}": answers[id(model), name] for role, model in compared.items() for name in splits}
    outputs |= {f"{name}/targets": split.y for name, split in splits.items()}
    return Unscored(Evaluation(whole_state, kept, [], outputs), listed, measured)


class Scores(Sequence[ModelScore]):
    """The scores of one evaluation, which are computed with those of others when one of them is read.

    `metrics` are those of all evaluations; the ones of this begin at `first`.
    """

    def __init__(self, unscored: Unscored, metrics: Callable[[], Sequence[Metrics]], first: int) -> None:
        self._shown, self._metrics, self._first = unscored.shown, metrics, first

    @functools.cached_property
    def _scores(self) -> list[ModelScore]:
        metrics, first = self._metrics(), self._first
        return [ModelScore(role, arch, stage, split, metrics[first + index]) for role, arch, stage, split, index in self._shown]

    def __len__(self) -> int:
        return len(self._shown)

    @overload
    def __getitem__(self, place: int) -> ModelScore: ...
    @overload
    def __getitem__(self, place: slice) -> list[ModelScore]: ...
    def __getitem__(self, place: int | slice) -> ModelScore | list[ModelScore]:
        return self._scores[place]

    def __iter__(self) -> Iterator[ModelScore]:
        return iter(self._scores)


def scored(evaluations: Sequence[Unscored], unit: Sequence[float]) -> list[Evaluation]:
    """The evaluations of several clients with their scores; `unit` is that of regression targets.

    All scores are computed together when the first of them is read.
    """
    answers = [answer for unscored in evaluations for answer in unscored.answers]
    metrics = functools.cache(lambda: measure_all(answers, unit))
    complete, first = [], 0
    for unscored in evaluations:
        complete.append(replace(unscored.evaluation, scores=Scores(unscored, metrics, first)))
        first += len(unscored.answers)
    return complete


def _first_state(
    method: AnyMethod, task: Task, data: ClientData, root: Key, update_bn: bool, part: ExchangedPart | None
) -> Computation[Any]:
    """The state of a client at its first participation; with a shared part, also the rest of its own model."""
    state = yield from _of_method(method.init_client(task, data.id, data, root.at("init")), data, update_bn)
    return state if part is None else part.keep(state, task.first_model(data.id, root.at("init")))


def _of_method(work: Computation[T], data: ClientData, update_bn: bool) -> Computation[T]:
    return with_own_statistics(work, data) if update_bn else work
