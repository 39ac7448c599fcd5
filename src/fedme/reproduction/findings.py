"""What all runs of a scale measured, by run and seed, and the numbers that tables ask for.

A measure is one of: "GM", "PM" (accuracy of the global and the personal models, pooled over test samples), "own" (of the
personal models, mean over clients), "tuned" (the same after fine-tuning), "own val" (on validation data), "client 0",
"clients 0,1" (of single clients), "GM settled" (mean of the last evaluations instead of the last one), "loss ROLE" (training
loss), "chosen 1" (clients that begin with an architecture), "seconds client", "seconds server" (a round), "train total", "test
max" ... (sizes of clients).
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fedme.config.experiment import ConfigError, parse
from fedme.core.atomic_files import RunError, finite, write_text
from fedme.core.typed import TypedError
from fedme.reproduction import catalogue, measured
from fedme.reproduction.catalogue import Scale
from fedme.reproduction.measured import Curve, Measured
from fedme.reproduction.planned_runs import Spot, experiment
from fedme.running.run_queue import identity

# Which round: the last, the mean of the last few, the best by validation, the best on test data.
Pick = Literal["last", "settled", "validation", "test"]
Mean = Literal["mean", "pooled"]

SETTLED = 5  # evaluations behind a mean of the last ones: how many is not chosen by results

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
        """A number for every seed that has it; accuracies in %. `other`: the other mean, over clients or over samples."""
        found = {seed: value(each, measure, pick, other) for seed, each in self.runs.get(run, {}).items()}
        return {seed: number for seed, number in sorted(found.items()) if number is not None}


def value(run: Measured, measure: str, pick: Pick = "last", other: bool = False) -> float | None:
    """One number of one run."""
    if measure.endswith(" settled"):
        measure, pick = measure.removesuffix(" settled"), "settled"
    kind, _, rest = measure.partition(" ")
    if kind == "chosen":
        return float(run.chosen[int(rest) - 1]) if run.chosen else None
    if kind == "seconds":
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
    kind, _, rest = measure.partition(" ")
    if measure in ACCURACIES:
        name, mean = ACCURACIES[measure]
        curve = run.curves.get(name, Curve((), ()))
        wanted = curve.mean if (mean == "mean") != other else curve.pooled
        yield from zip(curve.rounds, (100 * number for number in wanted), strict=True)
    elif kind == "loss" and not other and measure in run.curves:
        yield from zip(run.curves[measure].rounds, run.curves[measure].mean, strict=True)
    elif kind in ("client", "clients") and not other:
        curves = [run.curves[f"client {each}"] for each in rest.split(",") if f"client {each}" in run.curves]
        for i, t in enumerate(curves[0].rounds if curves else ()):
            yield t, 100 * sum(curve.mean[i] for curve in curves) / len(curves)


def error(run: Measured, measure: str) -> float:
    """The standard error of an accuracy in points, by the test samples behind it; 0 where they are not known."""
    number, count = value(run, measure), _samples(run, measure.removesuffix(" settled"))
    return math.sqrt(max(number * (100 - number), 0.0) / count) if number is not None and count else 0.0


def _samples(run: Measured, measure: str) -> float:
    kind, _, rest = measure.partition(" ")
    if measure in ACCURACIES:
        name, mean = ACCURACIES[measure]
        curve = run.curves.get(name, Curve((), ()))
        return curve.worth if mean == "mean" else curve.samples
    if kind not in ("client", "clients"):
        return 0.0
    counts = [run.curves[f"client {each}"].samples for each in rest.split(",") if f"client {each}" in run.curves]
    return measured.worth(counts) if counts and all(counts) else 0.0


def _best_by_validation(run: Measured, measure: str) -> int | None:
    """The round with the best validation accuracy of the same model; None without a validation part."""
    name = ACCURACIES.get(measure, ("", "mean"))[0]
    if not name.endswith(" test"):
        return None
    judged = run.curves.get(name.removesuffix("test") + "val", Curve((), ()))
    if len(judged.rounds) < 2:
        return None
    return max(zip(judged.mean, (-t for t in judged.rounds), judged.rounds, strict=True))[2]


def every_run() -> list[str]:
    """The names of all runs that some result or claim asks for."""
    return list(dict.fromkeys(run for result in catalogue.results().values() for run in result.runs))


def gather(spot: Spot, runs: list[str] | None = None, archive: Path | None = None) -> Findings:
    """What is finished in the run directories and, for other runs, in an archive; runs of other settings are left out."""
    found: dict[str, dict[int, Measured]] = {}
    kept = read_archive(archive) if archive else {}
    for run in runs if runs is not None else every_run():
        mine = {seed: each for (name, seed), each in kept.items() if name == run}
        prefix = f"{spot.folder(run, 0).name.removesuffix('0')}"
        for folder in sorted((spot.root / spot.scale).glob(f"{prefix}[0-9]*")):
            seed = folder.name.removeprefix(prefix)
            if seed.isdigit() and (each := measured.read(folder)) is not None:
                mine[int(seed)] = each
        if mine := {seed: each for seed, each in mine.items() if _is(each, experiment(run, spot.scale, seed))}:
            found[run] = mine
    return Findings(spot.scale, found)


def _is(run: Measured, config: Mapping[str, Any]) -> bool:
    """Whether a run was made with a configuration, as it is read today."""
    try:
        return identity(parse(run.config).plain()) == identity(config)
    except ConfigError:
        return False


def read_archive(path: Path) -> dict[tuple[str, int], Measured]:
    """Measurements that were kept, by run and seed."""
    if not path.exists():
        return {}
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            plain = json.loads(line)
            name = str(plain.pop("run")), int(plain.pop("seed"))
            found[name] = measured.from_plain(plain)
        except (ValueError, KeyError, AttributeError, TypedError) as error:
            raise RunError(f"{path}, line {number}: cannot be read ({error}); restore the file") from error
    return found


def write_archive(findings: Findings, path: Path) -> None:
    """Keep measurements, one run a line, so that tables can be made again and extended without the run directories."""
    lines = [
        json.dumps(finite({"run": run, "seed": seed, **asdict(each)}), ensure_ascii=False)
        for run, by_seed in sorted(findings.runs.items())
        for seed, each in sorted(by_seed.items())
    ]
    write_text(path, "".join(f"{line}\n" for line in lines))
