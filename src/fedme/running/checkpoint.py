"""The checkpoint of a run: one small file that is replaced atomically, and the weights it names, which are in the store.

A checkpoint writes only what is new since the last one. It holds no random state, because keys are derived. Reading checks
format, configuration and types at once, and the bytes of weights when they are loaded.
"""

import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fedme.config.experiment import ConfigError
from fedme.config.identity import digest
from fedme.core.atomic_files import CHECK, RunError, is_whole, signed, write_text
from fedme.core.data import ClientId
from fedme.core.method import TaskError
from fedme.core.model import Arch
from fedme.core.serialization import pack, unpack
from fedme.core.typed import TypedError, build
from fedme.federation.client_work import AnyMethod
from fedme.federation.offences import OffenceRecord
from fedme.federation.reply_validation import MessageTypes
from fedme.learning.accountant import Ledger
from fedme.running.best_round import BestRound
from fedme.running.weight_store import Layout, Place, Store, Weights

FORMAT = "fedme-checkpoint-2"
NAME = "checkpoint.json"
AGAIN = "delete it to start again from round 0: finished rounds are computed again with identical results"


@dataclass(frozen=True)
class Header:
    """The part of a checkpoint that is read before the states."""

    round: int  # the next round
    metrics_bytes: int  # the size of metrics.jsonl after the finished rounds
    assigned: Mapping[ClientId, str]  # every client's first architecture
    spent: Mapping[ClientId, Ledger] = field(default_factory=dict)  # the privacy loss of every client
    offences: Mapping[ClientId, OffenceRecord] = field(default_factory=dict)  # invalid replies of every client
    metrics_check: int | None = None  # the checksum of the `metrics_bytes`


@dataclass(frozen=True)
class Checkpoint:
    """A run between two rounds; the store holds the weights of the states."""

    header: Header
    server: Any
    clients: Mapping[ClientId, Any]
    archs: Mapping[str, Arch]  # the architectures that a resumed run knows by name; it may grow
    best: Mapping[ClientId, BestRound] = field(default_factory=dict)


@dataclass(frozen=True)
class Written:
    """A set of weights in the file: the index of its layout, and its place in the store."""

    layout: int
    place: Place


@dataclass(frozen=True)
class File:
    """The content of the file."""

    format: str
    config: str
    header: Header
    layouts: tuple[Layout, ...]
    loose: Written | None  # tensors that are not part of a set
    server: Any
    clients: Any
    archs: tuple[str, ...] = ()  # the names of all architectures in the states
    best: Any = field(default_factory=dict)


