"""Validation of replies before anything uses them, the same in every engine.

A reply must have the type that the method declares and belong to the requested round. Its models must have the architecture
that was sent, with the same names, shapes and types. All numbers must be finite, `samples` at most what the client announced.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedme.core import tree
from fedme.core.method import Report, Round, Task
from fedme.core.metrics import Metrics
from fedme.core.model import Arch, Model, not_finite
from fedme.core.operations import Score
from fedme.core.serialization import Plain, fitting
from fedme.core.task_types import TaskType
from fedme.core.typed import TypedError, build
from fedme.federation.client_work import AnyMethod, ModelScore

LONGEST = 200  # characters of a text that a client sends for the records
MOST = 64  # entries of a table of that kind


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
        return _kinds(kind)


@functools.lru_cache(maxsize=64)
def _kinds(method: Any) -> MessageTypes:
    hints = typing.get_type_hints(method.client_round)
    answer = typing.get_args(typing.get_args(hints["return"])[2])[1]
    options = [value for value in typing.get_args(answer) if value is not types.NoneType] or [answer]
    return MessageTypes(typing.get_type_hints(method.init_server)["return"], hints["state"], hints["down"], options[0])


@functools.lru_cache(maxsize=64)
def _fields(kind: Hashable) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def check_reply(method: AnyMethod, task: Task, down: Any, up: Any, when: Round, samples: int | None) -> dict[str, Any]:
    """Refuse a reply, with a TypedError that names the place; else what its fields were compared with.

    `samples` is how many the client has said to train on, if it has.
    """
    kind = MessageTypes.of(method).up
    fields = _fields(kind)
    if type(up) is not kind:
        raise TypedError("", f"must be a {kind.__name__}, got a {type(up).__name__}")
    plain = {name for name in fields if isinstance(getattr(up, name), bool | int | float | str)}
    for name in plain:
        build(fields[name], getattr(up, name), name)
    if "samples" in plain and not 1 <= up.samples <= (samples if samples is not None else up.samples):
        raise TypedError("samples", f"must be >= 1 and <= {samples}, the number that the client announced, got {up.samples}")
    wanted = {name: getattr(down, name) for name in fields if hasattr(down, name) and name not in plain}
    wanted |= method.expects(task, down, up, when)
    for name, hint in fields.items():
        value = getattr(up, name)
        if name in plain:
            continue
        if value is None:
            build(hint, None, name)
        elif name in wanted:
            require_alike(value, wanted[name], name)
        else:
            build(hint, value, name, functools.partial(_already, task))
    _require_finite(up)
    return wanted


def require_alike(got: Any, sent: Any, at: str) -> None:
    """Refuse a value that does not look like what was sent: architecture, names, shapes, types."""
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
    for at in not_finite(value):
        raise TypedError(at, "is not finite")


def check_report(report: Report, seconds: float, kind: TaskType) -> None:
    """Refuse what no client can have measured: records and their means must stay readable."""
    _require(math.isfinite(seconds) and seconds >= 0, "seconds", f"must be finite and >= 0, got {seconds}")
    for name, table in (("losses", report.losses), ("scores", report.scores), ("notes", report.notes)):
        _require(len(table) <= MOST, name, f"must have at most {MOST} entries, got {len(table)}")
        for key, value in table.items():
            _require(len(key) <= LONGEST, name, f"names must have at most {LONGEST} characters, got {len(key)}")
            _require(
                not isinstance(value, str) or len(value) <= LONGEST, f"{name}.{key}", f"must have at most {LONGEST} characters"
            )
    for role, score in report.scores.items():
        _check_score(score, f"scores.{role}", kind)


def _check_score(score: Score, at: str, kind: TaskType) -> None:
    _require(score.samples >= 0, f"{at}.samples", "is negative")
    if kind != "regression":  # numbers are never right or wrong
        _require(0 <= score.accuracy <= 1, f"{at}.accuracy", f"must be between 0 and 1, got {score.accuracy}")
    _require(
        math.isfinite(score.seconds) and score.seconds >= 0, f"{at}.seconds", f"must be finite and >= 0, got {score.seconds}"
    )


def check_scores(scores: list[ModelScore]) -> None:
    """The same for the scores of a client's models."""
    _require(len(scores) <= MOST, "scores", f"must have at most {MOST} entries, got {len(scores)}")
    for i, score in enumerate(scores):
        at, metrics = f"scores[{i}]", score.metrics
        _require(
            all(len(text) <= LONGEST for text in (score.model, score.arch)), at, f"names must have at most {LONGEST} characters"
        )
        _require(score.stage in ("round", "finetuned"), f"{at}.stage", f"must be 'round' or 'finetuned', got '{score.stage}'")
        _require(score.split in ("val", "test"), f"{at}.split", f"must be 'val' or 'test', got '{score.split}'")
        _check_metrics(metrics, at)


def _check_metrics(metrics: Metrics, at: str) -> None:
    _require(
        0 <= metrics.correct <= metrics.samples,
        f"{at}.correct",
        f"must be between 0 and {metrics.samples} samples, got {metrics.correct}",
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
