"""Where arithmetic is done. Models rest in main memory; those of an operation are moved to the device, their results back."""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedme.core.model import Model
from fedme.core.operations import Models, Op, OptState, Train, Trained
from fedme.core.tree import Params

Device = Literal["cpu", "cuda", "mps"]


def missing(device: Device) -> str:
    """Why a device cannot be used here; empty if it can."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    found = [name for name, is_there in there.items() if is_there]
    return "" if there[device] else f"there is no '{device}' here; there is: {', '.join(found)}"


def moved(op: Op, device: torch.device) -> Op:
    """The operation with its weights on the device; data stays where it is and is moved batch by batch, or once as a table."""
    if isinstance(op, Train):
        return replace(op, models=_models(op.models, device), frozen=_models(op.frozen, device), opt=_opt(op.opt, device))
    return replace(op, model=_model(op.model, device))


def home(result: Any) -> Any:
    """A result in main memory."""
    cpu = torch.device("cpu")
    if isinstance(result, Trained):
        return replace(result, models=_models(result.models, cpu), opt=_opt(result.opt, cpu))
    return result.to(cpu) if isinstance(result, Tensor) else result


def _params(params: Params, device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in params.items()}


def _model(model: Model, device: torch.device) -> Model:
    return Model(model.arch, _params(model.params, device), _params(model.buffers, device))


def _models(models: Models, device: torch.device) -> dict[str, Model]:
    return {role: _model(model, device) for role, model in models.items()}


def _opt(opt: OptState, device: torch.device) -> dict[str, dict[str, Tensor]]:
    return {role: _params(state, device) for role, state in opt.items()}
