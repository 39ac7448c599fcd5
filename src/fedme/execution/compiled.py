"""The compiled backend (`compiled.cpp`): chains of convolutions and dense layers, one client after another on every thread.

The weights of a client stay in the processor's cache for all its steps, and no Python runs between them. The structures below
have the names and the order of those in the C++ code.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedme.core import tree
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import Models, Objective, Op, Role, Train, Trained
from fedme.core.tree import Params
from fedme.execution.input_tables import InputTable, InputTables
from fedme.execution.network_layers import Activation, Convolution, Dropout, Flatten, Linear, MaxPool, network_layers
from fedme.execution.reference import DRAWS_PER_STEP, result_of
from fedme.execution.routing import Tick, models_of
from fedme.execution.threads import Computing, on_threads
from fedme.learning.objectives import CrossEntropy, Mutual
from fedme.learning.optimizers import SGD, Moreau, MutualMoreau

DERIVED_ROLES = {Moreau: ("w",), MutualMoreau: ("theta",)}  # roles whose weights follow from those of another
LAYER_TYPES = {Linear: 0, Convolution: 1, MaxPool: 2}
ACTIVATIONS = {"relu": 1, "tanh": 2, "sigmoid": 3}


def _fields(c_type: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, c_type) for name in names]


class Batches(ctypes.Structure):
    """The batches of one training."""

    _fields_ = [*_fields(ctypes.c_void_p, "rows", "targets", "sizes"), *_fields(ctypes.c_int64, "steps", "width")]


class ParameterSpec(ctypes.Structure):
    """A parameter, its momentum buffer and its anchor."""

    _fields_ = _fields(ctypes.c_void_p, "value", "momentum", "anchor")


class LayerSpec(ctypes.Structure):
    """A layer with its activation and dropout."""

    _fields_ = [
        *_fields(ctypes.c_int64, "layer_type", "inputs", "outputs", "window_rows", "window_columns"),
        *_fields(ctypes.c_int64, "padding_rows", "padding_columns", "activation"),
        ("dropout", ctypes.c_double),
        ("seed", ctypes.c_int64),
    ]


class NetworkSpec(ctypes.Structure):
    """A network, the shape of its images, the weights of its loss terms, and the sum of its losses (a result)."""

    _fields_ = [
        ("depth", ctypes.c_int64),
        ("layers", ctypes.POINTER(LayerSpec)),
        ("parameters", ctypes.POINTER(ParameterSpec)),
        *_fields(ctypes.c_int64, "channels", "rows", "columns"),
        *_fields(ctypes.c_double, "label_weight", "peer_weight", "loss"),
    ]


class OptimizerSpec(ctypes.Structure):
    """A local optimizer."""

    _fields_ = [
        *_fields(ctypes.c_int64, "optimizer", "mutual", "inner_steps", "draws_per_step"),
        *_fields(ctypes.c_double, "lr", "momentum", "weight_decay", "prox", "outer_lr", "clip"),
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
    if not hasattr(code, "fedme_runs_here"):
        return "the extension was built from other sources; install fedme again"
    return code if code.fedme_runs_here() else "this processor lacks AVX2"


@dataclass(frozen=True)
class FusedLayer:
    """A layer with the activation after it and the dropout after that."""

    layer: Linear | Convolution | MaxPool
    activation: Activation | None = None
    dropout: Dropout | None = None


@functools.lru_cache(maxsize=256)
def fused_layers(arch: Arch) -> tuple[FusedLayer, ...] | str:
    """The layers that the compiled code runs, convolutions and pooling before dense layers; or why it cannot."""
    layers = network_layers(arch)
    if isinstance(layers, str):
        return layers
    fused: list[FusedLayer] = []
    flat = False
    for layer in layers:
        last = fused[-1] if fused else None
        dense = last is not None and isinstance(last.layer, Linear)
        spatial = not flat and not dense
        if isinstance(layer, Flatten):
            flat = True
        elif (
            (isinstance(layer, Linear) and (flat or dense or last is None))
            or (isinstance(layer, Convolution) and spatial)
            or (isinstance(layer, MaxPool) and spatial and last is not None)
        ):
            fused.append(FusedLayer(layer))
        elif isinstance(layer, Activation) and last and not last.activation and not last.dropout:
            fused[-1] = replace(last, activation=layer)
        elif isinstance(layer, Dropout) and last and not last.dropout:
            fused[-1] = replace(last, dropout=layer)
        else:
            return f"unsupported place of {type(layer).__name__} among the layers"
    return tuple(fused)


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
            layers = fused_layers(model.arch)
            if isinstance(layers, str):
                return layers
            if model.buffers:
                return f"{model.arch.name} has buffers"
            if model.dtype not in (torch.float32, torch.float64):
                return f"unsupported type {model.dtype}"
            if reason := self.tables.table(op).obstacle(model.arch):
                return reason
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
    if op.batch_schedule.scales(len(op.data)):
        return "a scaled last batch"
    if type(optimizer) is SGD:
        if optimizer.alternating:
            return "alternating steps"
        if optimizer.nesterov:
            return "Nesterov momentum"
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
    models = {role: model.with_params(_copy(model.params)) for role, model in op.models.items()}
    if isinstance(optimizer, SGD):
        momentum = {role: _copy(op.opt.get(role) or tree.zeros(m.params)) for role, m in models.items()}
        momentum = momentum if optimizer.momentum else {}
        anchors = {role: _copy(op.frozen[role].params) for role in models} if optimizer.prox else {}
        clip = math.inf if optimizer.clip is None else optimizer.clip
        settings = optimizer.lr, optimizer.momentum, optimizer.weight_decay, optimizer.prox, 0.0, clip
        spec = OptimizerSpec(0, isinstance(optimizer.objective, Mutual), 1, DRAWS_PER_STEP, *settings)
        return Trained(models, momentum, (yield from _train(op, table, models, momentum, anchors, spec)))
    assert isinstance(optimizer, Moreau | MutualMoreau)
    mutual = isinstance(optimizer, MutualMoreau)
    outer_lr = optimizer.lr if mutual else optimizer.lr * optimizer.lam
    settings = optimizer.inner_lr, 0.0, optimizer.l2, optimizer.lam, outer_lr, math.inf
    spec = OptimizerSpec(2 if mutual else 1, mutual, optimizer.inner, DRAWS_PER_STEP, *settings)
    if not mutual:
        losses = yield from _train(op, table, {"theta": models["theta"]}, {}, {"theta": models["w"].params}, spec)
        return Trained({role: models[role] for role in ("theta", "w")}, {}, losses)
    trained = {role: models[role] for role in ("aux", "local")}
    anchors = {role: _copy(op.frozen[role].params) for role in trained}
    losses = yield from _train(op, table, trained, {}, anchors, spec)
    # The anchor of the outer step is the last inner copy.
    return Trained({**trained, "theta": trained["aux"].with_params(anchors["aux"])}, {}, losses)


def _train(
    op: Train,
    table: InputTable,
    models: Models,
    momentum: Mapping[Role, Params],
    anchors: Mapping[Role, Params],
    spec: OptimizerSpec,
) -> Computing[dict[Role, float]]:
    """Train the models in place, with their momentum buffers and anchors; the mean loss of every model."""
    positions, sizes = op.batch_schedule.positions(len(op.data), op.key.at("batches"))
    rows, targets = op.data.rows[positions].contiguous(), op.data.y[positions].contiguous()
    networks = [
        _network_spec(model, table, momentum.get(role), anchors.get(role), op.key.at("dropout", role))
        for role, model in models.items()
    ]
    for role, network in zip(models, networks, strict=True):
        network.label_weight, network.peer_weight = _loss_weights(op.optimizer.objective, role)
    _require_below(rows, len(table.values), "row")
    classes = {network.layers[network.depth - 1].outputs for network in networks}
    if spec.mutual and len(classes) > 1:
        raise ValueError(f"models that learn from each other must have the same classes, got {sorted(classes)} outputs")
    _require_below(targets, min(classes), "class")
    batches = Batches(rows.data_ptr(), targets.data_ptr(), sizes.data_ptr(), *rows.shape)
    specs = (NetworkSpec * len(networks))(*networks)
    yield _call("fedme_train", table, ctypes.byref(batches), specs, ctypes.c_int64(len(networks)), ctypes.byref(spec))
    samples = int(sizes.sum())
    return {role: network.loss / samples for role, network in zip(models, specs, strict=True)}


def _predict(model: Model, rows: Tensor, table: InputTable) -> Computing[Tensor]:
    rows = rows.contiguous()
    _require_below(rows, len(table.values), "row")
    contiguous = model.with_params({name: value.contiguous() for name, value in model.params.items()})
    spec = _network_spec(contiguous, table)
    logits = table.values.new_empty((len(rows), spec.layers[spec.depth - 1].outputs))
    arguments = ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(len(rows)), ctypes.byref(spec)
    yield _call("fedme_predict", table, *arguments, ctypes.c_void_p(logits.data_ptr()))
    return logits


def _call(name: str, table: InputTable, *arguments: object) -> Callable[[], None]:
    code, values = library(), table.values
    assert not isinstance(code, str)
    sizes = ctypes.c_int64(values.shape[1]), ctypes.c_int64(values.element_size())

    def call() -> None:
        if getattr(code, name)(ctypes.c_void_p(values.data_ptr()), *sizes, *arguments):
            raise MemoryError("not enough memory for the models of a client")

    return call


def _copy(params: Params) -> dict[str, Tensor]:
    """Contiguous copies: the compiled code gets their pointers and writes to them."""
    return {name: value.clone(memory_format=torch.contiguous_format) for name, value in params.items()}


def _network_spec(
    model: Model, table: InputTable, momentum: Params | None = None, anchor: Params | None = None, key: Key | None = None
) -> NetworkSpec:
    """A network, after a check that its layers fit the inputs and each other: the compiled code does not check.

    `key` seeds its dropout layers.
    """
    fused = fused_layers(model.arch)
    assert not isinstance(fused, str)
    for params in (momentum, anchor):
        for name, value in model.params.items():
            other = params[name] if params else value
            if (other.shape, other.dtype) != (value.shape, table.values.dtype):
                raise ValueError(
                    f"{model.arch.name}: {name} must be {tuple(value.shape)}, got {tuple(other.shape)} {other.dtype}"
                )
    image = table.shape if isinstance(fused[0].layer, Convolution) else (0, 0, 0)
    shape = image if isinstance(fused[0].layer, Convolution) else (table.values.shape[1],)
    specs, parameters = [], []
    for layer in fused:
        spec, shape = _layer_spec(model, layer, shape)
        spec.seed = key.at(layer.dropout.name).integer() if key and layer.dropout else 0
        specs.append(spec)
        names = (None, None) if isinstance(layer.layer, MaxPool) else (layer.layer.weight, layer.layer.bias)
        for parameter in names:
            trees = (model.params, momentum, anchor)
            pointers = [params[parameter].data_ptr() if params and parameter else None for params in trees]
            parameters.append(ParameterSpec(*pointers))
    layers = (LayerSpec * len(specs))(*specs)
    return NetworkSpec(len(specs), layers, (ParameterSpec * len(parameters))(*parameters), *image)


def _layer_spec(model: Model, fused: FusedLayer, shape: tuple[int, ...]) -> tuple[LayerSpec, tuple[int, ...]]:
    """A layer for samples of this shape, and the shape of its outputs: features, or channels, rows and columns."""
    layer, name = fused.layer, model.arch.name
    if isinstance(layer, Linear):
        shape, window, padding = (math.prod(shape),), (1, 1), (0, 0)
    elif len(shape) != 3:
        raise ValueError(f"{name}: a convolution takes channels, rows and columns, got inputs of shape {shape}")
    else:
        window, padding = layer.window, layer.padding if isinstance(layer, Convolution) else (0, 0)
    sizes = (shape[0], shape[0], *window) if isinstance(layer, MaxPool) else tuple(model.params[layer.weight].shape)
    if sizes[1] != shape[0]:
        raise ValueError(f"{name}: a layer takes {sizes[1]} inputs, got {shape[0]}")
    if not isinstance(layer, MaxPool) and layer.bias and model.params[layer.bias].shape != sizes[:1]:
        raise ValueError(f"{name}: {layer.bias} must have shape {sizes[:1]}, got {tuple(model.params[layer.bias].shape)}")
    activation = ACTIVATIONS[fused.activation.function] if fused.activation else 0
    dropout = fused.dropout.p if fused.dropout else 0.0
    spec = LayerSpec(LAYER_TYPES[type(layer)], sizes[1], sizes[0], *window, *padding, activation, dropout)
    if isinstance(layer, Linear):
        return spec, sizes[:1]
    padded = [size + 2 * border for size, border in zip(shape[1:], padding, strict=True)]
    if sizes[2:] != window or any(size < least for size, least in zip(padded, window, strict=True)):
        raise ValueError(f"{name}: a window of {window} does not fit into {tuple(padded)}")
    pools = isinstance(layer, MaxPool)
    return spec, (sizes[0], *(size // k if pools else size - k + 1 for size, k in zip(padded, window, strict=True)))


def _loss_weights(objective: Objective, role: Role) -> tuple[float, float]:
    """The weights of labels and peer in the loss of a role."""
    if not isinstance(objective, Mutual):
        return 1.0, 0.0
    place = (objective.first, objective.second).index(role)
    return objective.labels[place], objective.peer[place]


def _require_below(numbers: Tensor, count: int, what: str) -> None:
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise IndexError(f"{what} numbers must be >= 0 and < {count}, got {int(numbers.min())} to {int(numbers.max())}")
