"""A run seen while it goes on: `metrics.jsonl` is read along and drawn in the terminal."""

import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from fedme.core.atomic_files import RunError
from fedme.core.metrics import MEASURES, task_type_of_row
from fedme.report.terminal_plot import plot
from fedme.results import records, summary

LOSSES = "training loss"
HEIGHT = 12  # rows of a plot


class Followed:
    """What is known of a run so far; `look` reads what is new."""

    def __init__(self, folder: Path) -> None:
        if not (folder / summary.CONFIG).exists():
            raise RunError(f"{folder}: not a run directory (no {summary.CONFIG}); `fedme run` starts one")
        self.folder, self.config = folder, summary.config_of(folder)
        self._forget()

    def _forget(self) -> None:
        self.at = 0
        self.curves: dict[str, dict[int, float]] = defaultdict(dict)
        self.sent: dict[int, int] = {}
        self.newest: tuple[int, list[dict[str, Any]]] = (-1, [])  # the rows of the last round, which may not be whole yet
        self.shown: dict[str, None] = {}  # the curves of what counts

    def look(self) -> bool:
        """Read whole new lines; whether there were any."""
        path = self.folder / records.NAME
        size = path.stat().st_size if path.exists() else 0
        if size < self.at:  # resumed from an earlier checkpoint: rounds are computed again
            self._forget()
        if size == self.at:
            return False
        with path.open("rb") as file:
            file.seek(self.at)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self.at += len(whole)
        fresh: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for line in whole.splitlines():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise RunError(f"{path}: damaged: {error}") from error
            fresh[row["round"]].append(row)
        for t, rows in fresh.items():
            self.newest = t, [*(self.newest[1] if self.newest[0] == t else []), *rows]
            self._add(*self.newest)
        return bool(fresh)

    def _add(self, t: int, rows: list[dict[str, Any]]) -> None:
        """What is known of a round, in place of what was known of it before."""
        traffic = {row["client"]: row["bytes_up"] + row["bytes_down"] for row in rows}
        self.sent[t] = sum(traffic.values())
        measure = MEASURES[task_type_of_row(rows[0])][0]
        factor = 100 if measure.percent else 1
        named = {
            f"{word} {measure.heading}": [r[measure.key] for r in rows if _is(r, "personal", "round", split)]
            for split, word in (("val", "validation"), ("test", "test"))
        }
        self.shown |= dict.fromkeys(named)
        for name, values in (named | {LOSSES: [r["loss"] for r in rows if r["stage"] == "training"]}).items():
            known = [value for value in values if value is not None]
            if known:
                self.curves[name][t] = statistics.fmean(known) * (1 if name == LOSSES else factor)

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return (self.folder / summary.NAME).exists()

    def line(self, t: int) -> str:
        """A round in one line."""
        known = [f"{name} {curve[t]:.4g}" for name, curve in self.curves.items() if t in curve]
        sent = sum(size for round, size in self.sent.items() if round <= t)
        return f"round {t + 1}/{self.config['rounds']}: {', '.join(known)}, {sent / 1e6:.1f} MB sent"

    def screen(self, width: int, idle: float) -> RenderableType:
        """Everything that there is to see."""
        config = self.config
        state = "finished" if self.finished else f"no news for {idle:.0f} s" if idle > 10 else "running"
        title = Text(f"{config['name']}: {config['method']['name']}, seed {config['seed']}, {state}, in {self.folder}")
        if not self.sent:
            return Group(title, Text("no round is finished yet"))
        half = width // 2 - 1 if width >= 110 else width - 1
        shown = [list(self.shown), [LOSSES]]
        plots = []
        for names in shown:
            series = {name: sorted(self.curves[name].items()) for name in names if self.curves.get(name)}
            if series:
                plots.append(plot(series, half, HEIGHT, config["rounds"] - 1))
        return Group(title, Columns(plots, padding=(0, 1)), Text(self.line(max(self.sent))))


def _is(row: dict[str, Any], model: str, stage: str, split: str) -> bool:
    return (row["model"], row["stage"], row["split"]) == (model, stage, split)


def watch(folder: Path, console: Console, every: float, once: bool = False) -> None:
    """Draw a run again and again until it is finished; without a terminal, print a line a round."""
    run = Followed(folder)
    if once or not console.is_terminal:
        _plainly(run, console, every, once)
        return
    news = time.monotonic()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            finished = run.finished  # before reading: what was written by then is read below
            news = time.monotonic() if run.look() else news
            live.update(run.screen(console.width, time.monotonic() - news), refresh=True)
            if finished:
                return
            time.sleep(every)


def _plainly(run: Followed, console: Console, every: float, once: bool) -> None:
    if once:
        run.look()
        console.print(run.screen(console.width, 0))
        return
    told = -1
    while True:
        finished = run.finished
        run.look()
        for t in sorted(t for t in run.sent if t > told):
            console.print(run.line(t), highlight=False, soft_wrap=True)
            told = t
        if finished:
            return
        time.sleep(every)
