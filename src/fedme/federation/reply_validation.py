"""Validation of replies before anything uses them, the same in every engine.

A reply must have the type that the method declares and belong to the requested round. Its models must have the architecture
that was sent, with the same names, shapes and types. All numbers must be finite, `samples` at most what the client announced.
"""

import dataclasses
import functools
import itertools
import types
import typing
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedme.core import tree
from fedme.core.data import ClientId
from fedme.core.flat_params import flat_params
from fedme.core.method import Report, Round, Task, TaskError
from fedme.core.metrics import Metrics, possible
from fedme.core.model import Arch, Model, models_in, not_finite, surely_finite
from fedme.core.operations import Score
from fedme.core.serialization import Plain, fitting
from fedme.core.task_types import TaskType
from fedme.core.typed import TypedError, build
from fedme.federation.client_work import AnyMethod, ModelScore
from fedme.learning.exchanged_part import StateWithRest
from fedme.learning.partial_model import Part

LONGEST = 200  # characters of a text that a client sends for the records
MOST = 64  # entries of a table of that kind
MOST_SECONDS = 1e9  # of a client's work
MOST_SAMPLES = 2**40
NOT_SENT = object()
Changes = list[tuple[tree.Params, tree.Params]]  # weights, each with those that they were made from
RESERVED = frozenset(("missing", "malicious", "alarm", "not_averaged"))  # notes that only the round loop writes


@dataclass(frozen=True)
class MessageTypes:
    """The types that a method declares for what moves and persists."""

    server: Any
    state: Any
    down: Any
    up: Any  # without the None of a client whose reply does not count

    @classmethod
    def of(cls, method: AnyMethod) -> "MessageTypes":
        """As the annotations of the method say."""
        kind: Hashable = type(method)
        declared = _kinds(kind)
        return dataclasses.replace(declared, state=_with_rest(declared.state)) if method.exchanged else declared


@functools.lru_cache(maxsize=64)
def _kinds(method: Any) -> MessageTypes:
    hints = _annotations(method, "client_round", "state", "down", "return")
    answer = typing.get_args(typing.get_args(hints["return"])[2])[1]
    options = [value for value in typing.get_args(answer) if value is not types.NoneType] or [answer]
    return MessageTypes(_annotations(method, "init_server", "return")["return"], hints["state"], hints["down"], options[0])


def _annotations(method: type, function: str, *names: str) -> Mapping[str, Any]:
    """The annotations of a function of a method; if it has none, those of the function that it overrides."""
    for owner in method.__mro__:
        hints = typing.get_type_hints(vars(owner)[function]) if function in vars(owner) else {}
        if all(name in hints and not isinstance(hints[name], typing.TypeVar) for name in names):
            return hints
    raise TaskError(
        f"method '{method.__name__}': {function} says no type of {' or '.join(names)}, by which what travels and is saved "
        f"is read; annotate it as in docs/add-a-method.md"
    )


@functools.lru_cache(maxsize=64)
def _with_rest(state: Any) -> Any:
    """The type of a client's state if it also keeps a part of its model."""
    return dataclasses.make_dataclass(
        "StateWithRest", [("state", state), ("arch", Arch), ("rest", Part)], bases=(StateWithRest,), frozen=True
    )


@functools.lru_cache(maxsize=64)
def _fields(kind: Hashable) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


@functools.lru_cache(maxsize=64)
def _scalars(kind: Hashable) -> Mapping[str, frozenset[Any]]:
    """The scalar types that each field may have."""
    unions = (typing.Union, types.UnionType)
    options = {n: typing.get_args(h) if typing.get_origin(h) in unions else (h,) for n, h in _fields(kind).items()}
    return {name: frozenset(some) & {bool, int, float, str} for name, some in options.items()}


