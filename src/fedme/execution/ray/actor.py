"""An actor: a process of a Ray cluster that has opened the data of an experiment and executes operations."""

import gc
import hashlib
import platform
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from typing import Any

import ray
import torch
from torch import Tensor

from fedme.core.data import Split
from fedme.core.model import Arch
from fedme.core.tree import Params
from fedme.execution.compiled_library import active, library
from fedme.execution.dispatcher import Dispatcher
from fedme.execution.ray.messages import Failure, Message, Number, ResultPacker, Results, Splits, unpack_operations
from fedme.execution.ray.packed_weights import PackedWeights

LOOKED_AT = 64  # samples of every source that are compared


@dataclass(frozen=True)
class Identity:
    """What must be equal in the driver and in every actor, or results would differ."""

    fedme: str
    torch: str
    python: str
    code: str  # the compiled code, or why there is none
    samples: str  # a fingerprint of the data

    @classmethod
    def of(cls, splits: Splits) -> "Identity":
        """The versions of this process and the fingerprint of its data."""
        python = ".".join(platform.python_version_tuple()[:2])
        return cls(metadata.version("fedme"), torch.__version__, python, active(library()), fingerprint(splits))

    def difference(self, other: "Identity") -> str:
        """What another process has that is not equal; empty if all is."""
        unequal = [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]
        names = {"code": "compiled code", "samples": "samples"}
        values = [(names.get(name, name), getattr(other, name), getattr(self, name)) for name in unequal]
        return "; ".join(
            "other samples" if name == "samples" else f"{name} is {there}, expected {here}" for name, there, here in values
        )


@dataclass(frozen=True)
class Opened:
    """What an actor works with: the splits of the experiment by name, and an executor."""

    splits: Mapping[str, Split]
    execute: Dispatcher


class OperationActor:
    """Executes the operations of messages. Weights that it got or trained stay here until a message says that they may go."""

    def __init__(self, open_data: Callable[[], Opened]) -> None:
        self._open = open_data
        self.held: dict[Number, Params] = {}
        self.archs: dict[str, Arch] = {}  # one object per architecture: what is made once per architecture is found by it

    def open(self) -> Identity | Failure:
        """Open the data."""
        try:
            opened = self._open()
        except Exception as error:  # of files that are not there, or of a user's code; an exception may not be picklable
            return Failure(f"{socket.gethostname()}: {type(error).__name__}: {error}")
        self.splits, self.execute = Splits(opened.splits), opened.execute
        gc.freeze()  # what is here now stays: garbage is looked for among the objects of messages only
        return Identity.of(self.splits)

    def run(self, message: Message, *sent: PackedWeights) -> Results | Failure:
        """Execute operations; `sent` are weights that are new here."""
        for number in message.forget:
            self.held.pop(number, None)
        for numbers, packed in zip(message.sent, sent, strict=True):
            self.held.update(zip(numbers, packed.unpack(), strict=True))
        for place, value in enumerate(message.common):
            if isinstance(value, Arch):
                message.common[place] = self.archs.setdefault(value.name, value)
        operations = unpack_operations(message, self.splits, self.held)
        timed: dict[int, tuple[Any, float]] = {}
        try:
            for unit in message.units:
                timed.update(zip(unit, self.execute([operations[index] for index in unit]), strict=True))
        except Exception as error:  # a user's network may raise anything; the driver raises it again
            return Failure(f"{type(error).__name__}: {error}")
        packer = ResultPacker()
        values = [packer.pack(timed[index][0]) for index in range(len(operations))]
        self.held.update(zip(range(message.first, message.first + len(packer.kept)), packer.kept, strict=True))
        packages = [PackedWeights.of(sets) for sets in packer.packages.values()]
        paths, self.execute.paths = self.execute.paths, Counter()
        return Results(
            values,
            [timed[index][1] for index in range(len(operations))],
            list(packer.archs),
            PackedWeights.of(packer.outputs),
            [ray.put(package) for package in packages],
            [package.forms for package in packages],
            paths,
        )


def fingerprint(splits: Splits) -> str:
    """A fingerprint of the rows of all splits, of all labels, and of some inputs of every source."""
    digest = hashlib.sha256()
    sources: set[int] = set()
    for name, split in zip(splits.names, splits.splits, strict=True):
        digest.update(name.encode())
        _add(digest, split.rows)
        if split.targets is not None:
            _add(digest, split.targets)
        if id(split.source) not in sources and len(split):
            sources.add(id(split.source))
            _add(digest, split.source.labels)
            inputs = split.inputs(torch.arange(min(LOOKED_AT, len(split))))
            for tensor in inputs.values() if isinstance(inputs, Mapping) else (inputs,):
                _add(digest, tensor)
    return digest.hexdigest()


def _add(digest: Any, tensor: Tensor) -> None:
    digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
    if tensor.numel():
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
