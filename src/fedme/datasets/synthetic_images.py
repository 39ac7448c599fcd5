"""Synthetic images with any number of clients, samples, pixels and classes, for experiments on scale; no download."""

from dataclasses import dataclass
from pathlib import Path

import torch

from fedme.core.data import Arrays, Scaling, Schema
from fedme.core.key import Key
from fedme.core.settings import setting
from fedme.datasets.data_errors import require, require_memory
from fedme.datasets.dataset import Dataset


@dataclass(frozen=True)
class Images:
    """Synthetic greyscale images: one noisy pattern per class; every client has the same number of samples."""

    users: int = setting(100, "number of clients")
    samples: int = setting(40, "number of samples per client")
    side: int = setting(28, "height and width in pixels")
    classes: int = setting(10, "number of classes")
    seed: int = setting(0, "seed of the generator")

    def __post_init__(self) -> None:
        for name in ("users", "samples", "side", "classes"):
            require(getattr(self, name) >= 1, name, f"must be >= 1, got {getattr(self, name)}")

    def load(self, root: Path) -> Dataset:
        """Draw the samples; `root` is not used."""
        require_memory(
            "users", self.users, self.users * self.samples, self.side**2 + 8, "choose fewer users, samples or pixels"
        )
        draw = Key(self.seed).at("images").torch()
        patterns = torch.rand((self.classes, 1, self.side, self.side), generator=draw)
        labels = torch.randint(0, self.classes, (self.users * self.samples,), generator=draw)
        x = torch.empty((len(labels), 1, self.side, self.side), dtype=torch.uint8)
        for part in torch.arange(len(labels)).split(10_000):  # float32 noise takes four times the memory of the images
            noise = torch.rand((len(part), 1, self.side, self.side), generator=draw)
            x[part] = ((patterns[labels[part]] + noise) * 127.5).to(torch.uint8)
        rows = torch.arange(len(labels))
        none = torch.empty(0, dtype=torch.int64)
        return Dataset(
            name="images",
            source=Arrays(x, labels, Scaling(1 / 255)),
            schema=Schema((1, self.side, self.side), tuple(str(c) for c in range(self.classes)), {"scaling": "unit"}),
            train=rows,
            test=none,
            owners={str(user): (train, none) for user, train in enumerate(rows.split(self.samples))},
        )
