"""Personal models on disk: weights in safetensors, and a JSON file with their architecture, inputs and classes.

A network without an import path (an instance, a class of the main program) is also saved as data, its layers or its graph, so
that it can be used without its code.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from torch import Tensor, nn

from fedme import __version__, networks
from fedme.artifacts import export, model_cards, model_choice
from fedme.core.atomic_files import RunError, read_tensors, sealed, unsealed, write_json, write_tensors, write_text
from fedme.core.data import ClientId, Inputs, Schema
from fedme.core.key import Key
from fedme.core.model import Model, load
from fedme.core.task_types import TaskType
from fedme.core.typed import TypedError, build
from fedme.datasets.preprocessing import Preparation

FORMAT = "fedme-model-1"
CLIENTS, UNSEEN = "clients", "newcomers"  # the folders of clients in a run, and of clients that joined later
LONGEST = 120  # characters of a folder; file systems take 255 bytes, some with everything before it
HASHED = "~"  # in the name of a folder that is a hash
DEVICES = {"CON", "PRN", "AUX", "NUL", *(f"{port}{i}" for port in ("COM", "LPT") for i in range(10))}  # not on Windows
GRAPH = ".graph.json"  # the suffix of a network's graph
CARDS = {
    "model": "card.md",
    "finetuned": "card-finetuned.md",
    "global": "card-global.md",
    "best": "card-best.md",
    "local": "card-local.md",
}


def folder_of(run: Path, client: ClientId, group: str = CLIENTS) -> Path:
    """The folder of a client's models. Special characters in its name are percent-encoded.

    A name that no file system takes, or not every one, is replaced by its hash; the models' descriptions have the name.
    """
    plain = quote(client, safe=" ()[]!,'+&=-_", errors="surrogatepass").replace("..", "%2E%2E").replace(HASHED, "%7E")
    if 0 < len(plain) <= LONGEST and plain[-1] not in " ." and plain.partition(".")[0].upper().strip() not in DEVICES:
        return run / group / plain
    readable = "".join(character for character in client[:30] if character.isascii() and character.isalnum())
    digest = hashlib.sha256(client.encode(errors="surrogatepass")).hexdigest()
    return run / group / f"{readable or 'client'}{HASHED}{digest[:32]}"


def client_of(folder: Path) -> ClientId:
    """The client whose models are in a folder of `folder_of`."""
    return str(describe(folder)["client"]) if HASHED in folder.name else unquote(folder.name, errors="surrogatepass")


def save(folder: Path, name: str, model: Model, schema: Schema, classes: list[str], about: dict[str, Any]) -> str:
    """Write `name`.safetensors, `name`.json and a card; returns a note for the user, or an empty string."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {**model.params, **model.buffers}
    write_tensors(folder / f"{name}.safetensors", weights, {"format": FORMAT, "arch": model.arch.name})
    description = {
        "format": FORMAT,
        "fedme": __version__,
        "arch": model.arch.name,
        "factory": f"{model.arch.factory.__module__}:{getattr(model.arch.factory, '__qualname__', model.arch.name)}",
        "options": dict(model.arch.options),
        "parameters": model.parameters,
        "dtype": str(model.dtype).removeprefix("torch."),
        "task": schema.task_type,
        "inputs": {"shape": list(schema.shape), "vocabulary": schema.vocabulary},
        "classes": classes,
        "importable": networks.importable(model.arch.factory),
        "preprocessing": plain(schema.preprocessing),
        **about,
    }
    note = ""
    if not description["importable"]:
        description["network"], note = _save_network(folder, name, model, schema)
    write_json(folder / f"{name}.json", sealed(description))
    if "client" in description:
        write_text(folder / CARDS[name], model_cards.markdown(description))
    return note


def _save_network(folder: Path, name: str, model: Model, schema: Schema) -> tuple[Mapping[str, Any], str]:
    """Save a network without an import path as data. Returns what the description says of it, and a note if that fails."""
    network = networks.as_data(model, lambda: _example(schema, model.dtype))
    if network.layers is not None:
        return network.layers, ""
    if network.graph is not None:
        write_text(folder / f"{name}{GRAPH}", network.graph)
        return {"graph": hashlib.sha256(network.graph.encode()).hexdigest()}, ""
    note = f"{model.arch.name} has no import path, so only its weights are saved, and using them needs its code"
    return {"reason": network.reason}, f"{note}: {network.reason}"


