"""The inputs of a source as one tensor, made once, so that a batch is one index operation."""

import functools
import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedme.core.data import Arrays, Source, Windows
from fedme.core.in_threads import in_threads
from fedme.core.operations import Op
from fedme.execution.routing import models_of

LARGEST = 2 << 30  # bytes that the table of one source may take
CHUNK = 1 << 18  # numbers of a table that are made at a time


@dataclass(frozen=True)
class InputTable:
    """The inputs of a source: one flat row per sample, or a text with the place of every sample, which may overlap."""

    values: Tensor
    shape: tuple[int, ...]  # of one input
    starts: Tensor | None = None  # of the samples of a text

    def __len__(self) -> int:
        return len(self.values if self.starts is None else self.starts)

    @functools.cached_property
    def features(self) -> int:
        """The numbers of one input."""
        return math.prod(self.shape)

    def flat(self, rows: Tensor) -> Tensor:
        """The flat inputs of row numbers of any shape."""
        if self.starts is not None:
            return self.values[self.starts[rows][..., None] + torch.arange(self.features, device=rows.device)]
        return self.values.index_select(0, rows.reshape(-1)).view(*rows.shape, self.features)

    @functools.cached_property
    def heads(self) -> dict[tuple[int, ...], Any]:
        """What compiled networks that read this table have in common, by the identity of what it is made from."""
        return {}

    @functools.cached_property
    def symbols(self) -> bool:
        """Whether the inputs are whole numbers, each of which stands for something."""
        return not self.values.is_floating_point()

    @functools.cached_property
    def range(self) -> tuple[int, int]:
        """The smallest and the largest symbol."""
        return int(self.values.min()), int(self.values.max())

    def shaped(self, rows: Tensor) -> Tensor:
        """The inputs of row numbers of any shape, each in its own shape."""
        return self.flat(rows).view(*rows.shape, *self.shape)


class InputTables:
    """The tables of all sources, kept as long as the source lives."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables: dict[int, dict[torch.dtype, InputTable]] = {}  # by the identity of the source

    def supports(self, op: Op) -> str:
        """Why the inputs of an operation cannot come from a table; empty if they can."""
        source = op.data.source
        if not len(op.data):
            return "no samples"
        if isinstance(source, Windows):
            return _too_large(source.text)
        if not isinstance(source, Arrays) or not isinstance(source.x, Tensor) or source.augmentation is not None:
            return "the inputs are augmented or not one tensor"
        return _too_large(source.x)

    def table(self, op: Op) -> InputTable:
        """The table of a supported operation; floating-point inputs are of the type of its first model."""
        source, dtype = op.data.source, models_of(op)[0].dtype
        tables = self._tables.get(id(source))
        if tables is None:
            weakref.finalize(source, self._tables.pop, id(source), None)
            tables = self._tables.setdefault(id(source), {})
        if dtype not in tables and isinstance(source, Windows):
            text, starts = (values.to(self.device, torch.int64).contiguous() for values in (source.text, source.starts))
            if len(starts) and not 0 <= int(starts.min()) <= int(starts.max()) <= len(text) - source.length:
                raise IndexError(f"windows of {source.length} symbols must be inside the text, which has {len(text)}")
            tables[dtype] = InputTable(text, (source.length,), starts)
        elif dtype not in tables:
            tables[dtype] = _table_of(source, dtype, self.device)
        return tables[dtype]


def _table_of(source: Source, dtype: torch.dtype, device: torch.device) -> InputTable:
    """The table of a source, made of few samples at a time, which stay in the processor's cache."""
    count = len(source.labels)
    first = source.inputs(torch.arange(min(count, 1)))
    features, kind = math.prod(first.shape[1:]), dtype if first.is_floating_point() else torch.int64
    values = torch.empty((count, features), dtype=kind)

    def fill(rows: Tensor) -> None:
        values[rows[0] : rows[-1] + 1] = source.inputs(rows).flatten(1)

    in_threads(fill, torch.arange(count).split(max(1, CHUNK // max(1, features))))
    return InputTable(values.to(device), tuple(first.shape[1:]))


def _too_large(x: Tensor) -> str:
    return "" if x.numel() * 4 <= LARGEST else f"the inputs take more than {LARGEST >> 30} GB"
