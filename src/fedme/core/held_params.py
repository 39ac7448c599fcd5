"""Weights that are elsewhere: in another process, or on a device. They are copied to main memory when they are read.

What can be said of them without a copy is known: names, shapes, types. An operation can refer to weights that never came here.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedme.core.flat_params import FlatLayout, FlatParams, flat_params

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Form:
    """The name, type and shape of every tensor of a set of weights, and whether they are in one tensor (`FlatParams`)."""

    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    flat: bool = False

    @classmethod
    def of(cls, params: Mapping[str, Tensor]) -> "Form":
        """The form of weights. Nothing is copied or read if they are elsewhere."""
        if (held := held_params(params)) is not None:
            return held.form
        if (flat := flat_params(params)) is not None:
            return flat_form(flat.layout)
        return cls(tuple((name, value.dtype, tuple(value.shape)) for name, value in params.items()))


@functools.lru_cache(maxsize=1024)
def flat_form(layout: FlatLayout) -> Form:
    """The form of weights in one tensor, one object per layout."""
    return Form(tuple((name, layout.dtype, shape) for name, shape in layout.shapes.items()), True)


class HeldParams(Mapping[str, Tensor]):
    """Weights of a known form; `fetch` copies them to main memory, once."""

    def __init__(self, form: Form, fetch: Callable[[], Mapping[str, Tensor]], device: torch.device = CPU) -> None:
        self.form, self.device = form, device
        self._fetch: Callable[[], Mapping[str, Tensor]] | None = fetch
        self._loaded: Mapping[str, Tensor] | None = None

    # Compared by identity: comparing values would copy them.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> Tensor:
        return self.loaded()[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _, _ in self.form.tensors)

    def __len__(self) -> int:
        return len(self.form.tensors)

    def __contains__(self, name: object) -> bool:
        return any(name == own for own, _, _ in self.form.tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process receives plain tensors."""
        return dict, (dict(self.loaded()),)

    @property
    def here(self) -> bool:
        """Whether they have been copied to main memory."""
        return self._loaded is not None

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first tensor."""
        return self.form.tensors[0][1] if self.form.tensors else torch.float32

    @property
    def flat_params(self) -> FlatParams | None:
        """The weights in one tensor, if they are."""
        return flat_params(self.loaded()) if self.form.flat else None

    def loaded(self) -> Mapping[str, Tensor]:
        """The tensors in main memory."""
        if self._loaded is None:
            fetch = self._fetch
            if fetch is not None:  # None: another thread has just fetched them
                self._loaded = fetch()
                self._fetch = None
        assert self._loaded is not None
        return self._loaded


def held_params(params: Mapping[str, Tensor]) -> HeldParams | None:
    """The weights, or those that a holder of weights has, if they are elsewhere."""
    return params if isinstance(params, HeldParams) else getattr(params, "held_params", None)