def check_reply(method: AnyMethod, task: Task, down: Any, up: Any, when: Round, samples: int | None) -> dict[str, Any]:
    """Refuse a reply, with a TypedError that names the place; else what its fields were compared with.

    `samples` is how many the client has said to train on, if it has.
    """
    method_type: Hashable = type(method)
    kind = _kinds(method_type).up
    fields, scalars = _fields(kind), _scalars(kind)
    if type(up) is not kind:
        raise TypedError("", f"must be a {kind.__name__}, got a {type(up).__name__}")
    values, plain = {}, set()
    for name, wanted_type in fields.items():
        value = getattr(up, name)
        if isinstance(value, (int, float, str)):
            plain.add(name)
            if type(value) not in scalars[name]:  # of which any value fits
                build(wanted_type, value, name)
        else:
            values[name] = value
    if "samples" in plain and not 1 <= up.samples <= (samples if samples is not None else up.samples):
        raise TypedError("samples", f"must be >= 1 and <= {samples}, the number that the client announced, got {up.samples}")
    wanted = {name: sent for name in values if (sent := getattr(down, name, NOT_SENT)) is not NOT_SENT}
    wanted |= method.expects(task, down, up, when)
    for name, value in values.items():
        if name not in wanted and (sent := _counterpart(value, down, name)) is not None:
            wanted[name] = sent
    for name, value in values.items():
        if value is None:
            build(fields[name], None, name)
        elif name in wanted:
            require_alike(value, wanted[name], name)
        else:
            build(fields[name], value, name, functools.partial(_already, task))
    _require_finite(up)
    return wanted


def _counterpart(got: Any, down: Any, at: str) -> Any:
    """What was sent that a field resembles whose name was not sent: the model of its architecture, the weights of its names.

    None if there is no such value, or more than one.
    """
    if isinstance(got, Model):
        models = [model for _, model in models_in(down) if model.arch == got.arch]
        return models[0] if len(models) == 1 else None
    if not (isinstance(got, Mapping) and got and all(isinstance(value, Tensor) for value in got.values())):
        return None
    near = [weights for weights in _weights_in(down) if weights.keys() & got.keys()]
    if near and not any(got.keys() <= weights.keys() for weights in near):
        odd = min(got.keys() - near[0].keys(), key=str)
        raise TypedError(f"{at}.{odd}", "was not sent")
    return {name: near[0][name] for name in got} if len(near) == 1 else None


def _weights_in(value: Any) -> Iterator[Mapping[str, Tensor]]:
    """Every table of tensors in a message."""
    if isinstance(value, Mapping):
        if value and all(isinstance(item, Tensor) for item in value.values()):
            yield value
        else:
            for item in value.values():
                yield from _weights_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type | Arch):
        for field in dataclasses.fields(value):
            yield from _weights_in(getattr(value, field.name))


def require_alike(got: Any, sent: Any, at: str) -> None:
    """Refuse a value that does not look like what was sent: architecture, names, shapes, types."""
    if got is sent or (type(got) is Model and type(sent) is Model and _same_layout(got, sent)):
        return
    if isinstance(sent, Tensor) and isinstance(got, Tensor):
        if (got.shape, got.dtype) != (sent.shape, sent.dtype):
            raise TypedError(at, f"must be {_looks(sent)}, got {_looks(got)}")
    elif isinstance(sent, Mapping) and isinstance(got, Mapping):
        if odd := sorted(map(str, got.keys() ^ sent.keys())):
            raise TypedError(f"{at}.{odd[0]}", "is missing" if odd[0] in sent else "was not sent")
        for name, value in sent.items():
            require_alike(got[name], value, f"{at}.{name}")
    elif isinstance(sent, Arch) and isinstance(got, Arch):
        if got != sent:
            raise TypedError(at, f"must be of architecture {sent.name}, got {got.name}")
    elif dataclasses.is_dataclass(sent) and type(got) is type(sent):
        for field in dataclasses.fields(sent):
            require_alike(getattr(got, field.name), getattr(sent, field.name), f"{at}.{field.name}")
    elif sent is None:
        raise TypedError(at, "must be empty, because the server sent none")
    elif isinstance(sent, Tensor | Mapping | Arch) or dataclasses.is_dataclass(sent) or type(got) is not type(sent):
        raise TypedError(at, f"must be a {type(sent).__name__}, got a {type(got).__name__}")


