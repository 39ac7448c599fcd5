"""Chains of convolutions and dense layers in compiled code (`compiled.cpp`): one client after another on every thread.

A client's weights stay in the processor's cache for all its steps, and no Python runs between them. Where the code could not
be built, and for what it does not know, `stacked` and `alone` do the same.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedme.core import tree
from fedme.core.key import Key
from fedme.core.model import Model
from fedme.core.operations import Evaluate, Models, Objective, Op, Predict, Role, Train, Trained
from fedme.core.tree import Params
from fedme.execution.batch_gathering import Fetch
from fedme.execution.layers import Layer, layers
from fedme.execution.reference import DRAWS_A_STEP
from fedme.execution.threads import Computing, on_threads
from fedme.learning.objectives import CrossEntropy, Mutual
from fedme.learning.optimizers import SGD, Moreau, MutualMoreau

T = TypeVar("T")
GIVEN = {Moreau: ("w",), MutualMoreau: ("theta",)}  # roles that get their weights from another
KINDS = {"linear": 0, "convolution": 1, "pool": 2}
NUMBERS: dict[type[nn.Module] | None, int] = {None: 0, nn.ReLU: 1, nn.Tanh: 2, nn.Sigmoid: 3}


class Batches(ctypes.Structure):
    """As in the compiled code; so are the following."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("rows", "targets", "sizes")] + [
        (name, ctypes.c_int64) for name in ("steps", "width")
    ]


class Given(ctypes.Structure):
    """A tensor, its momentum and its anchor."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("now", "speed", "anchor")]


class Shape(ctypes.Structure):
    """A layer."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "inputs", "outputs", "rows", "columns", "above", "beside", "activation")),
        ("p", ctypes.c_double),
        ("seed", ctypes.c_int64),
    ]


class Network(ctypes.Structure):
    """A network, its inputs, how much it learns from labels and from a peer, and the sum of its losses."""

    _fields_ = [
        ("depth", ctypes.c_int64),
        ("shapes", ctypes.POINTER(Shape)),
        ("tensors", ctypes.POINTER(Given)),
        *((name, ctypes.c_int64) for name in ("channels", "height", "width")),
        ("labels", ctypes.c_double),
        ("peer", ctypes.c_double),
        ("loss", ctypes.c_double),
    ]


class Step(ctypes.Structure):
    """The numbers of a rule."""

    _fields_ = [(name, ctypes.c_int64) for name in ("way", "mutual", "inner", "draws")] + [
        (name, ctypes.c_double) for name in ("rate", "momentum", "decay", "pull", "outer", "limit")
    ]


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL | str:
    """The compiled code, or why there is none."""
    built = [Path(__file__).with_name(f"_compiled{suffix}") for suffix in EXTENSION_SUFFIXES]
    found = next((path for path in built if path.exists()), None)
    if found is None:
        return "it was not built when fedme was installed (that needs a C++ compiler)"
    try:
        code = ctypes.CDLL(str(found))
    except OSError as error:
        return f"it cannot be loaded: {error}"
    if not hasattr(code, "fedme_runs_here"):
        return "it was built from other sources than these; install fedme again"
    return code if code.fedme_runs_here() else "this processor lacks AVX2"


def obstacle(op: Op) -> str:
    """Why the compiled code cannot run this; empty if it can."""
    code = library()
    if isinstance(code, str):
        return f"no compiled code: {code}"
    if isinstance(op, Train) and op.mechanism is not None:
        return "its training is private"
    for model in op.models.values() if isinstance(op, Train) else [op.model]:
        if layers(model.arch) is None or model.dtype not in (torch.float32, torch.float64):
            return f"{model.arch.name} has other layers"
    return _obstacle_of_training(op) if isinstance(op, Train) else ""


def _obstacle_of_training(op: Train) -> str:
    optimizer = op.optimizer
    if type(optimizer) is SGD:
        if optimizer.alternating:
            return "its models step one after another"
        if optimizer.prox and not op.frozen.keys() >= op.models.keys():
            return "there is a pull, but not for every model"
    elif type(optimizer) not in (Moreau, MutualMoreau):
        return "its rule is another one"
    labels = op.data.source.labels if op.data.targets is None else op.data.targets
    if labels.dim() != 1 or labels.dtype != torch.int64:
        return "its targets are not classes"
    loss, trained = optimizer.objective, {role for role in op.models if role not in GIVEN.get(type(optimizer), ())}
    known = type(loss) is CrossEntropy or (type(loss) is Mutual and {loss.first, loss.second} == trained)
    return "" if known and (isinstance(loss, Mutual) or type(optimizer) is not MutualMoreau) else "its loss is another one"


