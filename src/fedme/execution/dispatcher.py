"""Execute operations that wait at the same time: in groups of one program where that is possible, else one by one.

The route of an operation depends on the operation and the settings alone, and `paths` counts what was taken and why.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fedme.core.operations import EstimateStatistics, Evaluate, Op, Train
from fedme.execution.compiled import Compiled, alike_for_compiled
from fedme.execution.device import DeviceWeights, Precision, arithmetic, free_memory, needed_memory
from fedme.execution.eager import Eager
from fedme.execution.early_calls import EarlyCalls, Results
from fedme.execution.input_tables import InputTables
from fedme.execution.private_batches import PrivateBatches
from fedme.execution.reference import Reference
from fedme.execution.routing import (
    Backend,
    Route,
    Tick,
    effort,
    effort_alone,
    is_large,
    models_of,
    no_tick,
    pieces,
    run_timed,
    sizes,
)
from fedme.execution.stacked import Stacked, StackedByVmap
from fedme.execution.worker_processes import Workers

EnginePath = Literal["auto", "reference", "compiled", "stacked", "workers"]
LARGE = 2e8  # effort from which on a stack is divided among workers
WORTHWHILE = 5e7  # effort of operations that run alone from which on they go to workers: a message costs about 0.3 ms
TOO_LARGE = "a network of so many weights does not fit the cache, and runs by itself to save memory"
PIECES = 4  # messages per worker: fewer cost less, more are divided more evenly


@dataclass(frozen=True)
class Unit:
    """Operations, by index, that are executed in one place, and their effort; `own_program`: as one program."""

    operations: Sequence[int]
    effort: float
    own_program: bool


class Dispatcher:
    """An executor that groups operations.

    `path` allows one way of running operations only; what it does not support runs on the reference backend. `before_fork`
    is called before a worker process is started.
    """

    clients_at_a_time = 128  # what Python makes for more of them in a round does not fit the cache of a processor

    def __init__(
        self,
        tick: Tick = no_tick,
        workers: int = 1,
        path: EnginePath = "auto",
        device: str = "cpu",
        before_fork: Tick = no_tick,
        precision: Precision | None = None,
        device_memory: int | None = None,
    ) -> None:
        self.tick, self.path, self.device, self.precision = tick, path, torch.device(device), precision
        # Neither compiled code nor a forked process can use another device. "cpu:0" is the processor in the part of a device.
        on_cpu = device == "cpu"
        limit = 0 if on_cpu else free_memory(self.device) if device_memory is None else device_memory
        self.device_weights = None if on_cpu else DeviceWeights(self.device, limit // 2)
        self.device_limit = limit - limit // 2  # of operations that run at the same time
        workers = workers if path in ("auto", "workers") and on_cpu else 1
        tables = InputTables(self.device)
        self.eager, self.private, self.reference = Eager(tables), PrivateBatches(), Reference()
        by_vmap = StackedByVmap(tables, self.eager if path == "auto" and on_cpu else None)
        # Gradients in closed form do not know that networks run in another precision than their weights.
        stacked = [by_vmap] if precision == "bfloat16" else [Stacked(tables), by_vmap]
        native, eager = ([Compiled(tables, workers)], [self.eager]) if on_cpu else ([], [])
        paths: dict[str, list[Backend]] = {
            "auto": [*native, *stacked, *eager, self.private],
            "compiled": [*native],
            "stacked": [*stacked, self.private],
            "workers": [*eager, self.private],
        }
        self.backends: list[Backend] = [*paths.get(path, []), self.reference]
        self.workers = Workers(workers, self.backends, tick, before_fork) if workers > 1 else None
        self.paths: Counter[tuple[str, str, str]] = Counter()  # (operation, path, reason) -> operations
        self._known: dict[Hashable, tuple[Route, Op]] = {}  # routes that operations share until all have run
        self._early = EarlyCalls()

    def begin(self, operations: Sequence[Op]) -> None:
        """Begin with some of the operations that will be asked for, where this changes no result."""
        for op in operations:
            self._early.offer(op, *self._route_of(op))

    def __call__(self, operations: Sequence[Op]) -> Sequence[tuple[Any, float]]:
        """The result of every operation and its seconds. What has begun may be computed until its result is read."""
        if not self._early.places:
            return self._run(operations)
        self.begin([op for op in operations if id(op) not in self._early.places])
        calls, places = self._early.taken()
        for call in calls:
            self._count(call.operations, call.routes)
        others = [op for op in operations if id(op) not in places]
        results = dict(zip(map(id, others), self._run(others), strict=True))
        return Results([places.get(id(op)) or results[id(op)] for op in operations], self.tick)

    def _run(self, operations: Sequence[Op]) -> list[tuple[Any, float]]:
        routes = [self._route_of(op)[0] for op in operations]
        here, in_workers = self._place(operations, routes)
        results: dict[int, tuple[Any, float]] = {}
        if self.workers is not None and in_workers:
            work = [(routes[piece[0]].backend, [operations[index] for index in piece]) for piece in in_workers]
            for piece, timed in zip(in_workers, self.workers(work), strict=True):
                results.update(zip(piece, timed, strict=True))
        for piece in here:
            run = run_timed if self.device_weights is None else self._run_on_device
            timed = run(routes[piece[0]].backend, [operations[index] for index in piece], self.tick)
            results.update(zip(piece, timed, strict=True))
        for placed, where in ((here, ""), (in_workers, " in workers")):
            placed_operations = [index for piece in placed for index in piece]
            self._count(
                [operations[index] for index in placed_operations], [routes[index] for index in placed_operations], where
            )
        self._known.clear()
        return [results[index] for index in range(len(operations))]

    def _count(self, operations: Sequence[Op], routes: Sequence[Route], where: str = "") -> None:
        by_id = {id(route): route for route in routes}
        for (kind, number), count in Counter(zip(map(type, operations), map(id, routes), strict=True)).items():
            route = by_id[number]
            self.paths[kind.__name__.lower(), f"{route.backend.name}{where}", route.reason] += count

    def _route_of(self, op: Op) -> tuple[Route, float]:
        """The route of an operation, and its effort; operations that compiled code cannot tell apart share a route."""
        alike = alike_for_compiled(op)
        known = self._known.get(alike) if alike is not None else None
        if known is not None:
            route, size = known[0], sizes(op)
            takes = route.efforts.get(size)
            if takes is not None:
                return route, takes
            assert isinstance(route.backend, Compiled)
            if route.backend.supports_alike(op):
                takes = effort(op)
                if not any(model.buffers for model in models_of(op)):  # else the next one may have other buffers
                    route.efforts[size] = takes
                return route, takes
        route = self.route(op)
        if alike is not None and isinstance(route.backend, Compiled):
            self._known[alike] = route, op  # identities are valid while the operation is kept
        return route, effort(op)

    def _run_on_device(self, backend: Backend, ops: Sequence[Op], tick: Tick) -> list[tuple[Any, float]]:
        """The results of operations of one group on the device, of as many at once as it has memory for."""
        weights = self.device_weights
        assert weights is not None
        results: dict[int, tuple[Any, float]] = {}
        for piece in pieces([float(needed_memory(op)) for op in ops], self.device_limit):
            with arithmetic(self.device, self.precision):
                timed = run_timed(backend, [weights.put(ops[index]) for index in piece], tick)
            results.update(
                {index: (weights.keep(value), seconds) for index, (value, seconds) in zip(piece, timed, strict=True)}
            )
            weights.make_room()
        return [results[index] for index in range(len(ops))]

    def units(self, operations: Sequence[Op]) -> list[Unit]:
        """What other processes may execute separately, with the results that this one would have."""
        stacks: dict[Hashable, list[int]] = {}
        units = []
        for index, op in enumerate(operations):
            route = self.route(op)  # which reads no weights: they may be elsewhere
            if isinstance(route.backend, Stacked):
                stacks.setdefault((route.backend.name, route.group), []).append(index)
            else:
                takes = effort(op) if isinstance(route.backend, Compiled) else effort_alone(op)
                units.append(Unit([index], takes, own_program=False))
        stacked = [
            Unit(members, sum(effort(operations[index]) for index in members), own_program=True) for members in stacks.values()
        ]
        return [*units, *stacked]

    def route(self, op: Op) -> Route:
        """The first backend that supports the operation, and why those before it do not."""
        if isinstance(op, Evaluate) and op.timed:
            return Route(self.reference, None, "the time of inference is measured")
        if isinstance(op, EstimateStatistics):
            return Route(self.reference, None, "only the reference backend estimates running statistics")
        reasons: dict[str, list[str]] = {}
        too_large = self.path == "auto" and self.device_weights is None and is_large(op)
        for backend in self.backends:
            reason = TOO_LARGE if too_large and isinstance(backend, Compiled | Stacked) else backend.supports(op)
            if not reason:
                break
            reasons.setdefault(reason, []).append(backend.name)
        texts = [f"not {' or '.join(names)}: {reason}" for reason, names in reasons.items()]
        if self.path in ("reference", "workers"):
            texts = [f'engine.path = "{self.path}"', *texts]
        return Route(backend, backend.group(op), "; ".join(texts))

    def _place(self, operations: Sequence[Op], routes: Sequence[Route]) -> tuple[list[list[int]], list[list[int]]]:
        """What runs as one program or one message, by index: first in this process, then in workers."""
        groups: dict[Hashable, list[int]] = {}
        for index, route in enumerate(routes):
            groups.setdefault(index if route.group is None else (route.backend.name, route.group), []).append(index)
        here: list[list[int]] = []
        in_workers: list[list[int]] = []
        by_backend: dict[str, list[int]] = {}  # operations without a group
        for members in groups.values():
            op, backend = operations[members[0]], routes[members[0]].backend
            if self.workers is None or isinstance(backend, Compiled):  # compiled code has threads instead
                here.append(members)
            elif is_large(op):
                here.append(members)  # a worker would need copies of the weights
            elif isinstance(op, Evaluate) and op.timed:
                here.append(members)  # the time of inference is measured while nothing else is computed
            elif backend in (self.eager, self.private, self.reference):
                by_backend.setdefault(backend.name, []).extend(members)
            else:
                parts = self._divide(members, [operations[index] for index in members])
                (in_workers if len(parts) > 1 else here).extend(parts)
        total = sum(effort_alone(operations[index]) for members in by_backend.values() for index in members)
        for members in by_backend.values():
            if total < WORTHWHILE:
                here.append(members)
            else:
                in_workers.extend(self._pieces(members, operations, total))
        return (here + in_workers, []) if len(in_workers) == 1 else (here, in_workers)

    def _pieces(self, members: Sequence[int], operations: Sequence[Op], total: float) -> list[list[int]]:
        """Operations that run alone, in messages: small ones share one."""
        assert self.workers is not None
        efforts, most = (
            [effort_alone(operations[index]) for index in members],
            min(total / (PIECES * self.workers.count), LARGE),
        )
        return [[members[place] for place in piece] for piece in pieces(efforts, most)]

    def _divide(self, members: list[int], ops: Sequence[Op]) -> list[list[int]]:
        """A group in one part, or in one part per worker if that is worth their while."""
        # Several threads of torch need the processors of the workers.
        count = self.workers.count if self.workers is not None and torch.get_num_threads() == 1 else 1
        if count == 1 or len(ops) < 2 * count or not isinstance(ops[0], Train) or sum(map(effort, ops)) < LARGE:
            return [members]
        order = [index for _, index in sorted(zip(map(effort, ops), members, strict=True), key=lambda pair: -pair[0])]
        return [order[worker::count] for worker in range(count)]

    def explain(self) -> list[str]:
        """One line per path that operations took, with the reason; before them, why there is no compiled code."""
        missing = [reason for backend in self.backends if isinstance(backend, Compiled) and (reason := backend.missing())]
        return [*missing, *explanation(self.paths)]

    def close(self) -> None:
        """End the worker processes."""
        if self.workers is not None:
            self.workers.close()


def explanation(paths: Mapping[tuple[str, str, str], int]) -> list[str]:
    """One line per path that operations took, with the reason."""
    return [
        f"{name}: {count} operations {path}{f' ({reason})' if reason else ''}"
        for (name, path, reason), count in sorted(paths.items())
    ]
