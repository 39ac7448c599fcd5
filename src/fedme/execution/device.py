"""Operations on a device: weights are moved there once, and what was trained there stays until it is read.

Whatever is on the device is also known in main memory (`HeldParams`), so a method cannot tell. When the device has no room
left, the weights that were used longest ago leave it.
"""

import contextlib
import os
import re
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedme.core import tree
from fedme.core.held_params import Form, HeldParams, held_params
from fedme.core.model import Model
from fedme.core.operations import ClassSums, Models, Op, Train, Trained
from fedme.core.tree import Params

Precision = Literal["tf32", "bfloat16"]
CPU = torch.device("cpu")
NAME = re.compile(r"cpu|cpu:0|mps|cuda|cuda:\d+")
JOB = "FEDME_JOB"  # the number of this process among those that run at the same time
COPIES = 6  # of the weights of an operation: values, gradients, momentum, frozen ones, temporary ones, results
FREE = 0.5  # the part of the free memory of a device that weights and operations may take
UNKNOWN = 8 << 30  # bytes of a device that does not say how many are free


def missing(device: str) -> str:
    """Why a device cannot be used on this machine; empty if it can."""
    if not NAME.fullmatch(device):
        return f"must be cpu, mps, cuda or cuda:N, got '{device}'"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cuda = ["cuda", *(f"cuda:{number}" for number in range(count))] if count else []
    names = ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]
    known = device in names or device == "cpu:0"
    return "" if known else f"'{device}' is not available on this machine; available: {', '.join(names)}"


def chosen(device: str) -> str:
    """The device of this process: "cuda" is one of them all, another one for every process that runs at the same time."""
    if device != "cuda":
        return device
    return f"cuda:{int(os.environ.get(JOB, '0')) % max(1, torch.cuda.device_count())}"


def given(device: str) -> str:
    """The device in a process that was given one of its own, as Ray does it: the only one that the process sees."""
    return "cuda" if device.startswith("cuda") else device


def gpus(device: str) -> int:
    """How many GPUs a process takes that computes on a device."""
    return int(device.startswith("cuda"))


def free_memory(device: torch.device) -> int:
    """Bytes that weights and operations may take on a device."""
    if device.type == "cuda":
        return int(FREE * torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(FREE * (torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()))
    return int(FREE * UNKNOWN)


def needed_memory(op: Op) -> int:
    """An estimate of the bytes that an operation takes on a device: its weights, and the inputs of a batch."""
    models = [*op.models.values(), *op.frozen.values()] if isinstance(op, Train) else [op.model]
    weights = sum(model.parameters * model.dtype.itemsize for model in models)
    batch = op.batch_schedule.batch if isinstance(op, Train) else len(op.data)
    return COPIES * (weights + batch * 4 * _input_size(op))


def _input_size(op: Op) -> int:
    source_inputs = getattr(op.data.source, "x", None)
    return source_inputs[0].numel() if isinstance(source_inputs, Tensor) and len(source_inputs) else 1


@contextlib.contextmanager
def arithmetic(device: torch.device, precision: Precision | None) -> Iterator[None]:
    """Products of matrices in TensorFloat-32, or networks in bfloat16, while the block runs; weights keep their type."""
    if precision == "bfloat16":
        with torch.autocast(device.type, torch.bfloat16):
            yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class DeviceWeights:
    """The weights on a device, at most `limit` bytes of them between operations."""

    def __init__(self, device: torch.device, limit: int) -> None:
        self.device, self.limit, self.bytes, self.moved = device, limit, 0, 0
        self._there: OrderedDict[int, tuple[Params, int, weakref.ref[Any]]] = OrderedDict()  # by identity

    def put(self, op: Op) -> Op:
        """The operation with its weights on the device; its data is moved per batch, or once as a table."""
        if isinstance(op, Train):
            opt = {role: self._params(state) for role, state in op.opt.items()}
            return replace(op, models=self._models(op.models), frozen=self._models(op.frozen), opt=opt)
        return replace(op, model=self._model(op.model))

    def keep(self, result: Any) -> Any:
        """The result, whose weights stay on the device until they are read."""
        if isinstance(result, Trained):
            opt = {role: self._held(state) for role, state in result.opt.items()}
            seen = {role: ClassSums(each.sums.to(CPU), each.counts.to(CPU)) for role, each in result.seen.items()}
            return replace(result, models={role: self._held_model(m) for role, m in result.models.items()}, opt=opt, seen=seen)
        if isinstance(result, Model):
            return self._held_model(result)
        return result.to(CPU) if isinstance(result, Tensor) else result

    def make_room(self) -> None:
        """Take the weights that were used longest ago off the device, if there are more than the limit allows."""
        while self.bytes > self.limit and self._there:
            _, size, owner = self._there.popitem(last=False)[1]
            self.bytes -= size
            weights = owner()
            if isinstance(weights, HeldParams):
                weights.loaded()  # what is only there must come here first

    def _models(self, models: Models) -> dict[str, Model]:
        return {role: self._model(model) for role, model in models.items()}

    def _model(self, model: Model) -> Model:
        return Model(model.arch, self._params(model.params), self._params(model.buffers))

    def _params(self, params: Params) -> Params:
        held = held_params(params)
        owner = params if held is None else held
        known = self._there.get(id(owner))
        if known is not None:
            self._there.move_to_end(id(owner))
            return known[0]
        there = _copied(owner, self.device)
        self.moved += tree.nbytes(there)
        if not isinstance(owner, dict):  # nobody notices the end of a dictionary
            self._note(owner, there)
        return there

    def _held_model(self, model: Model) -> Model:
        held = Model(model.arch, self._held(model.params), self._held(model.buffers))
        vars(held)["finite"] = model.finite
        return held

    def _held(self, there: Params) -> Params:
        if not there:
            return {}
        held = HeldParams(Form.of(there), lambda: _copied(there, CPU))
        self._note(held, there)
        return held

    def _note(self, owner: Params, there: Params) -> None:
        place, size = id(owner), tree.nbytes(there)

        def end(_: object) -> None:
            if place in self._there:
                self.bytes -= self._there.pop(place)[1]

        self._there[place] = there, size, weakref.ref(owner, end)
        self.bytes += size


def _copied(params: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in params.items()}
