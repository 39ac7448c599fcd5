"""Several methods on the same clients, over several seeds: ``fedme.compare([Local(), FedMe()], clients, seeds=3)``."""

import math
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedme.api.client import Client
from fedme.api.display import Table, optional
from fedme.api.learner import Learner
from fedme.api.measurements import axes, curves, draw_mean
from fedme.api.result import Result, display_for
from fedme.config.experiment import ConfigError
from fedme.core.atomic_files import RunError
from fedme.core.callbacks import Metric
from fedme.core.metrics import Measure
from fedme.core.typed import nearest
from fedme.results import verdicts
from fedme.results.statistics import Paired, holm, paired
from fedme.results.verdicts import Overall, signed
from fedme.results.views import spread_text

HEADER = ["method", "seeds", "{metric}", "gain", "95 % interval", "gained", "lost", "cannot tell", "vs {reference}", "p"]


@dataclass(frozen=True)
class Line:
    """A method in a comparison; `overall` compares with training alone, `test` with the reference over seeds.

    `p` is corrected for the number of methods.
    """

    name: str
    means: Mapping[int, float | None]  # by seed: the mean over clients; None if models diverged
    overall: Overall | None = None
    test: Paired | None = None
    p: float = math.nan


class Comparison(Mapping[str, tuple[Result, ...]]):
    """Methods on the same clients: ``comparison["fedme"]`` are the results of a method, one per seed.

    `summary()` is a table of accuracies with tests, `to_frame()` its numbers, `plot()` the curves, `report(path)` the page.
    """

    def __init__(self, results: Mapping[str, Sequence[Result]], quiet: bool = False) -> None:
        self._results = {name: tuple(of_method) for name, of_method in results.items()}
        self._quiet = quiet
        self._known: list[Line] | None = None

    def __getitem__(self, name: str) -> tuple[Result, ...]:
        if name not in self._results:
            raise KeyError(f"there is no method '{name}'{nearest(name, self._results)}")
        return self._results[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        return repr(self.summary())

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    @property
    def measure(self) -> Measure:
        """The main measure: accuracy, or RMSE for regression."""
        return next(iter(self._results.values()))[0].measure

    @property
    def reference(self) -> str:
        """The method that the others are tested against: the one that trains clients alone, or else the first."""
        isolated = [name for name, results in self._results.items() if results[0].experiment.method.isolated]
        return (isolated or list(self._results))[0]

    def lines(self) -> list[Line]:
        """The numbers of every method. The first time, every client is trained alone, once per seed for all methods."""
        if self._known is None:
            self._known = self._computed()
        return self._known

    def _computed(self) -> list[Line]:
        measure, lines = self.measure, []
        means = {name: {r.seed: _mean(r) for r in results} for name, results in self._results.items()}
        known = {name: {seed: m for seed, m in of_method.items() if m is not None} for name, of_method in means.items()}
        tests = {name: paired(of_method, known[self.reference]) for name, of_method in known.items() if name != self.reference}
        p_values = {name: test.p for name, test in tests.items() if test is not None and math.isfinite(test.p)}
        corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
        for name, results in self._results.items():
            overall = None
            if not results[0].experiment.method.isolated:
                runs = [result.verdicts(self._quiet) for result in results]
                overall = verdicts.overall(verdicts.over_seeds(runs))
            test = tests.get(name)
            if test is not None and not measure.higher:  # a smaller error is a gain
                test = Paired(tuple(-d for d in test.differences), -test.mean, -test.high, -test.low, test.p)
            lines.append(Line(name, means[name], overall, test, corrected.get(name, math.nan)))
        return lines

    def summary(self) -> Table:
        """Mean ± standard deviation over seeds, how many clients gained and lost against training alone, and a test.

        A client has gained or lost if its own model is better or worse than the best that it could train alone, beyond chance
        (corrected for the number of clients). The last columns compare the means over clients with those of the reference,
        seed by seed (paired t test, corrected for the number of methods).
        """
        lines, measure = self.lines(), self.measure
        words = {"metric": f"test {measure.heading}", "reference": self.reference}
        rows = [self._cells(line) for line in lines]
        clients = {client for results in self._results.values() for client in results[0]}
        below = [
            "Mean over clients; ± is the standard deviation over seeds (ddof = 1).",
            "gained, lost: clients clearly better or worse than the best that they could train alone; gain: mean over clients.",
        ]
        if len(lines[0].means) < 2:
            below.append("One seed has no test: use seeds=3 or more.")
        elif len(lines) > 1:
            corrected = f", corrected for {len(lines) - 1} methods (Holm)" if len(lines) > 2 else ""
            below.append(f"p: paired t test over seeds against {self.reference}{corrected}.")
        title = f"{len(self)} methods, {len(clients)} clients"
        return Table(title, [name.format(**words) for name in HEADER], rows, below)

    def _cells(self, line: Line) -> list[str]:
        measure, overall = self.measure, line.overall
        cells = [line.name, str(len(line.means)), spread_text(measure, list(line.means.values()))]
        if overall is None:
            cells += ["-"] * 5
        else:
            interval = (
                f"{signed(measure, overall.low)} to {signed(measure, overall.high)}" if math.isfinite(overall.low) else "-"
            )
            counts = [str(len(clients)) for clients in (overall.better, overall.worse, overall.open)]
            cells += [signed(measure, overall.mean), interval, *counts]
        if line.test is None:
            return [*cells, "-", "-"]
        p = "-" if math.isnan(line.p) else "< 0.001" if line.p < 0.001 else f"{line.p:.3f}"
        return [*cells, signed(measure, line.test.mean), p]

    def to_frame(self) -> Any:
        """The numbers of `summary` as a pandas frame, one row per method; accuracies and gains are fractions."""
        pandas = optional("pandas", "comparison.to_frame()")
        rows = []
        for line in self.lines():
            values = [value for value in line.means.values() if value is not None]
            frame = pandas.Series(values, dtype=float)
            row = {"method": line.name, "seeds": len(line.means), self.measure.key: frame.mean(), "std": frame.std(ddof=1)}
            if (o := line.overall) is not None:
                row |= {"gain": o.mean, "low": o.low, "high": o.high}
                row |= {"gained": len(o.better), "lost": len(o.worse), "cannot_tell": len(o.open)}
            if line.test is not None:
                row |= {"difference": line.test.mean, "p": line.p}
            rows.append(row)
        return pandas.DataFrame(rows).set_index("method")

    def plot(self, metric: str | None = None, split: str = "test", ax: Any = None) -> Any:
        """Draw the mean over clients against the rounds, with the range over seeds. Returns matplotlib's axes."""
        measure = next(iter(self._results.values()))[0].scores(metric, split).measure
        ax = axes(ax, measure, split, f"{len(self)} methods")
        for place, (name, results) in enumerate(self._results.items()):
            drawn = [curves(result.folder, measure.key, split) for result in results]
            draw_mean(ax, place, name, drawn, 100 if measure.percent else 1)
        ax.legend()
        return ax

    def report(self, path: Path | str) -> Path:
        """Write a report of all runs that can be read in a browser."""
        from fedme.report import write

        write([result.folder for results in self._results.values() for result in results], Path(path))
        return Path(path)


def compare(
    learners: Sequence[Learner] | Mapping[str, Learner],
    clients: Sequence[Client],
    seeds: int | Sequence[int] = 3,
    *,
    unlabeled: Any = None,
    public: Any = None,
    output: str | Path | None = None,
    metrics: Mapping[str, Metric] | None = None,
    quiet: bool = False,
) -> Comparison:
    """Train every method with every seed on the same clients, and compare.

    `learners` are methods with their settings, by name if they are a dictionary. `seeds` is a number (0, 1, ...) or a list; it
    replaces the seed of the learners. The runs are in directories NAME-sSEED of `output`, and called again, `compare` goes on
    where it was stopped; without `output` they are kept as long as the comparison. Every client is trained alone once per seed,
    for all methods that have the same training settings. Other arguments are those of `fit`.
    """
    numbers = list(range(seeds)) if isinstance(seeds, int) else [int(seed) for seed in seeds]
    if not numbers or len(set(numbers)) < len(numbers):
        raise ConfigError(f"seeds: give a number >= 1 or a list of different seeds, got {seeds!r}")
    named = _named(learners)
    root = Path(output) if output is not None else Path(tempfile.mkdtemp(prefix="fedme-compare-"))
    results: dict[str, list[Result]] = {name: [] for name in named}
    with display_for(quiet) as display:
        for seed in numbers:
            for name, learner in named.items():
                done = sum(map(len, results.values()))
                display.note(f"{name}, seed {seed} ({done + 1} of {len(numbers) * len(named)})")
                folder = root / f"{name}-s{seed}"
                results[name].append(learner.with_seed(seed).run(clients, folder, display, unlabeled, public, metrics))
    comparison = Comparison(results, quiet)
    if output is None:
        weakref.finalize(comparison, shutil.rmtree, root, ignore_errors=True)
    comparison.lines()
    return comparison


def _named(learners: Sequence[Learner] | Mapping[str, Learner]) -> dict[str, Learner]:
    given = [*learners.values()] if isinstance(learners, Mapping) else [*learners] if isinstance(learners, Sequence) else []
    if not given or not all(isinstance(learner, Learner) for learner in given):
        raise ConfigError(
            "learners: give a list of methods with their settings, such as [fedme.Local(), fedme.FedMe(rounds=30)]"
        )
    if isinstance(learners, Mapping):
        names = [str(name) for name in learners]
        if wrong := [name for name in names if not name or "/" in name or name[0] == "."]:
            raise ConfigError(f"learners: '{wrong[0]}' is the name of a directory too: it must have no '/' or leading '.'")
        return dict(zip(names, given, strict=True))
    named: dict[str, Learner] = {}
    for learner in given:
        name, number = str(learner.name), 1
        while name in named:
            number += 1
            name = f"{learner.name}-{number}"
        named[name] = learner
    return named


def _mean(result: Result) -> float | None:
    scores = result.scores()
    if not len(scores):
        raise RunError(f"{result.folder}: no client has test samples, so there is nothing to compare; set data.test")
    return scores.mean if len(scores) == len(scores.samples) else None
