"""Inputs by row number, as fast as they can be had: a source is turned into one tensor once, then only indexed."""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from fedme.core.data import Arrays, Source, Split

LARGEST = 2 << 30  # bytes that one source may take when it is turned into numbers


@dataclass(frozen=True)
class Fetch:
    """The inputs of a source by row numbers of any shape."""

    table: Tensor
    shape: tuple[int, ...]  # of one input

    def flat(self, rows: Tensor) -> Tensor:
        """One flat row a sample."""
        return self.table.index_select(0, rows.reshape(-1)).view(*rows.shape, self.table.shape[1])

    def shaped(self, rows: Tensor) -> Tensor:
        """Every sample in its own shape."""
        return self.flat(rows).view(*rows.shape, *self.shape)


class Gather:
    """Flat inputs of sources, kept between rounds as long as the source lives."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ready: dict[int, tuple[weakref.ref[object], dict[torch.dtype, Tensor] | None]] = {}
        self._samples: dict[int, tuple[weakref.ref[object], Tensor | None]] = {}

    def table(self, source: Source, dtype: torch.dtype) -> Tensor | None:
        """All inputs of the source, one flat row a sample; None if they are too many, or change at random."""
        known = self._ready.get(id(source))
        if known is None or known[0]() is not source:
            known = (weakref.ref(source), {} if self._fits(source) else None)
            self._ready[id(source)] = known
        tables = known[1]
        if tables is None:
            return None
        if dtype not in tables:
            x = source.inputs(torch.arange(len(source.labels))).flatten(1)
            tables[dtype] = (x.to(dtype) if x.is_floating_point() else x).contiguous().to(self.device)
        return tables[dtype]

    def sample(self, split: Split) -> Tensor | None:
        """The first input of the split's source; None if an input is more than one tensor."""
        known = self._samples.get(id(split.source))
        if known is None or known[0]() is not split.source:
            known = self._samples[id(split.source)] = (weakref.ref(split.source), sample(split))
        return known[1]

    def fetch(self, split: Split, dtype: torch.dtype) -> Fetch:
        """What gathers the inputs of the split's source, which must fit."""
        table, first = self.table(split.source, dtype), self.sample(split)
        assert table is not None
        assert first is not None
        return Fetch(table, tuple(first.shape))

    def _fits(self, source: Source) -> bool:
        if not isinstance(source, Arrays) or not isinstance(source.x, Tensor) or source.augmentation is not None:
            return False
        return source.x.numel() * 4 <= LARGEST


def sample(split: Split) -> Tensor | None:
    """The first input; None if an input is more than one tensor."""
    x = split.inputs(torch.zeros(1, dtype=torch.int64))
    return x[0] if isinstance(x, Tensor) else None
