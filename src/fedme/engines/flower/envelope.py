"""What a message carries: plain data as text, and tensors by name. Read as the types a method declares, never unpickled."""

import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedme.core.model import Arch
from fedme.core.typed import TypedError
from fedme.core.wire import pack, unpack
from fedme.engines.client import AnyMethod

T = TypeVar("T")
BODY, TENSORS = "body", "tensors"


@dataclass(frozen=True)
class Envelope:
    """Values that travel together, by name."""

    body: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, **values: Any) -> "Envelope":
        """An envelope with these values."""
        tensors: dict[str, Tensor] = {}
        return cls({name: pack(value, tensors, name) for name, value in values.items()}, tensors)

    def read(self, name: str, kind: type[T], archs: Mapping[str, Arch] | None = None) -> T:
        """One of the values, as a `kind`; architectures are looked up in `archs`."""
        if name not in self.body:
            raise TypedError(name, "is missing from the message")
        return unpack(kind, self.body[name], self.tensors, archs or {}, name)

    def content(self) -> RecordDict:
        """The envelope as Flower carries it."""
        arrays = ArrayRecord({name: tensor.detach().contiguous() for name, tensor in self.tensors.items()})
        return RecordDict({BODY: ConfigRecord({"json": json.dumps(self.body)}), TENSORS: arrays})

    @classmethod
    def opened(cls, content: RecordDict) -> "Envelope":
        """The envelope that somebody sent."""
        try:
            body = json.loads(str(content.config_records[BODY]["json"]))
            arrays = {name: torch.from_numpy(array.numpy()) for name, array in content.array_records[TENSORS].items()}
        except (KeyError, ValueError, TypeError) as error:
            raise TypedError("message", f"cannot be read: {error}") from error
        if not isinstance(body, dict):
            raise TypedError("message", "must be a table")
        return cls(body, arrays)


@dataclass(frozen=True)
class Kinds:
    """The types that a method declares for what moves and persists."""

    server: Any
    state: Any
    down: Any
    up: Any

    @classmethod
    def of(cls, method: AnyMethod) -> "Kinds":
        """As the annotations of the method say."""
        hints = typing.get_type_hints(method.client_round)
        answer = typing.get_args(typing.get_args(hints["return"])[2])
        return cls(typing.get_type_hints(method.init_server)["return"], hints["state"], hints["down"], answer[1])
