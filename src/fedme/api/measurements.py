"""The measurements of a run as numbers: scores of the clients, frames, and plots."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedme.api.display import Table, optional
from fedme.core.data import ClientId
from fedme.core.metrics import MEASURES, Measure, task_type_of_row
from fedme.core.typed import nearest
from fedme.results import records, summary

MOST_LINES = 30  # clients of a plot that get a line each; more become a band
HISTORY = ["round", "client", "model", "stage", "split", "metric", "value"]  # columns
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito, for all eyes
DASHES = ("-", "--", "-.", ":")


class Scores(Mapping[ClientId, float]):
    """One metric of every client's personal model: ``scores["hospital-a"]``, `mean` over clients, `std` (ddof = 1)."""

    def __init__(self, measure: Measure, split: str, values: Mapping[ClientId, float], samples: Mapping[ClientId, int]) -> None:
        self.measure, self.split, self.samples = measure, split, dict(samples)
        self._values = dict(values)

    def __getitem__(self, client: ClientId) -> float:
        return self._values[client]

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def mean(self) -> float:
        """The mean over clients, each counted once; NaN if no client has a value."""
        return statistics.fmean(self._values.values()) if self._values else math.nan

    @property
    def std(self) -> float:
        """The standard deviation over clients; NaN for fewer than two."""
        return statistics.stdev(self._values.values()) if len(self._values) > 1 else math.nan

    def __float__(self) -> float:
        return self.mean

    def _text(self, value: float) -> str:
        return "-" if math.isnan(value) else self.measure.text(value)

    def __repr__(self) -> str:
        values = [f"{client} {self._text(value)}" for client, value in self._values.items()]
        more = f", ... {len(values) - 10} more" if len(values) > 10 else ""
        spread = f" ± {self._text(self.std)}" if len(values) > 1 else ""
        title = f"{self.split} {self.measure.heading}: {self._text(self.mean)}{spread}, mean ± std of {len(values)} clients"
        return f"{title} ({', '.join(values[:10])}{more})"

    def _repr_html_(self) -> str:
        title = f"{self.split} {self.measure.heading}: mean {self._text(self.mean)}, std {self._text(self.std)}"
        rows = [(client, str(self.samples.get(client, "")), self._text(value)) for client, value in self._values.items()]
        table = Table(title, ("client", "samples", self.measure.heading), rows)
        return table._repr_html_()


def scores(folder: Path, metric: str | None, split: str, stage: str) -> Scores:
    """A metric of every client's personal model when it was last evaluated; without a name, the main one of the task."""
    rows = [r for r in evaluations(folder) if (r["model"], r["stage"], r["split"]) == ("personal", stage, split)]
    measure = measure_of(folder, metric)
    newest = {row["client"]: row for row in rows}
    values = {client: value for client, row in newest.items() if (value := _value(row, measure.key)) is not None}
    return Scores(measure, split, values, {client: row["samples"] for client, row in newest.items()})


def measure_of(folder: Path, metric: str | None) -> Measure:
    """A metric of a run by its name; the main one of the task by default."""
    measures = {measure.key: measure for measure in summary.measures_of(summary.so_far(folder))}
    if metric is None:
        return next(iter(measures.values()))
    if metric not in measures:
        raise ValueError(f"there is no metric '{metric}'{nearest(metric, measures)}")
    return measures[metric]


