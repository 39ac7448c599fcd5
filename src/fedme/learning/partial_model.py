"""Sharing a part of a model: some weights, chosen by their names, travel; the others stay at the client.

A pattern chooses all names that begin with it ("features.") or that it matches as a file name pattern ("*.bias"),
as a whole or up to a dot ("*.lora_A").
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedme.core import tree
from fedme.core.data import ClientId
from fedme.core.method import TaskError
from fedme.core.model import Arch, Model, frozen_weights, template

SHOWN = 5  # names in an error, those of the last layers
Choice = Callable[[str], bool]  # of weights and buffers, by name


@dataclass(frozen=True)
class Part:
    """Some weights and buffers of a model, by name."""

    params: tree.Params
    buffers: tree.Params


def named(*patterns: str) -> Choice:
    """The choice of all names that begin with one of the patterns or that one matches, as a whole or up to a dot."""
    return lambda name: any(
        name.startswith(pattern) or fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns
    )


def all_but(chosen: Choice) -> Choice:
    """The choice of all other names."""
    return lambda name: not chosen(name)


@functools.lru_cache(maxsize=256)
def head_of(arch: Arch) -> str:
    """The prefix of the names of the last linear layer, which is the head of a network; the layers before it are its body."""
    linear = [name for name, module in template(arch, False).named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise TaskError(
            f"{arch.name} has no linear layer, which would be its head; name the layers in the settings of the method"
        )
    return f"{linear[-1]}." if linear[-1] else ""


@functools.lru_cache(maxsize=256)
def normalisation_of(arch: Arch) -> tuple[str, ...]:
    """The prefixes of the names of the layers with batch normalisation."""
    return tuple(f"{name}." for name, module in template(arch, False).named_modules() if isinstance(module, _NormBase))


def require_some(arch: Arch, patterns: Sequence[str], setting: str) -> None:
    """Raise a TaskError for a pattern that matches no weight of the architecture that is trained."""
    weights = {name: p.requires_grad for name, p in template(arch, False).named_parameters()}
    trained = [name for name, is_trained in weights.items() if is_trained]
    for pattern in patterns:
        if not any(map(named(pattern), trained)):
            frozen = ", only frozen ones, which never travel" if any(map(named(pattern), weights)) else ""
            more = f" and {len(trained) - SHOWN} more" if len(trained) > SHOWN else ""
            raise TaskError(
                f"{setting}: no weight of {arch.name} has a name that '{pattern}' matches{frozen}; "
                f"it has {', '.join(trained[-SHOWN:])}{more}"
            )


def patterns_of(shared: str | Sequence[str]) -> tuple[str, ...]:
    """The patterns of a setting that may be one pattern, a list, or nothing, which stands for everything."""
    return (shared,) if isinstance(shared, str) else tuple(shared) or ("",)


def cut(model: Model, shared: str | Sequence[str]) -> Part:
    """The weights and buffers of `model` whose names match."""
    return chosen_part(model, named(*patterns_of(shared)))


def rest(model: Model, shared: str | Sequence[str]) -> Part:
    """The weights and buffers that `cut` leaves."""
    return chosen_part(model, all_but(named(*patterns_of(shared))))


def chosen_part(model: Model, chosen: Choice) -> Part:
    """The weights and buffers of `model` whose names are chosen; there may be none. Frozen weights belong to no part."""
    params, buffers = ({name: value for name, value in of.items() if chosen(name)} for of in (model.params, model.own_buffers))
    return Part(params, buffers)


def fork(arch: Arch, kept: Part, shared: Part) -> Model:
    """A model made of the part a client kept and the part it received, and of the frozen weights of the architecture."""
    params, buffers = {**kept.params, **shared.params}, {**kept.buffers, **shared.buffers}
    dtype = next((value.dtype for value in params.values()), torch.float32)
    return Model(arch, params, {**frozen_weights(arch, dtype), **buffers}).with_frozen()


def require_same_part(archs: Mapping[ClientId, Arch], shared: Arch, patterns: str | Sequence[str]) -> None:
    """Raise a TaskError for clients whose architecture has other shapes in the shared part."""
    prefix, chosen = ", ".join(patterns_of(patterns)), named(*patterns_of(patterns))

    def shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in template(arch, False).named_parameters() if chosen(name)}

    expected = shapes(shared)
    for client, arch in archs.items():
        odd = [name for name, shape in shapes(arch).items() if expected.get(name) != shape]
        if odd:
            raise TaskError(
                f"client {client} cannot share '{prefix}' of {shared.name}: {odd[0]} depends on its number of classes; "
                f"choose a prefix without it"
            )


def merge(parts: Sequence[Part], weights: Sequence[float], combine: tree.Combine = tree.average) -> Part:
    """The weighted mean of parts; `combine` replaces the mean, for example by a robust one."""
    total = sum(weights)
    weights = [weight / total for weight in weights]
    params, buffers = (
        combine([getattr(part, of) for part in parts], weights) if getattr(parts[0], of) else {} for of in ("params", "buffers")
    )
    return Part(params, buffers)
