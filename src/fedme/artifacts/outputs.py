"""What a client's models answer on its validation and test parts, kept beside the models so that they can be compared later.

The file has "val/model", "test/finetuned" and so on, samples x outputs, and "val/targets" and "test/targets".
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

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


def write(folder: Path, outputs: Mapping[str, Tensor]) -> None:
    """Write the outputs of a client's models beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / NAME, outputs, {"format": "fedme-outputs-1"})


def read(folder: Path) -> dict[str, Tensor]:
    """The outputs of a client's models."""
    if not (folder / NAME).exists():
        raise RunError(f"{folder}: no {NAME}; runs of earlier versions did not keep it: run the experiment again")
    return read_tensors(folder / NAME)[0]
