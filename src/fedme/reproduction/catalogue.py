"""The papers' results as data: numbers with their sources, claims, and the families of runs behind them."""

import functools
import importlib.resources
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedme.config.experiment import ConfigError
from fedme.core.typed import build, nearest

DATA = importlib.resources.files("fedme") / "reproduction" / "data"
PAPERS = {
    "fedme": "FedMe: Federated Learning via Model Exchange",
    "fedme-ja": "FedMe, first version",
    "pfml": "PFML: Regularized Mutual Learning for Personalized Federated Learning",
    "fml": "FML: Federated Mutual Learning",
}  # files of this folder, with titles

Scale = Literal["full", "small", "smoke"]
ClaimType = Literal["greater", "close", "no better", "sooner", "no later", "between", "steady", "slower"]


@dataclass(frozen=True)
class Column:
    """A column of a table; `key` is part of the names of its runs."""

    name: str
    key: str = ""
    measure: str = ""


@dataclass(frozen=True)
class Row:
    """A row of a table: its runs, their measures, and the paper's numbers, one per column."""

    name: str
    run: str | tuple[str, ...]
    measure: str | tuple[str, ...] = ""
    paper: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    group: str = ""  # rows are ranked within their group


@dataclass(frozen=True)
class Series:
    """A curve: a run and a measure."""

    name: str
    run: str
    measure: str


@dataclass(frozen=True)
class Panel:
    """A plot with several curves."""

    title: str
    y: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Cell:
    """A cell of a table, with the paper's number if it has one, or a curve in its panel; and the run behind it."""

    row: str
    column: str
    group: str
    run: str
    measure: str
    paper: float | None = None
    std: float | None = None


@dataclass(frozen=True)
class Result:
    """A table or a figure of a paper."""

    name: str
    title: str
    source: str
    notes: tuple[str, ...] = ()
    unit: Literal["%", "samples", "clients", "seconds"] = "%"
    columns: tuple[Column, ...] = ()
    rows: tuple[Row, ...] = ()
    panels: tuple[Panel, ...] = ()
    best_on_test: bool = False  # the paper reports the best round on test data: a separate column
    settled: bool = False  # accuracy varies strongly between rounds: a column for the mean of the last evaluations
    paper: str = ""  # filled in: the file that it comes from
    order: Literal["columns", "rows"] = "columns"  # within which the ranking of numbers is compared with the paper's
    plot: Literal["", "rows"] = ""  # plot the columns over the rows

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells of the table, row by row, or all curves, panel by panel."""
        curves = [
            Cell(curve.name, panel.title, "", curve.run, curve.measure) for panel in self.panels for curve in panel.series
        ]
        return (*(cell for row in self.rows for cell in self._cells(row)), *curves)

    def _cells(self, row: Row) -> list[Cell]:
        cells = []
        for i, column in enumerate(self.columns):
            run = row.run.replace("{column}", column.key) if isinstance(row.run, str) else row.run[i]
            measure = (row.measure if isinstance(row.measure, str) else row.measure[i]) or column.measure
            paper = row.paper[i] if row.paper else None
            std = row.std[i] if row.std else None
            if run:
                cells.append(Cell(row.name, column.name, row.group, run, measure, paper, std))
        return cells

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs behind the result, in order, without duplicates."""
        claimed = [run for claim in claims() if claim.results[0] == self.name for run in claim.runs]
        return tuple(dict.fromkeys([cell.run for cell in self.cells] + claimed))


@dataclass(frozen=True)
class Plain:
    """A claim in plain words, as clauses: what is the case if it holds, if it does not, and what is open otherwise.

    Also what is the case if what should be better is equivalent; empty: in general words.
    """

    holds: str
    fails: str
    open: str  # "whether ..."
    equal: str = ""


