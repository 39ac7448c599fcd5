"""Execute operations that wait at the same time: grouped into one program where that is possible, else one by one.

The choice is a function of the operations alone, and `paths` says what was chosen and why.
"""

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from fedme.core.client import Evaluate, Op, Score, Train
from fedme.core.data import Split
from fedme.engines import alone
from fedme.engines.dense import chain
from fedme.engines.gather import Gather, dims
from fedme.engines.schedule import schedule
from fedme.engines.stacked import train_sgd
from fedme.engines.stacked_predict import predict_stacked
from fedme.engines.stacked_rules import train_rule
from fedme.learn.objectives import cross_entropy
from fedme.learn.rules import Sgd


class Batched:
    """An executor that groups. `tick` is called after every operation, for progress and for stopping."""

    def __init__(self, tick: Callable[[], None] = lambda: None) -> None:
        self.tick = tick
        self.gather = Gather()
        self.paths: Counter[tuple[str, str]] = Counter()  # (what, path and reason) -> operations

    def __call__(self, operations: Sequence[Op]) -> list[tuple[Any, float]]:
        """The result of every operation and the seconds it took; a group's time is shared by its samples."""
        results: list[tuple[Any, float] | None] = [None] * len(operations)
        groups: dict[Hashable, list[int]] = {}
        for index, op in enumerate(operations):
            groups.setdefault(self._key(op, index), []).append(index)
        for members in groups.values():
            ops = [operations[index] for index in members]
            for index, result in zip(members, self._run(ops), strict=True):
                results[index] = result
        return [result for result in results if result is not None]

    def _run(self, ops: list[Op]) -> list[tuple[Any, float]]:
        start = time.perf_counter()
        values = self._together(ops)
        if values is None:
            return [self._alone(op) for op in ops]
        spent = time.perf_counter() - start
        for _ in ops:
            self.tick()
        weights = [len(op.data) or 1 for op in ops]
        return [(value, spent * weight / sum(weights)) for value, weight in zip(values, weights, strict=True)]

    def _alone(self, op: Op) -> tuple[Any, float]:
        start = time.perf_counter()
        value = alone.run(op)
        spent = time.perf_counter() - start
        self.tick()
        return value, spent

    def _key(self, op: Op, index: int) -> Hashable:
        """What operations must have in common to run as one; an operation that runs alone has a key of its own."""
        reason = self._obstacle(op)
        kind = type(op).__name__.lower()
        if reason:
            self.paths[kind, f"alone: {reason}"] += 1
            return index
        self.paths[kind, "stacked"] += 1
        source = id(op.data.source)
        if isinstance(op, Train):
            shape = None if op.data.targets is None else op.data.targets.shape[1:]
            roles = tuple((role, model.dtype) for role, model in op.models.items())
            return Train, op.rule, source, shape, roles, tuple(op.frozen), tuple(op.opt) == ()
        return "look", op.model.arch, op.model.dtype, source

    def _obstacle(self, op: Op) -> str:
        """Why an operation cannot be stacked; empty if it can."""
        models = list(op.models.values()) if isinstance(op, Train) else [op.model]
        if isinstance(op, Evaluate) and op.timed:
            return "its speed is to be measured"
        if not len(op.data):
            return "no data"
        for model in models:
            network = chain(model.arch)
            if network is None:
                return f"{model.arch.name} is not a chain of dense layers"
            if model.buffers:
                return f"{model.arch.name} has buffers"
            if not network.flattens and dims(op.data) != 1:
                return f"{model.arch.name} does not flatten its inputs"
        if self.gather.table(op.data.source, models[0].dtype) is None:
            return "the inputs are not one table of numbers"
        return ""

    def _together(self, ops: list[Op]) -> list[Any] | None:
        first = ops[0]
        if self._obstacle(first):
            return None
        if isinstance(first, Train):
            return self._train([op for op in ops if isinstance(op, Train)])
        looks = [op for op in ops if not isinstance(op, Train)]
        table = self.gather.table(first.data.source, first.model.dtype)
        assert table is not None
        logits = predict_stacked([(op.model, op.data) for op in looks], table)
        return [_score(z, op.data) if isinstance(op, Evaluate) else z for op, z in zip(looks, logits, strict=True)]

    def _train(self, ops: list[Train]) -> list[Any]:
        dtype = next(iter(ops[0].models.values())).dtype
        table = self.gather.table(ops[0].data.source, dtype)
        assert table is not None
        order, plan = schedule(ops, dtype)
        in_order = [ops[index] for index in order]
        plain = type(ops[0].rule) is Sgd and not ops[0].rule.alternating
        trained = (train_sgd if plain else train_rule)(in_order, plan, table)
        results: list[Any] = [None] * len(ops)
        for index, result in zip(order, trained, strict=True):
            results[index] = result
        return results

    def explain(self) -> list[str]:
        """One line for every path that operations took."""
        return [f"{what}: {count} operations {path}" for (what, path), count in sorted(self.paths.items())]


def _score(logits: Tensor, data: Split) -> Score:
    y = data.y
    right = (logits.argmax(-1) == y) & ~logits.isnan().any(-1)
    return Score(len(data), cross_entropy(logits, y).mean().item(), right.double().mean().item())
