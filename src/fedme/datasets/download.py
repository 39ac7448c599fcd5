"""Download files from their publishers once and verify their checksums; existing files are never changed.

All data is below one folder: $FEDME_DATA, or the user's cache directory. From an archive, only the members of a fixed list
are extracted, with a size limit, to file names on that list: an archive cannot choose where its content is written.
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

TIMEOUT = (10, 60)  # seconds to connect, and between two bytes
CHUNK = 1 << 16


@dataclass(frozen=True)
class File:
    """A single file to download."""

    name: str
    url: str
    md5: str


@dataclass(frozen=True)
class Archive:
    """A .tar.gz or .zip archive; `members` maps paths inside the archive to file names on disk."""

    url: str
    md5: str
    members: Mapping[str, str]
    largest: int  # upper bound on the size of a member, in bytes


Remote = Sequence[File] | Archive


def root() -> Path:
    """The folder of all data sets: $FEDME_DATA, or the user's cache directory."""
    folder = os.environ.get("FEDME_DATA")
    return Path(folder).expanduser() if folder else platformdirs.user_cache_path("fedme")


def obtain(dataset: str, folder: Path, names: Sequence[str], remote: Remote) -> dict[str, Path]:
    """The paths of these files, after downloading the missing ones; NAME.gz may also be present unpacked, as NAME."""
    paths = _present(folder, names)
    missing = [name for name in names if name not in paths]
    if not missing:
        return paths
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
            f"Copy the files to that folder, or set FEDME_DATA to the folder that contains {folder.name}/"
        ) from error
    return _present(folder, names)


def _present(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    spellings = {name: (folder / name, folder / name.removesuffix(".gz")) for name in names}
    return {name: path for name, paths in spellings.items() for path in reversed(paths) if path.is_file()}


def _fetch(url: str, md5: str, folder: Path, name: str) -> Path:
    pooch.get_logger().setLevel("WARNING")  # the progress bar already shows its messages
    try:
        with _progress(name) as bar:
            downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=CHUNK, timeout=TIMEOUT)
            return Path(pooch.retrieve(url, f"md5:{md5}", name, folder, downloader=downloader))
    except requests.RequestException as error:
        raise DataError(f"Downloading {url} failed: {_reason(error)}") from error
    except OSError as error:
        raise DataError(f"{folder / name} cannot be written: {error}") from error
    except ValueError as error:  # how pooch reports a wrong checksum
        raise DataError(f"The content of {url} does not have the expected checksum (md5 {md5})") from error


def _reason(error: requests.RequestException) -> str:
    if error.response is not None:
        error.response.close()  # pooch leaves the connection of a failed request open
        return f"the server answered {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.Timeout):
        return "the server does not respond"
    if isinstance(error, requests.ConnectionError):
        return "no connection to the server"
    return type(error).__name__


class _Bar:
    """The progress bar interface of pooch, implemented with rich."""

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
    """Extract the listed members of an archive to `folder`, then delete the archive."""
    missing = set(archive.members)
    try:
        for member, size, stream in _members(path, archive.members):
            if size > archive.largest:
                raise DataError(f"{path}: {member} has {size} bytes; expected at most {archive.largest}")
            _write(folder / archive.members[member], stream, archive.largest)
            missing.discard(member)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise DataError(f"{path}: cannot be unpacked ({error})") from error
    if missing:
        raise DataError(f"{path}: does not contain {', '.join(sorted(missing))}")
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
    """Write at most `largest` bytes, to a temporary file first, so that an existing file is always complete."""
    unfinished = target.with_name(target.name + ".part")
    written = 0
    try:
        with unfinished.open("wb") as file:
            while chunk := stream.read(CHUNK):
                written += len(chunk)
                if written > largest:
                    raise DataError(f"{target.name}: larger than {largest} bytes")
                file.write(chunk)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
