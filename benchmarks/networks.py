"""The networks of the comparisons in PyTorch, for the peers that use it (and the CNN, which our table does not have)."""

from collections.abc import Sequence

import numpy as np
import torch
import user_networks
from torch import nn


def cnn(classes: int = 10) -> nn.Sequential:
    """PFLlib's CNN for 28 x 28 images: two 5x5 convolutions and a dense layer of 512; 582,026 weights."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, classes)),
    )


def dense(weights: Sequence[np.ndarray]) -> nn.Sequential:
    """Linear layers with ReLU between them, as many and as large as the weights say."""
    layers: list[nn.Module] = [nn.Flatten()]
    for matrix in weights[::2]:
        layers += [nn.Linear(matrix.shape[1], matrix.shape[0]), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def build(model: str, weights: Sequence[np.ndarray]) -> nn.Module:
    """The network called `model` with these weights, which are given in order."""
    network = cnn() if model == "cnn" else dense(weights) if model == "dense" else getattr(user_networks, model)()
    with torch.no_grad():
        for slot, value in zip(network.parameters(), weights, strict=True):
            slot.copy_(torch.from_numpy(value))
    return network


@torch.no_grad()
def accuracy(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """The share of right answers."""
    right = [(network(part).argmax(1) == labels).sum() for part, labels in zip(x.split(1000), y.split(1000), strict=True)]
    return float(torch.stack(right).sum()) / len(y)
