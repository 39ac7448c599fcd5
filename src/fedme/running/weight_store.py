"""The weights of client and server states: in memory up to a budget, the others in files, read again on access.

States are values, so a set of weights never changes. It is written at most once, to free memory or for a checkpoint, and a
checkpoint writes only new sets. Sets are written one after another into a segment, a file that never changes either. When
less than half of a segment is still needed, the rest is copied to the next segment and the file is deleted.
"""

import contextlib
import dataclasses
import math
import operator
import re
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedme.core.atomic_files import RunError, replacing
from fedme.core.flat_params import FlatParams, flat_params
from fedme.core.held_params import HeldParams, held_params
from fedme.core.model import Arch, WithFrozen

T = TypeVar("T")
Layout = tuple[tuple[str, str, tuple[int, ...]], ...]  # the name, type and shape of every tensor of a set

FOLDER = "weights"
CHUNK = 1 << 24  # bytes that are read at once to check them
BUFFER = 1 << 20  # bytes that are written at once: sets of many clients are small
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _FLOATS + _INTEGERS}
_NAMES = {dtype: name for name, dtype in TYPES.items()}


@dataclasses.dataclass(frozen=True)
class Place:
    """The location of a set of weights on disk, and the checksum of its bytes."""

    segment: int
    offset: int
    check: int


