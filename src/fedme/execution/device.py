"""Operations on a device: their weights are moved there, and their results back to main memory."""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedme.core.model import Model
from fedme.core.operations import ClassSums, Models, Op, OptState, Train, Trained
from fedme.core.tree import Params

Device = Literal["cpu", "cuda", "mps"]


def missing(device: Device) -> str:
    """Why a device cannot be used on this machine; empty if it can."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    names = [name for name, is_available in available.items() if is_available]
    return "" if available[device] else f"'{device}' is not available on this machine; available: {', '.join(names)}"


def to_device(op: Op, device: torch.device) -> Op:
    """The operation with its weights on the device; its data is moved per batch, or once as a table."""
    if isinstance(op, Train):
        return replace(op, models=_models(op.models, device), frozen=_models(op.frozen, device), opt=_opt(op.opt, device))
    return replace(op, model=_model(op.model, device))


def from_device(result: Any) -> Any:
    """The result in main memory."""
    cpu = torch.device("cpu")
    if isinstance(result, Trained):
        seen = {role: ClassSums(each.sums.to(cpu), each.counts.to(cpu)) for role, each in result.seen.items()}
        return replace(result, models=_models(result.models, cpu), opt=_opt(result.opt, cpu), seen=seen)
    if isinstance(result, Model):
        return _model(result, cpu)
    return result.to(cpu) if isinstance(result, Tensor) else result


def _params(params: Params, device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in params.items()}


def _model(model: Model, device: torch.device) -> Model:
    return Model(model.arch, _params(model.params, device), _params(model.buffers, device))


def _models(models: Models, device: torch.device) -> dict[str, Model]:
    return {role: _model(model, device) for role, model in models.items()}


def _opt(opt: OptState, device: torch.device) -> dict[str, dict[str, Tensor]]:
    return {role: _params(state, device) for role, state in opt.items()}