def _same_layout(got: Model, sent: Model) -> bool:
    """Whether two models are obviously alike; it takes much longer to compare them weight by weight."""
    flat, sent_flat = flat_params(got.params), flat_params(sent.params)
    if flat is None or sent_flat is None or flat.layout is not sent_flat.layout:
        return False
    return got.arch is sent.arch and not got.buffers and not sent.buffers


def _already(task: Task, kind: Any, value: Any, at: str) -> Any:
    """Values that are typed already: a model must be of an architecture that somebody has, and fit it."""
    if kind is Tensor and isinstance(value, Tensor):
        return value
    if kind is Model and isinstance(value, Model):
        if value.arch not in (task.shared, *(member.arch for member in task.members.values())):
            raise TypedError(at, f"no client has the architecture {value.arch.name}")
        return fitting(Plain(value.arch, value.params, value.buffers), at)
    if dataclasses.is_dataclass(kind) and type(value) is kind:
        given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return build(kind, given, at, functools.partial(_already, task))
    return NotImplemented


def _looks(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _require_finite(value: Any) -> None:
    if surely_finite(value):
        return
    for at in not_finite(value):
        raise TypedError(at, "is not finite")


def check_report(report: Report, seconds: float, kind: TaskType, clients: Collection[ClientId] = ()) -> None:
    """Refuse what no client can have measured: records and their means must stay readable. A note may name one of `clients`."""
    _check_seconds(seconds, "seconds")
    if not RESERVED.isdisjoint(report.notes):
        raise TypedError(f"notes.{min(RESERVED & report.notes.keys())}", "is written by the server only")
    for name, table in (("losses", report.losses), ("scores", report.scores), ("notes", report.notes)):
        if len(table) > MOST:
            raise TypedError(name, f"must have at most {MOST} entries, got {len(table)}")
        for key, value in table.items():
            if len(key) > LONGEST:
                raise TypedError(name, f"names must have at most {LONGEST} characters, got {len(key)}")
            if type(value) is float or type(value) is bool:
                continue
            if isinstance(value, str):
                if len(value) > LONGEST and value not in clients:
                    raise TypedError(f"{name}.{key}", f"must have at most {LONGEST} characters")
            elif isinstance(value, int) and abs(value) > 2**53:
                raise TypedError(f"{name}.{key}", "must be between -2**53 and 2**53")
    for role, score in report.scores.items():
        _check_score(score, f"scores.{role}", kind)


def _check_score(score: Score, at: str, kind: TaskType) -> None:
    if not 0 <= score.samples <= MOST_SAMPLES:
        raise TypedError(f"{at}.samples", f"must be >= 0 and <= {MOST_SAMPLES}, got {score.samples}")
    if kind != "regression" and not 0 <= score.accuracy <= 1:  # numbers are never right or wrong
        raise TypedError(f"{at}.accuracy", f"must be between 0 and 1, got {score.accuracy}")
    _check_seconds(score.seconds, f"{at}.seconds")


def _check_seconds(seconds: float, at: str) -> None:
    if not 0 <= seconds <= MOST_SECONDS:
        raise TypedError(at, f"must be >= 0 and <= {MOST_SECONDS:g}, got {seconds:g}")


def check_scores(scores: list[ModelScore], task_type: TaskType) -> None:
    """The same for the scores of a client's models."""
    _require(len(scores) <= MOST, "scores", f"must have at most {MOST} entries, got {len(scores)}")
    for i, score in enumerate(scores):
        at, metrics = f"scores[{i}]", score.metrics
        _require(
            all(len(text) <= LONGEST for text in (score.model, score.arch)), at, f"names must have at most {LONGEST} characters"
        )
        _require(score.stage in ("round", "finetuned"), f"{at}.stage", f"must be 'round' or 'finetuned', got '{score.stage}'")
        _require(score.split in ("val", "test"), f"{at}.split", f"must be 'val' or 'test', got '{score.split}'")
        _check_metrics(metrics, at, task_type)


def _check_metrics(metrics: Metrics, at: str, task_type: TaskType) -> None:
    for count in ("samples", "classes_present"):
        value = getattr(metrics, count)
        _require(value is None or 0 <= value <= MOST_SAMPLES, f"{at}.{count}", f"must be >= 0 and <= {MOST_SAMPLES}")
    _require(
        possible(metrics.correct, metrics.samples, metrics.accuracy, task_type),
        f"{at}.correct",
        f"is not possible for {metrics.samples} samples and accuracy {metrics.accuracy}, got {metrics.correct}",
    )
    for name in ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "ece", "exact_match", "micro_f1"):
        value = getattr(metrics, name)
        _require(value is None or 0 <= value <= 1, f"{at}.{name}", f"must be between 0 and 1, got {value}")


