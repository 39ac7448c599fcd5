"""What a client's models answer on its validation and test parts, kept beside the models so that they can be compared later.

The file has "val/model", "test/finetuned" and so on, samples x outputs, and "val/targets" and "test/targets".
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fedme.artifacts import model_pack
from fedme.artifacts.model_pack import PackWriter
from fedme.core.atomic_files import RunError, read_tensors, write_tensors

NAME = "outputs.safetensors"
FILES = {  # the file of a model in a client's folder, by role
    "personal": "model",
    "finetuned": "finetuned",
    "global": "global",
    "best": "best",
}


def by_file(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of an evaluation, named by the files of the models."""
    renamed = {}
    for name, value in outputs.items():
        split, _, role = name.partition("/")
        renamed[f"{split}/{FILES.get(role, role)}"] = value
    return renamed


def of_split(outputs: Mapping[str, Tensor], split: str) -> tuple[dict[str, Tensor], Tensor | None]:
    """The outputs of every model on one part, and the targets."""
    prefix = f"{split}/"
    models = {name.removeprefix(prefix): value for name, value in outputs.items() if name.startswith(prefix)}
    targets = models.pop("targets", None)
    return models, targets


def write(folder: Path, outputs: Mapping[str, Tensor], pack: PackWriter | None = None) -> None:
    """Write the outputs of a client's models beside them, or add them to a pack."""
    if pack is not None:
        return pack.add_outputs(folder.name, outputs)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / NAME, outputs, {"format": "fedme-outputs-1"})


def exist(folder: Path) -> bool:
    """Whether there are outputs of a client's models."""
    return (folder / NAME).exists() or model_pack.has_outputs(folder)


def read(folder: Path) -> dict[str, Tensor]:
    """The outputs of a client's models."""
    packed = None if (folder / NAME).exists() else model_pack.outputs(folder)
    if packed is not None:
        return packed
    if not (folder / NAME).exists():
        raise RunError(f"{folder}: no {NAME}; runs of earlier versions did not keep it: run the experiment again")
    return read_tensors(folder / NAME)[0]
