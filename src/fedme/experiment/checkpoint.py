"""Where a run stands: one file that is replaced atomically, holding every state as plain data and tensors.

Randomness needs no place in it, because keys are derived. Reading trusts nothing: format, configuration and types are checked.
"""

import hashlib
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedme.core.data import ClientId
from fedme.core.model import Arch
from fedme.core.typed import TypedError, build
from fedme.core.wire import pack, unpack
from fedme.engines.client import AnyMethod
from fedme.experiment.files import RunError, read_tensors, write_tensors

FORMAT = "fedme-checkpoint-1"
NAME = "checkpoint.safetensors"


@dataclass(frozen=True)
class Header:
    """What is known before the states are read."""

    round: int  # the next round
    metrics_bytes: int  # how much of metrics.jsonl belongs to finished rounds
    assigned: Mapping[ClientId, str]  # every client's first architecture


@dataclass(frozen=True)
class Checkpoint:
    """A run between two rounds."""

    header: Header
    server: Any
    clients: Mapping[ClientId, Any]


def digest(config: Mapping[str, Any]) -> str:
    """A fingerprint of everything in a configuration that decides the results."""
    deciding = {key: value for key, value in config.items() if key not in ("output", "name", "checkpoint_every")}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def save(folder: Path, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Replace the checkpoint of a run directory."""
    tensors: dict[str, Tensor] = {}
    body = {
        "header": pack(checkpoint.header, tensors),
        "server": pack(checkpoint.server, tensors, "server"),
        "clients": pack(checkpoint.clients, tensors, "clients"),
    }
    write_tensors(folder / NAME, tensors, {"format": FORMAT, "config": digest(config), "body": body})


def load_header(folder: Path, config: Mapping[str, Any]) -> tuple[Header, Any, dict[str, Tensor]] | None:
    """The checked head of a checkpoint and its unread rest; None when there is no checkpoint yet."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        tensors, metadata = read_tensors(path)
    except RunError as error:
        raise RunError(f"{error}; delete it to begin again: finished rounds are computed again to the same numbers") from error
    if metadata.get("format") != FORMAT:
        raise RunError(f"{path}: this version reads {FORMAT}, the file is {metadata.get('format', 'something else')}")
    if metadata.get("config") != digest(config):
        raise RunError(f"{path}: was made with another configuration than config.toml beside it; restore that file")
    try:
        body = metadata["body"]
        return build(Header, body["header"], "header"), body, tensors
    except (TypedError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: damaged: {error}") from error


def load_states(
    folder: Path, header: Header, body: Any, tensors: Mapping[str, Tensor], method: AnyMethod, archs: Mapping[str, Arch]
) -> Checkpoint:
    """The states, read as the types that the method declares."""
    server_type = typing.get_type_hints(method.init_server)["return"]
    state_type = typing.get_type_hints(method.client_round)["state"]
    try:
        server = unpack(server_type, body["server"], tensors, archs, "server")
        clients = unpack(Mapping[str, state_type], body["clients"], tensors, archs, "clients")  # type: ignore[type-abstract, valid-type]
    except (TypedError, KeyError, TypeError) as error:
        raise RunError(f"{folder / NAME}: damaged: {error}") from error
    return Checkpoint(header, server, clients)
