"""The losses that compiled code computes, and what it reads about them (`LossSpec` in `compiled.cpp`)."""

from typing import Any

import numpy as np
import torch

from fedme.core.operations import ClassSums, Objective, Role, Train
from fedme.core.task_types import TASK_LOSSES, task_type_of
from fedme.execution.compiled_calls import LOSS, Call, address
from fedme.learning.objectives import CrossEntropy, Imitate, MaskedCrossEntropy, Mutual, TowardsClass, TowardsPrototype
from fedme.learning.optimizers import Moreau, MutualMoreau

DERIVED_ROLES = {Moreau: ("w",), MutualMoreau: ("theta",)}  # roles whose weights follow from those of another
OF_CLASSES = (MaskedCrossEntropy, TowardsClass, TowardsPrototype)
CHANCES = 3  # the number of targets that are chances of the classes, in the C++ code


def loss_obstacle(op: Train) -> str:
    """Why the compiled code cannot compute the loss of a training; empty if it can."""
    optimizer, loss = op.optimizer, op.optimizer.objective
    trained = op.models.keys() - set(DERIVED_ROLES.get(type(optimizer), ()))
    targets = op.data.source.labels if op.data.targets is None else op.data.targets
    if op.collect is not None and (len(op.models) > 1 or task_type_of(targets) != "classification"):
        return "the outputs of several models, or without classes, are collected"
    if op.collect is not None and op.collect.chances and type(loss) is TowardsPrototype:
        return "chances of features are collected"
    if type(loss) is Mutual:
        supported = {loss.first, loss.second} == trained
    elif type(loss) in OF_CLASSES:
        supported = type(optimizer) is not MutualMoreau and task_type_of(targets) == "classification"
    elif type(loss) is Imitate:
        supported = type(optimizer) is not MutualMoreau and loss.loss == "kl" and targets.is_floating_point()
    else:
        supported = type(loss) is CrossEntropy and type(optimizer) is not MutualMoreau
    return "" if supported else f"unsupported loss {type(loss).__name__}"


def loss_weights(objective: Objective, role: Role) -> tuple[float, float]:
    """The weights of labels and peer in the loss of a role."""
    if not isinstance(objective, Mutual):
        return 1.0, 0.0
    place = (objective.first, objective.second).index(role)
    return objective.labels[place], objective.peer[place]


def classes_of(objective: Objective, outputs: int) -> int:
    """How many of a model's outputs are logits of classes."""
    return len(objective.known) if isinstance(objective, TowardsPrototype) else outputs


def add_loss(op: Train, call: Call, outputs: int) -> tuple[int, ClassSums | None]:
    """Add what there is to a loss beside labels and peer; its address, or 0 if there is nothing, and where sums will be."""
    loss = op.optimizer.objective
    if op.collect is None and not isinstance(loss, OF_CLASSES):
        return 0, None
    classes, dtype = classes_of(loss, outputs), next(iter(op.models.values())).dtype
    fields: tuple[Any, ...] = (0,) * 6 + (0.0,)
    if isinstance(loss, MaskedCrossEntropy):
        _require(len(loss.present) == outputs, f"{len(loss.present)} classes", outputs)
        fields = _numbers(call, loss.present), 0, 0, 0, 0, 0, 0.0
    elif isinstance(loss, TowardsClass | TowardsPrototype):
        near = isinstance(loss, TowardsPrototype)
        targets = (loss.prototypes if isinstance(loss, TowardsPrototype) else loss.targets).to("cpu", dtype).contiguous()
        first, width = (classes if near else 0), targets.shape[1]
        wanted = len(targets) == len(loss.known) == classes and first + width == outputs
        _require(wanted, f"targets of shape {tuple(targets.shape)}", outputs)
        call.keep(targets)
        by_chances = isinstance(loss, TowardsClass) and loss.distance == "cross-entropy"
        places = targets.data_ptr(), _numbers(call, loss.known.tolist())
        fields = 0, *places, first, width, int(by_chances), loss.weight
    seen, sums = None, (0, 0, 0)
    if op.collect is not None:
        _require(op.collect.classes == classes, f"{op.collect.classes} classes", outputs)
        seen = ClassSums(torch.zeros((classes, outputs), dtype=dtype), torch.zeros(classes, dtype=torch.int64))
        sums = seen.sums.data_ptr(), seen.counts.data_ptr(), int(op.collect.chances)
    spec = np.array([(classes, *fields, *sums)], LOSS)
    call.keep(spec)
    return address(spec), seen


def _numbers(call: Call, flags: Any) -> int:
    array = np.array(flags, np.int64)
    call.keep(array)
    return address(array)


def _require(fits: bool, what: str, outputs: int) -> None:
    if not fits:
        raise ValueError(f"the loss has {what}, but the model has {outputs} outputs")


def chances(targets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The chances that logits stand for."""
    return TASK_LOSSES["classification"].ready(targets.to(dtype)).exp()
