"""The digits of scikit-learn: a small real data set that needs no download."""

from dataclasses import dataclass
from pathlib import Path

import torch

from fedme.core.data import Arrays, Scaling, Schema
from fedme.datasets.dataset import Dataset


@dataclass(frozen=True)
class Digits:
    """Handwritten digits: 1,797 greyscale images of 8 x 8 pixels, bundled with scikit-learn; for tests and first steps."""

    def load(self, root: Path) -> Dataset:
        """Read the bundled images; `root` is not used."""
        from sklearn.datasets import load_digits

        bundle = load_digits()
        images = torch.from_numpy(bundle.images.astype("uint8"))[:, None]
        labels = torch.from_numpy(bundle.target.astype("int64"))
        return Dataset(
            name="digits",
            source=Arrays(images, labels, Scaling(1 / 16)),
            schema=Schema((1, 8, 8), tuple("0123456789"), {"scaling": "unit"}),
            train=torch.arange(len(labels)),
            test=torch.empty(0, dtype=torch.int64),
        )