def train_compiled(ops: Sequence[Train], fetch: Fetch, threads: int, tick: Callable[[], None]) -> list[Trained]:
    """Train operations none of which has an obstacle; `tick` is called on this thread, once for each that is done."""
    ways = {SGD: _sgd, Moreau: _moreau, MutualMoreau: _mutual_moreau}
    return on_threads(ops, lambda op: ways[type(op.optimizer)](op, fetch), threads, tick)


def look_compiled(
    ops: Sequence[Evaluate | Predict],
    fetch: Fetch,
    shown: Callable[[Evaluate | Predict, Tensor], T],
    threads: int,
    tick: Callable[[], None],
) -> list[T]:
    """What `shown` makes of the logits of the models of operations none of which has an obstacle."""
    logits = on_threads(ops, lambda op: _predict(op.model, op.data.rows, fetch), threads, tick)
    return [shown(op, z) for op, z in zip(ops, logits, strict=True)]


def _sgd(op: Train, fetch: Fetch) -> Computing[Trained]:
    optimizer = op.optimizer
    assert isinstance(optimizer, SGD)
    models = {role: Model(m.arch, _own(m.params), {}) for role, m in op.models.items()}
    speeds = {role: _own(op.opt.get(role) or tree.zeros(m.params)) for role, m in models.items()} if optimizer.momentum else {}
    anchors = {role: _own(op.frozen[role].params) for role in models} if optimizer.prox else {}
    limit = math.inf if optimizer.clip is None else optimizer.clip
    numbers = optimizer.lr, optimizer.momentum, optimizer.weight_decay, optimizer.prox, 0.0, limit
    step = Step(0, isinstance(optimizer.objective, Mutual), 1, DRAWS_A_STEP, *numbers)
    return Trained(models, speeds, (yield from _train(op, fetch, models, speeds, anchors, step)))


def _moreau(op: Train, fetch: Fetch) -> Computing[Trained]:
    optimizer = op.optimizer
    assert isinstance(optimizer, Moreau)
    theta, w = (Model(op.models[role].arch, _own(op.models[role].params), {}) for role in ("theta", "w"))
    step = Step(
        1,
        False,
        optimizer.inner,
        DRAWS_A_STEP,
        optimizer.inner_lr,
        0.0,
        optimizer.l2,
        optimizer.lam,
        optimizer.lr * optimizer.lam,
        math.inf,
    )
    losses = yield from _train(op, fetch, {"theta": theta}, {}, {"theta": w.params}, step)
    return Trained({"theta": theta, "w": w}, {}, losses)


def _mutual_moreau(op: Train, fetch: Fetch) -> Computing[Trained]:
    optimizer = op.optimizer
    assert isinstance(optimizer, MutualMoreau)
    models = {role: Model(op.models[role].arch, _own(op.models[role].params), {}) for role in ("aux", "local")}
    anchors = {role: _own(op.frozen[role].params) for role in models}
    step = Step(
        2, True, optimizer.inner, DRAWS_A_STEP, optimizer.inner_lr, 0.0, optimizer.l2, optimizer.lam, optimizer.lr, math.inf
    )
    losses = yield from _train(op, fetch, models, {}, anchors, step)
    theta = models["aux"].with_params(anchors["aux"])  # the last inner copy is what the last step was pulled to
    return Trained({**models, "theta": theta}, {}, losses)


def _train(
    op: Train, fetch: Fetch, models: Models, speeds: Mapping[Role, Params], anchors: Mapping[Role, Params], step: Step
) -> Computing[dict[Role, float]]:
    """Change all of these in place by the operation's batches; the mean loss of every model."""
    positions, sizes = op.batch_schedule.positions(len(op.data), op.key.at("batches"))
    rows, targets = op.data.rows[positions].contiguous(), op.data.y[positions].contiguous()
    trainees = (Network * len(models))(
        *(
            _network(
                m,
                fetch,
                speeds.get(role),
                anchors.get(role),
                op.key.at("dropout", role),
                *_shares(op.optimizer.objective, role),
            )
            for role, m in models.items()
        )
    )
    _require_inside(rows, len(fetch.table), "row")
    classes = {each.shapes[each.depth - 1].outputs for each in trainees}
    if step.mutual and len(classes) > 1:
        raise ValueError("models that learn from each other must have the same classes")
    _require_inside(targets, min(classes), "class")
    batches = Batches(rows.data_ptr(), targets.data_ptr(), sizes.data_ptr(), *rows.shape)
    yield _call("fedme_train", fetch.table, ctypes.byref(batches), trainees, ctypes.c_int64(len(models)), ctypes.byref(step))
    samples = int(sizes.sum())
    return {role: each.loss / samples for role, each in zip(models, trainees, strict=True)}


