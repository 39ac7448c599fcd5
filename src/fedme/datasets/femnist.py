"""FEMNIST: handwritten characters by writer, from the JSON files of LEAF; every writer is a natural client.

Pixels are between 0 (ink) and 1 (paper), as in LEAF. If all of them are multiples of 1/255, as LEAF's are, they are stored
as uint8, which takes a quarter of the memory; otherwise as float32.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedme.core.data import Arrays, Scaling, Schema
from fedme.datasets.data_errors import DataError
from fedme.datasets.dataset import Dataset
from fedme.datasets.leaf import User, find_files, read_rows

CLASSES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
PIXELS = 28 * 28
RECIPE = (
    "create it with LEAF (github.com/TalwalkarLab/leaf), in data/femnist: "
    "./preprocess.sh -s niid --sf 0.05 -k 0 -t sample --tf 0.9"
)


@dataclass(frozen=True)
class Femnist:
    """Handwritten characters by writer (LEAF): greyscale images of 28 x 28 pixels, 62 classes; every writer is a client."""

    def load(self, root: Path) -> Dataset:
        """Read the JSON files of `root`/femnist."""
        files = find_files("femnist", root / "femnist", RECIPE)
        images: list[np.ndarray] = []
        labels: list[np.ndarray] = []

        def add(user: User) -> int:
            images.append(_pixels(user))
            labels.append(_labels(user))
            return user.declared

        train, test, owners = read_rows(files, add)
        if not len(train):
            raise DataError(f"femnist: the files in {files[0][0].parent} contain no samples")
        as_bytes = all(x.dtype == np.uint8 for x in images)
        pixels = images if as_bytes else [x / np.float32(255) if x.dtype == np.uint8 else x for x in images]
        return Dataset(
            name="femnist",
            source=Arrays(
                torch.from_numpy(np.concatenate(pixels)).reshape(-1, 1, 28, 28),
                torch.from_numpy(np.concatenate(labels)),
                Scaling(1 / 255) if as_bytes else None,
            ),
            schema=Schema((1, 28, 28), tuple(CLASSES), {"scaling": "unit"}),
            train=train,
            test=test,
            owners=owners,
        )


def _pixels(user: User) -> np.ndarray:
    rows = user.column("x")
    if not rows:
        return np.empty((0, PIXELS), dtype=np.uint8)
    if any(not isinstance(row, list) or len(row) != PIXELS for row in rows):
        raise DataError(f"{user.where}: an image in 'x' is not a list of {PIXELS} pixels; create the file again")
    try:
        values = np.asarray(rows)
    except ValueError:
        values = np.empty(0, dtype=object)
    if values.ndim != 2 or values.dtype.kind not in "fiu":
        raise DataError(f"{user.where}: a pixel in 'x' is not a number; create the file again")
    if not (values.min() >= 0 and values.max() <= 1):
        raise DataError(f"{user.where}: pixels in 'x' must be between 0 and 1; create the file again")
    levels = np.rint(values * 255)
    if np.abs(levels / 255 - values).max() < 1e-5:
        return np.asarray(levels, dtype=np.uint8)
    return np.asarray(values, dtype=np.float32)


def _labels(user: User) -> np.ndarray:
    labels = user.column("y")
    for label in labels:
        if type(label) is not int or not 0 <= label < len(CLASSES):
            raise DataError(f"{user.where}: labels in 'y' must be integers between 0 and {len(CLASSES) - 1}, got {label!r}")
    return np.asarray(labels, dtype=np.int64)
