"""From the name of a run, as "pfml-synthetic-mlr/fedavg", to an ordinary experiment in an ordinary run directory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedme.config.experiment import override, parse, read_preset
from fedme.core.processors import processors
from fedme.reproduction.catalogue import Scale, Shrunk, family_of, words_of
from fedme.running.run_queue import Planned

CHECKPOINTS = 12  # in a run, about: enough to lose little, few enough to cost little
ONLY_DATA = "data"  # the run that looks at the data and trains nothing


@dataclass(frozen=True)
class Spot:
    """Where the runs of a scale are."""

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
    shrunk = family_of(run).at(scale_of(run, scale))
    raw, _ = read_preset(preset)
    override(raw, [*words, *shrunk.set])
    override(raw, shrunk.by_method.get(raw["method"]["name"], ()))
    raw["models"] = _replaced(raw["models"], shrunk)
    return raw


def scale_of(run: str, scale: Scale) -> Scale:
    """The scale that a run really has: to look at the whole data costs nothing."""
    return "full" if scale == "small" and run.endswith(f"/{ONLY_DATA}") else scale


def _words(run: str) -> tuple[str, Sequence[str]]:
    family, words = family_of(run), words_of(run)
    other = words and "=" not in words[0]
    return (words[0], words[1:]) if other else (family.preset, words)


def _replaced(models: Mapping[str, Any], shrunk: Shrunk) -> dict[str, Any]:
    """The `[models]` table with other architectures in the places of the paper's."""

    def other(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: other(item) for key, item in value.items()}
        if isinstance(value, list):
            return [other(item) for item in value]
        return shrunk.models.get(value, value) if isinstance(value, str) else value

    return {key: other(value) for key, value in models.items()}


def planned(runs: Sequence[str], spot: Spot, seeds: Sequence[int], jobs: int) -> list[Planned]:
    """The runs to be made, the first seed of everything first. With several at a time each has one worker."""
    workers = 1 if jobs > 1 else None
    return [
        Planned(f"{run}, seed {seed}", spot.folder(run, seed), experiment(run, spot.scale, seed, workers))
        for seed in seeds
        for run in runs
        if not run.endswith(f"/{ONLY_DATA}") or seed == seeds[0]
    ]


def jobs_for(minutes: float, count: int, asked: int | None) -> int:
    """How many runs at a time: as many as processors, unless they are so short that processes do not pay."""
    if asked is not None:
        return asked
    return min(processors(), count) if minutes > 2 else 1