def _example(schema: Schema, dtype: torch.dtype) -> Inputs:
    """Two samples as the network takes them. The numbers by which samples are scaled may be many, and are not read."""
    scaled = schema.preprocessing.get("scale") is not None
    sample = export.example(Preparation.read({**schema.preprocessing, "scale": None}), dtype)
    return sample.to(dtype) if scaled and isinstance(sample, Tensor) else sample


def plain(value: Any) -> Any:
    """Tensors as lists, for JSON."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(value) if set(map(type, value)) <= {float, int, str} else [plain(item) for item in value]
    return value


def load_model(folder: Path | str, name: str | None = None, *, imports: bool = False) -> nn.Module:
    """A client's saved model as an ordinary `nn.Module`: ``load_model("runs/first/clients/3")``.

    By default the one that the client chose (`artifacts/model_choice.py`); `name` is "model" for the personal model,
    "finetuned" for the same after fine-tuning. A user-defined network, given by import path, is only
    imported with ``imports=True``: use it for folders that you trust.
    """
    return read(Path(folder), name or model_choice.chosen(Path(folder)), imports=imports)[0]


def describe(folder: Path, name: str = "model") -> dict[str, Any]:
    """The description of a saved model."""
    path = folder / f"{name}.json"
    try:
        about = unsealed(json.loads(path.read_text(encoding="utf-8")))
        if about.get("format") != FORMAT:
            raise ValueError(f"this version reads {FORMAT}, the file has {about.get('format', 'no format')}")
    except FileNotFoundError:
        raise RunError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error
    return about


def schema_of(about: Mapping[str, Any]) -> Schema:
    """The schema of the samples of a saved model."""
    shape = build(tuple[int, ...], about["inputs"]["shape"], "inputs.shape")
    task_type: TaskType = build(TaskType, about.get("task", "classification"), "task")
    scale = about["preprocessing"].get("targets") or {}
    unit = build(tuple[float, ...], scale.get("std", []), "preprocessing.targets.std")
    return Schema(shape, tuple(about["classes"]), about["preprocessing"], about["inputs"]["vocabulary"], task_type, unit)


def read(
    folder: Path, name: str = "model", *, imports: bool = False, more: Mapping[str, networks.Entry] | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """A saved model as a module, and its description; `more` are further networks by name."""
    model, about = read_model(folder, name, imports=imports, more=more)
    return model.module(), about


def read_model(
    folder: Path, name: str = "model", *, imports: bool = False, more: Mapping[str, networks.Entry] | None = None
) -> tuple[Model, dict[str, Any]]:
    """A saved model as a value, and its description."""
    path = folder / f"{name}.json"
    about = describe(folder, name)
    try:
        schema = schema_of(about)
        dtype = {"float32": torch.float32, "float64": torch.float64}[about["dtype"]]
        weights, _ = read_tensors(folder / f"{name}.safetensors")
        if "network" in about and not is_at_hand(about, more):
            arch = networks.described_arch(about["arch"], about["network"], _graph(folder, name, about), weights)
        else:
            arch = networks.arch(about["arch"].split("[classes=")[0], schema, imports=imports, more=more)
        module = arch.build(Key(0)).to(dtype)
    except (ValueError, KeyError, TypeError, AttributeError, TypedError, RecursionError) as error:
        hint = (
            ""
            if imports or "network" in about
            else " (for folders that you trust, imports=True or --imports imports a user-defined network)"
        )
        raise RunError(f"{path}: cannot be read: {error}{hint}") from error
    try:
        return Model.of(arch, load(module, weights), dtype), about
    except (ValueError, RuntimeError) as error:
        raise RunError(f"{folder / name}.safetensors: {error}") from error


def _graph(folder: Path, name: str, about: Mapping[str, Any]) -> str | None:
    """The graph of a saved network, if it is not saved otherwise."""
    if "reason" in about["network"]:
        raise ValueError(
            f"the network was given as an object, and only its weights were saved: {about['network']['reason']}; load the "
            "weights into your network, or give the network by its import path and train again"
        )
    if "graph" not in about["network"]:
        return None
    path = folder / f"{name}{GRAPH}"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path.name} with the graph of its network cannot be read: {error.strerror}") from error
    if hashlib.sha256(text.encode()).hexdigest() != about["network"]["graph"]:
        raise ValueError(f"{path.name} is not the graph that was saved with it: its checksum is wrong")
    return text


def is_at_hand(about: Mapping[str, Any], more: Mapping[str, networks.Entry] | None) -> bool:
    """Whether the network of a saved model is one of the further networks by name."""
    return about["arch"].partition("(")[0].partition("[")[0] in (more or {})
