"""Files that are either whole or absent, and a directory that belongs to one process at a time."""

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

CHECK = "check"  # the key of a fingerprint
HELD: set[IO[str]] = set()  # the locks of this process
os.register_at_fork(after_in_child=lambda: [lock.close() for lock in HELD])  # workers must not hold a lock of a dead parent


class RunError(RuntimeError):
    """A run directory cannot be used; the message says why and what to do."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file that becomes `path` at once, when everything is on disk; on any failure `path` is untouched."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # some writers make files for the owner only
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
        _sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_directory(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # half a letter must not stop a run


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n")


def finite(value: Any) -> Any:
    """Numbers that JSON does not have (not a number, infinite) as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write a safetensors file atomically. Tensors that are views are copied, as the format has no shared memory."""
    seen: set[int] = set()
    own = {}
    for name, tensor in tensors.items():
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        address = tensor.untyped_storage().data_ptr()
        own[name] = tensor if whole and address not in seen else tensor.contiguous().clone()
        seen.add(address)
    told = json.loads(json.dumps(metadata))  # as it will be read
    told |= {CHECK: _checksum(own, told)}
    with replacing(path) as temporary:
        # One entry: the order of several changes from run to run, and equal runs shall leave equal files.
        temporary.write_bytes(save(own, {"fedme": json.dumps(told, sort_keys=True)}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the metadata of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(json.loads((file.metadata() or {}).get("fedme", "{}")))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise RunError(f"{path}: no such file") from None
    except (SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:
        raise RunError(f"{path}: damaged ({error})") from error
    check = metadata.pop(CHECK, None)
    if check != _checksum(tensors, metadata):
        raise RunError(f"{path}: damaged (its checksum is {'wrong' if check else 'missing'})")
    return tensors, metadata


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> str:
    """A fingerprint of what a file holds: names, types, shapes, numbers, and what is said about them."""
    found = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        found.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        if value.numel():
            found.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def sealed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A table with a fingerprint of itself, for a file whose damage must not go unnoticed."""
    return {**plain, CHECK: hashlib.sha256(json.dumps(finite(plain), sort_keys=True).encode()).hexdigest()}


def unsealed(plain: Any) -> dict[str, Any]:
    """The table without its fingerprint; a ValueError if it is no table, or not the one that was written.

    Files of earlier versions have none.
    """
    if not isinstance(plain, dict):
        raise ValueError("not a table")
    rest = {key: value for key, value in plain.items() if key != CHECK}
    if CHECK in plain and sealed(rest)[CHECK] != plain[CHECK]:
        raise ValueError("its checksum is wrong: it was changed after it was written")
    return rest


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run directory. The lock ends with the process, however it ends."""
    with (folder / ".lock").open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.seek(0)
            owner = handle.read().strip() or "another process"
            raise RunError(f"{folder}: in use by process {owner}; wait for it, or stop it") from None
        handle.seek(0)
        handle.truncate()
        handle.write(str(os.getpid()))
        handle.flush()
        HELD.add(handle)
        try:
            yield
        finally:
            HELD.discard(handle)
