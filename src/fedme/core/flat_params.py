"""The weights of a model in one tensor: copied, averaged and checked in one go. Single weights are views, made on access.

Every weight begins where a tensor of its own would begin in a line of the cache, so that it makes no difference to the last
bits of results whether weights come from here or stand alone. Between weights there are zeros.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes
Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # of weights by name


class FlatLayout:
    """The names and shapes of weights of one type, and where each begins. Equal layouts are one object (`layout_of`)."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        self.shapes, self.dtype = dict(shapes), dtype
        step, self.size = ALIGNMENT // dtype.itemsize, 0
        self.starts: dict[str, int] = {}
        for name, shape in shapes:
            self.starts[name] = self.size
            self.size += -(-math.prod(shape) // step) * step
        # of a message: the weights without the zeros, and their names
        self.nbytes = sum(len(name.encode()) + math.prod(shape) * dtype.itemsize for name, shape in shapes)

    def fill(self, flat: Tensor, params: Mapping[str, Tensor]) -> None:
        """Copy weights into a tensor whose numbers may be anything."""
        if (given := flat_params(params)) is not None and given.layout is self:
            flat.copy_(given.flat)
            return
        ends = [*self.starts.values(), self.size][1:]
        for (name, view), start, end in zip(self.views(flat).items(), self.starts.values(), ends, strict=True):
            view.copy_(params[name])
            flat[start + view.numel() : end] = 0

    def flat(self, params: Mapping[str, Tensor]) -> Tensor:
        """The weights in one tensor: the one that they are in, or a copy."""
        if (given := flat_params(params)) is not None and given.layout is self:
            return given.flat
        copy = torch.empty(self.size, dtype=self.dtype)
        self.fill(copy, params)
        return copy

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The single weights."""
        return {
            name: flat[start : start + math.prod(shape)].view(shape)
            for (name, start), shape in zip(self.starts.items(), self.shapes.values(), strict=True)
        }


layout_of = functools.lru_cache(maxsize=1024)(FlatLayout)


class FlatParams(Mapping[str, Tensor]):
    """Weights of one type in one tensor."""

    def __init__(self, layout: FlatLayout, flat: Tensor) -> None:
        self.layout, self.flat = layout, flat
        self._views: dict[str, Tensor] | None = None

    @property
    def views(self) -> dict[str, Tensor]:
        """The single weights; always the same objects."""
        if self._views is None:
            self._views = self.layout.views(self.flat)
        return self._views

    def __getitem__(self, name: str) -> Tensor:
        return self.views[name]

    def __contains__(self, name: object) -> bool:
        return name in self.layout.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.shapes)

    def __len__(self) -> int:
        return len(self.layout.shapes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process receives single tensors."""
        return dict, (self.views,)

    def zeros(self) -> "FlatParams":
        """Zeros of the same layout."""
        return FlatParams(self.layout, torch.zeros_like(self.flat))

    def copy(self) -> "FlatParams":
        """The same weights in another tensor."""
        return FlatParams(self.layout, self.flat.clone())


def flat_layout(params: Mapping[str, Tensor]) -> FlatLayout | None:
    """How the weights are in one tensor, or would be; None if they are not of one floating-point type."""
    if (flat := flat_params(params)) is not None:
        return flat.layout
    dtypes = {value.dtype for value in params.values()}
    if len(dtypes) != 1 or not (dtype := dtypes.pop()).is_floating_point:
        return None
    return layout_of(tuple((name, tuple(value.shape)) for name, value in params.items()), dtype)


def flat_copy(params: Mapping[str, Tensor]) -> FlatParams | None:
    """A copy of the weights in one tensor; None if they are not of one floating-point type."""
    if (flat := flat_params(params)) is not None:
        return flat.copy()
    if (layout := flat_layout(params)) is None:
        return None
    new = FlatParams(layout, torch.empty(layout.size, dtype=layout.dtype))
    layout.fill(new.flat, params)
    return new


def flat_params(params: Mapping[str, Tensor]) -> FlatParams | None:
    """The weights, or those that a holder of weights has, if they are in one tensor."""
    return params if isinstance(params, FlatParams) else getattr(params, "flat_params", None)