def _predict(model: Model, rows: Tensor, fetch: Fetch) -> Computing[Tensor]:
    rows, table = rows.contiguous(), fetch.table
    _require_inside(rows, len(table), "row")
    weights = model.with_params({name: value.contiguous() for name, value in model.params.items()})
    network = _network(weights, fetch)
    logits = table.new_empty((len(rows), network.shapes[network.depth - 1].outputs))
    pointers = ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(len(rows)), ctypes.byref(network)
    yield _call("fedme_predict", table, *pointers, ctypes.c_void_p(logits.data_ptr()))
    return logits


def _call(name: str, table: Tensor, *more: object) -> Callable[[], None]:
    code = library()
    assert not isinstance(code, str)
    numbers = ctypes.c_int64(table.shape[1]), ctypes.c_int64(table.element_size())

    def call() -> None:
        if getattr(code, name)(ctypes.c_void_p(table.data_ptr()), *numbers, *more):
            raise MemoryError("not enough memory for a client's models")

    return call


def _own(params: Params) -> dict[str, Tensor]:
    """Copies that may be written to, row by row in memory."""
    return {name: value.clone(memory_format=torch.contiguous_format) for name, value in params.items()}


def _network(
    model: Model,
    fetch: Fetch,
    speed: Params | None = None,
    anchor: Params | None = None,
    key: Key | None = None,
    labels: float = 0.0,
    peer: float = 0.0,
) -> Network:
    """A network whose layers fit the inputs and each other: the compiled code does not look. `key` seeds its dropout."""
    chain = layers(model.arch)
    assert chain is not None
    for params in (model.params, speed or model.params, anchor or model.params):
        for name, value in model.params.items():
            if (params[name].shape, params[name].dtype) != (value.shape, fetch.table.dtype):
                raise ValueError(f"{model.arch.name}: what belongs to {name} is not of its size or type")
    image = fetch.shape if chain[0].kind == "convolution" else (0, 0, 0)
    shapes = []
    given = image if chain[0].kind == "convolution" else (fetch.table.shape[1],)
    for layer in chain:
        shape, given = _shape(model, layer, given)
        shape.seed = key.at(layer.dropout).integer() if key and layer.dropout else 0
        shapes.append(shape)
    names = [name for layer in chain for name in (layer.weight, layer.bias)]
    found = [[each[name].data_ptr() if each and name else None for each in (model.params, speed, anchor)] for name in names]
    tensors = (Given * len(found))(*(Given(*each) for each in found))
    return Network(len(shapes), (Shape * len(shapes))(*shapes), tensors, *image, labels, peer)


def _shape(model: Model, layer: Layer, given: tuple[int, ...]) -> tuple[Shape, tuple[int, ...]]:
    """A layer that is given samples of this shape, and what it makes of it: a number, or channels, rows and columns."""
    if layer.kind == "linear":
        given = (math.prod(given),)
    elif len(given) != 3:
        raise ValueError(f"{model.arch.name}: a convolution takes channels, rows and columns, but is given {given}")
    sizes = tuple(model.params[layer.weight].shape) if layer.weight else (given[0], given[0], *layer.window)
    if sizes[1] != given[0]:
        raise ValueError(f"{model.arch.name}: a layer takes {sizes[1]} inputs, but is given {given[0]}")
    if layer.bias and model.params[layer.bias].shape != sizes[:1]:
        raise ValueError(f"{model.arch.name}: {layer.bias} is not of the size of its layer")
    shape = Shape(KINDS[layer.kind], sizes[1], sizes[0], *layer.window, *layer.padding, NUMBERS[layer.activation], layer.p)
    if layer.kind == "linear":
        return shape, sizes[:1]
    places = [size + 2 * more for size, more in zip(given[1:], layer.padding, strict=True)]
    if sizes[2:] != layer.window or any(size < least for size, least in zip(places, layer.window, strict=True)):
        raise ValueError(f"{model.arch.name}: a window of {layer.window} does not fit into {tuple(places)}")
    pooled = layer.kind == "pool"
    left = [size // k if pooled else size - k + 1 for size, k in zip(places, layer.window, strict=True)]
    return shape, (sizes[0], *left)


def _shares(objective: Objective, role: Role) -> tuple[float, float]:
    """How much labels and peer count in the loss of a role."""
    if not isinstance(objective, Mutual):
        return 1.0, 0.0
    place = (objective.first, objective.second).index(role)
    return objective.labels[place], objective.peer[place]


def _require_inside(numbers: Tensor, count: int, what: str) -> None:
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise IndexError(f"{what} {int(numbers.min())} or {int(numbers.max())} is not among the {count} there are")
