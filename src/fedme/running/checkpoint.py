"""Where a run stands: one small file that is replaced atomically, and the weights it names, which are in the store.

A checkpoint writes only what is new since the last one. Randomness needs no place in it, because keys are derived. Reading
trusts nothing: format, configuration and types are checked at once, the bytes of weights when they are first looked at.
"""

import hashlib
import json
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fedme.config.identity import digest
from fedme.core.atomic_files import CHECK, RunError, write_text
from fedme.core.data import ClientId
from fedme.core.model import Arch
from fedme.core.serialization import pack, unpack
from fedme.core.typed import TypedError, build
from fedme.federation.client_work import AnyMethod
from fedme.federation.offences import OffenceRecord
from fedme.learning.accountant import Ledger
from fedme.running.weight_store import Layout, Place, Store, Weights

FORMAT = "fedme-checkpoint-2"
NAME = "checkpoint.json"
AGAIN = "delete it to begin again: finished rounds are computed again to the same numbers"


@dataclass(frozen=True)
class Header:
    """What is known before the states are read."""

    round: int  # the next round
    metrics_bytes: int  # how much of metrics.jsonl belongs to finished rounds
    assigned: Mapping[ClientId, str]  # every client's first architecture
    spent: Mapping[ClientId, Ledger] = field(default_factory=dict)  # of every client's privacy
    offences: Mapping[ClientId, OffenceRecord] = field(default_factory=dict)  # who has sent what could not be used
    metrics_check: int | None = None  # the checksum of those bytes


@dataclass(frozen=True)
class Checkpoint:
    """A run between two rounds; the states are in the care of the store."""

    header: Header
    server: Any
    clients: Mapping[ClientId, Any]


@dataclass(frozen=True)
class Written:
    """A set of weights as the file names it: the number of its layout, and its place."""

    layout: int
    place: Place


@dataclass(frozen=True)
class File:
    """What the file holds."""

    format: str
    config: str
    header: Header
    layouts: tuple[Layout, ...]
    loose: Written | None  # tensors that are not part of a set
    server: Any
    clients: Any


def save(folder: Path, store: Store, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Replace the checkpoint of a run directory."""
    tensors: dict[str, Tensor] = {}
    sets: dict[int, Weights] = {}

    def note(value: Any) -> Any:
        if not isinstance(value, Weights):
            return NotImplemented
        sets[id(value)] = value
        return value

    body = {
        "server": pack(checkpoint.server, tensors, "server", note),
        "clients": pack(checkpoint.clients, tensors, "clients", note),
        "loose": pack(store.keep(tensors), {}, "", note) if tensors else None,
    }
    new = [weights for weights in sets.values() if weights.place is None]
    store.write(new + store.scattered(sets.values()))
    layouts = {layout: number for number, layout in enumerate(dict.fromkeys(each.layout for each in sets.values()))}

    def plain(weights: Weights) -> dict[str, Any]:
        assert weights.place is not None
        return asdict(Written(layouts[weights.layout], weights.place))

    head = {"format": FORMAT, "config": digest(config), "header": asdict(checkpoint.header), "layouts": list(layouts)}
    write_text(folder / NAME, _signed(json.dumps(head | body, default=plain)))
    store.sweep(weights.place.segment for weights in sets.values() if weights.place is not None)


def _signed(text: str) -> str:
    """A JSON table with a last key that is the fingerprint of all the others."""
    return f'{text[:-1]}, "{CHECK}": "{hashlib.sha256(text.encode()).hexdigest()}"}}'


def _whole(text: str, check: Any) -> bool:
    """Whether this is the table that was written. Earlier versions wrote no fingerprint."""
    body, key, _ = text.rpartition(f', "{CHECK}": ')
    return check is None or (bool(key) and hashlib.sha256(f"{body}}}".encode()).hexdigest() == check)


def load(folder: Path, config: Mapping[str, Any]) -> File | None:
    """The checked file with its states unread; None when there is no checkpoint yet."""
    path = folder / NAME
    if not path.exists() and (folder / "checkpoint.safetensors").exists():
        raise RunError(f"{folder}: begun by an earlier version, whose checkpoints this one does not read; start a new run")
    if not path.exists():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        plain = json.loads(text)
        if not isinstance(plain, dict):
            raise ValueError("not a table")
    except (ValueError, OSError, RecursionError) as error:
        raise RunError(f"{path}: damaged ({error}); {AGAIN}") from error
    if plain.get("format") != FORMAT:
        raise RunError(f"{path}: this version reads {FORMAT}, the file is {plain.get('format', 'something else')}")
    if not _whole(text, plain.pop(CHECK, None)):
        raise RunError(f"{path}: damaged (its checksum is wrong: it was changed after it was written); {AGAIN}")
    if plain.get("config") != digest(config):
        raise RunError(f"{path}: was made with another configuration than config.toml beside it; restore that file")
    try:
        return typing.cast(File, build(File, plain))
    except (TypedError, ValueError) as error:
        raise RunError(f"{path}: damaged ({error}); {AGAIN}") from error


def states(folder: Path, store: Store, file: File, method: AnyMethod, archs: Mapping[str, Arch]) -> Checkpoint:
    """The states, read as the types that the method declares."""
    server_type = typing.get_type_hints(method.init_server)["return"]
    state_type = typing.get_type_hints(method.client_round)["state"]
    shared: dict[Place, Weights] = {}

    def weights(written: Written) -> Weights:
        if written.place not in shared:
            shared[written.place] = store.at(file.layouts[written.layout], written.place)
        return shared[written.place]

    def leaf(kind: Any, value: Any, at: str) -> Any:
        if kind == Mapping[str, Tensor] and isinstance(value, dict) and value.keys() == {"layout", "place"}:
            return weights(build(Written, value, at))
        return NotImplemented

    try:
        loose = weights(file.loose) if file.loose is not None else {}
        server = unpack(server_type, file.server, loose, archs, "server", leaf)
        clients = unpack(Mapping[str, state_type], file.clients, loose, archs, "clients", leaf)  # type: ignore[type-abstract, valid-type]
    except (TypedError, RunError, IndexError, KeyError, TypeError) as error:
        raise RunError(f"{folder / NAME}: damaged ({error}); {AGAIN}") from error
    store.sweep(place.segment for place in shared)
    return Checkpoint(file.header, server, clients)
