"""Small networks of the oracles: `body` computes features, `head` is the last linear layer."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Network(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Linear):
        super().__init__()
        self.body = body
        self.head = head

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Scaler(nn.Module):
    """HeteroFL's: divides by the width's rate while training, so that widths agree in scale; nothing otherwise."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return x / self.rate if self.training else x


def mlp(inputs: int = 5, hidden: int = 7, classes: int = 3) -> Network:
    return Network(nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU()), nn.Linear(hidden, classes))


def deep_mlp(inputs: int = 5, hidden: int = 6, features: int = 7, classes: int = 3) -> Network:
    """Another body with the feature width of `mlp`."""
    body = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, features), nn.ReLU())
    return Network(body, nn.Linear(features, classes))


def bn_mlp(inputs: int = 5, hidden: int = 7, classes: int = 3) -> Network:
    """A bias before the normalisation would have no gradient but rounding errors, and Adam divides them by their size."""
    body = nn.Sequential(nn.Linear(inputs, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU())
    return Network(body, nn.Linear(hidden, classes))


def cnn(channels: int = 3, classes: int = 3) -> Network:
    """For samples of shape (1, 6, 6)."""
    body = nn.Sequential(nn.Conv2d(1, channels, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return Network(body, nn.Linear(4 * channels, classes))


def scaled_mlp(rate: float, inputs: int = 5, hidden: int = 8, classes: int = 3) -> Network:
    """HeteroFL: two hidden layers of ceil(rate * hidden) units, each with a scaler."""
    width = math.ceil(rate * hidden)
    body = nn.Sequential(
        nn.Linear(inputs, width), Scaler(rate), nn.ReLU(), nn.Linear(width, width), Scaler(rate), nn.ReLU()
    )  # fmt: skip
    return Network(body, nn.Linear(width, classes))


def scaled_cnn(rate: float, channels: int = 4, classes: int = 3) -> Network:
    """HeteroFL, for samples of shape (1, 6, 6). Flattening is channel by channel, so a leading slice of channels is a leading
    slice of the head's inputs."""
    width = math.ceil(rate * channels)
    body = nn.Sequential(nn.Conv2d(1, width, 3), Scaler(rate), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return Network(body, nn.Linear(4 * width, classes))


def first_weights(network: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {name: value.clone() for name, value in network().double().state_dict().items()}
