"""The most common operations: from weights in one tensor, without buffers, a state, an anchor or dropout.

Many clients have such operations with the same architectures and one optimizer. What these have in common is found out once.
"""

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedme.core.flat_params import FlatParams, flat_params
from fedme.core.model import Model
from fedme.core.operations import Evaluate, Predict, Train, Trained
from fedme.execution.compiled_calls import NOT_GIVEN, Call, address, last_fields, packed
from fedme.execution.compiled_losses import loss_weights
from fedme.execution.compiled_networks import Head, head_of
from fedme.execution.input_tables import InputTable
from fedme.learning.objectives import CrossEntropy, Mutual
from fedme.learning.optimizers import SGD, Adam

NINE, SIX = struct.Struct("9q"), struct.Struct("6q")  # fields of structures
EPOCHS = "batches", "epoch"  # below the key of a training: the keys of the orders of its samples


class AlikeTrainings:
    """Trainings that share a route: their models have the same roles, architectures and layouts, and one optimizer."""

    def __init__(self, op: Train, heads: list[Head], spec: Any) -> None:
        self.kept = spec, heads  # the calls refer to their memory
        self.spec_place = address(spec)
        self.networks = []
        for (role, model), head in zip(op.models.items(), heads, strict=True):
            flat = flat_params(model.params)
            assert flat is not None
            last = last_fields(loss_weights(op.optimizer.objective, role))
            self.networks.append((role, model.arch, flat.layout, flat.flat.nbytes, packed(*head.fields), last))
        self.job_end = len(self.networks), self.spec_place, 0, 0, 0

    @classmethod
    def of(cls, op: Train, table: InputTable, spec: Callable[[SGD | Adam], Any]) -> "AlikeTrainings | None":
        """Those that are alike to an operation; None if they are not of this kind."""
        rule = op.optimizer
        if not isinstance(rule, SGD | Adam) or rule.prox or rule.shift or op.collect is not None or op.opt or op.keep_opt:
            return None
        if type(rule.objective) not in (CrossEntropy, Mutual):
            return None
        heads = [common_head(model, table) for model in op.models.values()]
        common = [head for head in heads if head is not None]
        if len(common) < len(heads) or len({head.program.program.classes for head in common}) > 1:
            return None
        return cls(op, common, spec(rule))

    def add(self, op: Train, call: Call, drawn: Any) -> Callable[[], Trained]:
        """Add a training to a call; its result, after the call."""
        models, first = {}, call.network_count
        for role, arch, layout, nbytes, head, last in self.networks:
            before, copy = flat_of(op.models[role]), torch.empty(layout.size, dtype=layout.dtype)
            models[role], place = Model(arch, FlatParams(layout, copy), {}), copy.data_ptr()
            call.add_packed_network((head, NINE.pack(place, 0, 0, 0, 0, 0, before.data_ptr(), place, nbytes), last))
            call.keep(before)
        call.keep(models, drawn, self.kept)
        key = call.add_name(op.key.below(*EPOCHS))
        number = call.add_packed_job((NINE.pack(*NOT_GIVEN, *key), drawn.packed, SIX.pack(first, *self.job_end)))

        def finish() -> Trained:
            samples, _ = call.seen[number]
            losses = {}
            for place, (role, model) in enumerate(models.items(), first):
                losses[role] = call.losses[place] / samples
                if call.finite[place]:
                    model.set_finite()
            return Trained(models, {}, losses)

        return finish


class AlikePredictions:
    """Predictions that share a route: their models have one architecture and layout."""

    def __init__(self, op: Predict | Evaluate, head: Head, table: InputTable) -> None:
        self.kept, self.head = head, packed(*head.fields)  # the calls refer to the memory of the first
        self.outputs, self.dtype = head.program.program.classes, op.model.dtype
        self.table_rows = len(table)

    @classmethod
    def of(cls, op: Predict | Evaluate, table: InputTable) -> "AlikePredictions | None":
        """Those that are alike to an operation; None if they are not of this kind."""
        head = common_head(op.model, table)
        return None if head is None else cls(op, head, table)

    def add(self, op: Predict | Evaluate, call: Call) -> Tensor:
        """Add a prediction to a call; its logits, after the call."""
        weights, rows = flat_of(op.model), op.data.rows
        rows = rows if rows.is_contiguous() else rows.contiguous()
        samples = rows.numel()
        logits = torch.empty(samples, self.outputs, dtype=self.dtype)
        network = call.add_packed_network((self.head, NINE.pack(weights.data_ptr(), 0, 0, 0, 0, 0, 0, 0, 0), NO_LOSS))
        call.keep(rows, weights, logits, self.kept)
        call.add_job((rows.data_ptr(), samples, self.table_rows, network, logits.data_ptr()))
        return logits


NO_LOSS = last_fields()


def flat_of(model: Model) -> Tensor:
    """The weights of a model that are known to be in one tensor."""
    params = model.params
    flat = params if type(params) is FlatParams else flat_params(params)
    assert flat is not None
    return flat.flat


def common_head(model: Model, table: InputTable) -> Head | None:
    """What the network of a model has in common with others; None if it is more than its weights in one tensor."""
    if (flat := flat_params(model.params)) is None or model.buffers:
        return None
    head = head_of(model, table, [flat, None, None])
    return head if head.fields and not head.program.program.layers else None
