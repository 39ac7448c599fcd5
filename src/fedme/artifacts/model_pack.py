"""The models of many clients in a few files, each found by the name of its client's folder.

A folder of clients has a pack: `index.json`, and shards with weights and outputs. Models of one architecture are rows of
stacked tensors, and equal models are one row. A client's own folder, where it exists, has files that were written later, as
a model trained alone; they go before the pack. The index is written last, so a pack is there as a whole or not at all.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedme.core.atomic_files import CHECK, RunError, finite, is_whole, signed, together, write_safetensors, write_text
from fedme.core.model import Arch, Model

FORMAT = "fedme-pack-1"
INDEX = "index.json"
PACKED_FROM = 200  # clients; a run with fewer has a folder of files for each
SHARD_BYTES = 1 << 28
SHARED = ("model", "stage", "method", "rounds", "versions")  # what is said of many models alike, besides their networks
CHECK_LENGTH = 32  # hexadecimal digits of a checksum of weights

Layout = tuple[tuple[str, torch.dtype, torch.Size], ...]


@dataclass(frozen=True)
class NetworkFacts:
    """What a description says of a network and its inputs; of networks that are the `same` it is equal."""

    same: Hashable
    facts: Callable[[], Mapping[str, Any]]


@dataclass
class _Shard:
    """What is collected for the next file."""

    weights: dict[tuple[str, Layout], list[Mapping[str, Tensor]]] = field(default_factory=dict)
    outputs: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = field(default_factory=dict)
    lengths: dict[tuple[torch.dtype, torch.Size], int] = field(default_factory=dict)
    size: int = 0


class PackWriter:
    """Collects models and writes them; nothing is there before `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clients: dict[str, dict[str, Any]] = {}
        self.descriptions: dict[Any, int] = {}
        self.shared: list[Mapping[str, Any]] = []
        self.graphs: dict[str, str] = {}
        self.known: dict[str, list[Any]] = {}  # the place of weights by their checksum
        self.shard, self.shards = _Shard(), 0

    def add_model(self, client: str, name: str, model: Model, about: Mapping[str, Any], network: "NetworkFacts") -> None:
        """Add a model of a client's folder; `network` is what its description says beside `about`."""
        same = network.same, *(about.get(key) for key in SHARED if key != "versions")
        number = self.descriptions.get(same)
        if number is None:
            number = self.descriptions[same] = len(self.shared)
            self.shared.append({**network.facts(), **{key: about[key] for key in SHARED if key in about}})
        own = {key: value for key, value in about.items() if key not in SHARED}
        placed = self._placed(model.arch, {**model.params, **model.own_buffers})
        self.clients.setdefault(client, {}).setdefault("models", {})[name] = {"shared": number, "weights": placed, "own": own}

    def add_outputs(self, client: str, outputs: Mapping[str, Tensor]) -> None:
        """Add what a client's models answer."""
        places: dict[str, list[int]] = {}
        for name, value in outputs.items():
            kind = value.dtype, value.shape[1:]
            start = self.shard.lengths.get(kind, 0)
            groups = self.shard.outputs
            groups.setdefault(kind, []).append(value)
            self.shard.lengths[kind] = start + len(value)
            places[name] = [list(groups).index(kind), start, start + len(value)]
            self.shard.size += value.numel() * value.element_size()
        self.clients.setdefault(client, {})["outputs"] = [self.shards, places, _checksum(outputs)]
        self._write_if_full()

    def add_choice(self, client: str, choice: Mapping[str, Any]) -> None:
        """Add which of its models a client uses."""
        self.clients.setdefault(client, {})["choice"] = choice

    def add_graph(self, graph: str) -> None:
        """Add the graph of a network that has no import path."""
        self.graphs[graph_digest(graph)] = graph

    def close(self) -> None:
        """Write what is left, and the index."""
        if self.shard.size:
            self._write_shard()
        clients = ", ".join(f"{json.dumps(name)}: {_json(entry)}" for name, entry in self.clients.items())
        head = _json({"format": FORMAT, "shared": self.shared, "graphs": self.graphs})
        write_text(self.folder / INDEX, signed(f'{head[:-1]}, "clients": {{{clients}}}}}'))
        _index.cache_clear()

    def _placed(self, arch: Arch, weights: Mapping[str, Tensor]) -> list[Any]:
        """The shard, the stack and the row of weights, and their checksum. Equal weights are stored once."""
        check = _checksum(weights, arch.name)
        if check not in self.known:
            layout = tuple((name, value.dtype, value.shape) for name, value in weights.items())
            stack = self.shard.weights.setdefault((arch.name, layout), [])
            stack.append(weights)
            number = list(self.shard.weights).index((arch.name, layout))
            self.known[check] = [self.shards, number, len(stack) - 1, check]
            self.shard.size += sum(value.numel() * value.element_size() for value in weights.values())
            self._write_if_full()
        return self.known[check]

    def _write_if_full(self) -> None:
        if self.shard.size >= SHARD_BYTES:
            self._write_shard()

    def _write_shard(self) -> None:
        tensors: dict[str, Tensor] = {}
        for number, ((_, layout), rows) in enumerate(self.shard.weights.items()):
            tensors |= {f"{number}/{name}": torch.stack([row[name] for row in rows]) for name, _, _ in layout}
        for number, values in enumerate(self.shard.outputs.values()):
            tensors[f"outputs/{number}"] = torch.cat(values)
        self.folder.mkdir(parents=True, exist_ok=True)
        with together():
            write_safetensors(_path(self.folder, self.shards), tensors, {"format": FORMAT})
        self.shards += 1
        self.shard = _Shard()


def graph_digest(graph: str) -> str:
    """The digest by which a description names a graph."""
    return hashlib.sha256(graph.encode()).hexdigest()


def _json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(finite(value))


def _path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05}.safetensors"


def _checksum(tensors: Mapping[str, Tensor], kind: str = "") -> str:
    """The digest of names, types, shapes and values."""
    digest = hashlib.sha256(kind.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        if value.numel():
            digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:CHECK_LENGTH]


def names(group: Path) -> Collection[str]:
    """The folders of the clients in the pack of a folder of clients; none if there is no pack."""
    index = _opened(group)
    return index["clients"].keys() if index is not None else ()


def has(folder: Path, name: str) -> bool:
    """Whether the pack has a model of a client's folder."""
    return name in (_entry(folder) or {}).get("models", {})


def has_outputs(folder: Path) -> bool:
    """Whether the pack has outputs of a client's models."""
    return "outputs" in (_entry(folder) or {})


def description(folder: Path, name: str) -> dict[str, Any] | None:
    """The description of a packed model; None if there is none."""
    index, entry = _opened(folder.parent), _entry(folder)
    if index is None or entry is None or name not in entry.get("models", {}):
        return None
    facts: dict[str, Any] = _read(
        folder, lambda: {**index["shared"][entry["models"][name]["shared"]], **entry["models"][name]["own"]}
    )
    return facts


def weights(folder: Path, name: str) -> dict[str, Tensor] | None:
    """The weights of a packed model; None if there is none."""
    entry = _entry(folder)
    if entry is None or name not in entry.get("models", {}):
        return None
    shard, number, row, check = _read(folder, lambda: entry["models"][name]["weights"])
    path = _path(folder.parent, shard)
    stored = _rows(path, lambda key: key.startswith(f"{number}/"), lambda key: slice(row, row + 1))
    tensors = {key.partition("/")[2]: value[0] for key, value in stored.items() if len(value)}
    about = description(folder, name) or {}
    if not tensors or _checksum(tensors, str(about.get("arch"))) != check:
        raise RunError(f"{path}: damaged (the weights of {folder.name}/{name} have not their checksum)")
    return tensors


def outputs(folder: Path) -> dict[str, Tensor] | None:
    """What the models of a packed client answer; None if there is nothing."""
    entry = _entry(folder)
    if entry is None or "outputs" not in entry:
        return None
    shard, places, check = _read(folder, lambda: entry["outputs"])
    path, stored = _path(folder.parent, shard), dict[str, Tensor]()
    for name, (number, start, stop) in places.items():
        rows = _rows(path, f"outputs/{number}".__eq__, functools.partial(_span, start, stop))
        stored |= dict.fromkeys([name], next(iter(rows.values()))) if rows else {}
    if _checksum(stored) != check:
        raise RunError(f"{path}: damaged (the outputs of {folder.name} have not their checksum)")
    return stored


def _span(start: int, stop: int, key: str) -> slice:
    return slice(start, stop)


def choice(folder: Path) -> Mapping[str, Any] | None:
    """Which of its models a packed client uses, as plain data; None if there is none."""
    return (_entry(folder) or {}).get("choice")


def graph(folder: Path, digest: str) -> str | None:
    """The graph of a network by its digest."""
    index = _opened(folder.parent)
    return None if index is None else index["graphs"].get(digest)


def _entry(folder: Path) -> Mapping[str, Any] | None:
    index = _opened(folder.parent)
    return None if index is None else index["clients"].get(folder.name)


def _opened(group: Path) -> Mapping[str, Any] | None:
    path = group / INDEX
    try:
        stat = path.stat()
    except OSError:
        return None
    return _index(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=4)
def _index(path: Path, changed: int, size: int) -> Mapping[str, Any]:
    """The index, read once."""
    try:
        text = path.read_text(encoding="utf-8")
        plain = json.loads(text)
        if not isinstance(plain, dict) or plain.get("format") != FORMAT:
            raise ValueError(f"this version reads {FORMAT}")
        if CHECK not in plain or not is_whole(text, plain[CHECK]):
            raise ValueError("its checksum is wrong")
        tables = {"clients": dict, "graphs": dict, "shared": list}
        if not all(isinstance(plain.get(key), kind) for key, kind in tables.items()):
            raise ValueError("it has no list of clients")
        if not all(
            isinstance(entry, dict) and isinstance(entry.get("models", {}), dict) for entry in plain["clients"].values()
        ):
            raise ValueError("an entry is not a table")
        return plain
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error


def _read(folder: Path, read: Any) -> Any:
    """What an entry of the index says; the index may come from anywhere."""
    try:
        return read()
    except (LookupError, TypeError, ValueError) as error:
        raise RunError(f"{folder.parent / INDEX}: its entry of {folder.name} cannot be read: {error!r}") from error


def _rows(path: Path, wanted: Any, rows: Any) -> dict[str, Tensor]:
    """The rows of some tensors of a shard; nothing else is read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_slice(key)[rows(key)] for key in file.keys() if wanted(key)}  # noqa: SIM118
    except FileNotFoundError:
        raise RunError(f"{path}: no such file") from None
    except (SafetensorError, OSError, ValueError, TypeError, IndexError, RuntimeError) as error:
        raise RunError(f"{path}: damaged ({error})") from error
