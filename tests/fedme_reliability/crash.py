"""Runs stopped at any instant, inside any write, by a loss of power, by a full or broken disk. Resumed, they end the same.

Every try is a real `fedme run` in a process of its own, killed by SIGKILL or stopped by its disk, then `fedme resume`. The end
is compared with a run that nobody touched: records but for the seconds, models byte for byte, the last checkpoint, the summary.
"""

import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fedme.running.progress import Display
from fedme_reliability import commands
from fedme_reliability.commands import Fault
from fedme_reliability.frame import Row
from fedme_test_runs import TINY, difference

SHORT = ["rounds=4", "train.epochs=1", "finetune.epochs=1"]
RUNS = {  # different ways to keep state: models of several architectures at the server, states at clients, clients that fail
    "fedme": ["models.pool=['mlr','dnn-8',{name='cnn-small',channels=2}]", "engine.workers=2", "engine.memory=0"],
    "fml": ["method.name=fml", "models.shared=dnn-8", "train.momentum=0.9", "checkpoint_every=2"],
    "pfedme": ["method.name=pfedme", "models.shared=mlr", "train.cohort=3", "faults.dropout=0.3", "faults.lost=0.2"],
}
KILLS = ("kill", "torn", "power")
ERRORS = {"full": "No space left on device", "broken": "Input/output error"}


class Bench:
    """One experiment, the run of it that nobody touched, and how long that takes."""

    def __init__(self, name: str, folder: Path, seed: int = 0) -> None:
        self.folder, self.random = folder / name, random.Random(f"{name} {seed}")
        self.words = ["digits-fedme", *TINY, *SHORT, *RUNS[name], "--quiet"]
        self.folder.mkdir(parents=True)
        self.whole = self.folder / "whole"
        self.command("resume", self.whole)  # refused at once; from now on everything is imported
        self.seconds = float("inf")
        for again in (self.whole, self.folder / "again"):  # twice: something else may have kept the machine busy
            began = time.monotonic()
            ended = self.command("run", again, Fault("none", 0))
            self.seconds = min(self.seconds, time.monotonic() - began)
        self.events = int((self.folder / "events").read_text())
        if ended.code or not self.events:
            raise RuntimeError(f"the run that nobody touches fails: {ended.said}")
        if different := difference(self.whole, self.folder / "again"):
            raise RuntimeError(f"two runs that nobody touches differ in their {different}")

    def command(self, verb: str, output: Path, fault: Fault | None = None) -> commands.Ended:
        return commands.do(self.given(verb, output), self.folder, output, fault)

    def given(self, verb: str, output: Path) -> list[str]:
        return ["run", *self.words, f"output={output}"] if verb == "run" else ["resume", str(output), "--quiet"]

    def begun(self, output: Path) -> str:
        """The command that goes on: a run that was stopped before it had a configuration is started again."""
        return "resume" if (output / "config.toml").exists() else "run"

    def killed(self, output: Path, verb: str = "run") -> bool:
        """Kill a command at some instant; whether it was not too late for that."""
        process = commands.start(self.given(verb, output), self.folder, output)
        time.sleep(self.random.uniform(0.0, self.seconds))
        process.kill()
        return commands.finish(process, self.folder).code == -signal.SIGKILL

    def goes_on(self, output: Path) -> str:
        """Resume; what is wrong with the end, or nothing."""
        ended = self.command(self.begun(output), output)
        if ended.code:
            return f"resume ended with {ended.code}: {ended.said[-300:]}"
        left = [path.name for path in output.rglob("*") if path.name.endswith((".partial", ".part"))]
        return f"left behind: {left}" if left else difference(self.whole, output)

    def instant(self, output: Path) -> str | None:
        """Killed at a random instant, sometimes twice."""
        if not self.killed(output):
            return None
        if self.random.random() < 0.3:
            self.killed(output, self.begun(output))
        return self.goes_on(output)

    def at_disk(self, output: Path, kind: str) -> str | None:
        """Killed at, or within, some operation of the disk."""
        fault = Fault(kind, self.random.randint(1, self.events))
        if self.command("run", output, fault).code != -signal.SIGKILL:
            return None
        wrong = self.goes_on(output)
        return wrong and f"{fault}: {wrong}"

    def refused(self, output: Path, kind: str) -> str | None:
        """Stopped by a disk that takes no more: told in one line; when it is mended the run goes on."""
        fault = Fault(kind, self.random.randint(1, self.events))
        ended = self.command("run", output, fault)
        if ended.code == 0:
            return None
        if ended.code != 2 or "Traceback" in ended.said or f"cannot be written to: {ERRORS[kind]}" not in ended.said:
            return f"{fault}: ended with {ended.code}: {ended.said[-300:]}"
        if self.begun(output) == "resume" and "`fedme resume" not in ended.said:
            return f"{fault}: does not say how to go on: {ended.said[-300:]}"
        wrong = self.goes_on(output)
        return wrong and f"{fault}: {wrong}"

    def tries(self, how: str, count: int, display: Display) -> tuple[int, list[str]]:
        """So many points at which the run really was stopped: how many there were, and what was wrong."""
        points, wrong = 0, []
        for number in range(4 * count):
            output = self.folder / f"{how}-{number}"
            found = (
                self.instant(output)
                if how == "instant"
                else self.at_disk(output, how)
                if how in KILLS
                else self.refused(output, how)
            )
            shutil.rmtree(output, ignore_errors=True)
            for spare in self.folder.glob("[0-9]*-[0-9]*"):
                spare.unlink()
            if found is None:
                continue
            points += 1
            display.advance()
            if found:
                wrong.append(found)
            if points == count:
                break
        return points, wrong


