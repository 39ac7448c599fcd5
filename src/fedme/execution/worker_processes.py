"""Worker processes, one thread each: for networks whose steps gain nothing from stacking, and for parts of large stacks.

Workers are forked, so they have the data without copying it; what travels is an operation's weights and row numbers. The
longest work goes first. A worker that dies is replaced and its work is done again, with the same result.
"""

import contextlib
import ctypes
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fedme.core.operations import Op, Train
from fedme.execution.worker_messages import Shared

LOOK = 0.5  # seconds between two looks whether the parent is alive
DEATHS = 3  # of workers over one piece of work before it is given up
Run = Callable[[Sequence[Op]], Sequence[tuple[Any, float]]]  # results and the seconds they took


class WorkerError(RuntimeError):
    """Work could not be done in a worker process."""


class Worker:
    """One process and the line to it."""

    def __init__(self, run: Run, shared: Shared) -> None:
        context = mp.get_context("fork")
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, run, shared, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()
        self.task: int | None = None

    def stop(self) -> None:
        """End the process at once: it keeps nothing."""
        self.process.kill()
        self.process.join()
        self.line.close()


def _serve(line: Connection, run: Run, shared: Shared, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    _keep_freed_memory()
    threading.Thread(target=_outlive, args=(parent,), daemon=True).start()
    while True:
        try:
            ops = [shared.unpacked(op) for op in line.recv()]
        except EOFError:
            return
        try:
            done, failure = [(shared.packed(value), seconds) for value, seconds in run(ops)], ""
        except Exception as error:  # whatever a user's network raises; the parent raises it again
            done, failure = [], f"{type(error).__name__}: {error}"
        line.send((done, failure))


def _keep_freed_memory() -> None:
    """Up to 256 MB of it: the tensors of a step are as large as those of the last one.

    What goes back to the system in between has to be cleared and mapped anew, which is a tenth of the time of large layers.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        libc = ctypes.CDLL(None)
        for setting, size in ((-3, 32 << 20), (-1, 256 << 20)):  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h
            libc.mallopt(setting, size)


def _outlive(parent: int) -> None:
    """End with the parent, however it ends and whatever is being computed: nobody waits for it."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    os._exit(1)


def effort(op: Op) -> float:
    """How long an operation takes, roughly: samples times weights."""
    if isinstance(op, Train):
        passes = (
            op.batch_schedule.steps * op.batch_schedule.batch
            if op.batch_schedule.steps is not None
            else op.batch_schedule.epochs * len(op.data)
        )
        return 3.0 * passes * sum(model.parameters for model in op.models.values())
    return float(len(op.data) * op.model.parameters)


class Workers:
    """A few worker processes, started when they are first needed, that do what `run` does.

    `before_fork` is called before one is started: a process with other threads at work is not copied safely.
    """

    def __init__(
        self, count: int, run: Run, tick: Callable[[], None] = lambda: None, before_fork: Callable[[], None] = lambda: None
    ) -> None:
        self.count, self.run, self.tick, self.before_fork = count, run, tick, before_fork
        self.shared = Shared()
        self.workers: list[Worker] = []

    def __call__(self, work: Sequence[Sequence[Op]]) -> list[Sequence[tuple[Any, float]]]:
        """Run every piece of work in some worker; its results in order, with the seconds each took."""
        if self.shared.lacks(op for piece in work for op in piece):
            self.close()  # workers have what was there when they were forked
        waiting = sorted(range(len(work)), key=lambda i: sum(map(effort, work[i])))  # taken from the end: the longest first
        results: dict[int, Sequence[tuple[Any, float]]] = {}
        deaths = [0] * len(work)
        try:
            while len(results) < len(work):
                self._hand_out(work, waiting)
                busy = {worker.line: worker for worker in self.workers if worker.task is not None}
                for line in wait(list(busy), timeout=1.0):
                    worker = busy[line]  # type: ignore[index]
                    task, worker.task = worker.task, None
                    assert task is not None
                    try:
                        done, failure = worker.line.recv()
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
                    results[task] = [(self.shared.unpacked(value), seconds) for value, seconds in done]
                    for _ in work[task]:
                        self.tick()
        except BaseException:
            self.close()  # nobody waits for what is still being computed
            raise
        return [results[i] for i in range(len(work))]

    def _hand_out(self, work: Sequence[Sequence[Op]], waiting: list[int]) -> None:
        while len(self.workers) < min(self.count, len(work)):
            self.workers.append(self._started())
        for worker in list(self.workers):
            if worker.task is None and waiting:
                task = waiting.pop()
                try:
                    worker.line.send([self.shared.packed(op) for op in work[task]])
                    worker.task = task
                except (BrokenPipeError, ConnectionResetError):  # it died while idle
                    waiting.append(task)
                    self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        with contextlib.suppress(OSError):
            worker.stop()
        self.workers[self.workers.index(worker)] = self._started()

    def _started(self) -> Worker:
        self.before_fork()
        return Worker(self.run, self.shared)

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            with contextlib.suppress(OSError):
                worker.stop()
        self.workers = []
