"""FEMNIST: handwritten characters by writer, from LEAF's JSON files; every writer is a natural client.

Pixels are numbers from 0 (ink) to 1 (paper), as LEAF makes them. They are kept as bytes when all of them are multiples of
1/255, as LEAF's are, which takes a quarter of the memory, and as 32-bit numbers otherwise.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedme.core.data import Arrays, ClientId, Scaling, Schema
from fedme.datasets.data_errors import DataError
from fedme.datasets.dataset import Dataset
from fedme.datasets.leaf import User, find_files, read_users

CLASSES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
PIXELS = 28 * 28
RECIPE = (
    "make it with LEAF (github.com/TalwalkarLab/leaf), in data/femnist: "
    "./preprocess.sh -s niid --sf 0.05 -k 0 -t sample --tf 0.9"
)


@dataclass(frozen=True)
class Femnist:
    """Handwritten characters by writer (LEAF): grey images of 28 x 28, 62 classes; every writer is a client."""

    def load(self, root: Path) -> Dataset:
        """Read the JSON files of `root`/femnist."""
        files = find_files("femnist", root / "femnist", RECIPE)
        images: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        rows: tuple[dict[ClientId, torch.Tensor], dict[ClientId, torch.Tensor]] = ({}, {})
        count = 0
        sizes = []
        for part, owned in zip(files, rows, strict=True):
            for user in read_users(part):
                images.append(_pixels(user))
                labels.append(_labels(user))
                owned[user.name] = torch.arange(count, count + user.declared)
                count += user.declared
            sizes.append(count)
        if not sizes[0]:
            raise DataError(f"femnist: the files in {files[0][0].parent} hold no samples")
        train, test = rows
        none = torch.empty(0, dtype=torch.int64)
        everything = torch.arange(count)
        small = all(x.dtype == np.uint8 for x in images)
        pixels = images if small else [x / np.float32(255) if x.dtype == np.uint8 else x for x in images]
        return Dataset(
            name="femnist",
            source=Arrays(
                torch.from_numpy(np.concatenate(pixels)).reshape(-1, 1, 28, 28),
                torch.from_numpy(np.concatenate(labels)),
                Scaling(1 / 255) if small else None,
            ),
            schema=Schema((1, 28, 28), tuple(CLASSES), {"scaling": "unit"}),
            train=everything[: sizes[0]],
            test=everything[sizes[0] :],
            owners={name: (train.get(name, none), test.get(name, none)) for name in {**train, **test}},
        )


def _pixels(user: User) -> np.ndarray:
    rows = user.column("x")
    if not rows:
        return np.empty((0, PIXELS), dtype=np.uint8)
    if any(not isinstance(row, list) or len(row) != PIXELS for row in rows):
        raise DataError(f"{user.where}: an image of 'x' is not a list of {PIXELS} pixels; make the file again")
    try:
        values = np.asarray(rows)
    except ValueError:
        values = np.empty(0, dtype=object)
    if values.ndim != 2 or values.dtype.kind not in "fiu":
        raise DataError(f"{user.where}: an image of 'x' holds something that is not a number")
    if not (values.min() >= 0 and values.max() <= 1):
        raise DataError(f"{user.where}: a pixel of 'x' is outside 0..1; LEAF's pixels are between 0 and 1")
    levels = np.rint(values * 255)
    if np.abs(levels / 255 - values).max() < 1e-5:
        return np.asarray(levels, dtype=np.uint8)
    return np.asarray(values, dtype=np.float32)


def _labels(user: User) -> np.ndarray:
    labels = user.column("y")
    for label in labels:
        if type(label) is not int or not 0 <= label < len(CLASSES):
            raise DataError(f"{user.where}: the label {label!r} of 'y' is not a class number, 0..{len(CLASSES) - 1}")
    return np.asarray(labels, dtype=np.int64)
