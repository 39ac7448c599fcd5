"""Networks as the C++ code reads them: nodes and values of a program, and where the weights of a model are in memory.

The structures have the names and the order of those in the C++ code.
"""

import ctypes
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedme.core.flat_params import FlatLayout, FlatParams, flat_params
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import Role
from fedme.core.tree import Params
from fedme.execution.compiled_calls import Call, address
from fedme.execution.compiled_library import vector_bytes
from fedme.execution.input_tables import InputTable
from fedme.execution.lowering import lowered
from fedme.execution.program import NODE_TYPES, Program

_numbers = itertools.count(1)  # of programs: the compiled code knows them again, also after others were forgotten
MOST_HEADS = 4096  # that a table of inputs keeps


def known_program(arch: Arch, shape: tuple[int, ...], symbols: bool, dtype: torch.dtype) -> Program:
    """The program of a network that is known to have one."""
    program = lowered(arch, shape, symbols, vector_bytes() // dtype.itemsize, dtype)
    assert not isinstance(program, str)
    return program


def _fields(c_type: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, c_type) for name in names]


class ValueSpec(ctypes.Structure):
    """A value of a network."""

    _fields_ = _fields(ctypes.c_int64, "size", "sums", "gradient")


class NodeSpec(ctypes.Structure):
    """A node of a network."""

    _fields_ = [
        ("node_type", ctypes.c_int64),
        ("inputs", ctypes.c_int64 * 3),
        ("output", ctypes.c_int64),
        ("parameters", ctypes.c_int64 * 4),
        ("numbers", ctypes.POINTER(ctypes.c_int64)),
        ("reals", ctypes.POINTER(ctypes.c_double)),
        ("table", ctypes.POINTER(ctypes.c_int64)),
        *_fields(ctypes.c_int64, "table_size", "seed"),
        ("starts", ctypes.c_int64 * 4),
    ]


class CompiledProgram:
    """The nodes and values of a program as the C++ code reads them; they do not change."""

    def __init__(self, program: Program, dtype: torch.dtype = torch.float32) -> None:
        self.program = program
        self.constants = {name: value.to(dtype).contiguous() for name, value in program.constants}
        self.values = (ValueSpec * len(program.values))(
            *(ValueSpec(value.size, value.sums, value.gradient) for value in program.values)
        )
        self.arrays: list[Any] = []  # what the nodes point to
        self.nodes = (NodeSpec * len(program.nodes))(*map(self._node, program.nodes))
        places = ctypes.addressof(self.values), ctypes.addressof(self.nodes)
        counts = len(program.values), len(program.nodes), len(program.parameters)
        self.head = *places, *counts, program.output, program.classes, next(_numbers)  # the first fields of a network

    def _node(self, node: Any) -> NodeSpec:
        names = {name: index for index, name in enumerate(self.program.parameters)}
        numbers, reals = self._array(ctypes.c_int64, node.numbers), self._array(ctypes.c_double, node.reals)
        table = self._array(ctypes.c_int64, node.table)
        parameters = [names[name] if name else -1 for name in node.parameters]
        return NodeSpec(
            NODE_TYPES.index(node.type),
            (ctypes.c_int64 * 3)(*_filled(node.inputs, 3)),
            node.output,
            (ctypes.c_int64 * 4)(*_filled(parameters, 4)),
            numbers,
            reals,
            table,
            len(node.table),
            self.program.layers.index(node.layer) if node.layer else -1,
            (ctypes.c_int64 * 4)(*node.starts),
        )

    def _array(self, c_type: Any, numbers: Sequence[float]) -> Any:
        array = (c_type * max(len(numbers), 1))(*numbers)
        self.arrays.append(array)
        return array


def _filled(numbers: Sequence[int], count: int) -> list[int]:
    return [*numbers, *[-1] * (count - len(numbers))]


@functools.lru_cache(maxsize=256)
def _compiled_program(arch: Arch, shape: tuple[int, ...], symbols: bool, dtype: torch.dtype) -> CompiledProgram:
    return CompiledProgram(known_program(arch, shape, symbols, dtype), dtype)


def network_fields(
    call: Call,
    model: Model,
    table: InputTable,
    state: Params | None = None,
    anchor: Params | None = None,
    key: Key | None = None,
    role: Role = "",
) -> tuple[tuple[int, ...], int]:
    """The first fields of a network, after a check that its weights are those of its program, and its number of outputs.

    The compiled code does not check. The `key` of a training seeds the dropout layers of a role.
    """
    flats = [flat_params(params) if params else None for params in (model.params, state, anchor)]
    flat, head = flats[0], head_of(model, table, flats)
    call.keep(head)  # the table may forget it before the call has ended
    if head.fields and flat is not None and not (model.buffers or state or anchor):  # most networks
        places: tuple[int, ...] = (*head.fields, flat.flat.data_ptr(), 0, 0, 0)
    elif head.fields and not model.buffers and (flats[1] is not None or not state) and (flats[2] is not None or not anchor):
        value, momentum, anchored = [one.flat.data_ptr() if one is not None else 0 for one in flats]
        places = *head.fields, value, momentum, 0, anchored
    else:
        places = *head.program.head, call.add_array(_addresses_of(head.program, model, state, anchor)), 0, 0, 0, 0
    seeds = 0
    if layers := head.program.program.layers:
        seeds = call.add_numbers([key.at("dropout", role, layer).integer() if key else 0 for layer in layers])
    return (*places, seeds), head.program.program.classes


