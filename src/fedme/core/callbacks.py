"""What a program may add to a run: metrics, and callbacks that are called while it goes on.

The numbers that they return are recorded beside the built-in metrics, in `metrics.jsonl`, the report, TensorBoard and MLflow.
They do not change the results.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from fedme.core.atomic_files import RunError
from fedme.core.data import ClientId
from fedme.core.metrics import Metrics
from fedme.core.model import Model

Metric = Callable[[Tensor, Tensor], float]  # of outputs (samples x classes, before softmax) and targets
Numbers = Mapping[str, float]


@dataclass(frozen=True)
class ClientRound:
    """The work of a client in a round (from 0). `answered` is false if its reply is missing; `seconds` are of computation."""

    round: int
    rounds: int
    client: ClientId
    losses: Mapping[str, float]
    notes: Mapping[str, Any]
    bytes_up: int
    bytes_down: int
    seconds: float
    answered: bool


@dataclass(frozen=True)
class ClientEvaluation:
    """The evaluation of a client's personal model after a round: its metrics by split ("val", "test").

    ``model.module()`` is the model as an `nn.Module`; it takes samples as they are after scaling. There is no model where it
    stays at a site.
    """

    round: int
    rounds: int
    client: ClientId
    scores: Mapping[str, Metrics]
    model: Model | None


@dataclass(frozen=True)
class FinishedRound:
    """A round with its records (the rows of `metrics.jsonl`); `folder` is the run directory."""

    round: int
    rounds: int
    folder: Path
    rows: Sequence[Mapping[str, Any]]


class Callback:
    """Base class of callbacks: override what you need, and pass objects to ``fit(clients, callbacks=[...])``.

    A method may return numbers by name. They are recorded: for the client, or for all clients of the round.
    """

    def on_client(self, event: ClientRound) -> Numbers | None:
        """After the work of a client in a round."""

    def on_evaluation(self, event: ClientEvaluation) -> Numbers | None:
        """After the evaluation of a client's models."""

    def on_round(self, event: FinishedRound) -> Numbers | None:
        """After a round, before its records are written."""


LARGEST = 1e100  # a larger number is recorded as missing
RESERVED = {field.name for field in fields(Metrics)} | {"round", "client", "model", "arch", "split", "stage", "epsilon"}


def has_form(name: object) -> bool:
    """Whether a number may be recorded under this name."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z][\w@.-]{0,60}", name) is not None and name.isprintable()


def check_name(name: object, what: str) -> None:
    """Raise an error for a name that cannot be recorded, or that a built-in metric has."""
    if not has_form(name):
        raise RunError(f"{what}: the name {name!r} must begin with a letter, and have letters, digits, _, -, . and @ only")
    if name in RESERVED:
        raise RunError(f"{what}: '{name}' is the name of a built-in metric or column; choose another name")


def numbers(returned: Any, what: str) -> dict[str, float]:
    """The numbers that a callback has returned, checked; infinite ones are recorded as missing."""
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise RunError(f"{what}: must return numbers by name, as in {{'name': 0.5}}, or None, got {type(returned).__name__}")
    for name in returned:
        check_name(name, what)
    return {name: number(value, f"{what}: {name}") for name, value in returned.items()}


def number(value: Any, what: str) -> float:
    """A number that a metric or a callback has returned."""
    try:
        converted = math.nan if value is None else float(value)
        return converted if abs(converted) <= LARGEST else math.nan
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several elements
        raise RunError(f"{what}: must be a number, got {type(value).__name__}") from error
