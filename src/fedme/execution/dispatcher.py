"""Execute operations that wait at the same time: grouped into one program where that is possible, else one by one.

The choice is a function of the operations and the settings alone, and `paths` says what was chosen and why.
"""

import functools
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch

from fedme.core.model import Arch, template
from fedme.core.operations import Evaluate, Op, Predict, Train
from fedme.execution import compiled, inplace, reference, vmapped
from fedme.execution.batch_gathering import Fetch, Gather, sample
from fedme.execution.dense_networks import chain
from fedme.execution.device import home, moved
from fedme.execution.reference import one_by_one
from fedme.execution.stacked_batches import schedule
from fedme.execution.stacked_inference import predict_stacked
from fedme.execution.stacked_optimizers import train_with_optimizer
from fedme.execution.stacked_privacy import PrivateGradient
from fedme.execution.stacked_sgd import train_sgd
from fedme.execution.worker_processes import Workers, effort
from fedme.learning.optimizers import SGD

Way = Literal["auto", "reference", "compiled", "stacked", "vmap", "workers"]
LARGE = 2e8  # effort from which on a stack is dealt out to workers


class Dispatcher:
    """An executor that groups.

    `tick` is called after every operation, for progress and for stopping; `path` allows only one way of running operations
    (those that cannot take it run alone); `before_fork` is called before a worker process is started.
    """

    def __init__(
        self,
        tick: Callable[[], None] = lambda: None,
        workers: int = 1,
        path: Way = "auto",
        device: str = "cpu",
        before_fork: Callable[[], None] = lambda: None,
    ) -> None:
        self.tick, self.path, self.device = tick, path, torch.device(device)
        self.gather = Gather(self.device)
        forks = path in ("auto", "workers") and device == "cpu"  # a forked process cannot use another device
        self.workers = Workers(workers, self._here, tick, before_fork) if forks and workers > 1 else None
        self.paths: Counter[tuple[str, str]] = Counter()  # (what, path and reason) -> operations

    def __call__(self, operations: Sequence[Op]) -> list[tuple[Any, float]]:
        """The result of every operation and the seconds it took; a group's time is shared by its samples."""
        return self._run(operations) if self.device.type == "cpu" else self._there_and_back(operations)

    def _there_and_back(self, operations: Sequence[Op]) -> list[tuple[Any, float]]:
        done = self._run([moved(op, self.device) for op in operations])
        return [(home(value), seconds) for value, seconds in done]

    def _run(self, operations: Sequence[Op]) -> list[tuple[Any, float]]:
        reasons = [self._obstacle(op) for op in operations]
        groups: dict[Hashable, list[int]] = {}
        for index, op in enumerate(operations):
            groups.setdefault(index if reasons[index] else self._key(op), []).append(index)
        near: list[list[int]] = []
        far: list[list[int]] = []
        for members in groups.values():
            pieces = self._pieces(members, [operations[index] for index in members])
            # Speed is measured in this process, while nothing else is computed.
            serial = reasons[members[0]] and not _is_timed(operations[members[0]])
            (far if self.workers is not None and (serial or len(pieces) > 1) else near).extend(pieces)
        if len(far) == 1:
            near, far = near + far, []
        results: dict[int, tuple[Any, float]] = {}
        if self.workers is not None and far:
            done = self.workers([[operations[index] for index in piece] for piece in far])
            for piece, each in zip(far, done, strict=True):
                results.update(zip(piece, each, strict=True))
        for piece in near:
            results.update(zip(piece, self._here([operations[index] for index in piece], self.tick), strict=True))
        for pieces, where in ((near, "reference"), (far, "in workers")):
            for index in (index for piece in pieces for index in piece):
                self._took(operations[index], reasons[index], where)
        return [results[index] for index in range(len(operations))]

    def _pieces(self, members: list[int], ops: Sequence[Op]) -> list[list[int]]:
        """A group as it is, or dealt out to the workers if it is worth their while: the largest operation first."""
        # Who gives this process several threads wants its processors for them.
        hands = self.workers.count if self.workers is not None and torch.get_num_threads() == 1 else 1
        threads = self._is_compiled(ops[0])  # here, where nothing has to travel
        if hands == 1 or threads or len(ops) < 2 * hands or not isinstance(ops[0], Train) or sum(map(effort, ops)) < LARGE:
            return [members]
        order = [index for _, index in sorted(zip(map(effort, ops), members, strict=True), key=lambda pair: -pair[0])]
        return [order[hand::hands] for hand in range(hands)]

    def _threads(self) -> int:
        """How many compiled operations run at once: the worker processes wait meanwhile."""
        return max(torch.get_num_threads(), self.workers.count if self.workers is not None else 1)

    def _here(self, ops: Sequence[Op], tick: Callable[[], None] = lambda: None) -> list[tuple[Any, float]]:
        """Run operations of one group in this process."""
        if self._obstacle(ops[0]):
            return list(one_by_one(tick, reference.run if self.path == "reference" else inplace.run)(ops))
        start = time.perf_counter()
        values = self._together(list(ops), tick)
        spent = time.perf_counter() - start
        weights = [len(op.data) for op in ops]
        return [(value, spent * weight / sum(weights)) for value, weight in zip(values, weights, strict=True)]

    def _took(self, op: Op, reason: str, where: str) -> None:
        together = "compiled" if self._is_compiled(op) else "stacked" if self._is_dense(op) else "stacked by vmap"
        together += " in workers" if where != "reference" else ""
        self.paths[type(op).__name__.lower(), f"{where}: {reason}" if reason else together] += 1

    def _key(self, op: Op) -> Hashable:
        """What operations must have in common to run as one."""
        source = id(op.data.source)
        if isinstance(op, Train):
            # A client with targets of its own may have classes of its own, and so many outputs.
            shape = None if op.data.targets is None else (op.data.targets.shape[1:], _outputs(op))
            roles = tuple((role, model.dtype) for role, model in op.models.items())
            way = self._is_compiled(op), self._is_dense(op), op.mechanism is None
            return Train, op.optimizer, source, way, shape, roles, tuple(op.frozen), tuple(op.opt) == ()
        return "look", op.model.arch, op.model.dtype, source

    def _is_compiled(self, op: Op) -> bool:
        return self.path in ("auto", "compiled") and self.device.type == "cpu" and not compiled.obstacle(op)

    def _is_dense(self, op: Op) -> bool:
        models = op.models.values() if isinstance(op, Train) else [op.model]
        return self.path != "vmap" and all(chain(model.arch) is not None for model in models)

    def _obstacle(self, op: Op) -> str:
        """Why an operation cannot be stacked; empty if it can."""
        models = list(op.models.values()) if isinstance(op, Train) else [op.model]
        if self.path in ("reference", "workers"):
            return f'engine.path is "{self.path}"'
        if _is_timed(op):
            return "its speed is to be measured"
        if not len(op.data):
            return "no data"
        if isinstance(op, Train) and not _hashable(op.optimizer):
            return "its rule cannot be compared with others"
        if self.path == "compiled" and (reason := compiled.obstacle(op)):
            return reason
        if self.gather.table(op.data.source, models[0].dtype) is None:
            return "the inputs are too many for one table, or change at random"
        first = self.gather.sample(op.data)
        if first is None:
            return "the inputs are more than one tensor"
        for model in models:
            if model.buffers:  # statistics, or weights that are not trained
                return f"{model.arch.name} has buffers"
            network = chain(model.arch) if self.path != "vmap" else None
            if network is not None and first.is_floating_point() and (network.flattens or first.dim() == 1):
                continue
            if network is None and first.is_floating_point() and self._is_compiled(op):
                continue
            if reason := "it does not flatten its inputs" if network else vmapped.obstacle(model.arch, first):
                return reason
        return ""

    def _together(self, ops: list[Op], tick: Callable[[], None]) -> list[Any]:
        first = ops[0]
        model = next(iter(first.models.values())) if isinstance(first, Train) else first.model
        fetch = self.gather.fetch(first.data, model.dtype)
        trainings = [op for op in ops if isinstance(op, Train)]
        looks = [op for op in ops if not isinstance(op, Train)]
        if self._is_compiled(first) and trainings:
            return list(compiled.train_compiled(trainings, fetch, self._threads(), tick))
        if self._is_compiled(first):
            return compiled.look_compiled(looks, fetch, _shown, self._threads(), tick)
        if trainings:
            results = self._train(trainings, fetch, model.dtype)
        else:
            logits = predict_stacked([(op.model, op.data) for op in looks], fetch, self._is_dense(first))
            results = [_shown(op, z) for op, z in zip(looks, logits, strict=True)]
        for _ in ops:
            tick()
        return results

    def _train(self, ops: list[Train], fetch: Fetch, dtype: torch.dtype) -> list[Any]:
        order, plan = schedule(ops, dtype)
        in_order = [ops[index] for index in order]
        plan = plan.to(self.device)
        if self._is_plain(ops[0]):
            trained = train_sgd(in_order, plan, fetch)
        else:
            kind = PrivateGradient if ops[0].mechanism else None
            trained = train_with_optimizer(in_order, plan, fetch, by_hand=self.path != "vmap", kind=kind)
        results: list[Any] = [None] * len(ops)
        for index, result in zip(order, trained, strict=True):
            results[index] = result
        return results

    def _is_plain(self, op: Train) -> bool:
        """Whether it is SGD that can be done in place: on dense networks, every one with its anchor if there is a pull."""
        optimizer = op.optimizer
        if op.mechanism or type(optimizer) is not SGD or optimizer.alternating or not self._is_dense(op):
            return False
        return not optimizer.prox or op.frozen.keys() >= op.models.keys()

    def explain(self) -> list[str]:
        """One line for every path that operations took."""
        return [f"{what}: {count} operations {path}" for (what, path), count in sorted(self.paths.items())]

    def close(self) -> None:
        """End what runs beside this process."""
        if self.workers is not None:
            self.workers.close()


def _shown(op: Evaluate | Predict, logits: torch.Tensor) -> Any:
    return reference.score(logits, op.data.y) if isinstance(op, Evaluate) else logits


def _is_timed(op: Op) -> bool:
    return isinstance(op, Evaluate) and op.timed


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _outputs(op: Train) -> int:
    """How many outputs the models of an operation have; they are the same for all."""
    first = sample(op.data)
    assert first is not None
    return _count(next(iter(op.models.values())).arch, tuple(first.shape), first.dtype)


@functools.lru_cache(maxsize=256)
def _count(arch: Arch, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    network = template(arch, False)
    x = torch.zeros((1, *shape), dtype=dtype)
    with torch.inference_mode():
        outputs: torch.Tensor = network(x.to(next(network.parameters()).dtype) if x.is_floating_point() else x)
    return outputs.shape[-1]
