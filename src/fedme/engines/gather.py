"""Inputs by row number, as fast as they can be had: a source is turned into one tensor once, then only indexed."""

import weakref

import torch
from torch import Tensor

from fedme.core.data import Arrays, Source, Split

LARGEST = 2 << 30  # bytes that one source may take when it is turned into numbers


class Gather:
    """Flat inputs of sources, kept between rounds as long as the source lives."""

    def __init__(self) -> None:
        self._ready: dict[int, tuple[weakref.ref[object], dict[torch.dtype, Tensor] | None]] = {}

    def table(self, source: Source, dtype: torch.dtype) -> Tensor | None:
        """All inputs of the source, one flat row a sample; None if they are too many, change at random, or are no numbers."""
        known = self._ready.get(id(source))
        if known is None or known[0]() is not source:
            known = (weakref.ref(source), {} if self._fits(source) else None)
            self._ready[id(source)] = known
        tables = known[1]
        if tables is None:
            return None
        if dtype not in tables:
            tables[dtype] = source.inputs(torch.arange(len(source.labels))).flatten(1).to(dtype).contiguous()
        return tables[dtype]

    def _fits(self, source: Source) -> bool:
        if not isinstance(source, Arrays) or not isinstance(source.x, Tensor) or source.augmentation is not None:
            return False
        numbers = source.scaling is not None or source.x.is_floating_point()
        return numbers and source.x.numel() * 4 <= LARGEST


def dims(split: Split) -> int | None:
    """How many axes one input has; None if an input is more than one tensor, or is made of symbols."""
    x = split.inputs(torch.zeros(1, dtype=torch.int64))
    return x.dim() - 1 if isinstance(x, Tensor) and x.is_floating_point() else None
