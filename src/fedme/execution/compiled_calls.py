"""The memory of one call of the compiled code: its jobs, their networks, and what these point to.

Structures are rows of arrays, which are filled in one go. They have the names and the order of those in the C++ code; every
field has 8 bytes. Addresses inside the call are relative to the beginning of an array until it is made.
"""

import ctypes
import functools
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def _structure(**fields: str) -> "np.dtype[np.void]":
    """A structure from the names of its fields, by type."""
    return np.dtype([(name, kind.split("_")[0]) for kind, names in fields.items() for name in names.split()])


NETWORK = _structure(
    i8="values nodes value_count node_count parameter_count output classes program parameters",
    i8_1="base_value base_momentum base_second base_anchor seeds steps copy_from copy_to copy_bytes finite",
    f8="label_weight peer_weight mix loss",
)
TRAIN_JOB = _structure(
    i8="rows targets sizes divisors steps width task",  # the batches that are given
    # what batches are drawn from
    i8_1="draw_key draw_key_size",
    i8_2="draw_rows draw_labels draw_targets draw_samples table_rows used draw_width per_epoch draw_steps divisor",
    i8_3="networks count optimizer loss samples several",
)
PREDICT_JOB = _structure(i8="rows count table_rows networks logits")
OPTIMIZER = _structure(
    i8="optimizer mutual inner_steps draws_per_step nesterov mixing",
    f8="lr momentum weight_decay prox outer_lr clip beta2 eps decoupled_decay first_decay",
)
LOSS = _structure(i8="classes present targets known first width cross_entropy", f8="weight", i8_1="sums counts chances")
NOT_DRAWN = (-1,) + (0,) * 11  # in place of what batches are drawn from
NOT_GIVEN = (0,) * 7  # in place of batches
WAITING, STARTED = -1, -2  # the status of a call that has not ended


class Call:
    """One call: jobs of one type are added, then it is made, and its arrays have the results."""

    def __init__(self, job_type: "np.dtype[np.void]") -> None:
        self.job_type = job_type
        self._numbers: list[int] = []
        self._names: list[bytes] = []  # of keys
        self._size_of_names = 0
        self._networks: list[bytes] = []  # field after field
        self._jobs: list[bytes] = []
        self.network_count = self.job_count = 0
        self._optimizers: dict[int, int] = {}
        self._kept: list[Any] = []
        self.specs: dict[tuple[int, int], np.ndarray[Any, Any]] = {}  # of optimizers, by their identity and mixing

    def keep(self, *values: Any) -> None:
        """Keep objects whose memory the call refers to."""
        self._kept += values

    def add_numbers(self, numbers: Iterable[int]) -> int:
        """Add whole numbers; where they begin."""
        start = 8 * len(self._numbers)
        self._numbers.extend(numbers)
        return start

    def add_name(self, name: bytes) -> tuple[int, int]:
        """Add the name of a key; where it begins, and its size."""
        self._names.append(name)
        self._size_of_names += len(name)
        return self._size_of_names - len(name), len(name)

    def add_array(self, numbers: Sequence[Sequence[int]]) -> int:
        """Keep an array of whole numbers; its address."""
        kept = np.array(numbers, np.int64)
        self._kept.append(kept)
        return address(kept)

    def add_network(self, network: tuple[int, ...], loss_weights: tuple[float, float] = (1.0, 0.0), mix: float = 0.0) -> int:
        """Add the whole numbers of a structure of type `NETWORK`, the weights of labels and peer, and its part of a mixture."""
        return self.add_packed_network((packed(*network), last_fields(loss_weights, mix)))

    def add_packed_network(self, network: tuple[bytes, ...]) -> int:
        """The same of a structure in pieces."""
        self._networks += network
        self.network_count += 1
        return self.network_count - 1

    def add_optimizer(self, optimizer: "np.ndarray[Any, Any]") -> int:
        """The address of an optimizer, which is kept."""
        place = self._optimizers.get(id(optimizer))
        if place is None:
            self._kept.append(optimizer)
            place = self._optimizers[id(optimizer)] = address(optimizer)
        return place

    def add_job(self, job: tuple[int, ...]) -> int:
        """Add a job, in which networks are the index of the first; its index."""
        return self.add_packed_job((packed(*job),))

    def add_packed_job(self, job: tuple[bytes, ...]) -> int:
        """The same of a structure in pieces."""
        self._jobs += job
        self.job_count += 1
        return self.job_count - 1

    def make(self, table: ctypes.Structure, itemsize: int) -> None:
        """Make the arrays; `itemsize` is the size of one number of the models."""
        numbers, names = array("q", self._numbers), array("b", b"".join(self._names))
        networks, jobs = array("q", b"".join(self._networks)), array("q", b"".join(self._jobs))
        base, first = numbers.buffer_info()[0], networks.buffer_info()[0]
        self.networks, self.jobs = np.frombuffer(networks, NETWORK), np.frombuffer(jobs, self.job_type)
        self.networks["seeds"] += base
        places = self.jobs["networks"]
        places *= NETWORK.itemsize
        places += first
        trains = self.job_type is TRAIN_JOB
        if trains:
            keys = self.jobs["draw_key"]
            np.add(keys, names.buffer_info()[0], out=keys, where=keys >= 0)
            np.maximum(keys, 0, out=keys)
        # A piece: table, bytes, jobs, count, trains, status, and seconds, which are a number of another type.
        self._piece = array("q", (ctypes.addressof(table), itemsize, jobs.buffer_info()[0], self.job_count, trains, WAITING, 0))
        self._kept += numbers, names, table
        self.place = self._piece.buffer_info()[0]

    @property
    def status(self) -> int:
        """What the compiled code says."""
        return self._piece[-2]

    @property
    def ended(self) -> bool:
        """Whether nobody computes it any more."""
        return self.status not in (WAITING, STARTED)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return struct.unpack("d", self._piece[-1:])[0]  # type: ignore[no-any-return]

    @functools.cached_property
    def finite(self) -> list[int]:
        """Whether the weights of every trained network are known to be finite, after the call."""
        return self.networks["finite"].tolist()  # type: ignore[no-any-return]

    @functools.cached_property
    def losses(self) -> list[float]:
        """The sum of the losses of every network, after the call."""
        return self.networks["loss"].tolist()  # type: ignore[no-any-return]

    @functools.cached_property
    def seen(self) -> list[tuple[int, int]]:
        """The samples that every training has seen, and its batches of more than one sample, after the call."""
        return list(zip(self.jobs["samples"].tolist(), self.jobs["several"].tolist(), strict=True))


@functools.lru_cache(maxsize=1024)
def last_fields(loss_weights: tuple[float, float] = (1.0, 0.0), mix: float = 0.0) -> bytes:
    """The last fields of a network, from `finite` on."""
    return struct.pack("q4d", 0, *loss_weights, mix, 0.0)


def packed(*fields: int) -> bytes:
    """Fields of a structure as they are in memory."""
    return struct.pack(f"{len(fields)}q", *fields)


def address(numbers: "np.ndarray[Any, Any]") -> int:
    """Where the numbers of an array are."""
    return numbers.ctypes.data
