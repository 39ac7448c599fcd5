"""Worker processes, one thread each: for networks whose steps are too large to gain from stacking, such as convolutions.

Workers are forked, so they have the data without copying it; what travels is an operation's weights and row numbers. The
longest operation goes first. A worker that dies is replaced and its operation is run again, with the same result.
"""

import contextlib
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fedme.core.client import Op, Train
from fedme.core.data import Source, Split
from fedme.engines import alone

DEATHS = 3  # of workers over one operation before it is given up


class WorkerError(RuntimeError):
    """An operation could not be run in a worker process."""


@dataclass(frozen=True)
class Sent:
    """A split without its source, which the worker has already."""

    source: int
    rows: torch.Tensor
    targets: torch.Tensor | None


class Worker:
    """One process and the line to it."""

    def __init__(self, sources: Mapping[int, Source]) -> None:
        context = mp.get_context("fork")
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, dict(sources)), daemon=True)
        self.process.start()
        theirs.close()
        self.task: int | None = None

    def stop(self) -> None:
        """End the process at once: it keeps nothing."""
        self.process.kill()
        self.process.join()
        self.line.close()


def _serve(line: Connection, sources: dict[int, Source]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    parent = os.getppid()
    while os.getppid() == parent:
        if not line.poll(1.0):
            continue
        try:
            op = _unpacked(line.recv(), sources)
        except EOFError:
            return
        start = time.perf_counter()
        try:
            answer: tuple[Any, float, str] = (alone.run(op), time.perf_counter() - start, "")
        except Exception as error:  # whatever a user's network raises; the parent raises it again
            answer = (None, 0.0, f"{type(error).__name__}: {error}")
        line.send(answer)


def _packed(op: Op, number: int) -> Op:
    sent: Any = Sent(number, op.data.rows, op.data.targets)
    return replace(op, data=sent)


def _unpacked(op: Op, sources: Mapping[int, Source]) -> Op:
    sent: Any = op.data
    return replace(op, data=Split(sources[sent.source], sent.rows, sent.targets))


def effort(op: Op) -> float:
    """How long an operation takes, roughly: samples times weights."""
    if isinstance(op, Train):
        passes = op.local.steps * op.local.batch if op.local.steps is not None else op.local.epochs * len(op.data)
        return 3.0 * passes * sum(model.parameters for model in op.models.values())
    return float(len(op.data) * op.model.parameters)


class Workers:
    """A few worker processes, started when they are first needed."""

    def __init__(
        self, count: int, tick: Callable[[], None] = lambda: None, before_fork: Callable[[], None] = lambda: None
    ) -> None:
        self.count, self.tick = count, tick
        self.before_fork = before_fork  # a process with other threads at work is not copied safely
        self.sources: dict[int, Source] = {}
        self.numbers: dict[int, int] = {}
        self.workers: list[Worker] = []

    def run(self, ops: Sequence[Op]) -> list[tuple[Any, float]]:
        """Run every operation in some worker; results in order, with the seconds each took."""
        self._know([op.data.source for op in ops])
        waiting = sorted(range(len(ops)), key=lambda i: effort(ops[i]))  # taken from the end: the longest first
        results: dict[int, tuple[Any, float]] = {}
        deaths = [0] * len(ops)
        try:
            while len(results) < len(ops):
                self._hand_out(ops, waiting)
                busy = {worker.line: worker for worker in self.workers if worker.task is not None}
                for line in wait(list(busy), timeout=1.0):
                    worker = busy[line]  # type: ignore[index]
                    task, worker.task = worker.task, None
                    assert task is not None
                    try:
                        value, seconds, failure = worker.line.recv()
                    except (EOFError, OSError):  # it died
                        deaths[task] += 1
                        if deaths[task] >= DEATHS:
                            raise WorkerError(
                                f"{DEATHS} worker processes died over one operation; is there enough memory?"
                            ) from None
                        waiting.append(task)
                        self._replace(worker)
                        continue
                    if failure:
                        raise WorkerError(failure)
                    results[task] = value, seconds
                    self.tick()
        except BaseException:
            self.close()  # nobody waits for what is still being computed
            raise
        return [results[i] for i in range(len(ops))]

    def _hand_out(self, ops: Sequence[Op], waiting: list[int]) -> None:
        while len(self.workers) < min(self.count, len(ops)):
            self.workers.append(self._started())
        for worker in list(self.workers):
            if worker.task is None and waiting:
                task = waiting.pop()
                try:
                    worker.line.send(_packed(ops[task], self.numbers[id(ops[task].data.source)]))
                    worker.task = task
                except (BrokenPipeError, ConnectionResetError):  # it died while idle
                    waiting.append(task)
                    self._replace(worker)

    def _know(self, sources: Sequence[Source]) -> None:
        """Workers have the sources that were there when they were forked."""
        new = [source for source in sources if id(source) not in self.numbers]
        if new:
            self.close()
            for source in new:
                self.numbers.setdefault(id(source), len(self.numbers))
                self.sources[self.numbers[id(source)]] = source

    def _replace(self, worker: Worker) -> None:
        with contextlib.suppress(OSError):
            worker.stop()
        self.workers[self.workers.index(worker)] = self._started()

    def _started(self) -> Worker:
        self.before_fork()
        return Worker(self.sources)

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            with contextlib.suppress(OSError):
                worker.stop()
        self.workers = []
