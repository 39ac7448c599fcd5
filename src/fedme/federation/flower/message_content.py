"""The content of a message: plain data as JSON, and tensors by name. It is read as declared types and never unpickled."""

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
MAX_BYTES = 1 << 36  # of a message whose expected size is unknown


@dataclass(frozen=True)
class MessageContent:
    """The values of a message, by name."""

    body: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, **values: Any) -> "MessageContent":
        """Pack these values."""
        tensors: dict[str, Tensor] = {}
        return cls({name: pack(value, tensors, name) for name, value in values.items()}, tensors)

    def read(self, name: str, value_type: type[T], archs: Mapping[str, Arch] | None = None) -> T:
        """Read one value as a `value_type`; architectures are looked up in `archs`."""
        if name not in self.body:
            raise TypedError(name, "is missing from the message")
        return unpack(value_type, self.body[name], self.tensors, archs or {}, name)

    def to_records(self) -> RecordDict:
        """Convert to Flower's records."""
        arrays = ArrayRecord({name: tensor.detach().contiguous() for name, tensor in self.tensors.items()})
        return RecordDict({BODY: ConfigRecord({"json": json.dumps(self.body)}), TENSORS: arrays})

    @classmethod
    def from_records(cls, content: RecordDict, max_bytes: int = MAX_BYTES) -> "MessageContent":
        """Read received records. A message of more than `max_bytes` bytes is rejected before it is parsed."""
        try:
            text, arrays = str(content.config_records[BODY]["json"]), content.array_records[TENSORS]
            size = len(text) + sum(len(array.data) for array in arrays.values())
            if size > max_bytes:
                raise TypedError("message", f"has {size} bytes, expected at most {max_bytes}")
            body = json.loads(text)
            if "\\u" in text:
                json.dumps(body, ensure_ascii=False).encode()  # refuses halves of characters, which no file can hold
            tensors = {name: _tensor(array.data) for name, array in arrays.items()}
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise TypedError("message", f"cannot be read: {str(error).removeprefix('message: ')}") from error
        if not isinstance(body, dict):
            raise TypedError("message", "must be a table")
        return cls(body, tensors)


def _tensor(data: bytes) -> Tensor:
    """Read a tensor from an npy file. The size in its header must match its bytes, so a forged one allocates nothing."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"unsupported npy format {version}")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    size = len(data) - file.tell()
    if dtype.kind not in "fiub" or fortran_order or size != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array claims to be {dtype} of shape {shape}, but has {size} bytes")
    return torch.from_numpy(np.frombuffer(data, dtype, offset=file.tell()).reshape(shape).copy())
