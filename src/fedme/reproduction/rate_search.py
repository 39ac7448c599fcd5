"""Searches of learning rates by validation accuracy, with one rule for all methods; `rates.toml` has what they found."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedme.config.experiment import ConfigError, parse
from fedme.core.typed import build, nearest
from fedme.reproduction.catalogue import DATA, read_data
from fedme.reproduction.planned_runs import RunFolders, experiment
from fedme.running.run_queue import Planned
from fedme.running.sweep import Decisive, Point, scores

SEED = 0
FOLDER = "rates"  # beside the runs of the scales


@dataclass(frozen=True)
class RateSearch:
    """The rates that were tried for a run at small scale, and the validation accuracy with each, in %; empty: not made yet."""

    run: str
    model: Decisive
    rates: tuple[float, ...]
    accuracy: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.accuracy and len(self.accuracy) != len(self.rates):
            raise ConfigError(f"{self.run}: {len(self.rates)} rates but {len(self.accuracy)} values of accuracy")

    @property
    def inside(self) -> bool:
        """Whether the best rate has a smaller and a larger one beside it that were tried; elsewhere the search goes on."""
        return self.chosen is not None and min(self.rates) < self.chosen < max(self.rates)

    @property
    def chosen(self) -> float | None:
        """The best rate."""
        return max(zip(self.accuracy, self.rates, strict=True))[1] if self.accuracy else None

    @property
    def used(self) -> float:
        """The rate of the run at small scale."""
        return float(experiment(self.run, "small", SEED)["train"]["lr"])


def searches() -> list[RateSearch]:
    """All searches."""
    return [build(RateSearch, table, f"{DATA.name}/rates.toml") for table in read_data("rates")["search"]]


def find(names: Sequence[str]) -> list[RateSearch]:
    """The searches of these runs, or of all runs of these families."""
    wanted = list[RateSearch]()
    for name in names:
        of_name = [search for search in searches() if name in (search.run, search.run.partition("/")[0])]
        if not of_name:
            known = sorted({word for search in searches() for word in (search.run, search.run.partition("/")[0])})
            raise ConfigError(f"--rates: no search named '{name}'{nearest(name, known)}")
        wanted += of_name
    return wanted


def points(search: RateSearch, folders: RunFolders, workers: int | None = None) -> list[Point]:
    """The runs of a search, one per rate."""
    result = []
    for rate in search.rates:
        config = experiment(search.run, folders.scale, SEED, workers)
        config["train"] = {**config["train"], "lr": rate}
        folder = folders.root / FOLDER / folders.scale / f"{search.run.replace('/', '-')}-lr{rate:g}"
        result.append(Point((f"{rate:g}",), (Planned(f"{search.run}, rate {rate:g}", folder, parse(config).plain()),)))
    return result


def table(searches: Sequence[RateSearch]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows: the validation accuracy with every rate, and the rate in use."""
    every = sorted({rate for search in searches for rate in search.rates})
    header = ("run", "model", *(f"{rate:g}" for rate in every), "best", "in use")
    rows = []
    for search in searches:
        by_rate = dict(zip(search.rates, search.accuracy, strict=False))
        numbers = [f"{by_rate[rate]:.2f}" if rate in by_rate else "" for rate in every]
        best = "" if search.chosen is None else f"{search.chosen:g}"
        rows.append(
            (search.run, "fine-tuned" if search.model == "finetuned" else search.model, *numbers, best, f"{search.used:g}")
        )
    return header, rows


def made(search: RateSearch, folders: RunFolders) -> RateSearch:
    """The search with what its runs found, if all are finished."""
    scored = scores(points(search, folders), search.model)
    complete = all(point.complete and point.validation for point in scored)
    return replace(search, accuracy=tuple(100 * point.validation[0] for point in scored) if complete else ())
