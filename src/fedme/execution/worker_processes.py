"""Worker processes of one thread each: they run operations of the reference backend and parts of large stacks.

Workers are forked, so they have the data without a copy. Weights and row numbers travel through shared memory. The longest work
goes first. A worker gets its next work while it computes, so that it never waits: messages take turns in two memories, and
results in three, because those of the work before may not be read yet. A worker that dies is replaced and its work is done
again, with the same result.
"""

import contextlib
import ctypes
import itertools
import multiprocessing as mp
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from fedme.core.operations import Op
from fedme.execution.routing import Backend, Tick, effort, no_tick, run_timed
from fedme.execution.worker_messages import SharedMemory, SharedObjects, needed_memory

PARENT_CHECK = 0.5  # seconds between two checks that the parent is alive
DEATHS = 3  # of workers over one piece of work before it fails
AHEAD = 2  # pieces of work that a worker has: what it does, and what it does next
FEW = 4  # operations of a message that may be sent ahead: others would be packed in vain
SHORT = 1 << 14  # bytes of a message that a pipe takes while nobody reads: a worker may be writing its results
LEAST_MEMORY = 1 << 24  # bytes that a process shares with a worker in each direction; they are taken when they are used
Work = tuple[Backend, Sequence[Op]]  # operations of one group, and their backend


class WorkerError(RuntimeError):
    """An operation failed in a worker process."""


class Worker:
    """One process and the connection to it; `tasks` are the numbers of the work it does and of what it does next."""

    def __init__(self, backends: Sequence[Backend], shared: SharedObjects, memory: int) -> None:
        context = mp.get_context("fork")
        self.line, worker_end = context.Pipe()
        theres, backs = ([SharedMemory(memory) for _ in range(count)] for count in (AHEAD, AHEAD + 1))
        self.theres, self.backs, self.sent = theres, itertools.cycle(backs), 0
        arguments = (worker_end, theres, backs, backends, shared, os.getpid())
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        worker_end.close()
        self.tasks: deque[int] = deque()

    def stop(self) -> None:
        """Kill the process: it has no state."""
        self.process.kill()
        self.process.join()
        self.line.close()


def _serve(
    line: Connection,
    theres: Sequence[SharedMemory],
    backs: Sequence[SharedMemory],
    backends: Sequence[Backend],
    shared: SharedObjects,
    parent: int,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    _keep_freed_memory()
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    for there, back in zip(itertools.cycle(theres), itertools.cycle(backs), strict=False):
        try:
            number, message = line.recv()
        except EOFError:
            return
        try:
            timed = run_timed(backends[number], shared.unpack(message, there, copy=False))
            results = shared.pack([value for value, _ in timed], back), [seconds for _, seconds in timed]
            failure = ""
        except Exception as error:  # a user's network may raise anything; the parent raises it again
            results, failure = ([], []), f"{type(error).__name__}: {error}"
        line.send((results, failure))


def _keep_freed_memory() -> None:
    """Keep up to 256 MB of freed memory: the tensors of a step are as large as those of the step before.

    Memory that goes back to the system in between must be mapped and cleared again, a tenth of the time of large layers.
    """
    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        libc = ctypes.CDLL(None)
        for setting, size in ((-3, 32 << 20), (-1, 256 << 20)):  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h
            libc.mallopt(setting, size)


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK)
    os._exit(1)


class Workers:
    """`count` worker processes with these backends, started when they are first needed.

    `before_fork` is called before a worker is started: forking while other threads run is not safe.
    """

    def __init__(self, count: int, backends: Sequence[Backend], tick: Tick = no_tick, before_fork: Tick = no_tick) -> None:
        self.count, self.backends, self.tick, self.before_fork = count, backends, tick, before_fork
        self.shared = SharedObjects()
        self.memory = LEAST_MEMORY
        self.workers: list[Worker] = []

    def __call__(self, work: Sequence[Work]) -> list[Sequence[tuple[Any, float]]]:
        """Run every piece of work in some worker; the results of each, with their seconds, in order."""
        memory = max((needed_memory(ops) for _, ops in work), default=0)
        if self.shared.add_missing(op for _, ops in work for op in ops) or memory > self.memory:
            self.close()  # workers know what was there when they were forked
        self.memory = max(self.memory, memory)
        waiting = sorted(range(len(work)), key=lambda i: sum(map(effort, work[i][1])))  # taken from the end: the longest first
        results: dict[int, Sequence[tuple[Any, float]]] = {}
        deaths = [0] * len(work)
        try:
            while len(results) < len(work):
                self._assign(work, waiting)
                busy = {worker.line: worker for worker in self.workers if worker.tasks}
                for line in wait(list(busy), timeout=1.0):
                    worker = busy[line]  # type: ignore[index]
                    task = worker.tasks.popleft()
                    try:
                        (values, seconds), failure = worker.line.recv()
                    except (EOFError, OSError):  # it died
                        deaths[task] += 1
                        if deaths[task] >= DEATHS:
                            raise WorkerError(
                                f"{DEATHS} worker processes died over one operation; is there enough memory?"
                            ) from None
                        waiting.extend([*reversed(worker.tasks), task])
                        self._replace(worker)
                        continue
                    if failure:
                        raise WorkerError(failure)
                    back = next(worker.backs)
                    self._assign(work, waiting)
                    unpacked = self.shared.unpack(values, back, copy=True)
                    results[task] = list(zip(unpacked, seconds, strict=True))
                    for _ in seconds:
                        self.tick()
        except BaseException:
            self.close()  # the results of what still runs are not needed
            raise
        return [results[i] for i in range(len(work))]

    def _assign(self, work: Sequence[Work], waiting: list[int]) -> None:
        while len(self.workers) < min(self.count, len(work)):
            self.workers.append(self._start())
        for ahead in range(AHEAD):  # nobody has a second piece before all have one; the last ones go to who is ready first
            for worker in list(self.workers):
                if len(worker.tasks) > ahead or len(waiting) <= ahead * self.count:
                    continue
                backend, ops = work[waiting[-1]]
                if ahead and len(ops) > FEW:
                    continue
                packed = self.shared.pack(ops, worker.theres[worker.sent % AHEAD])
                message = ForkingPickler.dumps((self.backends.index(backend), packed))
                if ahead and len(message) > SHORT:
                    continue
                try:
                    worker.line.send_bytes(message)
                except (BrokenPipeError, ConnectionResetError):  # it died; over work, `wait` says so too
                    if not worker.tasks:
                        self._replace(worker)
                    continue
                worker.sent += 1
                worker.tasks.append(waiting.pop())

    def _replace(self, worker: Worker) -> None:
        with contextlib.suppress(OSError):
            worker.stop()
        self.workers[self.workers.index(worker)] = self._start()

    def _start(self) -> Worker:
        self.before_fork()
        return Worker(self.backends, self.shared, self.memory)

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            with contextlib.suppress(OSError):
                worker.stop()
        self.workers = []
