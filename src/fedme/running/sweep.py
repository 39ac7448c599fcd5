"""The same experiment with many settings: a grid or a list of values for any keys, times seeds; the best by validation.

Every point is an ordinary run in a directory of its own, so a sweep that was interrupted goes on where it stopped. Test
accuracy is shown but never chooses.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fedme.config.experiment import ConfigError, load
from fedme.core.metrics import MEASURES, Measure
from fedme.results import summary
from fedme.running.run_queue import Planned

OPENING, CLOSING, QUOTES = "[{", "]}", "\"'"


@dataclass(frozen=True)
class Over:
    """A key and the values it takes."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """One setting of all keys, and its runs by seed."""

    values: tuple[str, ...]
    runs: tuple[Planned, ...]


@dataclass(frozen=True)
class Scored:
    """What the finished runs of a point reach, one number a seed; `best` by validation."""

    point: Point
    validation: tuple[float, ...]
    test: tuple[float, ...]
    best: bool = False
    measure: Measure = MEASURES["classification"][0]


def over(word: str) -> Over:
    """Read "key=value,value": commas within brackets and quotes belong to a value."""
    key, equals, text = word.partition("=")
    values = split(text)
    if not equals or not key or not all(values):
        raise ConfigError(f"--over '{word}': must look like key=value,value, for example train.lr=0.01,0.1")
    return Over(key, tuple(values))


def split(text: str) -> list[str]:
    """Cut at the commas that are not within brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in QUOTES:
            quote = letter
        elif letter in OPENING + CLOSING:
            depth += 1 if letter in OPENING else -1
        elif letter == "," and depth <= 0:
            parts.append("")
            continue
        parts[-1] += letter
    return [part.strip() for part in parts]


def points(
    source: str | None, overrides: Sequence[str], overs: Sequence[Over], seeds: Sequence[int], root: Path, together: bool
) -> list[Point]:
    """Every combination of the values, or with `together` the first values, then the second ones, and so on."""
    if not overs:
        raise ConfigError("a sweep needs --over key=value,value")
    if together and len({len(each.values) for each in overs}) > 1:
        counts = ", ".join(f"{each.key} has {len(each.values)}" for each in overs)
        raise ConfigError(f"--together takes as many values of every key: {counts}")
    combined = zip(*(each.values for each in overs), strict=True) if together else itertools.product(*(o.values for o in overs))
    found, taken = [], set[Path]()
    for values in combined:
        words = [f"{each.key}={value}" for each, value in zip(overs, values, strict=True)]
        runs = []
        for seed in seeds:
            experiment, _ = load(source, [*overrides, *words, f"seed={seed}"])
            folder = root / f"{re.sub(r'[^A-Za-z0-9.=_-]+', '-', ' '.join(words))}-s{seed}"
            if folder in taken:
                raise ConfigError(f"--over: two settings would share the directory {folder}; give a value once")
            taken.add(folder)
            runs.append(Planned(f"{' '.join(words)}, seed {seed}", folder, experiment.plain()))
        found.append(Point(tuple(values), tuple(runs)))
    return found


def scores(found: Sequence[Point], model: Literal["personal", "global"] = "personal") -> list[Scored]:
    """What the last round reaches, mean over clients, in every finished run; the best point has the best mean on validation."""
    scored = [_scored(point, model) for point in found]
    judged = [each for each in scored if each.validation]
    best = max(judged, key=lambda each: each.measure.gain(summary.spread(each.validation)[0], 0.0)) if judged else None
    return [replace(each, best=each is best) for each in scored]


def _scored(point: Point, model: str) -> Scored:
    reached: dict[str, list[float]] = {"val": [], "test": []}
    measure = MEASURES["classification"][0]
    for run in point.runs:
        if not (run.folder / summary.NAME).exists():
            continue
        result = summary.read(run.folder)
        measure = summary.measures_of(result)[0]
        for split, values in reached.items():
            wanted = {"model": model, "stage": "round", "split": split, "selection": "last round"}
            lines = [each for each in result["results"] if wanted.items() <= each.items()]
            values += [line[measure.key]["client_mean"] for line in lines if line[measure.key]["client_mean"] is not None]
    return Scored(point, tuple(reached["val"]), tuple(reached["test"]), measure=measure)