def save(folder: Path, store: Store, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Replace the checkpoint of a run directory."""
    tensors: dict[str, Tensor] = {}
    sets: dict[int, Weights] = {}
    archs: set[Arch] = set()

    def collect(value: Any) -> Any:
        if isinstance(value, Arch):
            archs.add(value)
        if not isinstance(value, Weights):
            return NotImplemented
        sets[id(value)] = value
        return value

    body = {
        "server": pack(checkpoint.server, tensors, "server", collect),
        "clients": pack(checkpoint.clients, tensors, "clients", collect),
        "best": pack(checkpoint.best, tensors, "best", collect),
        "loose": pack(store.keep(tensors), {}, "", collect) if tensors else None,
        "archs": sorted(arch.name for arch in archs),
    }
    if unknown := [arch for arch in archs if checkpoint.archs.get(arch.name) != arch]:
        raise TaskError(_unknown(unknown[0], checkpoint, config["method"]["name"]))
    new = [weights for weights in sets.values() if weights.place is None or weights.scratch]
    store.write(new + [weights for weights in store.scattered(sets.values()) if not weights.scratch])
    layouts = {layout: number for number, layout in enumerate(dict.fromkeys(weights.layout for weights in sets.values()))}

    def plain(weights: Weights) -> dict[str, Any]:
        place = weights.place
        assert place is not None
        located = {"segment": place.segment, "offset": place.offset, "check": place.check}  # `asdict` takes ten times as long
        return {"layout": layouts[weights.layout], "place": located}

    head = {"format": FORMAT, "config": digest(config), "header": asdict(checkpoint.header), "layouts": list(layouts)}
    write_text(folder / NAME, signed(json.dumps(head | body, default=plain)))
    store.sweep(weights.place.segment for weights in sets.values() if weights.place is not None)


def _unknown(arch: Arch, checkpoint: Checkpoint, method: str) -> str:
    """Why a state with an architecture that a method made itself is not saved."""

    def is_in(state: Any) -> bool:
        archs: set[Arch] = set()
        pack(state, {}, "", lambda value: archs.add(value) if isinstance(value, Arch) else NotImplemented)
        return arch in archs

    owners = (f"client {client}" for client, state in checkpoint.clients.items() if is_in(state))
    return (
        f"method '{method}': the state of {next(owners, 'the server')} holds the architecture '{arch.name}', which a resumed "
        "run cannot find by its name; get it from task.resolve(name, classes), with the name of a network that is built in, "
        "in the configuration, or given to fedme.networks.register"
    )


def load(folder: Path, config: Mapping[str, Any], earlier_rounds: Sequence[int] = ()) -> File | None:
    """The checked file with its states unread; None when there is no checkpoint yet.

    `earlier_rounds` are the numbers of rounds that the run had before it was extended.
    """
    path = folder / NAME
    if not path.exists() and (folder / "checkpoint.safetensors").exists():
        raise RunError(f"{folder}: begun by an earlier version, whose checkpoints this version cannot read; start a new run")
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
    check = plain.pop(CHECK, None)
    if check is not None and not is_whole(text, check):  # earlier versions wrote none
        raise RunError(f"{path}: damaged (wrong checksum: it was changed after it was written); {AGAIN}")
    configs = [config, *({**config, "rounds": rounds} for rounds in earlier_rounds)]
    if plain.get("config") not in [digest(known) for known in configs]:
        raise RunError(f"{path}: was made with another configuration than config.toml beside it; restore that file")
    try:
        return typing.cast(File, build(File, plain))
    except (TypedError, ValueError) as error:
        raise RunError(f"{path}: damaged ({error}); {AGAIN}") from error


def states(
    folder: Path,
    store: Store,
    file: File,
    method: AnyMethod,
    archs: Mapping[str, Arch],
    resolve: Callable[[str, int | None], Arch] | None = None,
) -> Checkpoint:
    """The states, read as the types that the method declares.

    `resolve` adds to `archs` an architecture that the method resolved itself; it imports nothing that the configuration does
    not name.
    """
    types = MessageTypes.of(method)
    server_type, state_type = types.server, types.state
    shared: dict[Place, Weights] = {}

    def weights(written: Written) -> Weights:
        if written.place not in shared:
            shared[written.place] = store.at(file.layouts[written.layout], written.place)
        return shared[written.place]

    def leaf(expected: Any, value: Any, at: str) -> Any:
        if expected == Mapping[str, Tensor] and isinstance(value, dict) and value.keys() == {"layout", "place"}:
            return weights(build(Written, value, at))
        return NotImplemented

    try:
        for name in file.archs:
            if resolve is not None and name not in archs:
                resolve(name, None)
        loose = weights(file.loose) if file.loose is not None else {}
        server = unpack(server_type, file.server, loose, archs, "server", leaf)
        clients = unpack(Mapping[str, state_type], file.clients, loose, archs, "clients", leaf)  # type: ignore[type-abstract, valid-type]
        best = unpack(Mapping[str, BestRound], file.best, loose, archs, "best", leaf)  # type: ignore[type-abstract]
    except (TypedError, ConfigError, RunError, IndexError, KeyError, TypeError) as error:
        raise RunError(f"{folder / NAME}: damaged ({error}); {AGAIN}") from error
    store.sweep(place.segment for place in shared)
    return Checkpoint(file.header, server, clients, archs, best)
