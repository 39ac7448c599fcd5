"""Personal models on disk: weights in safetensors, and a JSON file that says what they are and what they expect."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor, nn

from fedme import __version__, zoo
from fedme.core.data import ClientId, Schema
from fedme.core.key import Key
from fedme.core.model import Model, load
from fedme.core.typed import TypedError, build
from fedme.experiment.files import RunError, read_tensors, write_json, write_tensors

FORMAT = "fedme-model-1"


def folder_of(run: Path, client: ClientId) -> Path:
    """Where a client's models are; odd characters in its name are written as in web addresses."""
    return run / "clients" / quote(client, safe=" ()[]!,'+&=-_").replace("..", "%2E%2E")


def save(folder: Path, name: str, model: Model, schema: Schema, classes: list[str], about: dict[str, Any]) -> None:
    """Write `name`.safetensors and `name`.json."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {**model.params, **model.buffers}
    write_tensors(folder / f"{name}.safetensors", weights, {"format": FORMAT, "arch": model.arch.name})
    description = {
        "format": FORMAT,
        "fedme": __version__,
        "arch": model.arch.name,
        "factory": f"{model.arch.factory.__module__}:{model.arch.factory.__qualname__}",
        "options": dict(model.arch.options),
        "parameters": model.parameters,
        "dtype": str(model.dtype).removeprefix("torch."),
        "inputs": {"shape": list(schema.shape), "vocabulary": schema.vocabulary},
        "classes": classes,
        "preprocessing": plain(schema.preprocessing),
        **about,
    }
    write_json(folder / f"{name}.json", description)


def plain(value: Any) -> Any:
    """Tensors as lists, for JSON."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def load_model(folder: Path | str, name: str = "model", *, imports: bool = False) -> nn.Module:
    """A client's saved personal model as an ordinary `nn.Module`: ``load_model("runs/first/clients/3")``.

    `name` is "model", or "finetuned" for the model after fine-tuning. A network of one's own, given by import path, is only
    imported with ``imports=True``: say so if you trust the folder.
    """
    return read(Path(folder), name, imports=imports)[0]


def read(folder: Path, name: str = "model", *, imports: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """A saved model and its description."""
    path = folder / f"{name}.json"
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        shape = build(tuple[int, ...], about["inputs"]["shape"], "inputs.shape")
        schema = Schema(shape, tuple(about["classes"]), vocabulary=about["inputs"]["vocabulary"])
        dtype = {"float32": torch.float32, "float64": torch.float64}[about["dtype"]]
        module = zoo.arch(about["arch"].split("[classes=")[0], schema, imports=imports).build(Key(0)).to(dtype)
    except FileNotFoundError:
        raise RunError(f"{path}: no such file") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, TypedError) as error:
        trust = "" if imports else " (a network of one's own is only imported with imports=True)"
        raise RunError(f"{path}: cannot be read: {error}{trust}") from error
    weights, _ = read_tensors(folder / f"{name}.safetensors")
    try:
        return load(module, weights).eval(), about
    except (ValueError, RuntimeError) as error:
        raise RunError(f"{folder / name}.safetensors: {error}") from error
