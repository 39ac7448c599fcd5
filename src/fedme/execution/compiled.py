"""The compiled backend (`compiled.cpp`): programs made of traced networks, one client after another on every thread.

The weights of a client stay in the processor's cache for all its steps, and no Python runs between them. Small operations share
a call (`compiled_calls.py`), which has their networks (`compiled_networks.py`).
"""

import ctypes
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedme.core.data import Arrays, Split
from fedme.core.flat_params import FlatParams, flat_copy, flat_params
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import (
    BatchSchedule,
    ClassSums,
    EstimateStatistics,
    Evaluate,
    Models,
    Op,
    Predict,
    Role,
    Train,
    Trained,
)
from fedme.core.task_types import TaskType, task_type_of
from fedme.core.tree import Params
from fedme.execution import reference
from fedme.execution.alike_operations import EPOCHS, AlikePredictions, AlikeTrainings
from fedme.execution.batch_sizes import size_obstacle
from fedme.execution.compiled_calls import NOT_DRAWN, NOT_GIVEN, OPTIMIZER, PREDICT_JOB, TRAIN_JOB, Call, packed
from fedme.execution.compiled_library import active, library, vector_bytes
from fedme.execution.compiled_losses import CHANCES, add_loss, chances, classes_of, loss_obstacle, loss_weights
from fedme.execution.compiled_networks import known_program, network_fields
from fedme.execution.input_tables import InputTable, InputTables
from fedme.execution.lowering import lowered
from fedme.execution.program import Program
from fedme.execution.reference import DRAWS_PER_STEP, scores
from fedme.execution.routing import Route, Tick, effort, models_of, no_tick, pieces
from fedme.execution.threads import Computing, Helpers, Running, on_threads
from fedme.learning.objectives import CrossEntropy, Imitate, Mutual
from fedme.learning.optimizers import ALPHA, SGD, Adam, Mixing, Moreau, MutualMoreau

T = TypeVar("T")
TASKS: tuple[TaskType, ...] = ("classification", "multi-label", "regression")  # as in the C++ code
LABELS, ADAM = CrossEntropy(), 3  # the number of Adam in the C++ code
PIECES = 2  # calls per thread: fewer cost less, more are divided more evenly
LARGE = 2e7  # effort of a call that is worth itself, about 2 ms


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


Finish = Callable[[], T]  # the result of a job, after its call


