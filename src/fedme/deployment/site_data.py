"""A site's data: read, checked, labelled and split once, then stored in a file that is memory-mapped.

Flower starts a new process for every message, so loading must be cheap.
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
from fedme.core.method import Task
from fedme.datasets.data_errors import DataError
from fedme.datasets.federated_dataset import TEST_FRACTION
from fedme.datasets.splits import Splitting
from fedme.deployment.site_settings import Site

NAME = "data.safetensors"


def client_data(site: Site) -> ClientData:
    """The site's samples. They are read again when the file, or the settings that affect them, have changed."""
    tensors = _load_prepared(site)
    scaling = Scaling(site.experiment.dataset.scale)
    source, public = Arrays(tensors["x"], tensors["y"], scaling), None
    if "public_x" in tensors:
        public = Split(Arrays(tensors["public_x"], tensors["public_y"], scaling), torch.arange(len(tensors["public_y"])))
    train, val, test = (Split(source, tensors[part]) for part in ("train", "val", "test"))
    preprocessing = None
    if "gap_values" in tensors:  # of this site, so they are saved with its models and sent to nobody
        shared = site.experiment.dataset.preparation
        pairs = zip(shared.columns, tensors["gap_values"].tolist(), strict=True)
        preprocessing = replace(shared, columns=tuple(replace(c, value=value) for c, value in pairs)).plain()
    return ClientData(site.settings.name, train, val, test, public, preprocessing=preprocessing)


def public_samples(experiment: Experiment, folder: Path) -> Split | None:
    """The labelled samples that the server and all sites have (FedMD), from a file beside the experiment."""
    dataset = experiment.dataset
    if dataset.public_file is None:
        return None
    path = folder / dataset.public_file
    x, labels = dataset.read(path, dataset.public_label)
    x = _without_gaps(x, experiment, path)
    return Split(Arrays(x, _class_indices(labels, dataset.classes, path, {}), Scaling(dataset.scale)), torch.arange(len(x)))


def with_server_data(task: Task, folder: Path, experiment: Experiment) -> Task:
    """The task with the server's data: its unlabeled samples, and the number of public samples."""
    name, public = experiment.dataset.unlabeled_file, public_samples(experiment, folder)
    task = replace(task, public=len(public) if public is not None else 0)
    if name is None:
        return task
    x, _ = experiment.dataset.read(folder / name)
    x = _without_gaps(x, experiment, folder / name)
    source = Arrays(x, torch.zeros(len(x), dtype=torch.int64), Scaling(experiment.dataset.scale))
    return replace(task, unlabeled=Split(source, torch.arange(len(x))))


def _without_gaps(x: torch.Tensor, experiment: Experiment, path: Path) -> torch.Tensor:
    """Samples of the server, whose gaps are filled with the values that all sites agreed on."""
    preparation = experiment.dataset.preparation
    lacking = [c.name for at, c in preparation.numeric_columns() if c.value is None and bool(x[:, at].isnan().any())]
    if lacking:
        raise DataError(f"{path}: '{lacking[0]}' has gaps; fill them in, or agree on a value in data.fill")
    return preparation.fill(x)  # type: ignore[no-any-return]


def fingerprint(public: Split | None) -> str:
    """A hash of the public samples; empty if there are none."""
    if public is None:
        return ""
    x = public.inputs()
    assert isinstance(x, torch.Tensor)
    return hashlib.sha256(x.numpy().tobytes() + public.y.numpy().tobytes()).hexdigest()


def _load_prepared(site: Site) -> dict[str, torch.Tensor]:
    """The prepared data, from disk if it is intact and up to date."""
    path, source_path, source = site.state / NAME, site.state / "data.json", _source(site)
    try:
        if json.loads(source_path.read_text()) == source:
            return read_tensors(path)[0]
    except (OSError, ValueError, RecursionError, RunError):
        pass
    site.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    tensors = _prepare(site)
    write_tensors(path, tensors, {})
    write_json(source_path, source)
    return tensors


def _source(site: Site) -> dict[str, str | int]:
    """Everything that the prepared data depends on: files and settings."""
    experiment, path = site.experiment, site.path(site.settings.data.file)
    files = [path] if experiment.dataset.public_file is None else [path, site.shared / experiment.dataset.public_file]
    try:
        stats = [entry.stat() for file in files for entry in (file, *file.rglob("*"))]  # a file, or a folder of images
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from error
    settings = repr((site.settings.data, site.settings.name, experiment.dataset, experiment.data, experiment.partition_key))
    size, changed = sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats)
    return {"size": size, "changed": changed, "asked": hashlib.sha256(settings.encode()).hexdigest()}


def _prepare(site: Site) -> dict[str, torch.Tensor]:
    settings, experiment = site.settings.data, site.experiment
    path = site.path(settings.file)
    x, labels = experiment.dataset.read(path, settings.label, settings.features)
    y = _class_indices(labels, site.labels, path, settings.rename)
    none = torch.empty(0, dtype=torch.int64)
    split = Splitting(
        experiment.data.test or TEST_FRACTION, experiment.data.val, classes=y if experiment.data.stratify else None
    )
    key = experiment.partition_key.at("client", site.settings.name)
    parts = split(site.settings.name, (torch.arange(len(x)), none), key)
    public = public_samples(experiment, site.shared)
    shared = {} if public is None else {"public_x": public.source.x, "public_y": public.y}  # type: ignore[attr-defined]
    if experiment.dataset.preparation.fills:
        own = experiment.dataset.with_values(x, parts.train)
        x, shared = own.fill(x), shared | {"gap_values": torch.tensor([column.value for column in own.columns])}
    return {"x": x, "y": y, "train": parts.train, "val": parts.val, "test": parts.test} | shared


def _class_indices(labels: Sequence[str], classes: Sequence[str], path: Path, rename: Mapping[str, str]) -> torch.Tensor:
    indices = {name: i for i, name in enumerate(classes)}
    names = [rename.get(label, label) for label in labels]
    if unknown := sorted(set(names) - indices.keys()):
        raise DataError(f"{path}: label {', '.join(unknown[:5])} is not in the label space {list(classes)}; use data.rename")
    return torch.tensor([indices[name] for name in names])
