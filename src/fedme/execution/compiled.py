"""The compiled backend (`compiled.cpp`): programs made of traced networks, one client after another on every thread.

The weights of a client stay in the processor's cache for all its steps, and no Python runs between them. The structures below
have the names and the order of those in the C++ code.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedme.core.data import Arrays, Split
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, Models, Objective, Op, Predict, Role, Train, Trained
from fedme.core.tree import Params
from fedme.execution import reference
from fedme.execution.input_tables import InputTable, InputTables
from fedme.execution.lowering import NODE_TYPES, Program, lowered
from fedme.execution.reference import DRAWS_PER_STEP, result_of
from fedme.execution.routing import Tick, models_of, no_tick
from fedme.execution.threads import Computing, on_threads
from fedme.learning.objectives import CrossEntropy, Mutual
from fedme.learning.optimizers import SGD, Adam, Moreau, MutualMoreau

DERIVED_ROLES = {Moreau: ("w",), MutualMoreau: ("theta",)}  # roles whose weights follow from those of another
VECTOR_BYTES = 32
INTERFACE = 2  # of the structures below and the functions of the C++ code; change both together


def _fields(c_type: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, c_type) for name in names]


class Table(ctypes.Structure):
    """The inputs of all samples: numbers or symbols."""

    _fields_ = [("values", ctypes.c_void_p), *_fields(ctypes.c_int64, "features", "symbols")]


class Batches(ctypes.Structure):
    """The batches of one training."""

    _fields_ = [*_fields(ctypes.c_void_p, "rows", "targets", "sizes", "divisors"), *_fields(ctypes.c_int64, "steps", "width")]


class ParameterSpec(ctypes.Structure):
    """A parameter, its optimizer state and its anchor."""

    _fields_ = [*_fields(ctypes.c_void_p, "value", "momentum", "second", "anchor"), ("trained", ctypes.c_int64)]


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
    ]


class NetworkSpec(ctypes.Structure):
    """A network, the weights of its loss terms, and the sum of its losses, a result."""

    _fields_ = [
        ("values", ctypes.POINTER(ValueSpec)),
        ("nodes", ctypes.POINTER(NodeSpec)),
        *_fields(ctypes.c_int64, "value_count", "node_count", "output", "classes"),
        ("parameters", ctypes.POINTER(ParameterSpec)),
        ("seeds", ctypes.POINTER(ctypes.c_int64)),
        *_fields(ctypes.c_double, "label_weight", "peer_weight"),
        ("steps", ctypes.c_int64),
        ("loss", ctypes.c_double),
    ]


class OptimizerSpec(ctypes.Structure):
    """A local optimizer."""

    _fields_ = [
        *_fields(ctypes.c_int64, "optimizer", "mutual", "inner_steps", "draws_per_step", "nesterov"),
        *_fields(ctypes.c_double, "lr", "momentum", "weight_decay", "prox", "outer_lr", "clip"),
        *_fields(ctypes.c_double, "beta2", "eps", "decoupled_decay"),
    ]


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL | str:
    """The compiled code, or why there is none."""
    candidates = [Path(__file__).with_name(f"_compiled{suffix}") for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in candidates if path.exists()), None)
    if path is None:
        return "the extension was not built when fedme was installed (no C++ compiler?)"
    try:
        code = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the extension cannot be loaded: {error}"
    if not hasattr(code, "fedme_interface") or code.fedme_interface() != INTERFACE:
        return "the extension was built from other sources; install fedme again"
    return code if code.fedme_runs_here() else "this processor lacks AVX2"


def program_of(arch: Arch, shape: tuple[int, ...], symbols: bool, dtype: torch.dtype) -> Program | str:
    """The program of a network for inputs of this shape, if its results agree with the network; else why there is none."""
    # In float64 a small difference is not a rounding error; in the type of the model the layout of its vectors is checked too.
    for checked in (torch.float64, dtype):
        program = lowered(arch, shape, symbols, VECTOR_BYTES // checked.itemsize)
        if isinstance(program, str):
            return program
        if reason := disagreement(arch, shape, symbols, checked):
            return reason
    return program


@functools.lru_cache(maxsize=256)
def disagreement(arch: Arch, shape: tuple[int, ...], symbols: bool, dtype: torch.dtype) -> str:
    """How the program of a network differs from the network itself; empty if it does not.

    A trace does not see everything: a network may have its own backward pass, or change tensors behind another name. So both
    are trained for a few steps on random inputs, with batches of several samples and of one.
    """
    key, program, samples = Key(0).at("check"), _program(arch, shape, symbols, dtype), torch.arange(9)
    x = torch.randn((len(samples), *shape), generator=key.torch()).to(dtype)
    if symbols:
        x = torch.randint(program.symbols, x.shape, generator=key.torch())
    data = Split(Arrays(x, samples % program.classes), samples)
    model = Model.init(arch, key, dtype)
    # A second step in float32 would show how fast rounding errors grow.
    schedule = BatchSchedule(epochs=2, batch=4, steps=None if dtype == torch.float64 else 1, shuffle=False)
    op = Train({"net": model}, SGD(CrossEntropy(), 0.05, 0.5), data, schedule, key)
    if names := sorted(model.params.keys() - set(program.parameters)):
        return f"the weight {names[0]} is not used"
    try:
        wanted = reference.train(op).models["net"]
    except Exception as error:  # a user's network may raise anything
        return f"its training fails on random inputs ({type(error).__name__}: {error})"
    tables = InputTables(torch.device("cpu"))

    def run(op: Op) -> Any:
        return on_threads([op], functools.partial(_compute, table=tables.table(op)), 1, no_tick)[0]

    tolerance = 1e-7 if dtype == torch.float64 else 1e-2
    trained = run(op).models["net"]
    before, after, expected = ({**m.params, **m.buffers} for m in (model, trained, wanted))
    for name, value in expected.items():
        change = (value - before[name]).to(torch.float64).norm() + 1e-3 * value.numel() ** 0.5
        if not bool((after[name] - value).to(torch.float64).norm() <= tolerance * change):
            return f"compiled training differs from the network in {name}"
    logits, target = run(Predict(wanted, data)), reference.predict(Predict(wanted, data))
    agree = torch.allclose(logits, target, tolerance, tolerance * float(target.abs().max()))
    return "" if agree else "compiled predictions differ from those of the network"


def _program(arch: Arch, shape: tuple[int, ...], symbols: bool, dtype: torch.dtype) -> Program:
    program = lowered(arch, shape, symbols, VECTOR_BYTES // dtype.itemsize)
    assert not isinstance(program, str)
    return program


class Compiled:
    """Training and inference in compiled code, on `threads` threads or as many as torch has."""

    name = "compiled"

    def __init__(self, tables: InputTables, threads: int = 1) -> None:
        self.tables, self.threads = tables, threads

    def supports(self, op: Op) -> str:
        """Why the compiled code cannot run the operation; empty if it can."""
        if isinstance(library(), str):
            return "no compiled code"
        if reason := self.tables.supports(op):
            return reason
        for model in models_of(op):
            if model.dtype not in (torch.float32, torch.float64):
                return f"unsupported type {model.dtype}"
            table = self.tables.table(op)
            program = program_of(model.arch, table.shape, table.symbols, model.dtype)
            if isinstance(program, str):
                return program
            if table.symbols and not 0 <= table.range[0] <= table.range[1] < program.symbols:
                return f"symbols from {table.range[0]} to {table.range[1]}, but the network knows {program.symbols}"
        return training_obstacle(op) if isinstance(op, Train) else ""

    def group(self, op: Op) -> Hashable:
        """Operations on one table of inputs."""
        return isinstance(op, Train), models_of(op)[0].dtype, id(op.data.source)

    def run(self, ops: Sequence[Op], tick: Tick) -> list[Any]:
        """Run operations on several threads; `tick` is called on this thread."""
        compute = functools.partial(_compute, table=self.tables.table(ops[0]))
        return on_threads(ops, compute, max(torch.get_num_threads(), self.threads), tick)


def training_obstacle(op: Train) -> str:
    """Why the compiled code cannot train with the optimizer, loss and targets of an operation; empty if it can."""
    optimizer = op.optimizer
    if op.mechanism is not None:
        return "private training"
    if type(optimizer) in (SGD, Adam):
        assert isinstance(optimizer, SGD | Adam)
        if optimizer.alternating:
            return "alternating steps"
        if optimizer.prox and not op.frozen.keys() >= op.models.keys():
            return "a proximal term, but not for every model"
    elif type(optimizer) not in (Moreau, MutualMoreau):
        return f"unsupported optimizer {type(optimizer).__name__}"
    labels = op.data.source.labels if op.data.targets is None else op.data.targets
    if labels.dim() != 1 or labels.dtype != torch.int64:
        return "the targets are not classes"
    loss, trained = optimizer.objective, op.models.keys() - set(DERIVED_ROLES.get(type(optimizer), ()))
    mutual = type(loss) is Mutual and {loss.first, loss.second} == trained
    supported = mutual or (type(loss) is CrossEntropy and type(optimizer) is not MutualMoreau)
    return "" if supported else f"unsupported loss {type(loss).__name__}"


def _compute(op: Op, table: InputTable) -> Computing[Any]:
    """Prepare an operation, yield its computation, and return its result."""
    if not isinstance(op, Train):
        return result_of(op, (yield from _predict(op.model, op.data.rows, table)))
    optimizer = op.optimizer
    models = {role: Model(model.arch, _copy(model.params), _copy(model.buffers)) for role, model in op.models.items()}
    if isinstance(optimizer, SGD | Adam):
        states = {role: _copy(op.opt.get(role) or optimizer.init_state(model.params)) for role, model in models.items()}
        anchors = {role: _copy(op.frozen[role].params) for role in models} if optimizer.prox else {}
        losses = yield from _train(op, table, models, states, anchors, _descent_spec(optimizer))
        taken = op.batch_schedule.count(len(op.data))
        for state in states.values():
            for name in state if isinstance(optimizer, Adam) else ():
                if name.endswith(".step"):
                    state[name] += taken
        return Trained(models, {role: state for role, state in states.items() if state}, losses)
    assert isinstance(optimizer, Moreau | MutualMoreau)
    mutual = isinstance(optimizer, MutualMoreau)
    outer_lr = optimizer.lr if mutual else optimizer.lr * optimizer.lam
    settings = optimizer.inner_lr, 0.0, optimizer.l2, optimizer.lam, outer_lr, math.inf
    spec = OptimizerSpec(2 if mutual else 1, mutual, optimizer.inner, DRAWS_PER_STEP, 0, *settings)
    if not mutual:
        losses = yield from _train(op, table, {"theta": models["theta"]}, {}, {"theta": models["w"].params}, spec)
        w = models["w"].with_buffers(models["theta"].buffers)
        return Trained({"theta": models["theta"], "w": w}, {}, losses)
    trained = {role: models[role] for role in ("aux", "local")}
    # The anchor of the outer step is the last inner copy; it has its own running statistics.
    anchors = {role: _copy({**op.frozen[role].params, **models[role].buffers}) for role in trained}
    losses = yield from _train(op, table, trained, {}, anchors, spec)
    aux = trained["aux"]
    theta = Model(aux.arch, *({name: anchors["aux"][name] for name in names} for names in (aux.params, aux.buffers)))
    sizes = op.batch_schedule.positions(len(op.data), op.key.at("batches"))[1] > 1
    if len(sizes):  # before the last batch one per batch, then one per inner step
        _count_batches(theta, table, int(sizes[:-1].sum()) + optimizer.inner * int(sizes[-1]))
    return Trained({**trained, "theta": theta}, {}, losses)


def _descent_spec(optimizer: SGD | Adam) -> OptimizerSpec:
    clip = math.inf if optimizer.clip is None else optimizer.clip
    mutual = isinstance(optimizer.objective, Mutual)
    if isinstance(optimizer, SGD):
        settings = optimizer.lr, optimizer.momentum, optimizer.weight_decay, optimizer.prox, 0.0, clip
        return OptimizerSpec(0, mutual, 1, DRAWS_PER_STEP, optimizer.nesterov, *settings)
    decoupled = optimizer.weight_decay if optimizer.decoupled_weight_decay else 0.0
    settings = optimizer.lr, optimizer.betas[0], optimizer.weight_decay - decoupled, optimizer.prox, 0.0, clip
    return OptimizerSpec(3, mutual, 1, DRAWS_PER_STEP, 0, *settings, optimizer.betas[1], optimizer.eps, decoupled)


def _train(
    op: Train,
    table: InputTable,
    models: Models,
    states: Mapping[Role, Params],
    anchors: Mapping[Role, Params],
    spec: OptimizerSpec,
) -> Computing[dict[Role, float]]:
    """Train the models in place, with their optimizer states and anchors; the mean loss of every model."""
    positions, sizes = op.batch_schedule.positions(len(op.data), op.key.at("batches"))
    rows, targets = op.data.rows[positions].contiguous(), op.data.y[positions].contiguous()
    networks = [
        _network_spec(model, table, states.get(role), anchors.get(role), op.key.at("dropout", role))
        for role, model in models.items()
    ]
    for role, network in zip(models, networks, strict=True):
        network.label_weight, network.peer_weight = _loss_weights(op.optimizer.objective, role)
        network.steps = next((int(value) for name, value in states.get(role, {}).items() if name.endswith(".step")), 0)
    _require_below(rows, len(table.values), "row")
    classes = {network.classes for network in networks}
    if spec.mutual and len(classes) > 1:
        raise ValueError(f"models that learn from each other must have the same classes, got {sorted(classes)} outputs")
    _require_below(targets, min(classes), "class")
    divisors = op.batch_schedule.divisors(len(op.data), sizes).to(torch.float64)
    batches = Batches(rows.data_ptr(), targets.data_ptr(), sizes.data_ptr(), divisors.data_ptr(), *rows.shape)
    specs = (NetworkSpec * len(networks))(*networks)
    dtype = next(iter(models.values())).dtype
    yield _call("fedme_train", table, dtype, ctypes.byref(batches), specs, ctypes.c_int64(len(networks)), ctypes.byref(spec))
    batches_with_statistics = int((sizes > 1).sum()) * (1 if spec.optimizer != 1 else spec.inner_steps)
    for model in models.values():
        _count_batches(model, table, batches_with_statistics)
    samples = int(sizes.sum())
    return {role: network.loss / samples for role, network in zip(models, specs, strict=True)}


def _count_batches(model: Model, table: InputTable, count: int) -> None:
    for name in _program(model.arch, table.shape, table.symbols, model.dtype).counters:
        model.buffers[name].add_(count)


def _predict(model: Model, rows: Tensor, table: InputTable) -> Computing[Tensor]:
    rows = rows.contiguous()
    _require_below(rows, len(table.values), "row")
    contiguous = Model(
        model.arch, *({name: value.contiguous() for name, value in values.items()} for values in (model.params, model.buffers))
    )
    spec = _network_spec(contiguous, table)
    logits = torch.empty((len(rows), spec.classes), dtype=model.dtype)
    arguments = ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(len(rows)), ctypes.byref(spec)
    yield _call("fedme_predict", table, model.dtype, *arguments, ctypes.c_void_p(logits.data_ptr()))
    return logits


def _call(name: str, table: InputTable, dtype: torch.dtype, *arguments: object) -> Callable[[], None]:
    code, values = library(), table.values
    assert not isinstance(code, str)
    inputs = Table(values.data_ptr(), values.shape[1], table.symbols)

    def call() -> None:
        if getattr(code, name)(ctypes.byref(inputs), ctypes.c_int64(dtype.itemsize), *arguments):
            raise MemoryError("not enough memory for the models of a client")

    return call


def _copy(params: Params) -> dict[str, Tensor]:
    """Contiguous copies: the compiled code gets their pointers and writes to them."""
    return {name: value.clone(memory_format=torch.contiguous_format) for name, value in params.items()}


class CompiledProgram:
    """The nodes and values of a program as the C++ code reads them; they do not change."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values = (ValueSpec * len(program.values))(
            *(ValueSpec(value.size, value.sums, value.gradient) for value in program.values)
        )
        self.arrays: list[Any] = []  # what the nodes point to
        self.nodes = (NodeSpec * len(program.nodes))(*map(self._node, program.nodes))

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
        )

    def _array(self, c_type: Any, numbers: Sequence[float]) -> Any:
        array = (c_type * max(len(numbers), 1))(*numbers)
        self.arrays.append(array)
        return array


