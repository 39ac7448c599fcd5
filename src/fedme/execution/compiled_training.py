"""Trainings as jobs of compiled code, by their optimizer, and what it cannot train."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedme.core.flat_params import FlatParams, flat_copy, flat_params
from fedme.core.model import Model
from fedme.core.operations import ClassSums, Models, Role, Train, Trained
from fedme.core.tree import Params
from fedme.execution.alike_operations import AlikeTrainings
from fedme.execution.compiled_batches import batch_fields, drawn_batches
from fedme.execution.compiled_calls import OPTIMIZER, Call
from fedme.execution.compiled_losses import add_loss, classes_of, loss_obstacle, loss_weights
from fedme.execution.compiled_networks import known_program, network_fields
from fedme.execution.input_tables import InputTable
from fedme.execution.reference import DRAWS_PER_STEP
from fedme.execution.routing import Route
from fedme.learning.objectives import CrossEntropy, Mutual
from fedme.learning.optimizers import ALPHA, SGD, Adam, Mixing, Moreau, MutualMoreau

T = TypeVar("T")
LABELS, ADAM = CrossEntropy(), 3  # the number of Adam in the C++ code
Finish = Callable[[], T]  # the result of a job, after its call


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


def train_job(op: Train, table: InputTable, call: Call, route: Route | None = None) -> Finish[Trained]:
    """The training of an operation, by its optimizer."""
    optimizer = op.optimizer
    if route is not None:
        if "alike" not in route.made:
            route.made["alike"] = AlikeTrainings.of(op, table, functools.partial(_descent_spec, call))
        alike: AlikeTrainings | None = route.made["alike"]
        if alike is not None and (drawn := drawn_batches(op.data, op.batch_schedule, table)) is not None:
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
    batches = batch_fields(op, table, call, classes_of(objective, outputs))
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


def _count_batches(model: Model, table: InputTable, count: int) -> None:
    if model.buffers:
        for name in known_program(model.arch, table.shape, table.symbols, model.dtype).counters:
            model.buffers[name].add_(count)


def _copy(params: Params) -> Params:
    """Contiguous copies: the compiled code gets their pointers and writes to them."""
    if not params:
        return {}
    flat = flat_copy(params)
    return flat or {name: value.clone(memory_format=torch.contiguous_format) for name, value in params.items()}
