"""What the papers report, as data: results with their numbers and sources, claims, and the families of runs behind them."""

import functools
import importlib.resources
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedme.config.experiment import ConfigError
from fedme.core.typed import build, nearest

DATA = importlib.resources.files("fedme") / "reproduction" / "data"
PAPERS = ("fedme", "fedme-ja", "pfml", "fml")

Scale = Literal["full", "small", "smoke"]
Kind = Literal["greater", "close", "no better", "sooner", "no later", "between", "steady", "slower"]


@dataclass(frozen=True)
class Column:
    """A column of a table; `key` stands in the names of its runs."""

    name: str
    key: str = ""
    measure: str = ""


@dataclass(frozen=True)
class Row:
    """A row of a table: its runs, what is measured in them, and the paper's numbers, one a column."""

    name: str
    run: str | tuple[str, ...]
    measure: str | tuple[str, ...] = ""
    paper: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    group: str = ""  # rows are put in order within their group


@dataclass(frozen=True)
class Series:
    """A curve: a run and what is measured in it."""

    name: str
    run: str
    measure: str


@dataclass(frozen=True)
class Panel:
    """A picture with several curves."""

    title: str
    y: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Cell:
    """One number of the paper (or a place where it has none), or a curve in its panel; and the run that answers it."""

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
    best_on_test: bool = False  # the paper reports the best round on test data: a column of its own
    settled: bool = False  # models swing from round to round: a column for the mean of the last evaluations
    order: Literal["columns", "rows"] = "columns"  # in which the order of numbers is compared with the paper's
    plot: Literal["", "rows"] = ""  # draw the columns over the rows

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every place of the table, row by row, or every curve, panel by panel."""
        curves = [Cell(each.name, panel.title, "", each.run, each.measure) for panel in self.panels for each in panel.series]
        return (*(cell for row in self.rows for cell in self._cells(row)), *curves)

    def _cells(self, row: Row) -> list[Cell]:
        found = []
        for i, column in enumerate(self.columns):
            run = row.run.replace("{column}", column.key) if isinstance(row.run, str) else row.run[i]
            measure = (row.measure if isinstance(row.measure, str) else row.measure[i]) or column.measure
            paper = row.paper[i] if row.paper else None
            std = row.std[i] if row.std else None
            if run:
                found.append(Cell(row.name, column.name, row.group, run, measure, paper, std))
        return found

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs behind the result, each once, in order."""
        claimed = [run for claim in claims() if claim.results[0] == self.name for run in claim.runs]
        return tuple(dict.fromkeys([cell.run for cell in self.cells] + claimed))


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper as comparisons of "run measure" with "run measure"."""

    text: str
    source: str
    results: tuple[str, ...]  # where it belongs; its runs are run with the first
    kind: Kind = "greater"
    need: Literal["all", "most"] = "all"
    tolerance: float = 0.0
    pairs: tuple[tuple[str, str], ...] = ()

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs it compares."""
        return tuple(dict.fromkeys(side.partition(" ")[0] for pair in self.pairs for side in pair))


@dataclass(frozen=True)
class Known:
    """Something that a reader of the papers should know, from the papers themselves."""

    text: str
    source: str


@dataclass(frozen=True)
class Shrunk:
    """How a scale differs from the paper's setting, in words and as overrides."""

    says: str = ""
    set: tuple[str, ...] = ()
    by_method: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """Runs that share a preset and the ways to shrink them."""

    preset: str
    minutes: Mapping[str, float]
    small: Shrunk
    smoke: Shrunk
    full: Shrunk = Shrunk()
    runs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    runs_of: str = ""

    def at(self, scale: Scale) -> Shrunk:
        """What a scale does to the family."""
        return {"full": self.full, "small": self.small, "smoke": self.smoke}[scale]


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))


@functools.cache
def results() -> Mapping[str, Result]:
    """Every table and figure, by name."""
    found = [build(Result, table, f"{paper}.toml") for paper in PAPERS for table in _read(paper)["result"]]
    return {result.name: result for result in found}


@functools.cache
def claims() -> tuple[Claim, ...]:
    """Every claim."""
    return tuple(build(Claim, _spelled(table), f"{paper}.toml") for paper in PAPERS for table in _read(paper)["claim"])


def _spelled(table: Mapping[str, Any]) -> dict[str, Any]:
    """`for`, `left`, `right` and `others` are short for pairs."""
    rest = {key: value for key, value in table.items() if key not in ("for", "left", "right", "others")}
    pairs = [tuple(pair) for pair in table.get("pairs", [])]
    pairs += [(table["left"].replace("{}", each), table["right"].replace("{}", each)) for each in table.get("for", [])]
    pairs += [(table["left"], other) for other in table.get("others", [])]
    return rest | {"pairs": pairs}


@functools.cache
def known() -> tuple[Known, ...]:
    """What the papers' own numbers show."""
    return tuple(build(Known, table, f"{paper}.toml") for paper in PAPERS for table in _read(paper)["known"])


@functools.cache
def families() -> Mapping[str, Family]:
    """Every family of runs, by name."""
    return {name: build(Family, table, f"families.toml: {name}") for name, table in _read("families").items()}


def family_of(run: str) -> Family:
    """The family of a run."""
    return families()[run.partition("/")[0]]


def words_of(run: str) -> tuple[str, ...]:
    """The overrides of a run."""
    family = family_of(run)
    return (families()[family.runs_of] if family.runs_of else family).runs[run.partition("/")[2]]


def find(names: Sequence[str]) -> list[Result]:
    """The results of these names; "all" is every one."""
    table = results()
    if "all" in names:
        return list(table.values())
    for name in names:
        if name not in table:
            raise ConfigError(f"there is no result '{name}'{nearest(name, table)}; `fedme reproduce --list` shows all")
    return [table[name] for name in dict.fromkeys(names)]


def minutes(runs: Iterable[str], scale: Scale) -> float:
    """About how long runs take on one processor; to look at data takes next to nothing."""
    return sum(family_of(run).minutes[scale] for run in runs if not run.endswith("/data"))


def cost(minutes: float) -> str:
    """The order of magnitude of a time, in words."""
    steps = ((1, "a minute"), (10, "minutes"), (90, "an hour"), (1200, "hours"), (14400, "days"), (60000, "weeks"))
    return next((word for limit, word in steps if minutes <= limit), "months")
