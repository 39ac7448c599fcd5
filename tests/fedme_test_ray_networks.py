"""Networks that misbehave in the processes of a Ray cluster, and only there."""

import math
import os
import signal

import ray
from torch import Tensor, nn


def in_an_actor() -> bool:
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


class Deadly(nn.Module):
    """Kills the process that trains it."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(math.prod(shape), classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and in_an_actor():
            self.misbehave()
        result: Tensor = self.layer(x.flatten(1))
        return result

    def misbehave(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Refusing(Deadly):
    """Raises an error."""

    def misbehave(self) -> None:
        raise ValueError("not today")
