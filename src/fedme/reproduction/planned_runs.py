"""Experiments and run directories for the names of runs, such as "pfml-synthetic-mlr/fedavg"."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedme.config.experiment import override, parse, read_preset
from fedme.core.processors import processors
from fedme.reproduction.catalogue import Scale, ScaleChanges, family_of, words_of
from fedme.running.run_queue import Planned

CHECKPOINTS = 12  # per run, approximately
ONLY_DATA = "data"  # a run that counts samples and trains nothing


@dataclass(frozen=True)
class RunFolders:
    """The directories of the runs of a scale."""

    root: Path
    scale: Scale

    def folder(self, run: str, seed: int) -> Path:
        """The directory of a run."""
        return self.root / self.scale / f"{run.replace('/', '-')}-s{seed}"


def experiment(run: str, scale: Scale, seed: int, workers: int | None = None) -> dict[str, Any]:
    """The configuration of a run, every default filled in."""
    raw = _raw(run, scale)
    raw["name"], raw["seed"] = run.replace("/", "-"), seed
    raw["checkpoint_every"] = max(1, raw.get("rounds", 1) // CHECKPOINTS)
    if workers is not None:
        raw["engine"] = {**raw.get("engine", {}), "workers": workers}
    return parse(raw, f"{run} at scale {scale}").plain()


def _raw(run: str, scale: Scale) -> dict[str, Any]:
    preset, words = _words(run)
    changes = family_of(run).at(scale_of(run, scale))
    raw, _ = read_preset(preset)
    override(raw, [*words, *changes.set])
    override(raw, changes.by_method.get(raw["method"]["name"], ()))
    raw["models"] = _replaced(raw["models"], changes)
    return raw


def scale_of(run: str, scale: Scale) -> Scale:
    """The effective scale of a run: counting samples is cheap at full scale."""
    return "full" if scale == "small" and run.endswith(f"/{ONLY_DATA}") else scale


def _words(run: str) -> tuple[str, Sequence[str]]:
    family, words = family_of(run), words_of(run)
    has_preset = words and "=" not in words[0]
    return (words[0], words[1:]) if has_preset else (family.preset, words)


def _replaced(models: Mapping[str, Any], changes: ScaleChanges) -> dict[str, Any]:
    """The `[models]` table with the architectures of the scale instead of the paper's."""

    def replaced(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: replaced(item) for key, item in value.items()}
        if isinstance(value, list):
            return [replaced(item) for item in value]
        return changes.models.get(value, value) if isinstance(value, str) else value

    return {key: replaced(value) for key, value in models.items()}


def planned(
    runs: Sequence[str],
    folders: RunFolders,
    seeds: Sequence[int],
    jobs: int,
    archived: Mapping[str, Container[int]] = MappingProxyType({}),
) -> list[Planned]:
    """The runs to execute, all runs of the first seed first, but for the seeds of runs that are archived.

    With several jobs, each has one worker process.
    """
    workers = 1 if jobs > 1 else None
    return [
        Planned(f"{run}, seed {seed}", folders.folder(run, seed), experiment(run, folders.scale, seed, workers))
        for seed in seeds
        for run in runs
        if (not run.endswith(f"/{ONLY_DATA}") or seed == seeds[0]) and seed not in archived.get(run, ())
    ]


def jobs_for(minutes: float, count: int, asked: int | None) -> int:
    """The number of simultaneous runs: one per processor, unless the runs are too short for processes to pay off."""
    if asked is not None:
        return asked
    return min(processors(), count) if minutes > 2 else 1