def evaluations(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of evaluated models."""
    return (row for row in records.read(folder) if row["stage"] in ("round", "finetuned"))


def _value(row: Mapping[str, Any], key: str) -> float | None:
    value: float | None = {**row, **records.added_numbers(row)}.get(key)
    return value


def history(folder: Path) -> Any:
    """Every measurement of every round as a pandas frame with one value per line."""
    pandas = optional("pandas", "result.history")
    lines = []
    for row in records.read(folder):
        keys = [m.key for m in MEASURES[task_type_of_row(row)]]
        named = {key: row[key] for key in keys if row[key] is not None}
        named |= {key: value for key, value in records.added_numbers(row).items() if value is not None}
        about = [row["round"], row["client"], row["model"], row["stage"], row["split"]]
        lines += [[*about, key, value] for key, value in named.items()]
    return pandas.DataFrame(lines, columns=HISTORY)


def client_rows(folder: Path) -> list[dict[str, Any]]:
    """One row per client: its architecture, its test samples, and all metrics of its personal model on them."""
    measures = summary.measures_of(summary.so_far(folder))
    lines: dict[ClientId, dict[str, Any]] = {}
    tested: set[ClientId] = set()
    for row in evaluations(folder):
        if row["model"] != "personal" or (row["split"] != "test" and row["client"] in tested):
            continue
        line = lines.setdefault(row["client"], {})
        if row["split"] == "test" and row["client"] not in tested:
            tested.add(row["client"])
            line.clear()
        if row["stage"] == "round":
            line |= {"arch": row["arch"], "split": row["split"], "samples": row["samples"]}
            line |= {m.key: _value(row, m.key) for m in measures}
        else:
            line |= {f"{measures[0].key}_finetuned": row[measures[0].key]}
    return [{"client": client, **line} for client, line in lines.items()]


def curves(folder: Path, key: str, split: str) -> dict[int, dict[ClientId, float]]:
    """A metric of the personal models by round and client."""
    by_round: dict[int, dict[ClientId, float]] = defaultdict(dict)
    for row in evaluations(folder):
        value = _value(row, key)
        if (row["model"], row["stage"], row["split"]) == ("personal", "round", split) and value is not None:
            by_round[row["round"]][row["client"]] = value
    return by_round


def axes(ax: Any, measure: Measure, split: str, title: str) -> Any:
    """Axes to draw on, with their labels."""
    pyplot = optional("matplotlib.pyplot", "plot")
    ax = ax if ax is not None else pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")[1]
    ax.set_xlabel("round (from 0)")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_ylabel(f"{split} {measure.heading}")
    ax.set_title(title)
    ax.grid(alpha=0.3)
    return ax


def draw_clients(ax: Any, by_round: Mapping[int, Mapping[ClientId, float]], factor: float) -> None:
    """A thin line per client, or a band of the middle 80 % of many clients, and the mean over clients."""
    rounds = sorted(by_round)
    clients = dict.fromkeys(client for values in by_round.values() for client in values)
    if len(clients) <= MOST_LINES:
        for client in clients:
            points = [(t, factor * by_round[t][client]) for t in rounds if client in by_round[t]]
            ax.plot(*zip(*points, strict=True), color="0.7", linewidth=0.8, zorder=1)
    elif rounds:
        ends = [_middle(list(by_round[t].values())) for t in rounds]
        low, high = ([factor * end[side] for end in ends] for side in (0, 1))
        ax.fill_between(rounds, low, high, color="0.85", label="middle 80 % of the clients")
    means = [factor * statistics.fmean(by_round[t].values()) for t in rounds]
    ax.plot(rounds, means, color=COLOURS[0], linewidth=2, marker="o", markersize=3, label=f"mean of {len(clients)} clients")
    ax.legend()


def draw_mean(ax: Any, place: int, name: str, seeds: Sequence[Mapping[int, Mapping[ClientId, float]]], factor: float) -> None:
    """The mean over clients of several seeds: their mean as a line, their range as a band."""
    rounds = sorted(set.intersection(*(set(by_round) for by_round in seeds)))
    means = [[factor * statistics.fmean(by_round[t].values()) for by_round in seeds] for t in rounds]
    colour, dash = COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)]
    ax.plot(rounds, [statistics.fmean(values) for values in means], dash, color=colour, linewidth=2, label=name)
    if len(seeds) > 1:
        ax.fill_between(rounds, [min(v) for v in means], [max(v) for v in means], color=colour, alpha=0.15, linewidth=0)


def _middle(values: Iterable[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile."""
    tenths = statistics.quantiles(values, n=10)
    return tenths[0], tenths[-1]
