"""Sets of weights as one array of bytes: one object of Ray instead of one per tensor."""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedme.core.flat_params import FlatLayout, FlatParams, flat_params, layout_of
from fedme.core.held_params import Form
from fedme.core.tree import Params

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class PackedWeights:
    """Sets of weights, one after another."""

    forms: tuple[Form, ...]
    bytes: Bytes

    @classmethod
    def of(cls, sets: Iterable[Params]) -> "PackedWeights":
        """Pack sets of weights; equal forms are one object, so that a message has each of them once."""
        known: dict[Form, Form] = {}
        forms, parts = [], []
        for params in sets:
            form = Form.of(params)
            forms.append(known.setdefault(form, form))
            flat = flat_params(params) if form.flat else None
            parts += [_bytes(flat.flat)] if flat is not None else [_bytes(params[name]) for name, _, _ in form.tensors]
        return cls(tuple(forms), np.concatenate(parts) if parts else np.empty(0, np.uint8))

    def unpack(self) -> list[Params]:
        """The sets, in memory of their own: aligned as if they had been computed here."""
        sets: list[Params] = []
        start = 0
        for form in self.forms:
            tensors, end = _empty(form)
            for tensor in tensors:
                target = _bytes(tensor)
                target[:] = self.bytes[start : start + len(target)]
                start += len(target)
            sets.append(end)
        return sets


@functools.lru_cache(maxsize=1024)
def nbytes(form: Form) -> int:
    """The bytes of a packed set of weights."""
    if form.flat:
        layout = _layout(form)
        return layout.size * layout.dtype.itemsize
    return sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in form.tensors)


@functools.lru_cache(maxsize=1024)
def _layout(form: Form) -> FlatLayout:
    return layout_of(tuple((name, shape) for name, _, shape in form.tensors), form.tensors[0][1])


def _empty(form: Form) -> tuple[Sequence[Tensor], Params]:
    """Weights without values: the tensors to fill, and the weights that are made of them."""
    if form.flat:
        layout = _layout(form)
        flat = torch.empty(layout.size, dtype=layout.dtype)
        return [flat], FlatParams(layout, flat)
    params = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in form.tensors}
    return list(params.values()), params


def _bytes(tensor: Tensor) -> Bytes:
    if not tensor.numel():
        return np.empty(0, np.uint8)
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
