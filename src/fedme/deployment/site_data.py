"""A site's data, read once: checked, labelled, cut into its three parts and written as a file that is mapped into memory.

Flower starts a new process for every message, so reading must cost nothing.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fedme.config.experiment import Experiment
from fedme.core.atomic_files import RunError, read_tensors, write_json, write_tensors
from fedme.core.data import Arrays, ClientData, Scaling, Split
from fedme.core.key import Key
from fedme.core.method import Task
from fedme.datasets.data_errors import DataError
from fedme.datasets.federated_dataset import TEST_FRACTION, split_client
from fedme.deployment.site_settings import Site

NAME = "data.safetensors"


def client_data(site: Site) -> ClientData:
    """The site's samples; they are read anew when the file, or what is done with it, has changed."""
    path, told = site.state / NAME, site.state / "data.json"
    mark = _mark(site)
    tensors = _kept(path, told, mark)
    if tensors is None:
        site.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        tensors = _read(site)
        write_tensors(path, tensors, {})
        write_json(told, mark)
    scaling = Scaling(site.experiment.dataset.scale)
    source, public = Arrays(tensors["x"], tensors["y"], scaling), None
    if "public_x" in tensors:
        public = Split(Arrays(tensors["public_x"], tensors["public_y"], scaling), torch.arange(len(tensors["public_y"])))
    train, val, test = (Split(source, tensors[part]) for part in ("train", "val", "test"))
    return ClientData(site.settings.name, train, val, test, public)


def public_samples(experiment: Experiment, folder: Path) -> Split | None:
    """The labelled samples that everybody has (FedMD), from a file beside the experiment."""
    asked = experiment.dataset
    if asked.public_file is None:
        return None
    path = folder / asked.public_file
    x, words = asked.read(path, asked.public_label)
    return Split(Arrays(x, _numbered(words, asked.classes, path, {}), Scaling(asked.scale)), torch.arange(len(x)))


def with_own_data(task: Task, folder: Path, experiment: Experiment) -> Task:
    """The same federation with the samples that the server has: its own unlabeled ones, and how many public ones there are."""
    name, public = experiment.dataset.unlabeled_file, public_samples(experiment, folder)
    task = replace(task, public=len(public) if public is not None else 0)
    if name is None:
        return task
    x, _ = experiment.dataset.read(folder / name)
    source = Arrays(x, torch.zeros(len(x), dtype=torch.int64), Scaling(experiment.dataset.scale))
    return replace(task, unlabeled=Split(source, torch.arange(len(x))))


def fingerprint(public: Split | None) -> str:
    """What tells these samples from others."""
    if public is None:
        return ""
    x = public.inputs()
    assert isinstance(x, torch.Tensor)
    return hashlib.sha256(x.numpy().tobytes() + public.y.numpy().tobytes()).hexdigest()


def _kept(path: Path, told: Path, mark: dict[str, str | int]) -> dict[str, torch.Tensor] | None:
    """What was prepared before, if it is whole and about the same file."""
    try:
        return read_tensors(path)[0] if json.loads(told.read_text()) == mark else None
    except (OSError, ValueError, RecursionError, RunError):
        return None


def _mark(site: Site) -> dict[str, str | int]:
    experiment, path = site.experiment, site.path(site.settings.data.file)
    files = [path] if experiment.dataset.public_file is None else [path, site.shared / experiment.dataset.public_file]
    try:
        found = [each.stat() for file in files for each in (file, *file.rglob("*"))]  # a file, or a folder of images
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from error
    asked = repr((site.settings.data, site.settings.name, experiment.dataset, experiment.data, experiment.settings.seed))
    size, changed = sum(each.st_size for each in found), max(each.st_mtime_ns for each in found)
    return {"size": size, "changed": changed, "asked": hashlib.sha256(asked.encode()).hexdigest()}


def _read(site: Site) -> dict[str, torch.Tensor]:
    asked, experiment = site.settings.data, site.experiment
    path = site.path(asked.file)
    x, words = experiment.dataset.read(path, asked.label, asked.features)
    labels = _numbered(words, site.labels, path, asked.rename)
    key = Key(experiment.settings.seed).at("partition", "client", site.settings.name)
    none = torch.empty(0, dtype=torch.int64)
    share = experiment.data.test or TEST_FRACTION
    parts = split_client(site.settings.name, (torch.arange(len(x)), none), share, experiment.data.val, 0, key)
    public = public_samples(experiment, site.shared)
    common = {} if public is None else {"public_x": public.source.x, "public_y": public.y}  # type: ignore[attr-defined]
    return {"x": x, "y": labels, "train": parts.train, "val": parts.val, "test": parts.test} | common


def _numbered(words: Sequence[str], classes: Sequence[str], path: Path, rename: Mapping[str, str]) -> torch.Tensor:
    number = {name: i for i, name in enumerate(classes)}
    names = [rename.get(word, word) for word in words]
    if odd := sorted(set(names) - number.keys()):
        raise DataError(f"{path}: label {', '.join(odd[:5])} is not in the label space {list(classes)}; use data.rename")
    return torch.tensor([number[name] for name in names])