class Weights(Mapping[str, Tensor]):
    """Named tensors held by a store: in memory, in a file, or both."""

    def __init__(self, store: "Store", layout: Layout, tensors: Mapping[str, Tensor] | None, place: Place | None) -> None:
        self.store, self.layout, self.tensors, self.place = store, layout, tensors, place
        self.used = store.time
        self.checked: Place | None = None  # where the file was found undamaged
        self.scratch = False  # whether the file may be lost in a power cut
        self.nbytes = sum(TYPES[dtype].itemsize * math.prod(shape) for _, dtype, shape in layout)
        store.known.add(self)

    # Compared by identity: comparing values would read files.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> Tensor:
        return self.loaded()[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _, _ in self.layout)

    def __len__(self) -> int:
        return len(self.layout)

    def __reduce__(self) -> tuple[Any, ...]:
        """A worker process receives plain tensors."""
        return dict, (dict(self.loaded()),)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first tensor; nothing is read."""
        return TYPES[self.layout[0][1]] if self.layout else torch.float32

    @property
    def held_params(self) -> HeldParams | None:
        """The weights, if they are elsewhere: in another process or on a device."""
        return held_params(self.tensors) if self.tensors is not None else None

    @property
    def flat_params(self) -> FlatParams | None:
        """The weights in one tensor, if they are."""
        return flat_params(self.tensors) if self.tensors is not None else None

    def loaded(self) -> Mapping[str, Tensor]:
        """The tensors; they stay in memory until the store frees them."""
        self.used = self.store.time
        if self.tensors is None:
            self.tensors = self.store.read(self)
        return self.tensors

    def peek(self, name: str) -> Tensor:
        """One of the tensors; if the set is in a file, the others stay there."""
        return self.tensors[name] if self.tensors is not None else self.store.read_one(self, name)

    def sketch(self) -> dict[str, Tensor]:
        """Meta tensors of the same types and shapes; nothing is read."""
        return {name: torch.empty(shape, dtype=TYPES[dtype], device="meta") for name, dtype, shape in self.layout}


class Store:
    """The weights of a run; after `settle`, at most `budget` bytes of them are in memory."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder, self.budget = folder / FOLDER, budget
        self.known: weakref.WeakSet[Weights] = weakref.WeakSet()
        self.layouts: dict[Layout, Layout] = {}  # one object for equal layouts
        self.time = 0  # counts calls of `settle`
        self.segment_lock = threading.Lock()  # no segment is read while it is deleted
        self.writer = ThreadPoolExecutor(1, "store")
        self.writing: Future[None] | None = None
        self.next = max(self._segments(), default=-1) + 1

    def keep(self, value: T) -> T:
        """The same state with its weights held by the store. Weights that occur twice are stored once."""
        return _mapped(value, self._adopted, {})  # type: ignore[no-any-return]

    def _adopted(self, tensors: Mapping[str, Tensor]) -> Weights:
        if isinstance(tensors, Weights) and tensors.store is self:
            return tensors
        if (held := held_params(tensors)) is not None:  # a checkpoint will need them, but perhaps not in every round
            named = tuple((name, _NAMES[dtype], shape) for name, dtype, shape in held.form.tensors)
            return Weights(self, self.layouts.setdefault(named, named), held, None)
        flat = flat_params(tensors)
        if flat is not None:
            layout = tuple((name, _NAMES[flat.layout.dtype], shape) for name, shape in flat.layout.shapes.items())
        else:
            layout = tuple((name, _NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items())
        return Weights(self, self.layouts.setdefault(layout, layout), flat or dict(tensors), None)

    def at(self, layout: Layout, place: Place) -> Weights:
        """A set that is already in a file; its checksum is checked when it is read."""
        try:
            size = self._path(place.segment).stat().st_size
        except OSError:
            raise RunError(f"{self._path(place.segment)}: is missing") from None
        weights = Weights(self, self.layouts.setdefault(layout, layout), None, place)
        if not 0 <= place.offset <= size - weights.nbytes:
            raise RunError(f"{self._path(place.segment)}: is too short")
        return weights

    def settle(self, limit: int | None = None, scratch: bool = False) -> None:
        """Evict the least recently used weights until the others fit the budget, or `limit`; new ones are written first.

        With `scratch`, to files that nobody waits for to be on disk; a checkpoint writes what it needs of them again.
        """
        loaded = [weights for weights in self.known if weights.tensors is not None]
        excess = sum(weights.nbytes for weights in loaded) - (self.budget if limit is None else limit)
        evicted = []
        for weights in sorted(loaded, key=lambda weights: weights.used) if excess > 0 else []:
            if excess <= 0:
                break
            evicted.append(weights)
            excess -= weights.nbytes
        if evicted:
            self.wait()
        self.write([weights for weights in evicted if weights.place is None], scratch)
        for weights in evicted:
            weights.tensors = None
        self.time += 1

    def later(self, work: Callable[[], None]) -> None:
        """Run `work`, which writes files, in a thread; the next `wait` raises its errors."""
        self.wait()
        self.writing = self.writer.submit(work)

    def wait(self) -> None:
        """Wait until the work of `later` is done."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Finish the work of `later` and end its thread."""
        self.writer.shutdown()

    def write(self, sets: Sequence[Weights], scratch: bool = False) -> None:
        """Write sets of weights into a new segment; unless it is for `scratch`, they are on disk when this returns."""
        if not sets:
            return
        self.folder.mkdir(exist_ok=True)
        number, offset, places = self.next, 0, []
        self.next += 1
        path = self._path(number)
        with contextlib.nullcontext(path) if scratch else replacing(path) as written, written.open("wb", BUFFER) as file:
            for weights in sets:
                check = 0
                tensors = weights.tensors or self.read(weights)
                for name, _, _ in weights.layout:
                    data = _bytes(tensors[name].contiguous())
                    check = zlib.crc32(data, check)
                    file.write(data)
                places.append(Place(number, offset, check))
                offset += weights.nbytes
        for weights, place in zip(sets, places, strict=True):
            weights.place, weights.scratch = place, scratch

    def scattered(self, sets: Iterable[Weights]) -> list[Weights]:
        """The sets of a state that lie in segments of which less than half is still needed."""
        needed: dict[int, list[Weights]] = {}
        for weights in sets:
            if weights.place is not None:
                needed.setdefault(weights.place.segment, []).append(weights)
        sizes = {number: self._path(number).stat().st_size for number in needed}
        return [
            weights
            for number, segment in needed.items()
            if 2 * sum(weights.nbytes for weights in segment) < sizes[number]
            for weights in segment
        ]

    def sweep(self, needed: Iterable[int]) -> None:
        """Remove every segment except the `needed` ones, and partial files of an interrupted write."""
        for path in self.folder.glob(".*.partial"):
            path.unlink(missing_ok=True)
        with self.segment_lock:
            for number in self._segments() - set(needed):
                self._path(number).unlink(missing_ok=True)

    def read(self, weights: Weights) -> dict[str, Tensor]:
        """The tensors of a set, from its file."""
        with self.segment_lock, self._opened(weights) as (file, place):
            tensors, check = {}, 0
            for name, dtype, shape in weights.layout:
                tensors[name] = _read(file, dtype, shape)
                check = zlib.crc32(_bytes(tensors[name]), check)
            self._require_whole(place, check)
            return tensors

    def read_one(self, weights: Weights, wanted: str) -> Tensor:
        """One tensor of a set, from its file. The whole set is checked when the first of its tensors is read so."""
        with self.segment_lock, self._opened(weights) as (file, place):
            if weights.checked != place:
                check, left = 0, weights.nbytes
                while left:
                    data = file.read(min(left, CHUNK))
                    if not data:
                        break
                    check, left = zlib.crc32(data, check), left - len(data)
                self._require_whole(place, check)
                weights.checked = place
            start = place.offset
            for name, dtype, shape in weights.layout:
                if name == wanted:
                    file.seek(start)
                    return _read(file, dtype, shape)
                start += TYPES[dtype].itemsize * math.prod(shape)
        raise KeyError(wanted)

    @contextlib.contextmanager
    def _opened(self, weights: Weights) -> Iterator[tuple[BinaryIO, Place]]:
        """The file of a set, at its beginning, and its place: the thread that writes a checkpoint may give it another."""
        place = weights.place
        assert place is not None
        path = self._path(place.segment)
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(place.offset)
                yield file, place
        except (OSError, ValueError) as error:
            raise RunError(f"{path}: cannot be read: {error}") from error

    def _require_whole(self, place: Place, check: int) -> None:
        if check != place.check:
            raise RunError(f"{self._path(place.segment)}: damaged (wrong checksum)")

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06}.bin"

    def _segments(self) -> set[int]:
        return {int(path.stem) for path in self.folder.glob("*.bin") if re.fullmatch("[0-9]{6,}", path.stem)}