@functools.lru_cache(maxsize=256)
def program_of(arch: Arch, shape: tuple[int, ...], symbols: bool, dtype: torch.dtype) -> Program | str:
    """The program of a network for inputs of this shape, if its results agree with the network; else why there is none."""
    # In float64 a small difference is not a rounding error; in the type of the model the layout of its vectors is checked too.
    for checked in (torch.float64, dtype):
        program = lowered(arch, shape, symbols, vector_bytes() // checked.itemsize, checked)
        if isinstance(program, str):
            return program
        if program.narrowed and dtype == torch.float64:
            return "its forward pass computes in single precision"
        if reason := disagreement(arch, shape, symbols, checked):
            return reason
    return program


@functools.lru_cache(maxsize=256)
def disagreement(arch: Arch, shape: tuple[int, ...], symbols: bool, dtype: torch.dtype) -> str:
    """How the program of a network differs from the network itself; empty if it does not.

    A trace does not see everything: a network may have its own backward pass, or change tensors behind another name. So both
    are trained for a few steps on random inputs, with batches of several samples and of one, on yes-or-no labels: they give
    every output a gradient, also a single one.
    """
    key, program, samples = Key(0).at("check"), known_program(arch, shape, symbols, dtype), torch.arange(9)
    x = torch.randn((len(samples), *shape), generator=key.torch()).to(dtype)
    if symbols:
        x = torch.randint(program.symbols, x.shape, generator=key.torch())
    labels = torch.rand((len(samples), program.classes), generator=key.at("labels").torch()) > 0.5
    data = Split(Arrays(x, labels), samples)
    model = Model.init(arch, key, dtype)
    # A second step in float32 would show how fast rounding errors grow.
    schedule = BatchSchedule(epochs=2, batch=4, steps=None if dtype == torch.float64 else 1, shuffle=False)
    op = Train({"net": model}, SGD(CrossEntropy(), 0.05, 0.5), data, schedule, key)
    if names := sorted(model.params.keys() - set(program.parameters)):
        return f"the weight {names[0]} is not used"
    if name := other_buffer(program, model):
        return f"not all models have the same numbers in the buffer {name}"
    held = {**model.params, **model.buffers}
    if names := [name for name in program.parameters if name in held and held[name].dtype != dtype]:
        return f"it computes with {names[0]}, which is {str(held[names[0]].dtype).removeprefix('torch.')}"
    try:
        wanted = reference.train(op).models["net"]
        target = reference.predict(Predict(wanted, data))
    except Exception as error:  # a user's network may raise anything
        return f"its training fails on random inputs ({type(error).__name__}: {error})"
    tables = InputTables(torch.device("cpu"))

    def run(op: Op) -> Any:
        return Compiled(tables).run([op], no_tick)[0]

    tolerance = 1e-2 if dtype != torch.float64 else 1e-5 if program.narrowed else 1e-7
    trained = run(op).models["net"]
    before, after, expected = (
        {name: value.double() for name, value in {**m.params, **m.buffers}.items()} for m in (model, trained, wanted)
    )
    for name, value in expected.items():
        if torch.equal(after[name], value):
            continue  # also if it is infinite, as in a mask
        change = (value - before[name]).norm() + 1e-3 * value.numel() ** 0.5
        if not bool((after[name] - value).norm() <= tolerance * change):
            return f"compiled training differs from the network in {name}"
    logits = run(Predict(wanted, data))
    agree = torch.allclose(logits, target.to(logits.dtype), tolerance, tolerance * float(target.abs().max()))
    return "" if agree else "compiled predictions differ from those of the network"


def other_buffer(program: Program, model: Model) -> str:
    """A buffer of a model that has other numbers than those that are part of the program; empty if there is none."""
    named = ((name, model.buffers.get(name), value) for name, value in program.assumed)
    return next((name for name, own, value in named if own is None or not torch.equal(own, value.to(own.dtype))), "")


class Compiled:
    """Training and inference in compiled code, on `threads` threads or as many as torch has."""

    name = "compiled"

    def __init__(self, tables: InputTables, threads: int = 1) -> None:
        self.tables, self.threads = tables, threads

    def missing(self) -> str:
        """Why there is no compiled code; empty if there is."""
        return active(code) if isinstance(code := library(), str) else ""

    def supports(self, op: Op) -> str:
        """Why the compiled code cannot run the operation; empty if it can."""
        if isinstance(library(), str):
            return "no compiled code"
        if reason := self.tables.supports(op):
            return reason
        table = self.tables.table(op)
        for model in models_of(op):
            if model.dtype not in (torch.float32, torch.float64):
                return f"unsupported type {model.dtype}"
            program = program_of(model.arch, table.shape, table.symbols, model.dtype)
            if isinstance(program, str):
                return program
            if table.symbols and not 0 <= table.range[0] <= table.range[1] < program.symbols:
                return f"symbols from {table.range[0]} to {table.range[1]}, but the network knows {program.symbols}"
        if reason := self._obstacle(op, table):
            return reason
        return training_obstacle(op) if isinstance(op, Train) else ""

    def supports_alike(self, op: Op) -> bool:
        """Whether an operation is supported, if one that is alike is."""
        return not self._obstacle(op, self.tables.table(op))

    @staticmethod
    def _obstacle(op: Op, table: InputTable) -> str:
        """Why the programs of the networks do not describe this operation: by its batches or buffers."""
        for model in models_of(op):
            if model.buffers and (
                name := other_buffer(known_program(model.arch, table.shape, table.symbols, model.dtype), model)
            ):
                return f"the network was traced with other numbers in its buffer {name}"
        return size_obstacle(op, table.shape, table.symbols)

    def group(self, op: Op) -> Hashable:
        """Operations on one table of inputs."""
        return isinstance(op, Train), models_of(op)[0].dtype, id(op.data.source)

    def run(self, ops: Sequence[Op], tick: Tick) -> list[Any]:
        """Run operations on several threads; `tick` is called on this thread."""
        helpers, efforts = self._helpers(), [effort(op) for op in ops]
        # Predictions of one call share the weights of a model that they have in common.
        most = LARGE if isinstance(ops[0], Train) else 10 * LARGE
        parts = pieces(efforts, min(sum(efforts) / (PIECES * helpers.threads), most))
        compute = functools.partial(_together, table=self.tables.table(ops[0]))
        results = dict[int, Any]()
        for part, done in zip(
            parts, on_threads([[ops[i] for i in part] for part in parts], compute, helpers, tick), strict=True
        ):
            results.update(zip(part, done, strict=True))
        return with_scores(ops, [results[index] for index in range(len(ops))])

    def start(self, ops: Sequence[Op], routes: Sequence[Route]) -> Running[list[Any]]:
        """Let a helper run operations of one group, in one call; those that evaluate predict only (see `with_scores`)."""
        return Running(_together(ops, self.tables.table(ops[0]), routes), self._helpers())

    def _helpers(self) -> Helpers:
        code = library()
        assert not isinstance(code, str)
        return Helpers.of(code, max(torch.get_num_threads(), self.threads))


def alike_for_compiled(op: Op) -> Hashable:
    """What decides whether and with what an operation runs, in little time; None: ask. As long as the operations live."""
    data = op.data
    if data.targets is not None or isinstance(op, EstimateStatistics) or not len(data):
        return None
    if not isinstance(op, Train):
        flat, timed = flat_params(op.model.params), isinstance(op, Evaluate) and op.timed
        same = type(op), timed, id(data.source), id(op.model.arch), not op.model.buffers
        return None if flat is None else (*same, id(flat.layout))  # a layout has the type of the weights
    alike: list[Any] = [id(data.source), id(op.optimizer), id(op.mechanism), id(op.collect), op.keep_opt, len(op.opt)]
    for role, model in op.models.items():
        if (flat := flat_params(model.params)) is None:
            return None
        alike += role, id(model.arch), not model.buffers, id(flat.layout)
    return (*alike, *op.frozen)


def training_obstacle(op: Train) -> str:
    """Why the compiled code cannot train with the optimizer, loss and targets of an operation; empty if it can."""
    optimizer = op.optimizer
    if op.mechanism is not None:
        return "private training"
    rule = optimizer.rule if type(optimizer) is Mixing else optimizer
    if type(rule) in (SGD, Adam):
        assert isinstance(rule, SGD | Adam)
        if rule.alternating:
            return "alternating steps"
        if rule.prox and not op.frozen.keys() >= op.models.keys():
            return "a proximal term, but not for every model"
        if rule.shift and (rule.prox or rule.clip is not None):
            return "a shifted gradient with a proximal term or clipping"
        if rule is not optimizer and (rule.prox or rule.shift or type(optimizer.objective) is not CrossEntropy):
            return "a mixture with a proximal term, a shifted gradient or another loss"
    elif type(optimizer) not in (Moreau, MutualMoreau):
        return f"unsupported optimizer {type(optimizer).__name__}"
    return loss_obstacle(op)


def _together(ops: Sequence[Op], table: InputTable, routes: Sequence[Route] = ()) -> Computing[list[Any]]:
    """Prepare operations, yield one call that computes all of them, and return their results.

    Operations that are alike may share one of the `routes`.
    """
    call = Call(TRAIN_JOB if isinstance(ops[0], Train) else PREDICT_JOB)
    finish: list[Finish[Any]] = [
        _train(op, table, call, route) if isinstance(op, Train) else _predict(op, table, call, route)
        for op, route in itertools.zip_longest(ops, routes)
    ]
    call.make(Table.of(table), models_of(ops[0])[0].dtype.itemsize)
    yield call
    if call.status == 1:
        raise MemoryError("not enough memory for the models of a client")
    if call.status == 2:
        for op in ops:
            _require_in_range(op, table)
    return [result() for result in finish]


def with_scores(ops: Sequence[Op], results: list[Any]) -> list[Any]:
    """The same results, with the scores of the logits of evaluations."""
    looks = [index for index, op in enumerate(ops) if isinstance(op, Evaluate)]
    scored = scores([results[index] for index in looks], [ops[index].data for index in looks])
    for index, score in zip(looks, scored, strict=True):
        results[index] = score
    return results


def _train(op: Train, table: InputTable, call: Call, route: Route | None = None) -> Finish[Trained]:
    """The training of an operation, by its optimizer."""
    optimizer = op.optimizer
    if route is not None:
        if "alike" not in route.made:
            route.made["alike"] = AlikeTrainings.of(op, table, functools.partial(_descent_spec, call))
        alike: AlikeTrainings | None = route.made["alike"]
        if alike is not None and (drawn := _drawn_batches(op.data, op.batch_schedule, table)) is not None:
            return alike.add(op, call, drawn)
    if isinstance(optimizer, SGD | Adam):
        return _train_by_descent(op, optimizer, table, call)
    models = {role: Model(model.arch, _copy(model.params), _copy(model.buffers)) for role, model in op.models.items()}
    if isinstance(optimizer, Mixing):
        return _train_mixture(op, optimizer, table, call, models)
    assert isinstance(optimizer, Moreau | MutualMoreau)
    return _train_by_moreau(op, optimizer, table, call, models)


def _train_by_descent(op: Train, optimizer: SGD | Adam, table: InputTable, call: Call) -> Finish[Trained]:
    models, sources = {}, {}
    for role, model in op.models.items():
        flat = flat_params(model.params)
        if flat is None or model.buffers:
            models[role] = Model(model.arch, _copy(model.params), _copy(model.buffers))
        else:  # the compiled code copies it
            sources[role] = flat.flat
            models[role] = Model(
                model.arch, FlatParams(flat.layout, torch.empty(flat.layout.size, dtype=flat.layout.dtype)), {}
            )
    states: dict[Role, Params] = {}
    if op.opt or op.keep_opt:
        states = {role: state for role, model in op.models.items() if (state := _state(op, role, model))}
    anchors = {role: _copy(op.frozen[role].params) for role in models} if optimizer.prox or optimizer.shift else {}
    seen = dict[Role, ClassSums]()
    descended = _descend(op, table, call, models, states, anchors, _descent_spec(call, optimizer), seen=seen, sources=sources)

    def finish() -> Trained:
        _, losses = descended()
        if states:
            _count_steps(op, optimizer, states)
        return Trained(models, states, losses, seen)

    return finish


def _train_by_moreau(
    op: Train, optimizer: Moreau | MutualMoreau, table: InputTable, call: Call, models: Mapping[Role, Model]
) -> Finish[Trained]:
    mutual = isinstance(optimizer, MutualMoreau)
    outer_lr = optimizer.lr if mutual else optimizer.lr * optimizer.lam
    aux_l2 = optimizer.aux_l2 if isinstance(optimizer, MutualMoreau) and optimizer.aux_l2 is not None else optimizer.l2
    settings = optimizer.inner_lr, 0.0, optimizer.l2, optimizer.lam, outer_lr, math.inf, 0.0, 0.0, 0.0, aux_l2 - optimizer.l2
    spec = np.array([(2 if mutual else 1, mutual, optimizer.inner, DRAWS_PER_STEP, 0, 0, *settings)], OPTIMIZER)
    if not mutual:
        descended = _descend(op, table, call, {"theta": models["theta"]}, {}, {"theta": models["w"].params}, spec)

        def finish() -> Trained:
            _, losses = descended()
            w = models["w"].with_buffers(models["theta"].buffers)
            return Trained({"theta": models["theta"], "w": w}, {}, losses)

        return finish
    trained = {role: models[role] for role in ("aux", "local")}
    # The anchor of the outer step is the last inner copy; it has its own running statistics.
    anchors = {role: _copy({**op.frozen[role].params, **models[role].buffers}) for role in trained}
    descended = _descend(op, table, call, trained, {}, anchors, spec)

    def finish_mutual() -> Trained:
        several, losses = descended()
        aux = trained["aux"]
        theta = Model(aux.arch, *({name: anchors["aux"][name] for name in names} for names in (aux.params, aux.buffers)))
        if several:  # before the last batch one per batch, then one per inner step
            last = int(op.batch_schedule.positions(len(op.data), op.key.at("batches"))[1][-1] > 1)
            _count_batches(theta, table, several + (optimizer.inner - 1) * last)
        return Trained({**trained, "theta": theta}, {}, losses)

    return finish_mutual


def _train_mixture(
    op: Train, optimizer: Mixing, table: InputTable, call: Call, models: Mapping[Role, Model]
) -> Finish[Trained]:
    """The training of "own" in a mixture with "global"; the state of "own" has the part of it once per weight."""
    rule, names = optimizer.rule, [f"{name}{ALPHA}" for name in models["own"].params]
    roles = {role: models[role] for role in ("own", "global")}
    given = {role: op.opt.get(role) or state for role, state in optimizer.init(roles).items()}
    states = {role: _copy({n: v for n, v in state.items() if n not in names}) for role, state in given.items()}
    alpha = given["own"][names[0]] if names else torch.zeros(())
    moved: list[float] = []
    spec = _descent_spec(call, rule, ("never", "round", "step").index(optimizer.adapt) + 1)
    descended = _descend(op, table, call, roles, states, {}, spec, alpha.item(), moved)

    def finish() -> Trained:
        _, losses = descended()
        _count_steps(op, rule, states)
        states["own"] = {**states["own"], **{name: torch.full_like(alpha, moved[0]) for name in names}}
        return Trained(roles, {role: state for role, state in states.items() if state}, losses)

    return finish


def _count_steps(op: Train, rule: SGD | Adam, states: Mapping[Role, Params]) -> None:
    """Count the steps of Adam in its state."""
    if isinstance(rule, Adam):
        taken = op.batch_schedule.count(len(op.data))
        for state in states.values():
            for name in state:
                if name.endswith(".step"):
                    state[name] += taken


def _state(op: Train, role: Role, model: Model) -> Params:
    """A copy of the optimizer state of a role, or a new one; none if nobody asks for it, for compiled code makes its own."""
    if state := op.opt.get(role):
        return _copy(state)
    if not op.keep_opt:
        return {}
    flat = flat_params(model.params)
    if isinstance(op.optimizer, SGD) and flat is not None:
        return flat.zeros() if op.optimizer.momentum else {}
    assert isinstance(op.optimizer, SGD | Adam)
    return op.optimizer.init_state(model.params)


def _descent_spec(call: Call, optimizer: SGD | Adam, mixing: int = 0) -> "np.ndarray[Any, Any]":
    """The rule of a descent; clients of one call often have the same."""
    known = call.specs.get((id(optimizer), mixing))
    if known is None:
        known = call.specs[id(optimizer), mixing] = _new_spec(optimizer, mixing)
        call.keep(optimizer)
    return known


def _new_spec(optimizer: SGD | Adam, mixing: int) -> "np.ndarray[Any, Any]":
    # Other losses than mutual ones are in a structure of their own, and may be different in every round.
    return _made_spec(optimizer if isinstance(optimizer.objective, Mutual) else replace(optimizer, objective=LABELS), mixing)


@functools.lru_cache(maxsize=256)
def _made_spec(optimizer: SGD | Adam, mixing: int) -> "np.ndarray[Any, Any]":
    clip = math.inf if optimizer.clip is None else optimizer.clip
    mutual = isinstance(optimizer.objective, Mutual)
    prox, decay = optimizer.prox, optimizer.weight_decay
    if optimizer.shift:  # the compiled step has g + decay w + prox (w - anchor); this is g + weight_decay w + anchor
        prox, decay = -1.0, decay + 1.0
    if isinstance(optimizer, SGD):
        settings = optimizer.lr, optimizer.momentum, decay, prox, 0.0, clip, 0.0, 0.0, 0.0, 0.0
        return np.array([(0, mutual, 1, DRAWS_PER_STEP, optimizer.nesterov, mixing, *settings)], OPTIMIZER)
    decoupled = optimizer.weight_decay if optimizer.decoupled_weight_decay else 0.0
    first = optimizer.lr, optimizer.betas[0], decay - decoupled, prox, 0.0, clip
    return np.array(
        [(ADAM, mutual, 1, DRAWS_PER_STEP, 0, mixing, *first, optimizer.betas[1], optimizer.eps, decoupled, 0.0)], OPTIMIZER
    )


def _descend(
    op: Train,
    table: InputTable,
    call: Call,
    models: Models,
    states: Mapping[Role, Params],
    anchors: Mapping[Role, Params],
    spec: "np.ndarray[Any, Any]",
    mix: float = 0.0,
    moved: list[float] | None = None,
    seen: dict[Role, ClassSums] | None = None,
    sources: Mapping[Role, Tensor] | None = None,
) -> Finish[tuple[int, dict[Role, float]]]:
    """Train models in place, with their states and anchors; the number of batches of several samples, and the mean losses.

    `mix` is the part of the first model in its mixture with the second; where it has moved to is appended to `moved`. Outputs
    that were collected are put into `seen`. Models get their first weights from `sources`, those that are not there have them.
    """
    objective, classes, first = op.optimizer.objective, set(), call.network_count
    call.keep(models, states, anchors, sources)
    for role, model in models.items():
        state = states.get(role)
        network, outputs = network_fields(call, model, table, state, anchors.get(role), op.key, role)
        steps = _steps(state) if state and spec["optimizer"][0] == ADAM else 0
        source = sources.get(role) if sources else None
        copied = (0, 0, 0) if source is None else (source.data_ptr(), model.params.flat.data_ptr(), source.nbytes)  # type: ignore[attr-defined]
        call.add_network((*network, steps, *copied), loss_weights(objective, role), mix)
        classes.add(outputs)
    if len(classes) > 1 and isinstance(objective, Mutual):
        raise ValueError(f"models that learn from each other must have the same classes, got {sorted(classes)} outputs")
    outputs = min(classes)
    loss, collected = add_loss(op, call, outputs)
    batches = _batches(op, table, call, classes_of(objective, outputs))
    number = call.add_job((*batches, first, len(models), call.add_optimizer(spec), loss, 0, 0))

    def finish() -> tuple[int, dict[Role, float]]:
        samples, several = call.seen[number]
        if seen is not None and collected is not None and samples:
            seen[next(iter(models))] = collected
        if moved is not None:
            moved.append(float(call.networks["mix"][first]))
        losses = {}
        for place, (role, model) in enumerate(models.items(), first):
            losses[role] = call.losses[place] / samples
            if model.buffers:
                inner = int(spec["inner_steps"][0]) if isinstance(op.optimizer, Moreau) else 1
                _count_batches(model, table, several * inner)
            elif call.finite[place]:
                model.set_finite()
        return several, losses

    return finish


def _steps(state: Params) -> int:
    """The steps that Adam has taken."""
    return next((int(value) for name, value in state.items() if name.endswith(".step")), 0)


@dataclass(frozen=True)
class DrawnBatches:
    """What the compiled code draws the shuffled batches of a client's samples from, except for the key."""

    schedule: BatchSchedule
    table: InputTable
    fields: tuple[int, ...]
    packed: bytes  # the fields
    memory: tuple[Tensor, ...]  # that the fields point to


def _drawn_batches(data: Split, schedule: BatchSchedule, table: InputTable) -> DrawnBatches | None:
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


def _batches(op: Train, table: InputTable, call: Call, classes: int) -> tuple[int, ...]:
    """The batches of a training, as the first fields of its job; shuffled ones are drawn by the compiled code."""
    schedule, data, samples = op.batch_schedule, op.data, len(op.data)
    if (drawn := _drawn_batches(data, schedule, table)) is not None:
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


def _require_in_range(op: Op, table: InputTable) -> None:
    """Raise an error if a row is not in the table, or a target is no class."""
    _require_below(op.data.rows, len(table), "row")
    if isinstance(op, Train):
        models = op.models.values()
        outputs = min(known_program(m.arch, table.shape, table.symbols, m.dtype).classes for m in models)
        classes = classes_of(op.optimizer.objective, outputs)
        if task_type_of(op.data.y) == "classification":
            _require_below(op.data.y, classes, "class")


def _count_batches(model: Model, table: InputTable, count: int) -> None:
    if model.buffers:
        for name in known_program(model.arch, table.shape, table.symbols, model.dtype).counters:
            model.buffers[name].add_(count)


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


def _copy(params: Params) -> Params:
    """Contiguous copies: the compiled code gets their pointers and writes to them."""
    if not params:
        return {}
    flat = flat_copy(params)
    return flat or {name: value.clone(memory_format=torch.contiguous_format) for name, value in params.items()}


def _require_below(numbers: Tensor, count: int, what: str) -> None:
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise IndexError(f"{what} numbers must be >= 0 and < {count}, got {int(numbers.min())} to {int(numbers.max())}")
