"""Networks that misbehave in the actors of a Ray cluster, and only there."""

import math

from torch import Tensor, nn

import fedme_test_ray


class Deadly(nn.Module):
    """Ends the actor that trains it."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(math.prod(shape), classes)

    def forward(self, x: Tensor) -> Tensor:
        actor = fedme_test_ray.current_actor()
        if self.training and actor is not None:
            self.misbehave(actor)
        result: Tensor = self.layer(x.flatten(1))
        return result

    def misbehave(self, actor: fedme_test_ray.Handle) -> None:
        actor.dead = True


class Refusing(Deadly):
    """Raises an error."""

    def misbehave(self, actor: fedme_test_ray.Handle) -> None:
        raise ValueError("not today")
