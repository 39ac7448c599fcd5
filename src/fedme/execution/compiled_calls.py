"""The memory of one call of the compiled code: its jobs, their networks, and what these point to.

Structures are rows of numpy arrays, which are filled in one go. They have the names and the order of those in the C++ code;
every field has 8 bytes. Addresses inside the call are relative to the beginning of an array until it is made.
"""

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def _structure(**fields: str) -> "np.dtype[np.void]":
    """A structure from the names of its fields, by type."""
    return np.dtype([(name, kind.split("_")[0]) for kind, names in fields.items() for name in names.split()])


NETWORK = _structure(
    i8="values nodes value_count node_count parameter_count output classes parameters",
    i8_1="base_value base_momentum base_second base_anchor seeds steps",
    f8="label_weight peer_weight mix loss",
)
TRAIN_JOB = _structure(
    i8="rows targets sizes divisors steps width task",  # the batches that are given
    # what batches are drawn from
    i8_2="draw_seeds draw_rows draw_labels draw_targets draw_samples table_rows used draw_width per_epoch draw_steps divisor",
    i8_3="networks count optimizer loss samples several",
)
PREDICT_JOB = _structure(i8="rows count table_rows networks logits")
OPTIMIZER = _structure(
    i8="optimizer mutual inner_steps draws_per_step nesterov mixing",
    f8="lr momentum weight_decay prox outer_lr clip beta2 eps decoupled_decay",
)
LOSS = _structure(i8="classes present targets known first width cross_entropy", f8="weight", i8_1="sums counts chances")
NOT_DRAWN = (-1,) + (0,) * 10  # in place of what batches are drawn from
NOT_GIVEN = (0,) * 7  # in place of batches


class Call:
    """One call: jobs of one type are added, then it is made, and its arrays have the results."""

    def __init__(self, job_type: "np.dtype[np.void]") -> None:
        self.job_type = job_type
        self._numbers: list[int] = []
        self._networks: list[tuple[int, ...]] = []
        self._weights: list[tuple[float, float, float]] = []
        self._jobs: list[tuple[int, ...]] = []
        self._optimizers: dict[int, int] = {}
        self._kept: list[Any] = []
        self.heads: dict[tuple[int, ...], Any] = {}  # what networks have in common, by the identity of what it is made from
        self.specs: dict[tuple[int, int], np.ndarray[Any, Any]] = {}  # of optimizers, by their identity and mixing

    def keep(self, *values: Any) -> None:
        """Keep objects whose memory the call refers to."""
        self._kept.extend(values)

    def add_numbers(self, numbers: Iterable[int]) -> int:
        """Add whole numbers; where they begin."""
        start = 8 * len(self._numbers)
        self._numbers.extend(numbers)
        return start

    def add_array(self, numbers: Sequence[Sequence[int]]) -> int:
        """Keep an array of whole numbers; its address."""
        array = np.array(numbers, np.int64)
        self._kept.append(array)
        return address(array)

    def add_network(self, network: tuple[int, ...], loss_weights: tuple[float, float] = (1.0, 0.0), mix: float = 0.0) -> int:
        """Add the whole numbers of a structure of type `NETWORK`, the weights of labels and peer, and its part of a mixture."""
        self._networks.append((*network, 0, 0, 0, 0))
        self._weights.append((*loss_weights, mix))
        return len(self._networks) - 1

    def add_optimizer(self, optimizer: "np.ndarray[Any, Any]") -> int:
        """The address of an optimizer, which is kept."""
        place = self._optimizers.get(id(optimizer))
        if place is None:
            self._kept.append(optimizer)
            place = self._optimizers[id(optimizer)] = address(optimizer)
        return place

    def add_job(self, job: tuple[int, ...]) -> int:
        """Add a job, in which networks are the index of the first; its index."""
        self._jobs.append(job)
        return len(self._jobs) - 1

    def make(self) -> None:
        """Make the arrays."""
        self.numbers = np.array(self._numbers or [0], np.int64)
        self.networks = np.array(self._networks, np.int64).view(NETWORK)[:, 0]
        for name, weights in zip(("label_weight", "peer_weight", "mix"), zip(*self._weights, strict=True), strict=True):
            self.networks[name] = weights
        self.jobs = np.array(self._jobs, np.int64).view(self.job_type)[:, 0]
        base = address(self.numbers)
        self.networks["seeds"] += base
        self.jobs["networks"] = address(self.networks) + NETWORK.itemsize * self.jobs["networks"]
        if self.job_type is TRAIN_JOB:
            seeds = self.jobs["draw_seeds"]
            self.jobs["draw_seeds"] = np.where(seeds < 0, 0, base + seeds)

    @functools.cached_property
    def losses(self) -> list[float]:
        """The sum of the losses of every network, after the call."""
        return self.networks["loss"].tolist()  # type: ignore[no-any-return]

    @functools.cached_property
    def seen(self) -> list[tuple[int, int]]:
        """The samples that every training has seen, and its batches of more than one sample, after the call."""
        return list(zip(self.jobs["samples"].tolist(), self.jobs["several"].tolist(), strict=True))

    def run(self, function: Any, table: ctypes.Structure, itemsize: int) -> int:
        """Call a function of the compiled code; its answer."""
        jobs = ctypes.c_void_p(address(self.jobs)), ctypes.c_int64(len(self.jobs))
        return int(function(ctypes.byref(table), ctypes.c_int64(itemsize), *jobs))


def address(array: "np.ndarray[Any, Any]") -> int:
    """Where the numbers of an array are."""
    return array.ctypes.data
