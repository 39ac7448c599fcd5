"""Samples from a file of one's own: a .npz file of arrays, or a .csv file with a header line. Nothing is unpickled."""

import csv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from fedme.datasets.errors import DataError


def read(
    path: Path, shape: tuple[int, ...], label: str | None = "y", features: Sequence[str] = ()
) -> tuple[Tensor, list[str] | None]:
    """Inputs and the text of every label; with ``label=None`` only the inputs.

    A .npz file holds the inputs as `x` and the labels under the name `label`. Of a .csv file the columns `features` (all but
    the label by default) are the inputs, in this order.
    """
    if path.suffix == ".npz":
        x, labels = _npz(path, label)
    elif path.suffix == ".csv":
        x, labels = _csv(path, label, features)
    else:
        raise DataError(f"{path}: only .npz and .csv files are read")
    wanted = int(np.prod(shape))
    if not len(x) or x.size != len(x) * wanted:
        raise DataError(f"{path}: samples of {x.size // max(len(x), 1)} numbers, where shape {list(shape)} needs {wanted}")
    if labels is not None and len(labels) != len(x):
        raise DataError(f"{path}: {len(x)} samples, but {len(labels)} labels")
    if not np.isfinite(x).all():
        raise DataError(f"{path}: some inputs are not numbers; fill the gaps or leave these samples out")
    kept = x if x.dtype == np.uint8 else x.astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(kept.reshape(len(x), *shape))), labels


def _npz(path: Path, label: str | None) -> tuple[np.ndarray, list[str] | None]:
    try:
        with zipfile.ZipFile(path) as archive:
            arrays = {}
            for name in ["x", *([label] if label is not None else [])]:
                with archive.open(f"{name}.npy") as member:
                    arrays[name] = npy.read_array(member)  # refuses pickled objects
    except KeyError as error:
        raise DataError(f"{path}: holds no array {error}; inputs are `x`, labels `{label}`") from error
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if arrays["x"].dtype.kind not in "uif":
        raise DataError(f"{path}: x must be numbers, not {arrays['x'].dtype}")
    return arrays["x"], None if label is None else [str(value) for value in arrays[label].reshape(-1).tolist()]


def _csv(path: Path, label: str | None, features: Sequence[str]) -> tuple[np.ndarray, list[str] | None]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = list(features) or [name for name in reader.fieldnames or [] if name != label]
            if absent := [n for n in [*columns, *([label] if label else [])] if n not in (reader.fieldnames or [])]:
                raise DataError(f"{path}: there is no column {', '.join(absent)}; the columns are {reader.fieldnames}")
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    try:
        x = np.array([[float(row[name]) for name in columns] for row in rows], dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: a feature is not a number ({error}); name the columns to use in `features`") from error
    return x, None if label is None else [str(row[label]).strip() for row in rows]
