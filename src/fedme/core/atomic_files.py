"""Atomic writes with checksums, and a lock that gives a directory to one process at a time.

PyTorch is imported by the functions that need it: supervisors of programs use the rest, and are to stay small.
"""

import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CHECK = "check"  # the key of a checksum
_PLAIN = frozenset((str, int, bool, type(None)))
SYNCING = 16  # threads that wait for the disk: a file system serves those that wait at the same time in one go
_waiting: ContextVar[dict[Path, Path] | None] = ContextVar("waiting", default=None)  # temporary files by what they replace
_held_locks: set[IO[str]] = set()
os.register_at_fork(after_in_child=lambda: [lock.close() for lock in _held_locks])  # workers must not inherit the lock


class RunError(RuntimeError):
    """A run directory cannot be used; the message gives the reason and the remedy."""


class InUse(RunError):
    """Another process works in the run directory."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file that atomically replaces `path` once it is on disk; on any failure `path` is unchanged.

    Inside `together`, that happens at its end.
    """
    temporary = path.with_name(f".{path.name}.partial")
    waiting = _waiting.get()
    kept = False
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # some writers create files that only the owner can read
        if waiting is not None:
            waiting[path] = temporary
            kept = True
            return
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        if not kept:
            temporary.unlink(missing_ok=True)


@contextmanager
def together() -> Iterator[None]:
    """Put the files that are written in this context on disk at its end, all at once: many times faster than one by one.

    Every file is replaced atomically, after all of them are on disk; on a failure before that, none is.
    """
    waiting: dict[Path, Path] = {}
    token = _waiting.set(waiting)
    try:
        try:
            yield
        finally:
            _waiting.reset(token)
        with ThreadPoolExecutor(SYNCING) as threads:
            list(threads.map(_sync, waiting.values()))
            for path, temporary in waiting.items():
                temporary.replace(path)
            list(threads.map(_sync, {path.parent for path in waiting}))
    finally:
        for temporary in waiting.values():
            temporary.unlink(missing_ok=True)


def is_being_written(path: Path) -> bool:
    """Whether `together` will write the file at its end."""
    return path in (_waiting.get() or {})


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    """Wait until a file or a directory is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # a lone surrogate must not stop a run


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, _indented(finite(value)) + "\n")


def _indented(value: Any, margin: str = "") -> str:
    """JSON with indentation; a list of numbers or texts is one line."""
    deeper = f"{margin}  "
    if isinstance(value, dict) and value and {dict, list}.isdisjoint(map(type, value.values())):  # most tables; in one call
        return "{\n" + deeper + json.dumps(value, ensure_ascii=False, separators=(f",\n{deeper}", ": "))[1:-1] + f"\n{margin}}}"
    if isinstance(value, dict) and value:
        lines = (f"{deeper}{json.dumps(key, ensure_ascii=False)}: {_indented(item, deeper)}" for key, item in value.items())
        return "{\n" + ",\n".join(lines) + f"\n{margin}}}"
    if isinstance(value, list) and not {dict, list}.isdisjoint(map(type, value)):
        return "[\n" + ",\n".join(f"{deeper}{_indented(item, deeper)}" for item in value) + f"\n{margin}]"
    return json.dumps(value, ensure_ascii=False)


def finite(value: Any) -> Any:
    """Replace NaN and infinite values, which JSON cannot represent, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        isfinite = math.isfinite
        return {
            str(key): item if (kind := type(item)) in _PLAIN or (kind is float and isfinite(item)) else finite(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        types = set(map(type, value))  # long lists of one type are common
        if types <= _PLAIN or (types == {float} and math.isfinite(sum(value))):
            return list(value)
        return [finite(item) for item in value]
    return value


def write_tensors(path: Path, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, Any]) -> None:
    """Write a safetensors file atomically. Tensors that share memory are copied, because the format cannot store views."""
    addresses: set[int] = set()
    copies = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        is_view = not tensor.is_contiguous() or storage.nbytes() != tensor.numel() * tensor.element_size()
        copies[name] = tensor.contiguous().clone() if is_view or storage.data_ptr() in addresses else tensor
        addresses.add(storage.data_ptr())
    header = json.loads(json.dumps(metadata))  # as it will be read
    write_safetensors(path, copies, header | {CHECK: tensor_digest(copies, header)})


def write_safetensors(path: Path, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, Any]) -> None:
    """Write a safetensors file atomically. The tensors are contiguous and share no memory."""
    from safetensors.torch import save

    with replacing(path) as temporary:
        # A single entry: safetensors does not keep the order of several, and equal runs must write equal files.
        temporary.write_bytes(save(dict(tensors), {"fedme": json.dumps(metadata, sort_keys=True)}))


