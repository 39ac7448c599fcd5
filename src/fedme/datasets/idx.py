"""The IDX format of MNIST: a magic number, the dimensions as big-endian integers, then the bytes."""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fedme.datasets.data_errors import DataError

MAX_ITEMS = 2_000_000  # more than twice the largest data set in this format; a corrupt count must not exhaust the memory


def read_idx(path: Path, item: tuple[int, ...]) -> Tensor:
    """Read the unsigned bytes of an IDX file (gzipped if its name ends in .gz) with items of shape `item`."""
    try:
        with path.open("rb") as file:
            return _parse(path, _gzip_reader(file.read()) if path.suffix == ".gz" else file.read, item)
    except (OSError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); delete the file and download it again") from error


def _gzip_reader(packed: bytes) -> Callable[[int], bytes]:
    """A function that reads the next bytes of a gzip file; twice as fast as the gzip module."""
    stream = zlib.decompressobj(wbits=31)
    rest = packed

    def read(size: int) -> bytes:
        nonlocal rest
        content = stream.decompress(rest, size)
        rest = stream.unconsumed_tail
        if len(content) < size and not stream.eof:  # the checksum at the end was not verified
            raise OSError("unexpected end of file")
        if stream.unused_data.strip(b"\0"):
            raise OSError("trailing data")
        return content

    return read


def _parse(path: Path, read: Callable[[int], bytes], item: tuple[int, ...]) -> Tensor:
    axes = 1 + len(item)
    header = read(4 + 4 * axes)
    if header[:4] != bytes((0, 0, 8, axes)):
        raise DataError(
            f"{path}: not an IDX file of unsigned bytes with {axes} dimension(s): "
            f"must start with 0000080{axes}, got {header[:4].hex() or 'an empty file'}"
        )
    if len(header) < 4 + 4 * axes:
        raise DataError(f"{path}: incomplete header; delete the file and download it again")
    count, *shape = struct.unpack(f">{axes}I", header[4:])
    if tuple(shape) != item:
        raise DataError(f"{path}: items must have shape {item}, got {tuple(shape)}")
    if not 1 <= count <= MAX_ITEMS:
        raise DataError(f"{path}: number of items must be between 1 and {MAX_ITEMS}, got {count}")
    expected = count * torch.Size(item).numel()
    body = bytearray(read(expected + 1))
    if len(body) != expected:
        got = str(len(body)) if len(body) < expected else "more"
        raise DataError(f"{path}: must have {expected} bytes after its header, got {got}; download the file again")
    return torch.frombuffer(body, dtype=torch.uint8).reshape(count, *item)
