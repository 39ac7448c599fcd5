"""A site's data, read once: checked, labelled, cut into its three parts and written as a file that is mapped into memory.

Flower starts a new process for every message, so reading must cost nothing.
"""

import hashlib
import json
from pathlib import Path

import torch

from fedme.core.data import Arrays, ClientData, Scaling, Split
from fedme.core.key import Key
from fedme.datasets.errors import DataError
from fedme.datasets.federation import TEST_SHARE, parts_of
from fedme.deploy.site import Site
from fedme.experiment.files import RunError, read_tensors, write_json, write_tensors

NAME = "data.safetensors"


def client_data(site: Site) -> ClientData:
    """The site's samples; they are read anew when the file, or what is done with it, has changed."""
    path, told = site.state / NAME, site.state / "data.json"
    mark = _fingerprint(site)
    tensors = _kept(path, told, mark)
    if tensors is None:
        site.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        tensors = _read(site)
        write_tensors(path, tensors, {})
        write_json(told, mark)
    source = Arrays(tensors["x"], tensors["y"], Scaling(site.experiment.dataset.scale))
    return ClientData(site.settings.name, *(Split(source, tensors[part]) for part in ("train", "val", "test")))


def _kept(path: Path, told: Path, mark: dict[str, str | int]) -> dict[str, torch.Tensor] | None:
    """What was prepared before, if it is whole and about the same file."""
    try:
        return read_tensors(path)[0] if json.loads(told.read_text()) == mark else None
    except (OSError, ValueError, RecursionError, RunError):
        return None


def _fingerprint(site: Site) -> dict[str, str | int]:
    path = site.path(site.settings.data.file)
    try:
        found = [each.stat() for each in (path, *path.rglob("*"))]  # a file, or a folder of images
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    experiment = site.experiment
    asked = repr((site.settings.data, site.settings.name, experiment.dataset, experiment.data, experiment.settings.seed))
    size, changed = sum(each.st_size for each in found), max(each.st_mtime_ns for each in found)
    return {"size": size, "changed": changed, "asked": hashlib.sha256(asked.encode()).hexdigest()}


def _read(site: Site) -> dict[str, torch.Tensor]:
    asked, experiment = site.settings.data, site.experiment
    path = site.path(asked.file)
    x, words = experiment.dataset.read(path, asked.label, asked.features)
    number = {name: i for i, name in enumerate(site.labels)}
    names = [asked.rename.get(word, word) for word in words]
    if odd := sorted(set(names) - number.keys()):
        raise DataError(f"{path}: label {', '.join(odd[:5])} is not in the label space {list(site.labels)}; use data.rename")
    key = Key(experiment.settings.seed).at("partition", "client", site.settings.name)
    none = torch.empty(0, dtype=torch.int64)
    share = experiment.data.test or TEST_SHARE
    parts = parts_of(site.settings.name, (torch.arange(len(x)), none), share, experiment.data.val, 0, key)
    labels = torch.tensor([number[name] for name in names])
    return {"x": x, "y": labels, "train": parts.train, "val": parts.val, "test": parts.test}
