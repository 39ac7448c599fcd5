"""Progress of a run: a bar on a terminal, plain lines elsewhere, nothing in quiet mode.

Everything goes to standard error; standard output has results only.
"""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from fedme.results.tables import print_prose

PAUSE = 2.0  # seconds between plain lines


class Display:
    """Progress of one run."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.console, self.quiet = console, quiet
        self.live = console.is_terminal and not quiet
        self.bar = Progress(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            BarColumn(16),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[info]}", table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
            disable=not self.live,
        )
        self.task: TaskID | None = None
        self.by_operation = False
        self.label, self.info = "", ""
        self.printed: set[str] = set()  # notes that several runs on the same data have in common
        self.done, self.total, self.inside, self.first = 0, 0, 0, 0
        self.start_time = self.last_line = time.monotonic()

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def note(self, text: str, always: bool = False) -> None:
        """Print a line; notes that concern the results are printed `always`, even in quiet mode, and once."""
        if always and text in self.printed:
            return
        if always or not self.quiet:
            self.printed |= {text} if always else set()
            print_prose([text], self.console)

    def start(self, label: str, total: int, done: int = 0, by_operation: bool = False) -> None:
        """Start work of `total` parts, of which `done` are done; with `by_operation` every tick completes a part."""
        self.by_operation = by_operation
        if self.task is not None:
            self.bar.remove_task(self.task)
        self.label, self.total, self.done, self.inside, self.info = label, total, done, 0, ""
        self.first, self.start_time, self.last_line = done, time.monotonic(), time.monotonic()
        self.task = self.bar.add_task(label, total=total, completed=done, info="")

    def advance(self, info: str | None = None) -> None:
        """Complete one part."""
        self.done, self.inside = self.done + 1, 0
        self.info = info if info is not None else self.info
        if self.task is not None:
            self.bar.update(self.task, completed=self.done, info=self.info)
        self._print_line(force=self.done == self.total)

    def tick(self) -> None:
        """Complete an operation of the current part."""
        if self.by_operation:
            return self.advance()
        self.inside += 1
        if self.live and self.task is not None:
            self.bar.update(self.task, info=f"{self.info} {'.' * (1 + self.inside // 20 % 3)}".strip())
        self._print_line()

    def _print_line(self, force: bool = False) -> None:
        now = time.monotonic()
        if self.live or self.quiet or (not force and now - self.last_line < PAUSE):
            return
        self.last_line = now
        made = self.done - self.first
        left = f", about {(now - self.start_time) / made * (self.total - self.done):.0f} s left" if made and not force else ""
        inside = f" and {self.inside} operation{'s' * (self.inside != 1)} of the next" if self.inside and not force else ""
        info = f", {self.info}" if self.info else ""
        self.console.print(f"{self.label} {self.done}/{self.total}{inside}{left}{info}", highlight=False, soft_wrap=True)