def _filled(numbers: Sequence[int], count: int) -> list[int]:
    return [*numbers, *[-1] * (count - len(numbers))]


@functools.lru_cache(maxsize=256)
def _compiled_program(arch: Arch, shape: tuple[int, ...], symbols: bool, dtype: torch.dtype) -> CompiledProgram:
    return CompiledProgram(_program(arch, shape, symbols, dtype))


def _network_spec(
    model: Model, table: InputTable, state: Params | None = None, anchor: Params | None = None, key: Key | None = None
) -> NetworkSpec:
    """A network, after a check that its weights are those of its program: the compiled code does not check.

    `key` seeds its dropout layers.
    """
    compiled = _compiled_program(model.arch, table.shape, table.symbols, model.dtype)
    program = compiled.program
    template = _shapes(model.arch)
    parameters = (ParameterSpec * max(len(program.parameters), 1))()
    for index, name in enumerate(program.parameters):
        trained = name in model.params
        value = model.params[name] if trained else model.buffers[name]
        state, anchor = state or {}, anchor or {}
        others = [state.get(name, state.get(f"{name}.exp_avg")), state.get(f"{name}.exp_avg_sq"), anchor.get(name)]
        for tensor in (value, *others):
            if tensor is not None and (tuple(tensor.shape), tensor.dtype) != (template[name], model.dtype):
                raise ValueError(
                    f"{model.arch.name}: {name} must be {template[name]}, got {tuple(tensor.shape)} {tensor.dtype}"
                )
        pointers = [tensor.data_ptr() if tensor is not None else None for tensor in (value, *others)]
        parameters[index] = ParameterSpec(*pointers, trained)
    seeds = [key.at(layer).integer() for layer in program.layers] if key else [0] * len(program.layers)
    counts = len(program.values), len(program.nodes), program.output, program.classes
    return NetworkSpec(compiled.values, compiled.nodes, *counts, parameters, (ctypes.c_int64 * max(len(seeds), 1))(*seeds))


@functools.lru_cache(maxsize=256)
def _shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    network = arch.build(Key(0))
    return {name: tuple(value.shape) for name, value in (*network.named_parameters(), *network.named_buffers())}


def _loss_weights(objective: Objective, role: Role) -> tuple[float, float]:
    """The weights of labels and peer in the loss of a role."""
    if not isinstance(objective, Mutual):
        return 1.0, 0.0
    place = (objective.first, objective.second).index(role)
    return objective.labels[place], objective.peer[place]


def _require_below(numbers: Tensor, count: int, what: str) -> None:
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise IndexError(f"{what} numbers must be >= 0 and < {count}, got {int(numbers.min())} to {int(numbers.max())}")
