"""Follow a run in the terminal while it goes on, by reading its `metrics.jsonl`."""

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
from fedme.results.run_directory import similar_run

LOSS = "training loss"
HEIGHT = 12  # rows of a plot


class FollowedRun:
    """The records of a run so far; `update` reads new ones."""

    def __init__(self, folder: Path) -> None:
        if not (folder / summary.CONFIG).exists():
            raise RunError(f"{folder}: not a run directory{similar_run(folder) or '; `fedme run` starts one'}")
        self.folder, self.config = folder, summary.config_of(folder)
        self._reset()

    def _reset(self) -> None:
        self.offset = 0  # bytes read
        self.curves: dict[str, dict[int, float]] = defaultdict(dict)
        self.sent: dict[int, int] = {}
        self.newest: tuple[int, list[dict[str, Any]]] = (-1, [])  # the rows of the last round, which may be incomplete
        self.headline: dict[str, None] = {}  # the names of the curves of the headline metric

    def update(self) -> bool:
        """Read complete new lines and return whether there were any."""
        path = self.folder / records.NAME
        size = path.stat().st_size if path.exists() else 0
        if size < self.offset:  # resumed from an earlier checkpoint: rounds are computed again
            self._reset()
        if size == self.offset:
            return False
        with path.open("rb") as file:
            file.seek(self.offset)
            new = file.read()
        lines = new[: new.rfind(b"\n") + 1]
        self.offset += len(lines)
        rounds: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for line in lines.splitlines():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise RunError(f"{path}: damaged: {error}") from error
            rounds[row["round"]].append(row)
        for t, rows in rounds.items():
            self.newest = t, [*(self.newest[1] if self.newest[0] == t else []), *rows]
            self._set_round(*self.newest)
        return bool(rounds)

    def _set_round(self, t: int, rows: list[dict[str, Any]]) -> None:
        traffic = {row["client"]: row["bytes_up"] + row["bytes_down"] for row in rows}
        self.sent[t] = sum(traffic.values())
        measure = MEASURES[task_type_of_row(rows[0])][0]
        factor = 100 if measure.percent else 1
        metrics = {
            f"{split_name} {measure.heading}": [
                row[measure.key] for row in rows if (row["model"], row["stage"], row["split"]) == ("personal", "round", split)
            ]
            for split, split_name in (("val", "validation"), ("test", "test"))
        }
        self.headline |= dict.fromkeys(metrics)
        for name, values in (metrics | {LOSS: [row["loss"] for row in rows if row["stage"] == "training"]}).items():
            known = [value for value in values if value is not None]
            if known:
                self.curves[name][t] = statistics.fmean(known) * (1 if name == LOSS else factor)

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return (self.folder / summary.NAME).exists()

    def line(self, t: int) -> str:
        """A round in one line."""
        values = [f"{name} {curve[t]:.4g}" for name, curve in self.curves.items() if t in curve]
        sent = sum(size for round, size in self.sent.items() if round <= t)
        return f"round {t + 1}/{self.config['rounds']}: {', '.join(values)}, {sent / 1e6:.1f} MB sent"

    def screen(self, width: int, idle: float) -> RenderableType:
        """The state of the run, its curves and its last round."""
        config = self.config
        state = "finished" if self.finished else f"nothing new for {idle:.0f} s" if idle > 10 else "running"
        title = Text(f"{config['name']}: {config['method']['name']}, seed {config['seed']}, {state}, in {self.folder}")
        if not self.sent:
            return Group(title, Text("no round is finished yet"))
        plot_width = width // 2 - 1 if width >= 110 else width - 1
        plots = []
        for names in (self.headline, (LOSS,)):
            series = {name: sorted(self.curves[name].items()) for name in names if self.curves.get(name)}
            if series:
                plots.append(plot(series, plot_width, HEIGHT, config["rounds"] - 1))
        return Group(title, Columns(plots, padding=(0, 1)), Text(self.line(max(self.sent))))


def watch(folder: Path, console: Console, every: float, once: bool = False) -> None:
    """Redraw the curves of a run until it is finished; without a terminal, print one line per round."""
    run = FollowedRun(folder)
    if once:
        run.update()
        console.print(run.screen(console.width, 0))
    elif console.is_terminal:
        _redraw(run, console, every)
    else:
        _print_rounds(run, console, every)


def _redraw(run: FollowedRun, console: Console, every: float) -> None:
    last_change = time.monotonic()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            finished = run.finished  # before reading, so that everything written until then is read below
            last_change = time.monotonic() if run.update() else last_change
            live.update(run.screen(console.width, time.monotonic() - last_change), refresh=True)
            if finished:
                return
            time.sleep(every)


def _print_rounds(run: FollowedRun, console: Console, every: float) -> None:
    printed = -1
    while True:
        finished = run.finished
        run.update()
        for t in sorted(t for t in run.sent if t > printed):
            console.print(run.line(t), highlight=False, soft_wrap=True)
            printed = t
        if finished:
            return
        time.sleep(every)
