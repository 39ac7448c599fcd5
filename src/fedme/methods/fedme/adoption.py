"""When a client adopts its guest model (FedMe section 4.2): a criterion is a cost, where smaller is better."""

import math
from collections.abc import Callable, Mapping

from fedme.core.data import ClientId
from fedme.core.method import Task, TaskError, require_members
from fedme.core.operations import Score
from fedme.core.value_class import value_class
from fedme.learning.training_settings import require

SIZE_PENALTY = 0.1  # of "loss+size": nats per million weights
TIME_PENALTY = 0.1  # of "loss+time": nats per millisecond of inference per sample


@value_class
class Candidate:
    """What a criterion knows about a trained model: its validation score and number of weights."""

    score: Score
    parameters: int


Criterion = Callable[[Candidate], float]

CRITERIA: dict[str, Criterion] = {
    "loss": lambda c: c.score.loss,
    "accuracy": lambda c: -c.score.accuracy,
    "size": lambda c: float(c.parameters),
    "time": lambda c: c.score.seconds,
    "loss+size": lambda c: c.score.loss + SIZE_PENALTY * c.parameters / 1e6,
    "loss+time": lambda c: c.score.loss + TIME_PENALTY * c.score.seconds * 1e3,
}


def require_criteria(criteria: Mapping[str, str | Criterion]) -> None:
    """Raise a ValueError for a criterion that cannot work; `criteria` maps the name of the setting to its value."""
    wanted = "it must take one fedme.methods.fedme.adoption.Candidate and return a cost, where smaller is better"
    for setting, criterion in criteria.items():
        if isinstance(criterion, str):
            require(criterion in CRITERIA, setting, f"must be one of {', '.join(CRITERIA)} or a function, got '{criterion}'")
            continue
        try:
            cost: object = criterion(Candidate(Score(10, 0.5, 0.5, 0.001), 1000))
        except Exception as error:  # a user's function may raise anything
            name = getattr(criterion, "__qualname__", criterion)
            raise ValueError(f"{setting}: {name} fails ({type(error).__name__}: {error}); {wanted}") from error
        require(isinstance(cost, int | float), setting, f"returns a {type(cost).__name__}; {wanted}")


def require_meaning(task: Task, adopt: str | Criterion, adopt_by: Mapping[ClientId, str | Criterion]) -> None:
    """Raise a TaskError for criteria of clients that do not exist, and for accuracy in regression."""
    require_members(task, "method 'fedme': adopt_by", adopt_by)
    if task.schema.task_type == "regression" and "accuracy" in (adopt, *adopt_by.values()):
        raise TaskError("method 'fedme': adopt = 'accuracy' has no meaning for regression; use 'loss'")


def needs_time(criterion: str | Criterion) -> bool:
    """Whether the criterion needs the time of inference, which is not repeatable."""
    return not isinstance(criterion, str) or "time" in criterion


def prefers_guest(criterion: str | Criterion, own: Candidate, guest: Candidate) -> bool:
    """Whether the guest has a strictly smaller cost. Of two models, one that diverged always loses, first the guest."""
    if not math.isfinite(guest.score.loss):
        return False
    if not math.isfinite(own.score.loss):
        return True
    cost = CRITERIA[criterion] if isinstance(criterion, str) else criterion
    return cost(guest) < cost(own)
