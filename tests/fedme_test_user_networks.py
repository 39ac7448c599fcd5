"""Networks as a user would write them, imported by path in the tests."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn


class Gated(nn.Module):
    """Its own forward pass, its own parameters, and no knowledge of the library."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 8, scale: float = 1.0) -> None:
        super().__init__()
        units = shape[0]
        self.inside, self.gate = nn.Linear(units, width), nn.Linear(units, width)
        self.out = nn.Linear(width, classes)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(torch.sigmoid(self.gate(x)) * self.inside(x)) * self.scale
        return result


class SinglePrecision(Gated):
    """Computes in one type, whatever its weights have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.float32))


class Fixed(nn.Module):
    """Takes nothing from the task."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(x)
        return result


class TwoInputs(nn.Module):
    """Samples of two parts."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.out = nn.Linear(5, classes)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        result: Tensor = self.out(torch.cat([left, right], 1))
        return result


class Bag(nn.Module):
    """The mean of the symbols' vectors."""

    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(vocabulary, classes)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.vectors(x).mean(1)
        return result


def anything(**options: Any) -> nn.Module:
    """A function that takes whatever it is given."""
    return nn.Linear(6, options["outputs"])


def layers(sizes: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def no_module(classes: int) -> Any:
    return {"classes": classes}


def two_results() -> nn.Module:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    return Pair()


def choice() -> nn.Module:
    class Choice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :3].long()

    return Choice()


def needs_more(width: int, /) -> nn.Module:
    return nn.Linear(width, 2)


def breaks(depth: int) -> nn.Module:
    raise KeyError(f"no weights for depth {depth}")


class NotANetwork:
    pass


number = 3


class Normed(nn.Module):
    """Batch normalisation, for images or vectors of any size."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 8) -> None:
        super().__init__()
        inner = nn.Linear(math.prod(shape), width)
        self.net = nn.Sequential(nn.Flatten(), inner, nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result
