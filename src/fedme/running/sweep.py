"""One experiment with many settings: a grid or a list of values for any keys, times seeds. Validation selects the best point.

Every point is an ordinary run in its own directory, so an interrupted sweep can be continued. Test accuracy is shown but
never used for selection.
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
class SweptKey:
    """A key and its values, as texts."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """One value of every key, and one run per seed."""

    values: tuple[str, ...]
    runs: tuple[Planned, ...]


@dataclass(frozen=True)
class Scored:
    """The results of the finished runs of a point, one per seed; `best` is decided by validation."""

    point: Point
    validation: tuple[float, ...]
    test: tuple[float, ...]
    best: bool = False
    measure: Measure = MEASURES["classification"][0]
    complete: bool = True  # every seed is finished; only such points are compared


def swept_key(word: str) -> SweptKey:
    """Read "key=value,value"; commas within brackets and quotes belong to a value."""
    key, equals, text = word.partition("=")
    values = split(text)
    if not equals or not key or not all(values):
        raise ConfigError(f"--over '{word}': must look like key=value,value, for example train.lr=0.01,0.1")
    return SweptKey(key, tuple(values))


def split(text: str) -> list[str]:
    """Split at commas that are not within brackets or quotes."""
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
    source: str | None, overrides: Sequence[str], keys: Sequence[SweptKey], seeds: Sequence[int], root: Path, together: bool
) -> list[Point]:
    """Every combination of the values; with `together` only the first values, then the second values, and so on."""
    if not keys:
        raise ConfigError("a sweep needs --over key=value,value")
    if together and len({len(key.values) for key in keys}) > 1:
        counts = ", ".join(f"{key.key} has {len(key.values)}" for key in keys)
        raise ConfigError(f"--together needs the same number of values for every key: {counts}")
    columns = [key.values for key in keys]
    result, taken = [], set[Path]()
    for values in zip(*columns, strict=True) if together else itertools.product(*columns):
        words = [f"{key.key}={value}" for key, value in zip(keys, values, strict=True)]
        runs = []
        for seed in seeds:
            experiment, _ = load(source, [*overrides, *words, f"seed={seed}"])
            folder = root / f"{re.sub(r'[^A-Za-z0-9.=_-]+', '-', ' '.join(words))}-s{seed}"
            if folder in taken:
                raise ConfigError(f"--over: two points would share the directory {folder}; give every value once")
            taken.add(folder)
            runs.append(Planned(f"{' '.join(words)}, seed {seed}", folder, experiment.plain()))
        result.append(Point(tuple(values), tuple(runs)))
    return result


Decisive = Literal["personal", "global", "finetuned"]  # the models whose validation results decide


def scores(points: Sequence[Point], model: Decisive = "personal") -> list[Scored]:
    """The client mean of the last round in every finished run; the best of the complete points by validation is marked."""
    scored = [_scored(point, model) for point in points]
    validated = [score for score in scored if score.complete and score.validation]
    best = max(validated, key=lambda score: score.measure.gain(summary.spread(score.validation)[0], 0.0), default=None)
    return [replace(score, best=score is best) for score in scored]


def _scored(point: Point, model: Decisive) -> Scored:
    role, stage = ("personal", "finetuned") if model == "finetuned" else (model, "round")
    means: dict[str, list[float]] = {"val": [], "test": []}
    measure = MEASURES["classification"][0]
    finished = [run for run in point.runs if (run.folder / summary.NAME).exists()]
    for run in finished:
        result = summary.read(run.folder)
        measure = summary.measures_of(result)[0]
        for split, values in means.items():
            wanted = {"model": role, "stage": stage, "split": split, "selection": "last round"}
            lines = [line[measure.key] for line in result["results"] if wanted.items() <= line.items()]
            values += [line["client_mean"] for line in lines if line["client_mean"] is not None]
    return Scored(point, tuple(means["val"]), tuple(means["test"]), measure=measure, complete=len(finished) == len(point.runs))
