"""Exchanging a part of every model, whatever the method: the weights whose names match the patterns of `shared`.

On the way, a part is a model of an architecture of its own, which has these weights only. A client completes what it gets by
the rest of its own model, so networks may differ in everything else. The rest stays at the client and is part of its state.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import Tensor, nn

from fedme.core.method import Method, Task, TaskError
from fedme.core.model import Arch, Model, template
from fedme.learning.partial_model import Part, all_but, chosen_part, fork, named, require_some

SHARED = 'patterns of weights that travel, such as ["*.lora_A", "head."]; all by default'  # the help of the setting


class Hollow(nn.Module):
    """Some weights of a network, under their names."""

    def forward(self, *inputs: Any, **named_inputs: Any) -> Tensor:
        raise TypeError("a part of a network cannot be called")


@dataclass(frozen=True)
class PartOf:
    """Builds the shared part of a network."""

    factory: Callable[..., nn.Module]
    patterns: tuple[str, ...]

    def __call__(self, **options: Any) -> nn.Module:
        network, part, chosen = self.factory(**options), Hollow(), named(*self.patterns)
        for name, weight in network.named_parameters():
            if weight.requires_grad and chosen(name):
                _home(part, name).register_parameter(name.rpartition(".")[2], weight)
        for name, buffer in network.named_buffers():
            if chosen(name):
                _home(part, name).register_buffer(name.rpartition(".")[2], buffer)
        return part


def _home(root: nn.Module, name: str) -> nn.Module:
    for step in name.split(".")[:-1]:
        if not hasattr(root, step):
            root.add_module(step, Hollow())
        root = getattr(root, step)
    return root


@dataclass(frozen=True)
class StateWithRest:
    """The state of a client: that of the method, and what the client keeps of its model."""

    state: Any
    arch: Arch
    rest: Part


@dataclass(frozen=True)
class ExchangedPart:
    """The part of every model that travels."""

    arch: Arch
    patterns: tuple[str, ...]

    def stripped(self, value: Any) -> Any:
        """The same message or state with the shared part of every model."""
        return _mapped(value, self._part)

    def _part(self, model: Model) -> Model:
        if model.arch == self.arch:
            return model
        part = chosen_part(model, named(*self.patterns))
        return Model(self.arch, part.params, part.buffers)

    def completed(self, value: Any, kept: StateWithRest) -> Any:
        """The same message with every part completed by what a client keeps."""
        return _mapped(value, lambda part: self.joined(kept, part) if part.arch == self.arch else part)

    def joined(self, kept: StateWithRest, part: Model) -> Model:
        """A model of the client's architecture."""
        model = fork(kept.arch, kept.rest, Part(part.params, part.buffers))
        order = [name for name, _ in template(kept.arch, False).named_parameters() if name in model.params]
        return model.with_params({name: model.params[name] for name in order})

    def keep(self, state: Any, model: Model) -> StateWithRest:
        """The state of a client that keeps the rest of `model`."""
        return StateWithRest(state, model.arch, chosen_part(model, all_but(named(*self.patterns))))


def exchanged_part(method: Method[Any, Any, Any, Any], task: Task) -> ExchangedPart | None:
    """The part that a method exchanges; None: whole models, or what the method itself chooses."""
    return _exchanged(task.shared, tuple(method.exchanged)) if method.exchanged else None


@functools.lru_cache(maxsize=64)
def _exchanged(arch: Arch, patterns: tuple[str, ...]) -> ExchangedPart:
    factory = PartOf(arch.factory, patterns)
    return ExchangedPart(Arch.named(f"shared part of {arch.name}", factory, **dict(arch.options)), patterns)


def require_equal_parts(method: Method[Any, Any, Any, Any], task: Task) -> None:
    """Raise a TaskError for patterns that match nothing, and for clients whose shared part has other names or shapes."""
    if not method.exchanged:
        return
    require_some(task.shared, method.exchanged, "method.shared")
    chosen, expected = named(*method.exchanged), None
    for client, arch in [("", task.shared), *((member.id, member.arch) for member in task.members.values())]:
        shapes = _shapes(arch)
        present = {name: shape for name, shape in shapes.items() if chosen(name)}
        expected = present if expected is None else expected
        if odd := sorted(name for name in present.keys() | expected.keys() if present.get(name) != expected.get(name)):
            raise TaskError(
                f"client {client} cannot share what method.shared names: {odd[0]} is {present.get(odd[0], 'missing')} "
                f"in {arch.name}, and {expected.get(odd[0], 'missing')} in {task.shared.name}; name weights that are alike"
            )


@functools.lru_cache(maxsize=256)
def _shapes(arch: Arch) -> Mapping[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in template(arch, False).named_parameters() if p.requires_grad}


def _mapped(value: Any, change: Callable[[Model], Model]) -> Any:
    """The same value with every model changed."""
    if isinstance(value, Model):
        return change(value)
    if isinstance(value, Mapping) and not all(isinstance(item, Tensor) for item in value.values()):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        parts = [_mapped(item, change) for item in value]
        return value if all(map(operator.is_, parts, value)) else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type | Arch):
        new = {f.name: _mapped(getattr(value, f.name), change) for f in fields(value)}
        same = all(new[f.name] is getattr(value, f.name) for f in fields(value))
        return value if same else replace(value, **new)
    return value
