"""A long run: its memory, its open files and the files in its directory stay as they are, and it can be read while it grows."""

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedme.report.watch import FollowedRun
from fedme.results import records
from fedme.running.progress import Display
from fedme_reliability import commands
from fedme_reliability.frame import Row
from fedme_test_runs import TINY

ROUNDS = 2000
PAUSE = 0.5  # seconds between two looks
RUNS = {
    "fedme": ["method.clusters={0 = 1, 4 = 2}", "engine.memory=0"],
    "fml": ["method.name=fml", "models.shared=dnn-8", "train.momentum=0.9"],
}
GROWTH = (
    8.0  # megabytes between the first and the last quarter of a run that are no leak: the system rounds, and so does malloc
)
READERS = (["show"], ["show", "--clients"], ["watch", "--once"], ["report", "--output"])


class Look(NamedTuple):
    """A running process and its directory at one moment."""

    round: int
    megabytes: float  # resident
    handles: int
    files: int


def looked(pid: int, folder: Path, t: int) -> Look | None:
    """How things are now; nothing if the process has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        handles = len(os.listdir(f"/proc/{pid}/fd"))
    except (OSError, StopIteration):
        return None
    results = (str(folder / "clients"), str(folder / "shared"))  # the models themselves, at the end
    files = sum(len(names) for at, _, names in os.walk(folder) if not at.startswith(results))
    return Look(t, resident / 1024, handles, files)


class Watched:
    """One long run, looked at until it ends."""

    def __init__(self, words: list[str], rounds: int, place: Path, display: Display) -> None:
        self.folder, self.rounds, self.display = place / "run", rounds, display
        self.looks: list[Look] = []
        self.reads, self.wrong = 0, list[str]()
        given = ["run", "digits-fedme", *TINY, *words, f"rounds={rounds}", f"output={self.folder}", "--quiet"]
        process = commands.start(given, place, self.folder)
        done, reader = 0, 0
        while process.is_alive():
            time.sleep(PAUSE)
            t = self._read()
            if (look := looked(process.pid, self.folder, t)) is not None and t > 0:
                self.looks.append(look)
            for _ in range(done, t):
                display.advance()
            done = max(done, t)
            if t > (reader + 1) * rounds / 8:  # now and then somebody looks at it with a command
                self._command(READERS[reader % len(READERS)], place)
                reader += 1
        self.ended = commands.finish(process, place)
        self._read()

    def _read(self) -> int:
        """Read the whole metrics file as others do, in the middle of whatever is being written; the rounds in it."""
        if not (self.folder / records.NAME).exists():
            return 0
        self.reads += 1
        try:
            followed = FollowedRun(self.folder)
            followed.update()
            last = -1
            for row in records.read(self.folder):
                last = row["round"]
            if sorted(followed.sent) != list(range(max(followed.sent, default=-1) + 1)):
                self.wrong.append(f"rounds are missing before round {last}")
            return last + 1
        except Exception as error:
            self.wrong.append(f"{type(error).__name__}: {error}")
            return 0

    def _command(self, words: list[str], place: Path) -> None:
        output = [str(place / "report.html")] if words[-1] == "--output" else []
        (place / "reader").mkdir(exist_ok=True)
        self.reads += 1
        ended = commands.do([words[0], str(self.folder), *words[1:], *output], place / "reader", place / "nothing")
        if ended.code:
            self.wrong.append(f"fedme {' '.join(words)}: {ended.said[-200:]}")

    def quarter(self, number: int) -> list[Look]:
        """The looks in the first (0) to the last (3) quarter of the rounds."""
        return [look for look in self.looks if number <= 4 * look.round / self.rounds < number + 1]


def rows(display: Display, quick: bool) -> Iterator[Row]:
    """Long runs of two methods."""
    rounds = 200 if quick else ROUNDS
    for name, words in RUNS.items():
        display.start(f"{name}: long run, round", rounds)
        with tempfile.TemporaryDirectory() as place:
            watched = Watched(words, rounds, Path(place), display)
            yield from judged(name, watched)


def judged(name: str, watched: Watched) -> Iterator[Row]:
    """What was seen of a long run."""
    second, last = watched.quarter(1), watched.quarter(3)
    ended = watched.ended.code == 0 and json.loads((watched.folder / "summary.json").read_text())["rounds"] == watched.rounds
    yield Row(f"{name}: {watched.rounds} rounds", 1, int(ended), "" if ended else watched.ended.said[-300:])
    if not second or not last:
        yield Row(f"{name}: looked at often enough", 1, 0, f"{len(watched.looks)} looks")
        return
    before, after = max(look.megabytes for look in second), max(look.megabytes for look in last)
    seen = f"{before:.0f} MB in the second quarter, {after:.0f} MB in the last, at most {GROWTH:g} more"
    yield Row(f"{name}: memory does not grow", len(watched.looks), len(watched.looks) * (after - before <= GROWTH), seen)
    for what, index in (("open files", 2), ("files in the run directory", 3)):
        before, after = max(look[index] for look in second), max(look[index] for look in last)
        yield Row(
            f"{name}: {what} do not grow", len(watched.looks), len(watched.looks) * (after <= before + 2), f"{before}, {after}"
        )
    size = (watched.folder / records.NAME).stat().st_size / 1e6
    detail = "; ".join([f"up to {size:.1f} MB", *watched.wrong[:2]])
    yield Row(f"{name}: read while it grows", watched.reads, watched.reads - len(watched.wrong), detail)