def check_sent(method: AnyMethod, task: Task, down: Any, when: Round) -> None:
    """Refuse, at a client, a message of the server that cannot be meant for it."""
    _require(0 <= when.t < when.total, "when.t", f"must be a round from 0 to {when.total - 1}, got {when.t}")
    _require(when.phase in method.phases, "when.phase", f"must be one of {', '.join(method.phases)}, got '{when.phase}'")
    for at, leaf in tree.leaves(down):
        fits = not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dtype == task.dtype
        _require(fits, at, f"{str(task.dtype).removeprefix('torch.')} expected")
    _require_finite(down)


def _require(condition: bool, at: str, message: str) -> None:
    if not condition:
        raise TypedError(at, message)


def changes(up: Any, sent: Mapping[str, Any]) -> Changes:
    """The weights of a reply, each with those that it was compared with."""
    pairs: Changes = []
    for name, value in sent.items():
        pairs += _changes(getattr(up, name), value)
    return pairs


def _changes(got: Any, sent: Any) -> Changes:
    if isinstance(got, Model) and isinstance(sent, Model):
        weights = [(got.params, sent.params)] if sent.params else []
        return [*weights, (got.buffers, sent.buffers)] if sent.buffers else weights
    if isinstance(got, Mapping) and sent and all(isinstance(value, Tensor) for value in got.values()):
        return [(got, sent)]
    if dataclasses.is_dataclass(got) and not isinstance(got, type | Arch) and type(got) is type(sent):
        pairs_of_fields = ((getattr(got, field.name), getattr(sent, field.name)) for field in dataclasses.fields(got))
        return [pair for after, before in pairs_of_fields for pair in _changes(after, before)]
    return []


def moved(replies: Sequence[Changes]) -> list[float | None]:
    """How far the model of each reply that moved furthest is from what was sent; None if no weights were sent."""
    norms = iter(tree.distances([pair for changed in replies for pair in changed]))
    return [max(itertools.islice(norms, len(changed)), default=None) for changed in replies]


def bounded(up: Any, sent: Mapping[str, Any], limit: float) -> Any:
    """The reply with every change of weights scaled down to the norm `limit`, measured from what was `sent`."""
    changed = {name: _bounded(getattr(up, name), value, limit) for name, value in sent.items()}
    return dataclasses.replace(up, **{name: value for name, value in changed.items() if value is not getattr(up, name)})


def _bounded(got: Any, sent: Any, limit: float) -> Any:
    if isinstance(got, Mapping) and sent and all(isinstance(value, Tensor) for value in got.values()):
        moving = {name: value for name, value in got.items() if value.is_floating_point()}
        moved = tree.sub(moving, sent)
        if bool(tree.norm(moved) <= limit):
            return got
        return {**got, **tree.add({name: sent[name] for name in moving}, tree.clip(moved, limit))}
    if dataclasses.is_dataclass(got) and not isinstance(got, type | Arch) and sent is not None:
        pairs = {f.name: (getattr(got, f.name), getattr(sent, f.name)) for f in dataclasses.fields(got)}
        new = {name: _bounded(got, expected, limit) for name, (got, expected) in pairs.items()}
        return dataclasses.replace(got, **new) if any(new[name] is not pairs[name][0] for name in new) else got
    return got
