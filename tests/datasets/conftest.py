"""Writers of tiny files in the publishers' own formats."""

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from fedme.core.data import Arrays, Schema
from fedme.datasets.dataset import Dataset


def idx_bytes(values: np.ndarray) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.astype(np.uint8).tobytes()


@pytest.fixture(scope="session")
def idx():
    return idx_bytes


@pytest.fixture(scope="session")
def write_mnist():
    def write(folder: Path, names: tuple[str, ...], train: int = 12, test: int = 6, classes: int = 10, first: int = 0) -> dict:
        folder.mkdir(parents=True, exist_ok=True)
        draw = np.random.default_rng(0)
        written = {}
        for (images, labels), count in zip((names[:2], names[2:]), (train, test), strict=True):
            written[images] = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            written[labels] = (np.arange(count) % classes + first).astype(np.uint8)
        for name, values in written.items():
            content = idx_bytes(values)
            (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return written

    return write


@pytest.fixture(scope="session")
def leaf():
    def make(users: dict[str, dict], sizes: list[int] | None = None) -> str:
        count = [len(d["y"]) if "y" in d else max(0, len(d["raw"]) - 80) for d in users.values()]
        return json.dumps({"users": list(users), "num_samples": sizes or count, "user_data": users})

    return make


@pytest.fixture(scope="session")
def labelled():
    """A data set with the given labels; inputs are the row numbers."""

    def make(train: list[int], test: list[int] = (), owners=None, classes: int | None = None, overlap: int = 0) -> Dataset:
        labels = torch.tensor([*train, *test], dtype=torch.int64)
        rows = torch.arange(len(labels))
        names = tuple(str(c) for c in range(classes or int(labels.max()) + 1))
        source = Arrays(rows[:, None].float(), labels)
        return Dataset("made", source, Schema((1,), names), rows[: len(train)], rows[len(train) :], owners, overlap)

    return make
