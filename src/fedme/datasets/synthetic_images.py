"""Made-up images for trying out sizes: as many clients, samples, pixels and classes as you like, and nothing to download."""

from dataclasses import dataclass
from pathlib import Path

import torch

from fedme.core.data import Arrays, Scaling, Schema
from fedme.core.key import Key
from fedme.datasets.data_errors import DataError
from fedme.datasets.dataset import Dataset


@dataclass(frozen=True)
class Images:
    """Made-up grey images: a class is a pattern, seen through noise; every client has the same number of samples."""

    users: int = 100  # how many clients
    samples: int = 40  # of every client
    side: int = 28  # pixels
    classes: int = 10  # how many patterns
    seed: int = 0  # of the generator

    def __post_init__(self) -> None:
        for name in ("users", "samples", "side", "classes"):
            if getattr(self, name) < 1:
                raise DataError(f"images: {name} = {getattr(self, name)}; at least one is needed")

    def load(self, root: Path) -> Dataset:
        """Draw the samples; nothing is read from `root`."""
        draw = Key(self.seed).at("images").torch()
        patterns = torch.rand((self.classes, 1, self.side, self.side), generator=draw)
        labels = torch.randint(0, self.classes, (self.users * self.samples,), generator=draw)
        x = torch.empty((len(labels), 1, self.side, self.side), dtype=torch.uint8)
        for part in torch.arange(len(labels)).split(10_000):  # noise is drawn in small pieces: numbers take four bytes
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
            owners={str(user): (mine, none) for user, mine in enumerate(rows.split(self.samples))},
        )
