"""A disk that fails, in front of the files of one folder: every write, sync, rename and removal is an event that can go wrong.

What can happen at event number `at`:

* "kill": the process is killed (SIGKILL) before it; what was written before stays, as the system would keep it.
* "torn": the same, but half of a write is done, or a rename without what follows it.
* "power": the machine loses power. What was not synced is lost, or a part of it; renames in a directory not synced since then
  may be undone. Then the process is killed.
* "full": half of the write is done, and it and every later one fails with ENOSPC, until the process ends.
* "broken": this operation and every later one fails with EIO.

With "short" nothing fails, but every write takes a few bytes only.
"""

import errno
import io
import os
import random
import signal
import threading
import time
from pathlib import Path

REAL_OPEN, FSYNC, REPLACE, UNLINK, MKDIR = io.open, os.fsync, os.replace, os.unlink, os.mkdir
CHANGING = ("write", "truncate", "replace", "mkdir")  # what a full disk refuses; files can still be removed


class Disk:
    """The events in `folder`; `spare` is a folder outside of it for what a loss of power brings back."""

    def __init__(self, folder: Path, kind: str, at: int, spare: Path, seed: int = 0) -> None:
        self.folder, self.kind, self.at, self.spare = Path(folder).absolute(), kind, at, Path(spare)
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.count, self.failing = 0, False
        self.synced: dict[str, int] = {}  # of files with bytes that are not on disk: how many are
        self.renamed: list[tuple[str, str, str | None]] = []  # since the last sync: from, to, and where the old file is kept

    def install(self) -> None:
        """From now on, in this process."""
        io.open = self.open  # type: ignore[assignment]  # pathlib's way to files
        os.fsync = self.fsync
        os.replace = self.replace  # type: ignore[assignment]
        os.unlink = self.unlink  # type: ignore[assignment]
        os.mkdir = self.mkdir  # type: ignore[assignment]

    def mine(self, path) -> bool:
        return Path(path).absolute().is_relative_to(self.folder)

    def happens(self, what: str, half=lambda: None) -> None:
        """Count an event, and let go wrong what shall. `half` does a part of the operation."""
        self.count += 1
        now = self.count == self.at
        if now and self.kind in ("kill", "torn", "power"):
            if self.kind != "kill":
                half()
            if self.kind == "power":
                self.lose_power()
            os.kill(os.getpid(), signal.SIGKILL)
        if now and self.kind in ("full", "broken"):
            self.failing = True
            if what == "write":
                half()
        if self.failing and self.kind == "full" and what in CHANGING:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.failing and self.kind == "broken" and what != "unlink":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def lose_power(self) -> None:
        for source, target, old in reversed(self.renamed):
            if self.random.random() < 0.5:
                REPLACE(target, source)
                if old is not None:
                    REPLACE(old, target)
                if target in self.synced:
                    self.synced[source] = self.synced.pop(target)
        for path, safe in self.synced.items():
            if Path(path).exists():
                os.truncate(path, self.random.randint(safe, max(safe, Path(path).stat().st_size)))

    def open(self, path, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **rest):
        if not self.mine(path) or "+" in mode or not set(mode) & {"w", "a"}:
            return REAL_OPEN(path, mode, buffering, encoding, errors, newline, **rest)
        with self.lock:
            raw = Written(self, path, mode.replace("b", "").replace("t", ""))
            self.synced.setdefault(str(raw.name), 0 if "w" in mode else Path(path).stat().st_size)
        buffered = io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    def fsync(self, handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        if not self.mine(path):
            return FSYNC(handle)
        with self.lock:
            self.happens("fsync")
            self.synced.pop(path, None)
            if os.path.isdir(path):
                self.renamed = [each for each in self.renamed if os.path.dirname(each[1]) != path]

    def replace(self, source, target, **rest) -> None:
        if not self.mine(target):
            return REPLACE(source, target, **rest)
        with self.lock:
            source, target = str(Path(source).absolute()), str(Path(target).absolute())

            def do() -> None:
                old = None
                if os.path.exists(target):
                    old = str(self.spare / f"{os.getpid()}-{time.monotonic_ns()}")
                    os.link(target, old)
                REPLACE(source, target)
                self.renamed.append((source, target, old))
                if source in self.synced:
                    self.synced[target] = self.synced.pop(source)

            self.happens("replace", do)
            do()

    def unlink(self, path, **rest) -> None:
        if self.mine(path):
            with self.lock:
                self.happens("unlink")
        return UNLINK(path, **rest)

    def mkdir(self, path, *rest, **more) -> None:
        if self.mine(path):
            with self.lock:
                self.happens("mkdir")
        return MKDIR(path, *rest, **more)


class Written(io.FileIO):
    """A file of the disk, opened for writing."""

    def __init__(self, disk: Disk, path, mode: str) -> None:
        super().__init__(os.path.abspath(path), mode)
        self.disk = disk

    def write(self, data) -> int:
        with self.disk.lock:
            data = memoryview(data).cast("B")
            self.disk.happens("write", lambda: super(Written, self).write(data[: len(data) // 2]))
            return super().write(data[:1000] if self.disk.kind == "short" else data)

    def truncate(self, size=None) -> int:
        with self.disk.lock:
            self.disk.happens("truncate")
            self.disk.synced[self.name] = min(size if size is not None else self.tell(), self.disk.synced.get(self.name, 0))
            return super().truncate(size)