def read_tensors(path: Path) -> "tuple[dict[str, Tensor], dict[str, Any]]":
    """Read the tensors and the metadata of a safetensors file, and verify its checksum."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(json.loads((file.metadata() or {}).get("fedme", "{}")))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise RunError(f"{path}: no such file") from None
    except (SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:
        raise RunError(f"{path}: damaged ({error})") from error
    check = metadata.pop(CHECK, None)
    if check != tensor_digest(tensors, metadata):
        raise RunError(f"{path}: damaged (its checksum is {'wrong' if check else 'missing'})")
    return tensors, metadata


def tensor_digest(tensors: "Mapping[str, Tensor]", metadata: Mapping[str, Any]) -> str:
    """The SHA-256 digest of the metadata and of the names, dtypes, shapes and values of the tensors."""
    import torch

    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        if value.numel():
            digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sealed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Add a checksum to a table, so that `unsealed` detects damage."""
    return {**plain, CHECK: hashlib.sha256(json.dumps(finite(plain), sort_keys=True).encode()).hexdigest()}


def unsealed(plain: Any) -> dict[str, Any]:
    """Verify and remove the checksum; ValueError if it is wrong. Files of earlier versions have none."""
    if not isinstance(plain, dict):
        raise ValueError("not a table")
    rest = {key: value for key, value in plain.items() if key != CHECK}
    if CHECK in plain and sealed(rest)[CHECK] != plain[CHECK]:
        raise ValueError("its checksum is wrong: the file was changed after it was written")
    return rest


def signed(text: str) -> str:
    """A JSON table with the fingerprint of all its other keys as the last one."""
    return f'{text[:-1]}, "{CHECK}": "{hashlib.sha256(text.encode()).hexdigest()}"}}'


def is_whole(text: str, check: Any) -> bool:
    """Whether a table matches the fingerprint that `signed` gave it."""
    body, key, _ = text.rpartition(f', "{CHECK}": ')
    return bool(key) and hashlib.sha256(f"{body}}}".encode()).hexdigest() == check


def is_locked(folder: Path) -> bool:
    """Whether a process has locked a run directory."""
    try:
        with (folder / ".lock").open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def require_unlocked(folder: Path) -> None:
    """Refuse a directory that another process has locked."""
    if is_locked(folder):
        with locked(folder):  # its error names the process
            pass


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run directory against other processes. The operating system releases the lock if the process dies."""
    with (folder / ".lock").open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.seek(0)
            owner = handle.read().strip() or "another process"
            raise InUse(f"{folder}: in use by process {owner}; wait for it to finish, or stop it") from None
        handle.seek(0)
        handle.truncate()
        handle.write(str(os.getpid()))
        handle.flush()
        _held_locks.add(handle)
        try:
            yield
        finally:
            _held_locks.discard(handle)


@contextmanager
def locked_patiently(folder: Path, seconds: float) -> Iterator[None]:
    """As `locked`, with retries: who asks whether a directory is locked also takes the lock for a moment."""
    deadline = time.monotonic() + seconds
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(folder))
                break
            except InUse:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield
