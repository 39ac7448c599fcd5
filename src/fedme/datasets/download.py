"""Fetching files from their publishers, once, with checksums; files that are already there are never touched.

Data lives below one folder: $FEDME_DATA, or the user's cache. Of an archive, only the members of a fixed list are read, as
plain bytes of bounded size, into files whose names are on that list too: nothing in an archive can choose where it lands.
"""

import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import platformdirs
import pooch
import requests
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedme.datasets.data_errors import DataError

TIMEOUT = (10, 60)  # seconds to connect, and without a byte
CHUNK = 1 << 16


@dataclass(frozen=True)
class File:
    """A file that its publisher offers as it is."""

    name: str
    url: str
    md5: str


@dataclass(frozen=True)
class Archive:
    """A .tar.gz or .zip; `members` maps the paths inside it to the names of the files they become."""

    url: str
    md5: str
    members: Mapping[str, str]
    largest: int  # bytes; no member is that large


Remote = Sequence[File] | Archive


def root() -> Path:
    """The folder that holds all data sets: $FEDME_DATA, or the user's cache."""
    chosen = os.environ.get("FEDME_DATA")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("fedme")


def obtain(dataset: str, folder: Path, names: Sequence[str], remote: Remote) -> dict[str, Path]:
    """Where these files are, after fetching those that are missing; NAME.gz may also be there unpacked, as NAME."""
    found = _present(folder, names)
    missing = [name for name in names if name not in found]
    if not missing:
        return found
    try:
        if isinstance(remote, Archive):
            _unpack(_fetch(remote.url, remote.md5, folder, remote.url.rsplit("/", 1)[-1]), remote, folder)
        else:
            for file in remote:
                if file.name in missing:
                    _fetch(file.url, file.md5, folder, file.name)
    except DataError as error:
        raise DataError(
            f"{dataset}: missing from {folder}: {', '.join(missing)}. {error}. "
            f"Put the files into that folder yourself, or set FEDME_DATA to the folder that holds {folder.name}/"
        ) from error
    return _present(folder, names)


def _present(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    spellings = {name: (folder / name, folder / name.removesuffix(".gz")) for name in names}
    return {name: path for name, paths in spellings.items() for path in reversed(paths) if path.is_file()}


def _fetch(url: str, md5: str, folder: Path, name: str) -> Path:
    pooch.get_logger().setLevel("WARNING")  # its notices repeat what the progress bar shows
    try:
        with _progress(name) as bar:
            downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=CHUNK, timeout=TIMEOUT)
            return Path(pooch.retrieve(url, f"md5:{md5}", name, folder, downloader=downloader))
    except requests.RequestException as error:
        raise DataError(f"Fetching {url} failed: {_reason(error)}") from error
    except OSError as error:
        raise DataError(f"{folder / name} cannot be written: {error}") from error
    except ValueError as error:  # how pooch reports a checksum
        raise DataError(f"What {url} delivers does not have the known checksum (md5 {md5})") from error


def _reason(error: requests.RequestException) -> str:
    if error.response is not None:
        error.response.close()  # pooch leaves the connection of a failed request open
        return f"the server answered {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.Timeout):
        return "the server does not answer"
    if isinstance(error, requests.ConnectionError):
        return "no connection to the server"
    return type(error).__name__


class _Bar:
    """What pooch wants of a progress bar, drawn by rich."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    @property
    def total(self) -> int:
        return int(self._progress.tasks[0].total or 0)

    @total.setter
    def total(self, total: int) -> None:
        self._progress.update(self._task, total=total or None)

    def update(self, step: int) -> None:
        self._progress.advance(self._task, step)

    def reset(self) -> None:
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        self._progress.refresh()


@contextmanager
def _progress(name: str) -> Iterator[_Bar]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield _Bar(progress, progress.add_task(name, total=None))


def _unpack(path: Path, archive: Archive, folder: Path) -> None:
    """Write the listed members of an archive into `folder`, then remove the archive."""
    lacking = set(archive.members)
    try:
        for member, size, stream in _members(path, archive.members):
            if size > archive.largest:
                raise DataError(f"{path}: {member} claims {size} bytes, more than the {archive.largest} expected")
            _write(folder / archive.members[member], stream, archive.largest)
            lacking.discard(member)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise DataError(f"{path}: cannot be unpacked ({error})") from error
    if lacking:
        raise DataError(f"{path}: does not hold {', '.join(sorted(lacking))}")
    path.unlink()


def _members(path: Path, wanted: Mapping[str, str]) -> Iterator[tuple[str, int, IO[bytes]]]:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.filename in wanted:
                    with archive.open(entry) as stream:
                        yield entry.filename, entry.file_size, stream
        return
    with tarfile.open(path, "r:*") as tape:
        for member in tape:
            content = tape.extractfile(member) if member.name in wanted and member.isreg() else None
            if content is not None:
                yield member.name, member.size, content


def _write(target: Path, stream: IO[bytes], largest: int) -> None:
    """Write bounded content under another name first, so that a file that is there is a whole file."""
    unfinished = target.with_name(target.name + ".part")
    written = 0
    try:
        with unfinished.open("wb") as file:
            while chunk := stream.read(CHUNK):
                written += len(chunk)
                if written > largest:
                    raise DataError(f"{target.name}: holds more than the {largest} bytes expected")
                file.write(chunk)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
