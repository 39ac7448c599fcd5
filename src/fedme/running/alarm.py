"""An alarm when a round has left the models far worse than a guess, with the clients whose models moved furthest.

`divergence.py` looks at the losses of every client's training, and says which settings to change. Weights sent by one client
harm the models of others, so the alarm looks at the personal models after the round, and names those who may have done it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedme.core.data import ClientId, Schema
from fedme.federation.client_work import ModelScore
from fedme.federation.round import Traffic
from fedme.running.divergence import guess_loss

# Times the loss of a guess. Models that have been trained little, or that are sure of wrong answers, can be worse than a guess
# without an attack: twice its loss was seen. Attacks within the bounds of `[defence]` gave 3 to 4 times, and so do honest
# trainings whose steps are too large.
LIMIT = 3.0
NAMED = 3  # clients
NOTE = "alarm"  # the name of the note in the records


@dataclass(frozen=True)
class Alarm:
    """What is wrong, and how far the models of the clients that moved most have moved."""

    reason: str
    furthest: Mapping[ClientId, float]

    def text(self, t: int) -> str:
        """One line."""
        moved = ", ".join(f"{client} ({distance:.3g})" for client, distance in self.furthest.items())
        return f"ALARM: round {t}: {self.reason}; the models that moved furthest: {moved or 'no model was sent'}"


def alarm(scores: Mapping[ClientId, list[ModelScore]], traffic: Mapping[ClientId, Traffic], schema: Schema) -> Alarm | None:
    """The alarm after a round, from the validation losses of the personal models; None if there is no reason for one."""
    losses = [
        score.metrics.loss
        for of_client in scores.values()
        for score in of_client
        if (score.model, score.stage, score.split) == ("personal", "round", "val")
    ]
    if not losses:
        return None
    mean = sum(math.nan if loss is None else loss for loss in losses) / len(losses)
    guess = guess_loss(schema)
    if mean <= LIMIT * guess and math.isfinite(mean):
        return None
    above = f"more than {LIMIT:g} times that of a guess ({guess:.3g})" if math.isfinite(mean) else "not finite"
    distances = {client: sent.moved for client, sent in traffic.items() if sent.moved is not None}
    furthest = sorted(distances, key=lambda client: (-distances[client], client))[:NAMED]
    return Alarm(
        f"the mean validation loss of the personal models is {mean:.3g}, {above}", {name: distances[name] for name in furthest}
    )
