"""Operations as one call of compiled code: what it computes, and their results."""

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedme.core.flat_params import flat_params
from fedme.core.model import Model
from fedme.core.operations import EstimateStatistics, Evaluate, Op, Predict, Train
from fedme.execution.alike_operations import AlikePredictions
from fedme.execution.compiled_batches import require_in_range
from fedme.execution.compiled_calls import PREDICT_JOB, TRAIN_JOB, Call
from fedme.execution.compiled_networks import network_fields
from fedme.execution.compiled_training import Finish, train_job
from fedme.execution.input_tables import InputTable
from fedme.execution.routing import Route, models_of
from fedme.execution.threads import Computing


class Table(ctypes.Structure):
    """The inputs of all samples, numbers or symbols, as in the C++ code."""

    _fields_ = [
        ("values", ctypes.c_void_p),
        ("features", ctypes.c_int64),
        ("symbols", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
    ]

    @classmethod
    def of(cls, table: InputTable) -> "Table":
        """The same table."""
        starts = 0 if table.starts is None else table.starts.data_ptr()
        return cls(table.values.data_ptr(), table.features, table.symbols, starts)


def together(ops: Sequence[Op], table: InputTable, routes: Sequence[Route] = ()) -> Computing[list[Any]]:
    """Prepare operations, yield one call that computes all of them, and return their results.

    Operations that are alike may share one of the `routes`.
    """
    call = Call(TRAIN_JOB if isinstance(ops[0], Train) else PREDICT_JOB)
    finish: list[Finish[Any]] = [
        train_job(op, table, call, route) if isinstance(op, Train) else _predict(op, table, call, route)
        for op, route in itertools.zip_longest(ops, routes)
    ]
    call.make(Table.of(table), models_of(ops[0])[0].dtype.itemsize)
    yield call
    if call.status == 1:
        raise MemoryError("not enough memory for the models of a client")
    if call.status == 2:
        for op in ops:
            require_in_range(op, table)
    return [result() for result in finish]


def _predict(
    op: Predict | Evaluate | EstimateStatistics, table: InputTable, call: Call, route: Route | None = None
) -> Finish[Tensor]:
    """The logits of an operation."""
    if route is not None:
        assert not isinstance(op, EstimateStatistics)
        if "alike" not in route.made:
            route.made["alike"] = AlikePredictions.of(op, table)
        alike: AlikePredictions | None = route.made["alike"]
        if alike is not None:
            known = alike.add(op, call)
            return lambda: known
    data, model = op.data, op.model
    rows, samples = data.rows.contiguous(), len(data)
    if flat_params(model.params) is None or model.buffers:
        parts = ({name: value.contiguous() for name, value in values.items()} for values in (model.params, model.buffers))
        model = Model(model.arch, *parts)
    network, classes = network_fields(call, model, table)
    logits = torch.empty((samples, classes), dtype=model.dtype)
    index = call.add_network((*network, 0, 0, 0, 0))
    call.keep(rows, model)
    call.add_job((rows.data_ptr(), samples, len(table), index, logits.data_ptr()))
    return lambda: logits
