"""The measurements of all runs of a scale, by run and seed, and the numbers for the tables.

A measure is one of: "GM", "PM" (accuracy of the global and the personal models, pooled over test samples), "own" (of the
personal models, mean over clients), "tuned" (the same after fine-tuning), "own val" (on validation data), "trained ROLE" (of
what clients have trained, before the server aggregates, on validation data, mean over the round's clients), "client 0",
"clients 0,1" (of single clients), "best client 0" (its highest value in any round, as a line), "GM settled" (mean of the last
evaluations instead of the last one), "loss ROLE" (training loss), "chosen 1" (number of clients that begin with an
architecture), "seconds client", "seconds server" (per round), "train total", "test max" ... (samples of clients).
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedme.config.experiment import ConfigError, parse
from fedme.config.identity import identity
from fedme.core.atomic_files import RunError, finite, write_text
from fedme.core.key import Floats
from fedme.core.typed import TypedError
from fedme.reproduction import catalogue, measured
from fedme.reproduction.catalogue import Scale
from fedme.reproduction.measured import Curve, Measured
from fedme.reproduction.planned_runs import RunFolders, experiment

# Which round: the last, the mean of the last evaluations, the best by validation, the best on test data.
Pick = Literal["last", "settled", "validation", "test"]
Mean = Literal["mean", "pooled"]

SETTLED = 5  # number of last evaluations in a mean, fixed before looking at results

ACCURACIES: Mapping[str, tuple[str, Mean]] = {
    "GM": ("global round test", "pooled"),
    "PM": ("personal round test", "pooled"),
    "own": ("personal round test", "mean"),
    "tuned": ("personal finetuned test", "mean"),
    "own val": ("personal round val", "mean"),
}


@dataclass(frozen=True)
class Findings:
    """Everything that is finished at a scale."""

    scale: Scale
    runs: Mapping[str, Mapping[int, Measured]]

    def values(self, run: str, measure: str, pick: Pick = "last", other: bool = False) -> dict[int, float]:
        """A number per seed; accuracies in %. `other`: pooled instead of the client mean, or the reverse."""
        numbers = {seed: value(result, measure, pick, other) for seed, result in self.runs.get(run, {}).items()}
        return {seed: number for seed, number in sorted(numbers.items()) if number is not None}


def value(run: Measured, measure: str, pick: Pick = "last", other: bool = False) -> float | None:
    """One number of one run."""
    if measure.endswith(" settled"):
        measure, pick = measure.removesuffix(" settled"), "settled"
    name, _, rest = measure.partition(" ")
    if name == "chosen":
        return float(run.chosen[int(rest) - 1]) if run.chosen else None
    if name == "seconds":
        return run.seconds.get(rest)
    if measure in run.samples:
        return run.samples[measure]
    line = list(points(run, measure, other))
    if not line:
        return None
    if pick == "validation":
        best = _best_by_validation(run, measure)
        return dict(line).get(best) if best is not None else None
    if pick == "settled":
        return statistics.fmean(number for _, number in line[-SETTLED:]) if len(line) >= 2 * SETTLED else None
    return max(number for _, number in line) if pick == "test" else line[-1][1]


def points(run: Measured, measure: str, other: bool = False) -> Iterator[tuple[int, float]]:
    """A measure over the evaluated rounds; accuracies in %."""
    first, _, rest = measure.partition(" ")
    if first == "best":
        line = list(points(run, rest, other))
        yield from ((t, max(number for _, number in line)) for t, _ in line)
    elif measure in ACCURACIES or first == "trained":
        name, mean = ACCURACIES[measure] if first != "trained" else (f"{rest} trained val", "mean")
        curve = run.curves.get(name, Curve((), ()))
        values = curve.mean if (mean == "mean") != other else curve.pooled
        yield from zip(curve.rounds, (100 * number for number in values), strict=True)
    elif first == "loss" and not other and measure in run.curves:
        yield from zip(run.curves[measure].rounds, run.curves[measure].mean, strict=True)
    elif first in ("client", "clients") and not other:
        curves = [run.curves[f"client {client}"] for client in rest.split(",") if f"client {client}" in run.curves]
        for i, t in enumerate(curves[0].rounds if curves else ()):
            yield t, 100 * sum(curve.mean[i] for curve in curves) / len(curves)


def error(run: Measured, measure: str) -> float:
    """The standard error of an accuracy in points, by its number of test samples; 0 if that is unknown."""
    number, count = value(run, measure), _samples(run, measure.removesuffix(" settled"))
    return math.sqrt(max(number * (100 - number), 0.0) / count) if number is not None and count else 0.0


def client_differences(findings: Findings, left: str, right: str) -> dict[int, tuple[Floats, Floats]]:
    """Per common seed of two measures ("RUN MEASURE"): every client's difference in points, and its weight in the mean.

    Seeds of runs whose clients were not recorded, or that have other clients, are left out.
    """
    sides = [side.partition(" ")[::2] for side in (left, right)]
    if any(measure not in ACCURACIES for _, measure in sides):
        return {}
    (name, measure), (other_name, other_measure) = sides
    pooled = ACCURACIES[measure][1] == "pooled"
    runs, others = findings.runs.get(name, {}), findings.runs.get(other_name, {})
    result = {}
    for seed in sorted(runs.keys() & others.keys()):
        left_clients, right_clients = (
            run.clients.get(ACCURACIES[of][0], {}) for run, of in ((runs[seed], measure), (others[seed], other_measure))
        )
        counts, other_counts = ({c: n for c, (_, n) in clients.items()} for clients in (left_clients, right_clients))
        if counts and counts == other_counts:
            differences = [100 * (left_clients[c][0] - right_clients[c][0]) / count for c, count in counts.items()]
            weights = [count if pooled else 1 for count in counts.values()]
            result[seed] = np.array(differences), np.array(weights, float)
    return result


def _samples(run: Measured, measure: str) -> float:
    first, _, rest = measure.partition(" ")
    if measure in ACCURACIES:
        name, mean = ACCURACIES[measure]
        curve = run.curves.get(name, Curve((), ()))
        return curve.worth if mean == "mean" else curve.samples
    if first not in ("client", "clients"):
        return 0.0
    counts = [run.curves[f"client {client}"].samples for client in rest.split(",") if f"client {client}" in run.curves]
    return measured.effective_samples(counts) if counts and all(counts) else 0.0


def _best_by_validation(run: Measured, measure: str) -> int | None:
    """The round with the best validation accuracy of the same model; None without validation data."""
    name = ACCURACIES.get(measure, ("", "mean"))[0]
    if not name.endswith(" test"):
        return None
    validation = run.curves.get(name.removesuffix("test") + "val", Curve((), ()))
    if len(validation.rounds) < 2:
        return None
    return max(zip(validation.mean, (-t for t in validation.rounds), validation.rounds, strict=True))[2]


def every_run() -> list[str]:
    """The names of all runs of all results and claims."""
    return list(dict.fromkeys(run for result in catalogue.results().values() for run in result.runs))


def gather(folders: RunFolders, runs: list[str] | None = None, archive: Path | None = None) -> Findings:
    """All finished runs of the run directories and, for other runs, of an archive; runs of other settings are left out."""
    results: dict[str, dict[int, Measured]] = {}
    archived = read_archive(archive) if archive else {}
    for run in runs if runs is not None else every_run():
        by_seed = {seed: result for (name, seed), result in archived.items() if name == run}
        prefix = f"{folders.folder(run, 0).name.removesuffix('0')}"
        for folder in sorted((folders.root / folders.scale).glob(f"{prefix}[0-9]*")):
            number = folder.name.removeprefix(prefix)
            if number.isdigit() and (measurements := measured.read(folder)) is not None:
                by_seed[int(number)] = measurements
        by_seed = {seed: r for seed, r in by_seed.items() if _has_config(r, experiment(run, folders.scale, seed))}
        if by_seed:
            results[run] = by_seed
    return Findings(folders.scale, results)


def _has_config(run: Measured, config: Mapping[str, Any]) -> bool:
    """Whether a run was made with a configuration, as this version reads it."""
    try:
        return identity(parse(run.config).plain()) == identity(config)
    except ConfigError:
        return False


def read_archive(path: Path) -> dict[tuple[str, int], Measured]:
    """Archived measurements, by run and seed."""
    if not path.exists():
        return {}
    archived = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            plain = json.loads(line)
            name = str(plain.pop("run")), int(plain.pop("seed"))
            archived[name] = measured.from_plain(plain)
        except (ValueError, KeyError, AttributeError, TypedError) as error:
            raise RunError(f"{path}, line {number}: cannot be read ({error}); restore the file") from error
    return archived


def write_archive(findings: Findings, path: Path) -> None:
    """Write measurements, one run per line, so that tables can be made and extended without the run directories."""
    lines = [
        json.dumps(finite({"run": run, "seed": seed, **asdict(result)}), ensure_ascii=False)
        for run, by_seed in sorted(findings.runs.items())
        for seed, result in sorted(by_seed.items())
    ]
    write_text(path, "".join(f"{line}\n" for line in lines))