SMALL = """
mount -t tmpfs -o size=600k tmpfs "$1" || exit 77
small="$1"; copy="$2"; shift 2
"$@" "output=$small/run"; echo "run: $?"
mount -o remount,size=100m "$small"
"$1" -m fedme resume "$small/run" --quiet; echo "resume: $?"
cp -r "$small/run" "$copy"
"""


def small_disk(folder: Path) -> str | None:
    """A run on a real file system that gets full, then larger; what is wrong, and None where nobody may mount one."""
    words = ["run", "digits-fedme", *TINY, "rounds=80", "--quiet"]
    for name in ("whole", "mounted", "nothing"):
        (folder / name).mkdir(parents=True)
    script = ["unshare", "-rm", "sh", "-c", SMALL, "sh", str(folder / "mounted"), str(folder / "copy")]
    try:
        done = subprocess.run([*script, sys.executable, "-m", "fedme", *words], capture_output=True, text=True, timeout=600)
    except FileNotFoundError:
        return None
    if done.returncode == 77 or "unshare" in done.stderr:
        return None
    said = done.stdout + done.stderr
    message = "cannot be written to: No space left on device; free some space"
    if "run: 2" not in said or message not in said or "Traceback" in said:
        return f"not stopped in one line: {said[-500:]}"
    if "resume: 0" not in said:
        return f"not resumed: {said[-500:]}"
    whole = folder / "whole" / "run"
    commands.do([*words, f"output={whole}"], folder, whole)
    return difference(whole, folder / "copy")


def rows(display: Display, quick: bool) -> Iterator[Row]:
    """Killed and resumed, for every experiment and every way."""
    counts = {"instant": 2 if quick else 20, **dict.fromkeys((*KILLS, *ERRORS), 1 if quick else 10)}
    with tempfile.TemporaryDirectory() as place:
        for name in RUNS:
            display.start(f"{name}: killed and resumed", sum(counts.values()))
            bench = Bench(name, Path(place))
            done = {how: bench.tries(how, count, display) for how, count in counts.items()}
            said = {"instant": "at random instants", "kill": "before a write", "torn": "within a write or rename"}
            said |= {"power": "by a loss of power", "full": "by a full disk", "broken": "by a broken disk"}
            tried = sum(points for points, _ in done.values())
            wrong = [each for _, found in done.values() for each in found]
            detail = "; ".join([f"{points} {said[how]}" for how, (points, _) in done.items()] + wrong[:3])
            yield Row(f"{name}: stopped anywhere, resumed to the same bits", tried, tried - len(wrong), detail)
            short = bench.command("run", bench.folder / "short", Fault("short", 0))
            wrong = [difference(bench.whole, bench.folder / "short") if not short.code else short.said[-300:]]
            yield Row(f"{name}: writes that take a few bytes at a time", 1, int(wrong == [""]), wrong[0])
        display.start("a file system that gets full", 1)
        wrong = small_disk(Path(place) / "small")
        if wrong is not None:
            what = "a file system of 600 kB gets full, then larger: stopped in one line, resumed to the same bits"
            yield Row(what, 1, int(not wrong), wrong)