def head_of(model: Model, table: InputTable, flats: Sequence[FlatParams | None]) -> "Head":
    """What a network has in common with others; `flats` are its weights, state and anchor where they are in one tensor."""
    same = (id(model.arch), *[id(one.layout) if one is not None else 0 for one in flats])
    head: Head | None = table.heads.get(same)
    if head is None:
        if len(table.heads) >= MOST_HEADS:
            table.heads.clear()
        program = _compiled_program(model.arch, table.shape, table.symbols, model.dtype)
        head = table.heads[same] = Head(program, model, [one.layout if one is not None else None for one in flats])
    return head


class Head:
    """What networks have in common that have one architecture and equal layouts of weights, state and anchor."""

    fields: tuple[int, ...] = ()  # the first ones, if all weights are in one tensor

    def __init__(self, program: CompiledProgram, model: Model, layouts: Sequence[FlatLayout | None]) -> None:
        self.program, names = program, program.program.parameters
        self.known_by = model.arch, layouts  # as long as they live, their identities are theirs
        missing = [-1] * len(names)
        starts = [missing if layout is None else _starts(layout, names, model.arch, model.dtype) for layout in layouts]
        if -1 not in starts[0]:
            value, momentum, anchor = starts
            self.places = np.array([value, momentum, missing, anchor, [1] * len(names)], np.int64).T.copy()
            self.fields = *program.head, address(self.places)


def _addresses_of(
    compiled: CompiledProgram, model: Model, state: Params | None, anchor: Params | None
) -> list[tuple[int, ...]]:
    """Of every parameter, where its value, state and anchor are in memory, and whether it is trained."""
    names, params, constants = compiled.program.parameters, model.params, compiled.constants
    value = _addresses(params, names, model)
    if model.buffers:
        value = [a if a >= 0 else b for a, b in zip(value, _addresses(model.buffers, names, model), strict=True)]
    value = [constants[name].data_ptr() if name in constants else a for name, a in zip(names, value, strict=True)]
    if -1 in value:
        raise ValueError(f"{model.arch.name}: {names[value.index(-1)]} is missing")
    momentum = second = none = [-1] * len(names)
    if state and (flat_params(state) is not None or any(name in state for name in names)):
        momentum = _addresses(state, names, model)
    elif state:
        momentum, second = (_addresses(state, names, model, suffix) for suffix in (".exp_avg", ".exp_avg_sq"))
    anchored = _addresses(anchor, names, model) if anchor else none
    trained = [-1 if name in constants else int(name in params) for name in names]
    return list(zip(value, momentum, second, anchored, trained, strict=True))


def _addresses(params: Params, names: tuple[str, ...], model: Model, suffix: str = "") -> list[int]:
    """Where the weights of these names are in memory, after a check of their shapes; -1 where there is none."""
    if not suffix and (flat := flat_params(params)) is not None:
        base = flat.flat.data_ptr()
        return [-1 if start < 0 else base + start for start in _starts(flat.layout, names, model.arch, model.dtype)]
    shapes, addresses = _shapes(model.arch), []
    for name in names:
        tensor = params.get(name + suffix)
        if tensor is not None:
            _require_shape(model.arch, name, tuple(tensor.shape), tensor.dtype, shapes[name], model.dtype)
        addresses.append(-1 if tensor is None else tensor.data_ptr())
    return addresses


@functools.lru_cache(maxsize=1024)
def _starts(layout: FlatLayout, names: tuple[str, ...], arch: Arch, dtype: torch.dtype) -> list[int]:
    """Where the weights of these names begin, in bytes; -1 where there is none."""
    shapes = _shapes(arch)
    for name in names:
        if name in layout.shapes:
            _require_shape(arch, name, layout.shapes[name], layout.dtype, shapes[name], dtype)
    return [layout.starts[name] * dtype.itemsize if name in layout.starts else -1 for name in names]


def _require_shape(
    arch: Arch, name: str, shape: tuple[int, ...], dtype: torch.dtype, wanted: tuple[int, ...], wanted_dtype: torch.dtype
) -> None:
    if (shape, dtype) != (wanted, wanted_dtype):
        raise ValueError(f"{arch.name}: {name} must be {wanted}, got {shape} {dtype}")


@functools.lru_cache(maxsize=256)
def _shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    network = arch.build(Key(0))
    return {name: tuple(value.shape) for name, value in (*network.named_parameters(), *network.named_buffers())}
