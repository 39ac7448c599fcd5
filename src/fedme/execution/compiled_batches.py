"""The batches of a training as compiled code gets them: drawn there from a key, or given."""

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fedme.core.data import Split
from fedme.core.key import Key
from fedme.core.operations import BatchSchedule, Op, Train
from fedme.core.task_types import TaskType, task_type_of
from fedme.execution.alike_operations import EPOCHS
from fedme.execution.compiled_calls import NOT_DRAWN, NOT_GIVEN, Call, packed
from fedme.execution.compiled_library import library
from fedme.execution.compiled_losses import CHANCES, chances, classes_of
from fedme.execution.compiled_networks import known_program
from fedme.execution.input_tables import InputTable
from fedme.execution.routing import models_of
from fedme.learning.objectives import Imitate

TASKS: tuple[TaskType, ...] = ("classification", "multi-label", "regression")  # as in the C++ code


@dataclass(frozen=True)
class DrawnBatches:
    """What the compiled code draws the shuffled batches of a client's samples from, except for the key."""

    schedule: BatchSchedule
    table: InputTable
    fields: tuple[int, ...]
    packed: bytes  # the fields
    memory: tuple[Tensor, ...]  # that the fields point to


def drawn_batches(data: Split, schedule: BatchSchedule, table: InputTable) -> DrawnBatches | None:
    """The same for all rounds of a schedule; None if these batches are not drawn by the compiled code."""
    known: DrawnBatches | None = data.derived.get("drawn batches")
    if known is not None and known.schedule is schedule and known.table is table:
        return known
    own = data.targets is not None or not data.source.labels.is_contiguous()
    rows, labels, samples = data.rows.contiguous(), data.y.contiguous() if own else data.source.labels, len(data)
    if not schedule.shuffle or schedule.poisson or labels.dtype != torch.int64 or not _draws_as_torch():
        return None
    steps, per_epoch, place = schedule.count(samples), schedule.per_epoch(samples), labels.data_ptr()
    used, divisor = min(samples, per_epoch * schedule.batch), schedule.batch if schedule.scales(samples) else 0
    places = rows.data_ptr(), 0 if own else place, place if own else 0
    fields = *places, samples, len(table), used, schedule.batch, per_epoch, steps, divisor
    drawn = DrawnBatches(schedule, table, fields, packed(*fields), (rows, labels))
    data.derived["drawn batches"] = drawn
    return drawn


def batch_fields(op: Train, table: InputTable, call: Call, classes: int) -> tuple[int, ...]:
    """The batches of a training, as the first fields of its job; shuffled ones are drawn by the compiled code."""
    schedule, data, samples = op.batch_schedule, op.data, len(op.data)
    if (drawn := drawn_batches(data, schedule, table)) is not None:
        call.keep(drawn)
        return *NOT_GIVEN, *call.add_name(op.key.below(*EPOCHS)), *drawn.fields
    positions, sizes = schedule.positions(samples, op.key.at("batches"))
    chosen, targets = data.rows[positions].contiguous(), data.y[positions].contiguous()
    _require_below(chosen, len(table), "row")
    task = CHANCES if isinstance(op.optimizer.objective, Imitate) else TASKS.index(task_type_of(targets))
    if task == 0:
        _require_below(targets, classes, "class")
    elif targets.shape[-1] != classes:
        raise ValueError(f"the targets have {targets.shape[-1]} numbers, but the model has {classes} outputs")
    else:
        dtype = models_of(op)[0].dtype
        targets = chances(targets, dtype) if task == CHANCES else targets.to(dtype)
    given = chosen, targets, sizes.contiguous(), schedule.divisors(samples, sizes).to(torch.float64)
    call.keep(*given)
    return (*(tensor.data_ptr() for tensor in given), *chosen.shape, task, *NOT_DRAWN)


@functools.lru_cache(maxsize=1)
def _draws_as_torch() -> bool:
    """Whether the compiled code shuffles as this version of torch does."""
    code, key, count = library(), Key(0).at("order"), 1000
    assert not isinstance(code, str)
    order = torch.empty(count, dtype=torch.int64)
    name = key.below() + b"]"
    code.fedme_order(name, ctypes.c_int64(len(name)), ctypes.c_int64(count), ctypes.c_void_p(order.data_ptr()))
    return torch.equal(order, torch.randperm(count, generator=key.torch()))


def require_in_range(op: Op, table: InputTable) -> None:
    """Raise an error if a row is not in the table, or a target is no class."""
    _require_below(op.data.rows, len(table), "row")
    if isinstance(op, Train):
        models = op.models.values()
        outputs = min(known_program(m.arch, table.shape, table.symbols, m.dtype).classes for m in models)
        classes = classes_of(op.optimizer.objective, outputs)
        if task_type_of(op.data.y) == "classification":
            _require_below(op.data.y, classes, "class")


def _require_below(numbers: Tensor, count: int, what: str) -> None:
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise IndexError(f"{what} numbers must be >= 0 and < {count}, got {int(numbers.min())} to {int(numbers.max())}")
