"""User data in files: CSV, Parquet, npz and folders of images. No reader executes code from a file."""

import csv
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fedme.core.typed import nearest
from fedme.datasets.data_errors import DataError
from fedme.datasets.raw_samples import RawInputs, RawSamples, Table, checked, parse_column, to_column

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
MAX_UNPACKED, MAX_RATIO = 1 << 28, 100  # an npz file may unpack to this many bytes, or to this many times its size
DAMAGED_NPZ = (
    *(ValueError, TypeError, KeyError, OSError, EOFError, MemoryError, OverflowError, NotImplementedError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, struct.error, SyntaxError, tokenize.TokenError, AttributeError),
)  # everything that numpy and zipfile raise for damaged files
Label = str | tuple[str, ...] | None  # one column, several, or not specified
FILE_TYPES = ".csv, .tsv, .parquet, .npz, or a folder of images with one subfolder per class"


def require_package(name: str, purpose: str, extra: str) -> ModuleType:
    """Import an optional package; if it is missing, the error names the extra to install."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"{purpose} needs {name.split('.')[0]}: pip install 'fedme[{extra}]'") from error


def read_file(path: Path, label: Label, where: str, labelled: bool = True, only: Sequence[str] = ()) -> RawSamples:
    """Read a file or a folder of images; `label` names the label columns, `only` the input columns, in order."""
    where = f"{where} ({path})"
    if path.is_dir():
        return checked(_images(path, where, labelled))
    readers = {".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".npz": _npz}
    if path.suffix.lower() not in readers:
        raise DataError(f"{where}: unsupported file type; use {FILE_TYPES}")
    try:
        columns = readers[path.suffix.lower()](path, where)
    except FileNotFoundError:
        raise DataError(f"{where}: no such file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        remedy = "; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise DataError(f"{where}: cannot be read ({error}){remedy}") from error
    is_table = path.suffix.lower() != ".npz"
    label = label or (None if is_table else "y")
    labels = take_label(columns, label, where, labelled)
    for name in only:
        if name not in columns:
            raise DataError(f"{where}: there is no column '{name}'{nearest(name, columns)}")
    columns = {name: columns[name] for name in only} if only else columns
    return checked(RawSamples(where, Table(columns) if is_table else to_inputs(columns, where), labels, label_names(label)))


def label_names(label: Label) -> tuple[str, ...]:
    """The names of the label columns."""
    return () if label is None else (label,) if isinstance(label, str) else tuple(label)


def take_label(columns: dict[str, Any], label: Label, where: str, labelled: bool) -> np.ndarray | None:
    """Remove the label columns and return them, several as a matrix; labels of unlabeled data are dropped."""
    if label is not None and not isinstance(label, str):
        taken = {name: take_label(columns, name, where, labelled) for name in label}
        if not labelled:
            return None
        matrix = {name: values for name, values in taken.items() if values is not None}
        if text := [name for name, values in matrix.items() if values.dtype.kind not in "biuf"]:
            raise DataError(f"{where}: the label column '{text[0]}' contains text; several labels must be numeric columns")
        return np.stack([matrix[name] for name in label], 1)
    if label is not None and label in columns:
        labels = columns.pop(label)
        return labels if labelled else None
    if not labelled:
        return None
    if label is None:
        raise DataError(f"{where}: set label to the name of the label column; the columns are {', '.join(columns)}")
    raise DataError(f"{where}: there is no column '{label}'{nearest(label, columns)}")


def to_inputs(arrays: dict[str, np.ndarray], where: str) -> RawInputs:
    """A single array is the input; several are passed to the network by name."""
    tensors = {}
    for name, values in arrays.items():
        if values.dtype.kind not in "fiub":
            raise DataError(f"{where}: the array '{name}' has dtype {values.dtype}; inputs must be numeric")
        tensors[name] = torch.from_numpy(np.ascontiguousarray(values if values.dtype.kind != "b" else values.astype("uint8")))
    if not tensors:
        raise DataError(f"{where}: there are no inputs besides the labels")
    return next(iter(tensors.values())) if len(tensors) == 1 else tensors


def _csv(path: Path, where: str) -> dict[str, np.ndarray]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        delimiter = _delimiter(file.readline())
        file.seek(0)
        rows = list(csv.reader(file, delimiter=delimiter))
    if not rows:
        raise DataError(f"{where}: the file is empty; the first line must name the columns")
    header = [name.strip() for name in rows[0]]
    distinct = len(set(header)) == len(header) and all(header)
    if parse_column(header).dtype != object and not (distinct and all(name.isdecimal() for name in header)):
        numbers = ", ".join(header[:5])
        raise DataError(f"{where}: the first line must name the columns, got numbers ({numbers} ...); add a line with names")
    if not distinct:
        raise DataError(f"{where}: the first line must name every column once, got {', '.join(header)}")
    body = [row for row in rows[1:] if any(entry.strip() for entry in row)]
    for number, row in enumerate(body):
        if len(row) != len(header):
            raise DataError(f"{where}: sample {number} (counted from 0) must have {len(header)} entries, got {len(row)}")
    decimal = "," if delimiter == ";" else "."  # spreadsheets separate by semicolons where the comma is the decimal separator
    return {name: parse_column([row[i] for row in body], decimal) for i, name in enumerate(header)}


def _delimiter(header: str) -> str:
    """The delimiter that occurs most often in the first line, outside of quotes."""
    unquoted = "".join(header.split('"')[::2])
    return max((",", ";", "\t"), key=unquoted.count)


def _parquet(path: Path, where: str) -> dict[str, np.ndarray]:
    if not path.exists():
        raise FileNotFoundError
    pyarrow, parquet = require_package("pyarrow", "Parquet", "own"), require_package("pyarrow.parquet", "Parquet", "own")
    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError, MemoryError) as error:
        raise DataError(f"{where}: not a readable Parquet file ({error})") from error
    names = [name for name in table.column_names if not name.startswith("__index_level_")]
    return {name: to_column(table.column(name).to_pylist()) for name in names}


def _npz(path: Path, where: str) -> dict[str, np.ndarray]:
    try:
        _reject_zip_bomb(path, where)
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise
    except DAMAGED_NPZ as error:
        pickled = "allow_pickle" in str(error)
        hint = "; it contains pickled objects, which can execute arbitrary code: save plain arrays" if pickled else ""
        raise DataError(f"{where}: not a readable npz file ({error}){hint}") from error


def _reject_zip_bomb(path: Path, where: str) -> None:
    """Reject a small file whose declared content would exhaust the memory."""
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    size = path.stat().st_size
    if unpacked > max(MAX_UNPACKED, MAX_RATIO * size):
        raise DataError(f"{where}: {size} bytes unpack to {unpacked}; if this is intended, save the arrays without compression")


def _images(folder: Path, where: str, labelled: bool) -> RawSamples:
    pil = require_package("PIL.Image", "reading images", "own")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGES)
    if not paths:
        raise DataError(f"{where}: there are no images ({', '.join(IMAGES)})")
    loose = next((path for path in paths if path.parent == folder), None)
    if labelled and loose is not None:
        raise DataError(f"{where}: {loose.name} is not in a subfolder; the name of the subfolder is the class of an image")
    pixels = []
    for path in paths:
        try:
            with pil.open(path) as image:
                pixels.append(image_to_array(image))
        except Exception as error:  # image decoders raise many types of errors for damaged files
            raise DataError(f"{where}: {path} cannot be read ({error or type(error).__name__})") from error
        if pixels[-1].shape != pixels[0].shape:
            sizes = f"{path} is {_size_text(pixels[-1])}, but {paths[0]} is {_size_text(pixels[0])}"
            raise DataError(f"{where}: {sizes}; convert all images to one size and colour mode")
    names = np.array([path.relative_to(folder).parts[0] for path in paths], dtype=object) if labelled else None
    return RawSamples(where, torch.from_numpy(np.stack(pixels)), names)


def image_to_array(image: Any) -> np.ndarray:
    """A PIL image as uint8, channels first: one channel for greyscale images, else RGB."""
    converted = image if image.mode in ("L", "RGB") else image.convert("L" if image.mode in ("1", "I;16") else "RGB")
    values = np.asarray(converted, dtype=np.uint8)
    return values[None] if values.ndim == 2 else np.ascontiguousarray(values.transpose(2, 0, 1))


def _size_text(pixels: np.ndarray) -> str:
    return f"{pixels.shape[2]} x {pixels.shape[1]} {'greyscale' if pixels.shape[0] == 1 else 'RGB'}"
