"""Files of JSON lines that are only appended to. After a crash, a line that was not written completely does not count."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fedme.core.atomic_files import RunError


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The file, which only its owner can read, locked against other processes until the end of the context."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    existed = path.exists()
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not existed:
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        yield file


def lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines, oldest first."""
    if not path.exists():
        return []
    with opened(path) as file:
        return complete(path, file)


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line, and return when it is on disk."""
    with opened(path) as file:
        add(file, line)


def add(file: IO[bytes], line: Mapping[str, Any]) -> None:
    """The same for a file that is open and locked."""
    file.seek(0)
    content = file.read()
    if not content.endswith(b"\n"):  # the last line was not written completely, so what it was about did not happen
        file.truncate(content.rfind(b"\n") + 1)
    file.write((json.dumps(line, ensure_ascii=True) + "\n").encode())
    file.flush()
    os.fsync(file.fileno())


def complete(path: Path, file: IO[bytes]) -> list[dict[str, Any]]:
    """The complete lines of a file that is open and locked."""
    file.seek(0)
    content = file.read()
    complete_lines = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise RunError(f"{path}: line {number} is damaged; restore the file from a backup")
        complete_lines.append(value)
    return complete_lines
