"""What a message carries: plain data as text, and tensors by name. Read as the types a method declares, never unpickled."""

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedme.core.model import Arch
from fedme.core.serialization import pack, unpack
from fedme.core.typed import TypedError

T = TypeVar("T")
BODY, TENSORS = "body", "tensors"
ROOM = 1 << 36  # bytes of a message when nobody knows better


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
    def opened(cls, content: RecordDict, most: int = ROOM) -> "Envelope":
        """The envelope that somebody sent. A message of more than `most` bytes is refused before anything in it is read."""
        try:
            text, arrays = str(content.config_records[BODY]["json"]), content.array_records[TENSORS]
            size = len(text) + sum(len(array.data) for array in arrays.values())
            if size > most:
                raise TypedError("message", f"has {size} bytes; at most {most} were expected")
            body = json.loads(text)
            tensors = {name: _tensor(array.data) for name, array in arrays.items()}
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise TypedError("message", f"cannot be read: {str(error).removeprefix('message: ')}") from error
        if not isinstance(body, dict):
            raise TypedError("message", "must be a table")
        return cls(body, tensors)


def _tensor(data: bytes) -> Tensor:
    """The tensor in an npy file. What its head claims is compared with the bytes that there are before room is made."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"npy format {version} is not in use")
    shape, by_column, dtype = np.lib.format.read_array_header_1_0(file)
    rest = len(data) - file.tell()
    if dtype.kind not in "fiub" or by_column or rest != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array claims to be {dtype} of shape {shape}, but has {rest} bytes")
    return torch.from_numpy(np.frombuffer(data, dtype, offset=file.tell()).reshape(shape).copy())
