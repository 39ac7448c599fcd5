"""The stacked backends: the operations of many clients as one program over stacked weights."""

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from fedme.core.key import Key
from fedme.core.model import Arch, Model, template
from fedme.core.operations import Evaluate, Op, Predict, Train
from fedme.execution.batch_sizes import size_obstacle
from fedme.execution.dense_layers import dense_layers
from fedme.execution.eager import Eager
from fedme.execution.input_tables import InputTables
from fedme.execution.reference import result_of
from fedme.execution.routing import Tick, models_of
from fedme.execution.stacked_batches import StackedBatches
from fedme.execution.stacked_dense import Linear
from fedme.execution.stacked_inference import predict_stacked
from fedme.execution.stacked_privacy import PrivateGradient
from fedme.execution.stacked_training import StackedGradient, train_stacked
from fedme.execution.stacked_vmap import is_compute_bound, vmap_obstacle

# Networks with more parameters are faster one after another than in a stack (docs/performance.md).
LARGEST_BEFORE_EAGER, LARGEST_BEFORE_REFERENCE = 5_000, 100_000


class Stacked:
    """Dense networks, with gradients in closed form."""

    name = "stacked"

    def __init__(self, tables: InputTables) -> None:
        self.tables = tables

    def supports(self, op: Op) -> str:
        """Why the operation cannot be stacked; empty if it can."""
        if reason := self.tables.supports(op):
            return reason
        if isinstance(op, Train) and op.collect is not None:
            return "the training collects outputs"
        if isinstance(op, Train) and not _hashable(op.optimizer):
            return f"the optimizer {type(op.optimizer).__name__} is not hashable"
        if isinstance(op, Train) and len(op.data) and _sees_the_batch(op, self.tables):
            return f"the loss {type(op.optimizer.objective).__name__} of a sample depends on its batch"
        if reason := next((reason for model in models_of(op) if (reason := self._obstacle(model, op))), ""):
            return reason
        table = self.tables.table(op)
        return size_obstacle(op, table.shape, table.symbols, _padded_sizes(op) if isinstance(op, Train) else ())

    def _obstacle(self, model: Model, op: Op) -> str:
        table = self.tables.table(op)
        if table.symbols:
            return "the inputs are not floating-point numbers"
        layers = dense_layers(model.arch, table.shape)
        if isinstance(layers, str):
            return layers
        weights = {name for layer in layers if isinstance(layer, Linear) for name in (layer.weight, layer.bias)}
        return "" if model.buffers.keys() <= weights else f"{model.arch.name} has buffers"  # others than frozen weights

    def group(self, op: Op) -> Hashable:
        """What the operations of one program have in common."""
        source = id(op.data.source)
        if not isinstance(op, Train):
            return "predict", op.model.arch, op.model.dtype, source
        # A client with its own targets may have its own classes, and so another number of outputs.
        targets, table = op.data.targets, self.tables.table(op)
        outputs = _output_count(models_of(op)[0].arch, table.shape, table.values.dtype) if targets is not None else 0
        classes = (outputs, targets.shape[1:] if targets is not None else ())
        # Models of one architecture are stacked, so all of them must have the same frozen weights.
        roles = tuple((role, model.dtype, tuple(model.buffers)) for role, model in op.models.items())
        return Train, op.optimizer, source, op.mechanism is None, classes, roles, tuple(op.frozen), tuple(op.opt) == ()

    def run(self, ops: Sequence[Op], tick: Tick) -> list[Any]:
        """Run the operations of one group as one program."""
        table = self.tables.table(ops[0])
        trainings = [op for op in ops if isinstance(op, Train)]
        predictions = [op for op in ops if isinstance(op, Evaluate | Predict)]
        results: list[Any]
        if trainings:
            order, batches = StackedBatches.of(trainings, models_of(ops[0])[0].dtype, self.tables.device)
            gradient_type = PrivateGradient if trainings[0].mechanism else StackedGradient
            trained = train_stacked([trainings[index] for index in order], batches, table, gradient_type)
            by_index = dict(zip(order, trained, strict=True))
            results = [by_index[index] for index in range(len(ops))]
        else:
            logits = predict_stacked(predictions, table)
            results = [result_of(op, z) for op, z in zip(predictions, logits, strict=True)]
        for _ in ops:
            tick()
        return results


class StackedByVmap(Stacked):
    """Other networks that `torch.vmap` can stack, with gradients by autograd.

    Larger networks are left to `eager` if it can run the operation, else to the reference; None: everything is stacked.
    """

    name = "stacked by vmap"

    def __init__(self, tables: InputTables, eager: Eager | None) -> None:
        super().__init__(tables)
        self.eager = eager

    def _obstacle(self, model: Model, op: Op) -> str:
        if not super()._obstacle(model, op):
            return ""
        if model.buffers:
            return f"{model.arch.name} has buffers"  # or frozen weights
        if self.eager is not None:
            largest = LARGEST_BEFORE_REFERENCE if self.eager.supports(op) else LARGEST_BEFORE_EAGER
            if model.parameters > largest:
                return f"{model.arch.name} has more than {largest:,} parameters"
        if is_compute_bound(model.arch):
            return f"{model.arch.name} has layers that gain nothing from stacking"
        table = self.tables.table(op)
        return vmap_obstacle(model.arch, table.shape, table.values.dtype)


def _padded_sizes(op: Train) -> tuple[int, ...]:
    """Sizes of the batches of a stack, which are padded."""
    batch = op.batch_schedule.batch
    return (batch,) if op.mechanism is None else (1, 2, batch, 2 * batch)  # Poisson samples have any size


def _sees_the_batch(op: Train, tables: InputTables) -> bool:
    """Whether the loss of a sample depends on other samples of its batch: in a stack it would see those of other clients."""
    objective = op.optimizer.objective
    if type(objective).__module__.startswith("fedme.learning."):
        return False
    table = tables.table(op)
    sizes = {role: _output_count(model.arch, table.shape, table.values.dtype) for role, model in op.models.items()}
    key, y = Key(0).at("check"), op.data.y[[0, len(op.data) - 1]]
    logits = {role: torch.randn((2, size), generator=key.at(role).torch()) for role, size in sizes.items()}
    try:
        of_two, of_one = objective(logits, y), objective({role: z[:1] for role, z in logits.items()}, y[:1])
        return any(not torch.allclose(of_two[role][:1], of_one[role]) for role in of_two)
    except Exception:  # a user's loss may raise anything; by autograd it says what is wrong
        return True


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@functools.lru_cache(maxsize=256)
def _output_count(arch: Arch, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    network = template(arch, False)
    x = torch.zeros((1, *shape), dtype=dtype)
    with torch.inference_mode():
        outputs: torch.Tensor = network(x.to(next(network.parameters()).dtype) if x.is_floating_point() else x)
    return outputs.shape[-1]
