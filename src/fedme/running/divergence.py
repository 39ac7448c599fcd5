"""Trainings that diverge are noticed while they happen, with what to change.

A note is printed if a loss is not finite, or rises above ten times the loss of a model that only guesses. In the first round,
in which weights are not yet adapted to the size of the inputs, the limit is a hundred times higher. The records name a client
whose loss is not finite or above a hundred times that of guessing. That depends on the loss alone, so that a resumed run has
the same records.
"""

import math
from collections.abc import Mapping

from fedme.core.data import ClientId, Schema
from fedme.federation.round import Traffic
from fedme.learning.training_settings import Training

LIMIT = 10.0  # times the loss of a guess
FIRST_LIMIT = 1000.0  # the same in the first round
RECORDED_LIMIT = 100.0  # above it, the records say so
NAMED = 5  # clients that a note names
NOTE = "diverging"  # in the notes of a client's round: its loss, or "not finite"


def guess_loss(schema: Schema) -> float:
    """The mean loss of a model that only guesses: all classes equally often, every label with 1/2, the mean."""
    width = max(len(schema.classes), 2) if schema.task_type == "classification" else len(schema.classes)
    if schema.task_type == "classification":
        return math.log(width)
    return width * math.log(2) if schema.task_type == "multi-label" else width / 2  # of standardised targets


class DivergenceWatch:
    """Compares the training losses of every client with those of its last round."""

    def __init__(self, schema: Schema, training: Training) -> None:
        self.guess, self.training = guess_loss(schema), training
        self.last: dict[ClientId, float] = {}
        self.noticed: set[ClientId] = set()

    def check(self, t: int, traffic: Mapping[ClientId, Traffic]) -> str:
        """Mark the traffic of clients whose training diverged. Returns a note on the clients that began to diverge, or ""."""
        began: dict[ClientId, float] = {}
        for client, sent in traffic.items():
            losses = [loss for loss in sent.report.losses.values() if loss is not None]
            if not losses:
                continue
            loss = max(losses, key=lambda loss: (not math.isfinite(loss), loss))
            size = loss / self.guess
            if not math.isfinite(loss) or size > (RECORDED_LIMIT if t else FIRST_LIMIT):
                sent.note(NOTE, f"{loss:.3g}" if math.isfinite(loss) else "not finite")
            rising = client not in self.last or not loss < self.last[client]
            limit = LIMIT if client in self.last else FIRST_LIMIT
            if client not in self.noticed and (not math.isfinite(loss) or (size > limit and rising)):
                began[client] = loss
            self.last[client] = loss
        self.noticed |= began.keys()
        return self._note(t, began) if began else ""

    def _note(self, t: int, began: Mapping[ClientId, float]) -> str:
        names = ", ".join(list(began)[:NAMED]) + (f" and {len(began) - NAMED} more" if len(began) > NAMED else "")
        worst = max(began.values(), key=lambda loss: (not math.isfinite(loss), loss))
        size = f"{worst:.3g}" if math.isfinite(worst) else "not finite"
        what = f"round {t}: the training of {names} diverges (loss {size}; guessing has {self.guess:.2g})"
        return f"{what}: {remedies(self.training)}"


def remedies(training: Training) -> str:
    """The settings to change."""
    changes = [f"lower train.lr (now {training.lr:g})"]
    changes += (
        ["set train.clip, for example to 1.0"] if training.clip is None else [f"lower train.clip (now {training.clip:g})"]
    )
    changes += [f"lower train.momentum (now {training.momentum:g})"] if training.momentum else []
    return f"{', '.join(changes)}, or check the inputs for values that are not scaled"
