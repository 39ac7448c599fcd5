"""The IDX format of MNIST: a magic number, the dimensions as big-endian integers, then the bytes, and nothing else."""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fedme.datasets.data_errors import DataError

MOST_ITEMS = 2_000_000  # more than twice the largest data set in this format: a damaged count must not fill the memory


def read_idx(path: Path, item: tuple[int, ...]) -> Tensor:
    """The unsigned bytes of an IDX file (gzipped if its name ends in .gz) whose items have the shape `item`."""
    try:
        with path.open("rb") as file:
            return _parse(path, _unpacking(file.read()) if path.suffix == ".gz" else file.read, item)
    except (OSError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); delete it and fetch it again") from error


def _unpacking(packed: bytes) -> Callable[[int], bytes]:
    """What gives the next bytes of a gzip file, no more than it is asked for: twice as fast as the module of that name."""
    stream = zlib.decompressobj(wbits=31)
    rest = packed

    def read(most: int) -> bytes:
        nonlocal rest
        found = stream.decompress(rest, most)
        rest = stream.unconsumed_tail
        if len(found) < most and not stream.eof:  # the checksum at the end was not seen
            raise OSError("it ends too early")
        if stream.unused_data.strip(b"\0"):
            raise OSError("something follows its end")
        return found

    return read


def _parse(path: Path, read: Callable[[int], bytes], item: tuple[int, ...]) -> Tensor:
    axes = 1 + len(item)
    header = read(4 + 4 * axes)
    if header[:4] != bytes((0, 0, 8, axes)):
        raise DataError(
            f"{path}: starts with {header[:4].hex() or 'nothing'}, not with 0000080{axes}: "
            f"not an IDX file of unsigned bytes with {axes} dimension(s)"
        )
    if len(header) < 4 + 4 * axes:
        raise DataError(f"{path}: ends inside its header; delete it and fetch it again")
    count, *shape = struct.unpack(f">{axes}I", header[4:])
    if tuple(shape) != item:
        raise DataError(f"{path}: holds items of shape {tuple(shape)}, expected {item}")
    if not 1 <= count <= MOST_ITEMS:
        raise DataError(f"{path}: announces {count} items; expected between 1 and {MOST_ITEMS}")
    expected = count * torch.Size(item).numel()
    body = bytearray(read(expected + 1))
    if len(body) != expected:
        held = f"only {len(body)}" if len(body) < expected else "more"
        raise DataError(f"{path}: announces {expected} bytes after its header and holds {held}; fetch it again")
    return torch.frombuffer(body, dtype=torch.uint8).reshape(count, *item)
