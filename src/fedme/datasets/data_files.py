"""People's own files: CSV, Parquet, npz and folders of images. Nothing in them can run a program."""

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
from fedme.datasets.raw_samples import Raw, RawInputs, Table, checked, column, parsed

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
ROOM, MOST_TIMES = 1 << 28, 100  # a compressed file may hold so many bytes, or so many times its size
DAMAGED_NPZ = (
    *(ValueError, TypeError, KeyError, OSError, EOFError, MemoryError, OverflowError, NotImplementedError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, struct.error, SyntaxError, tokenize.TokenError, AttributeError),
)  # all that numpy and zipfile raise when bytes are not what they say
Label = str | tuple[str, ...] | None  # a column, several, or none named
KINDS = ".csv, .tsv, .parquet, .npz, or a folder of images with a subfolder a class"


def needed(name: str, what: str, extra: str) -> ModuleType:
    """A package that is only needed for `what`; if it is missing, the error says how to get it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"{what} needs {name.split('.')[0]}: pip install 'fedme[{extra}]'") from error


def read(path: Path, label: Label, where: str, labelled: bool = True, only: Sequence[str] = ()) -> Raw:
    """The samples of a file or a folder; `label` names the columns of labels, `only` those of the inputs, in order."""
    where = f"{where} ({path})"
    if path.is_dir():
        return checked(_images(path, where, labelled))
    readers = {".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".npz": _npz}
    if path.suffix.lower() not in readers:
        raise DataError(f"{where}: cannot be read; there are {KINDS}")
    try:
        found = readers[path.suffix.lower()](path, where)
    except FileNotFoundError:
        raise DataError(f"{where}: there is no such file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{where}: cannot be read ({error})") from error
    is_table = path.suffix.lower() != ".npz"
    label = label or (None if is_table else "y")
    labels = take_label(found, label, where, labelled)
    for name in only:
        if name not in found:
            raise DataError(f"{where}: there is no column '{name}'{nearest(name, found)}")
    found = {name: found[name] for name in only} if only else found
    return checked(Raw(where, Table(found) if is_table else arrays(found, where), labels, label_names(label)))


def label_names(label: Label) -> tuple[str, ...]:
    """The columns that hold labels."""
    return () if label is None else (label,) if isinstance(label, str) else tuple(label)


def take_label(found: dict[str, Any], label: Label, where: str, labelled: bool) -> np.ndarray | None:
    """Take the labels out of named columns; data that need none may have them, and they are left out.

    Several columns become the columns of a matrix.
    """
    if label is not None and not isinstance(label, str):
        taken = [take_label(found, name, where, labelled) for name in label]
        whole = [column for column in taken if column is not None]
        if labelled and (text := [name for name, column in zip(label, whole, strict=True) if column.dtype.kind not in "biuf"]):
            raise DataError(
                f"{where}: the label '{text[0]}' holds text; several labels at once are columns of 0 and 1, or of numbers"
            )
        return np.stack(whole, 1) if labelled else None
    if label is not None and label in found:
        labels = found.pop(label)
        return labels if labelled else None
    if not labelled:
        return None
    if label is None:
        raise DataError(f"{where}: which column is the label? Say label = '...'; there are {', '.join(found)}")
    raise DataError(f"{where}: there is no column '{label}'{nearest(label, found)}")


def arrays(found: dict[str, np.ndarray], where: str) -> RawInputs:
    """Arrays as inputs: a single one is the input, several are passed to the network by name."""
    tensors = {}
    for name, values in found.items():
        if values.dtype.kind not in "fiub":
            raise DataError(f"{where}: the array '{name}' holds {values.dtype}; networks take numbers")
        tensors[name] = torch.from_numpy(np.ascontiguousarray(values if values.dtype.kind != "b" else values.astype("uint8")))
    if not tensors:
        raise DataError(f"{where}: there are no inputs beside the labels")
    return next(iter(tensors.values())) if len(tensors) == 1 else tensors


def _csv(path: Path, where: str) -> dict[str, np.ndarray]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ","))
    if not rows:
        raise DataError(f"{where}: is empty; the first line names the columns")
    header = [name.strip() for name in rows[0]]
    if len(set(header)) != len(header) or not all(header):
        raise DataError(f"{where}: the first line must name every column once; it says {', '.join(header)}")
    body = [row for row in rows[1:] if row]
    for number, row in enumerate(body):
        if len(row) != len(header):
            raise DataError(
                f"{where}: sample {number} (from 0) has {len(row)} entries, the first line names {len(header)} columns"
            )
    return {name: parsed([row[i] for row in body]) for i, name in enumerate(header)}


def _parquet(path: Path, where: str) -> dict[str, np.ndarray]:
    if not path.exists():
        raise FileNotFoundError
    pyarrow, parquet = needed("pyarrow", "Parquet", "own"), needed("pyarrow.parquet", "Parquet", "own")
    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError, MemoryError) as error:
        raise DataError(f"{where}: is not a readable Parquet file ({error})") from error
    return {
        name: column(table.column(name).to_pylist()) for name in table.column_names if not name.startswith("__index_level_")
    }


def _npz(path: Path, where: str) -> dict[str, np.ndarray]:
    try:
        _refuse_bomb(path, where)
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise
    except DAMAGED_NPZ as error:
        hint = (
            "; it holds pickled objects, which can run any program: save plain arrays" if "allow_pickle" in str(error) else ""
        )
        raise DataError(f"{where}: is not a readable npz file ({error}){hint}") from error


def _refuse_bomb(path: Path, where: str) -> None:
    """Refuse a small file that would fill the memory; how large its arrays are is written in it."""
    with zipfile.ZipFile(path) as archive:
        largest = sum(entry.file_size for entry in archive.infolist())
    size = path.stat().st_size
    if largest > max(ROOM, MOST_TIMES * size):
        raise DataError(f"{where}: {size} bytes would become {largest}; save the arrays without compression if that is right")


def _images(folder: Path, where: str, labelled: bool) -> Raw:
    pil = needed("PIL.Image", "an image", "own")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGES)
    if not paths:
        raise DataError(f"{where}: there are no images ({', '.join(IMAGES)})")
    loose = next((path for path in paths if path.parent == folder), None)
    if labelled and loose is not None:
        raise DataError(f"{where}: {loose.name} lies in no subfolder; a subfolder's name is the class of its images")
    pixels = []
    for path in paths:
        try:
            with pil.open(path) as image:
                pixels.append(picture(image))
        except Exception as error:  # decoders of images raise whatever they like when bytes are not what they say
            raise DataError(f"{where}: {path} cannot be read ({error or type(error).__name__})") from error
        if pixels[-1].shape != pixels[0].shape:
            raise DataError(
                f"{where}: {path} is {shown(pixels[-1])}, but {paths[0]} is {shown(pixels[0])}; give all one size and colour"
            )
    names = np.array([path.relative_to(folder).parts[0] for path in paths], dtype=object) if labelled else None
    return Raw(where, torch.from_numpy(np.stack(pixels)), names)


def picture(image: Any) -> np.ndarray:
    """Bytes, channels first: grey stays one channel, everything else becomes red, green and blue."""
    plain = image if image.mode in ("L", "RGB") else image.convert("L" if image.mode in ("1", "I;16") else "RGB")
    values = np.asarray(plain, dtype=np.uint8)
    return values[None] if values.ndim == 2 else np.ascontiguousarray(values.transpose(2, 0, 1))


def shown(pixels: np.ndarray) -> str:
    """The size of an image in words."""
    return f"{pixels.shape[2]} x {pixels.shape[1]} in {'grey' if pixels.shape[0] == 1 else 'colour'}"