def _read(file: BinaryIO, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """The next tensor of a file."""
    # Freshly allocated, as after training: the last bits of results may depend on the alignment of memory.
    tensor = torch.empty(shape, dtype=TYPES[dtype])
    target, done = _bytes(tensor), 0
    while done < len(target):
        count = file.readinto(target[done:])  # type: ignore[attr-defined]  # at most 2 GB at once
        if not count:
            raise OSError("it is too short")
        done += count
    return tensor


def _mapped(value: Any, change: Any, seen: dict[int, Any]) -> Any:
    """The same state with every set of weights changed; parts without weights stay the same objects."""
    if isinstance(value, Weights):
        return change(value)
    if value is None or isinstance(value, bool | int | float | str | Arch | Tensor):
        return value
    if id(value) in seen:
        return seen[id(value)][1]
    if isinstance(value, WithFrozen):  # frozen weights are those of the architecture, and no part of a state
        own = _mapped(value.own, change, seen) if value.own else value.own
        new: Any = value if own is value.own else WithFrozen(own, value.frozen)
    elif isinstance(value, Mapping):
        if isinstance(value, FlatParams | HeldParams) or (value and all(isinstance(item, Tensor) for item in value.values())):
            new = change(value)
        else:
            items = {key: _mapped(item, change, seen) for key, item in value.items()}
            new = value if all(items[key] is item for key, item in value.items()) else items
    elif isinstance(value, list | tuple):
        parts = [_mapped(item, change, seen) for item in value]
        new = value if all(map(operator.is_, parts, value)) else type(value)(parts)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: _mapped(item, change, seen) for name, item in fields.items()}
        new = value if all(changed[name] is fields[name] for name in fields) else dataclasses.replace(value, **changed)
    else:
        new = value
    seen[id(value)] = value, new  # a reference to the value, so that its id is not reused
    return new


def _bytes(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor as an array of bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