@dataclass(frozen=True)
class Claim:
    """A statement of a paper as comparisons of "run measure" with "run measure"."""

    text: str
    source: str
    results: tuple[str, ...]  # the results it is about; its runs belong to the first
    kind: ClaimType = "greater"
    need: Literal["all", "most"] = "all"
    tolerance: float = 0.0
    pairs: tuple[tuple[str, str], ...] = ()
    plain: Plain | None = None  # None: not on the page of verdicts
    paper: str = ""  # filled in: the file that it comes from

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs it compares."""
        return tuple(dict.fromkeys(side.partition(" ")[0] for pair in self.pairs for side in pair))


@dataclass(frozen=True)
class Remark:
    """A sentence about a paper: a setting that it leaves open or that we chose otherwise, or what its own numbers show."""

    text: str
    source: str
    paper: str = ""  # filled in: the file that it comes from


@dataclass(frozen=True)
class ScaleChanges:
    """How a scale differs from the paper's setting, in words and as overrides."""

    says: str = ""
    set: tuple[str, ...] = ()
    by_method: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """Runs that share a preset and the changes of every scale."""

    preset: str
    minutes: Mapping[str, float]
    small: ScaleChanges
    smoke: ScaleChanges
    full: ScaleChanges = ScaleChanges()
    runs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    runs_of: str = ""

    def at(self, scale: Scale) -> ScaleChanges:
        """The changes of a scale."""
        return {"full": self.full, "small": self.small, "smoke": self.smoke}[scale]


def read_data(name: str) -> dict[str, Any]:
    """A data file of the catalogue."""
    return tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))


@functools.cache
def results() -> Mapping[str, Result]:
    """Every table and figure, by name."""
    tables = [
        build(Result, table | {"paper": paper}, f"{paper}.toml") for paper in PAPERS for table in read_data(paper)["result"]
    ]
    return {result.name: result for result in tables}


@functools.cache
def claims() -> tuple[Claim, ...]:
    """Every claim."""
    return tuple(
        build(Claim, _with_pairs(table) | {"paper": paper}, f"{paper}.toml")
        for paper in PAPERS
        for table in read_data(paper)["claim"]
    )


def _with_pairs(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with the pairs that `for`, `left`, `right` and `others` abbreviate."""
    rest = {key: value for key, value in table.items() if key not in ("for", "left", "right", "others")}
    pairs = [tuple(pair) for pair in table.get("pairs", [])]
    pairs += [(table["left"].replace("{}", word), table["right"].replace("{}", word)) for word in table.get("for", [])]
    pairs += [(table["left"], other) for other in table.get("others", [])]
    return rest | {"pairs": pairs}


def intro(paper: str) -> str:
    """What a paper is about, and what is to be known about our runs, whatever they say."""
    return str(read_data(paper)["intro"])


@functools.cache
def settings() -> tuple[Remark, ...]:
    """The settings that need a word: what a paper leaves open, what its authors' code does, what is ours."""
    return _remarks("setting")


@functools.cache
def known_issues() -> tuple[Remark, ...]:
    """The observations about the papers' own numbers."""
    return _remarks("known")


def _remarks(kind: str) -> tuple[Remark, ...]:
    return tuple(
        build(Remark, table | {"paper": paper}, f"{paper}.toml") for paper in PAPERS for table in read_data(paper)[kind]
    )


@functools.cache
def families() -> Mapping[str, Family]:
    """Every family of runs, by name."""
    return {name: build(Family, table, f"families.toml: {name}") for name, table in read_data("families").items()}


def family_of(run: str) -> Family:
    """The family of a run."""
    return families()[run.partition("/")[0]]


def words_of(run: str) -> tuple[str, ...]:
    """The overrides of a run."""
    family = family_of(run)
    return (families()[family.runs_of] if family.runs_of else family).runs[run.partition("/")[2]]


def find(names: Sequence[str]) -> list[Result]:
    """The results of these names; "all" selects every result."""
    table = results()
    if "all" in names:
        return list(table.values())
    for name in names:
        if name not in table:
            raise ConfigError(f"unknown result '{name}'{nearest(name, table)}; `fedme reproduce --list` shows all")
    return [table[name] for name in dict.fromkeys(names)]


def minutes(runs: Iterable[str], scale: Scale) -> float:
    """The approximate duration of runs on one processor; runs that only count samples take no time."""
    return sum(family_of(run).minutes[scale] for run in runs if not run.endswith("/data"))


def cost(minutes: float) -> str:
    """The order of magnitude of a time, in words."""
    steps = ((1, "a minute"), (10, "minutes"), (90, "an hour"), (1200, "hours"), (14400, "days"), (60000, "weeks"))
    return next((word for limit, word in steps if minutes <= limit), "months")
