"""All methods on MNIST, Dirichlet(0.1), 20 clients, and on the 30 persons of UCI HAR: the tables of docs/method-comparison.md.

    FEDME_DATA=folder python benchmarks/method_table.py [mnist|har ...] [--jobs N] [--output DIR] [--quick]

Every method is run with three learning rates. Validation data of seed 0 chooses the rate, and whether the fine-tuned model is
used; then the method is run with two further seeds. Test data is only reported. Runs are kept in DIR: the same command again
continues after an interruption.
"""

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from fedme.config.experiment import parse
from fedme.core.key import Key
from fedme.methods import METHODS
from fedme.results import records
from fedme.results.statistics import Paired, bootstrap, compare, holm
from fedme.results.tables import text
from fedme.running import assembly
from fedme.running.progress import Display
from fedme.running.run_queue import Batch, Planned

HERE = Path(__file__).resolve().parent
SEEDS, RATES = (0, 1, 2), (0.03, 0.1, 0.3)
HELD_OUT = 10  # windows of every person that the server has, unlabeled or public
STAGES = {"round": "as trained", "finetuned": "fine-tuned"}
Config = dict[str, Any]
Scores = dict[str, dict[str, float]]  # by split and client, in percent


@dataclass(frozen=True)
class Entry:
    """A line of a table: a method with some architectures."""

    method: str
    models: str
    pool: tuple[Any, ...] = field(hash=False)  # architectures may be tables

    @property
    def name(self) -> str:
        """Also the beginning of its run directories."""
        return f"{self.method}, {self.models}"


@dataclass(frozen=True)
class Work:
    """A table: what all its runs have in common, and its lines."""

    name: str
    common: Config
    entries: tuple[Entry, ...]
    rounds: int

    def config(self, entry: Entry, lr: float, seed: int) -> Config:
        """One experiment. Only training depends on the seed: all runs have the same clients and the same splits."""
        return self.common | {
            "method": {"name": entry.method},
            "seed": seed,
            "rounds": self.rounds,
            "evaluate_every": self.rounds,
            "checkpoint_every": self.rounds,
            "models": {"pool": list(entry.pool), "assign": "round-robin", "shared": entry.pool[0]},
            "train": {"lr": lr, "batch": 20, "epochs": 2},
            "finetune": {"epochs": 2},
        }


def mnist(folder: Path, quick: bool) -> Work:
    """MNIST, 20 clients with skewed labels, a dense network of 100 hidden units; HeteroFL has four widths of it."""
    common: Config = {
        "data": {"name": "mnist", "limit": 1200 if quick else 6000, "val": 0.2, "unlabeled": 200 if quick else 500},
        "partition": {"name": "dirichlet", "clients": 4 if quick else 20, "alpha_label": 0.1, "seed": 0},
    }
    common["data"]["public"] = common["data"]["unlabeled"]
    widths = tuple(f"dnn-{hidden}" for hidden in (100, 50, 25, 12))
    entries = [Entry(name, "dnn-100", ("dnn-100",)) for name in METHODS if name != "heterofl"]
    entries += [Entry(name, "four widths", widths) for name in ("local", "heterofl")]
    return Work("mnist", common, tuple(entries), 2 if quick else 12)


def har(folder: Path, quick: bool) -> Work:
    """UCI HAR, a client per person; four architectures with 64 features for the methods that allow them."""
    persons = sorted((Path(os.environ["FEDME_DATA"]) / "har").glob("person_*.npz"))[: 4 if quick else None]
    prepared = folder / "persons"
    prepared.mkdir(parents=True, exist_ok=True)
    held: dict[str, list[np.ndarray]] = {"x": [], "y": []}
    for file in persons:
        with np.load(file) as samples:
            order = Key(0).at("held out", file.stem).numpy().permutation(len(samples["y"]))
            parts = {name: samples[name].astype(np.float32 if name == "x" else np.int64)[order] for name in ("x", "y")}
        np.savez(prepared / file.name, **{name: values[HELD_OUT:] for name, values in parts.items()})
        for name, values in parts.items():
            held[name].append(values[:HELD_OUT])
    np.savez(prepared / "unlabeled.npz", x=np.concatenate(held["x"]))
    np.savez(prepared / "public.npz", **{name: np.concatenate(values) for name, values in held.items()})
    common: Config = {
        "data": {"val": 0.2, "test": 0.3} | {f"{name}_file": str(prepared / f"{name}.npz") for name in ("unlabeled", "public")},
        "partition": {"seed": 0},
        "clients": {file.stem: {"data": str(prepared / file.name)} for file in persons},
    }
    waves = "method_networks:Waves"
    four = ({"name": waves}, "dnn-64", "dnn-128-64", {"name": waves, "channels": 4, "kernel": 5})
    widths = tuple({"name": waves, "channels": channels} for channels in (8, 6, 4, 2))
    several = {name for name, method in METHODS.items() if method.own_architectures and name != "heterofl"}
    entries = [
        Entry(name, "convolutions", four[:1]) for name in METHODS if name not in several | {"heterofl"} or name == "local"
    ]
    entries += [Entry(name, "four architectures", four) for name in METHODS if name in several]
    entries += [Entry(name, "four widths", widths) for name in ("local", "heterofl")]
    return Work("har", common, tuple(entries), 2 if quick else 12)


WORKS = {"mnist": mnist, "har": har}


@dataclass(frozen=True)
class Choice:
    """What validation chose for an entry."""

    entry: Entry
    lr: float
    stage: str


@dataclass(frozen=True)
class Runs:
    """The runs of a table."""

    work: Work
    folder: Path
    jobs: int

    def scores(self, wanted: Sequence[tuple[Entry, float, int]]) -> list[dict[str, Scores]]:
        """The accuracies of runs, each an entry with a rate and a seed; those that are missing are run first."""
        plans = [self._planned(*each) for each in wanted]
        with Display(Console(stderr=True)) as display:
            outcomes = Batch(display, self.jobs).run(plans)
        if failed := [f"{outcome.planned.name}: {outcome.error}" for outcome in outcomes if outcome.error]:
            raise SystemExit("\n".join(failed))
        return [scores(planned.folder) for planned in plans]

    def _planned(self, entry: Entry, lr: float, seed: int) -> Planned:
        name = f"{self.work.name}: {entry.name}, rate {lr}, seed {seed}"
        folder = self.folder / self.work.name / f"{entry.method}-{entry.models.replace(' ', '-')}-{lr}-s{seed}"
        return Planned(name, folder, parse(self.work.config(entry, lr, seed), name).plain())

    def lines(self) -> list["Line"]:
        """The lines of the table: the first seed chooses, all seeds are reported."""
        entries = self.work.entries
        grid = list(itertools.product(entries, RATES))
        first = dict(zip(grid, self.scores([(entry, lr, SEEDS[0]) for entry, lr in grid]), strict=True))
        choices = [chosen(entry, {lr: first[entry, lr] for lr in RATES}) for entry in entries]
        runs = list(itertools.product(choices, SEEDS))
        found = self.scores([(choice.entry, choice.lr, seed) for choice, seed in runs])
        by_choice = {choice: found[len(SEEDS) * i : len(SEEDS) * (i + 1)] for i, choice in enumerate(choices)}
        return [line(choice, by_choice[choice]) for choice in choices]


def scores(folder: Path) -> dict[str, Scores]:
    """Accuracies of the personal models after the last round and after fine-tuning."""
    found: dict[str, Scores] = {}
    for row in records.read(folder):
        if row["model"] == "personal" and row["stage"] in STAGES and row["split"] in ("val", "test"):
            by_client = found.setdefault(row["stage"], {}).setdefault(row["split"], {})
            by_client[row["client"]] = 100 * row["accuracy"]  # the last round is the last row
    return found


@dataclass(frozen=True)
class Line:
    """A choice, and its test accuracies (clients x seeds)."""

    choice: Choice
    clients: tuple[str, ...]
    test: np.ndarray
    means: Mapping[str, float]  # of every stage

    @property
    def entry(self) -> Entry:
        """The method and its architectures."""
        return self.choice.entry


def chosen(entry: Entry, found: Mapping[float, dict[str, Scores]]) -> Choice:
    """The rate and the stage with the best mean validation accuracy over clients."""
    grid = itertools.product(found, STAGES)
    lr, stage = max(grid, key=lambda each: statistics.fmean(found[each[0]][each[1]]["val"].values()))
    return Choice(entry, lr, stage)


def line(choice: Choice, found: Sequence[dict[str, Scores]]) -> Line:
    """The test accuracies of a choice, from its runs with all seeds."""
    clients = tuple(sorted(found[0]["round"]["test"]))
    test = {stage: np.array([[each[stage]["test"][client] for each in found] for client in clients]) for stage in STAGES}
    return Line(choice, clients, test[choice.stage], {stage: float(values.mean()) for stage, values in test.items()})


def majority(work: Work) -> float:
    """The mean accuracy of a client that always answers the most frequent class of its training part."""
    federation = assembly.gather(parse(work.config(work.entries[0], RATES[0], 0), work.name))
    constant = [
        (data.test.y == data.train.y.bincount().argmax()).double().mean().item() for data in federation.clients.values()
    ]
    return 100 * statistics.fmean(constant)


def difference(line: Line, other: Line) -> tuple[Paired, tuple[float, float, float]]:
    """The gain of one line over another: a test over clients (means over seeds), and an interval over clients and seeds."""
    gains = line.test - other.test
    return compare(gains.mean(1).tolist()), bootstrap(gains, Key(0).at("interval"))


def table(work: Work, lines: Sequence[Line]) -> str:
    """The table in Markdown, best first; p values are corrected for all tests in it."""
    by_name = {line.entry.name: line for line in lines}
    first = work.entries[0].models
    fedavg = by_name[f"fedavg, {first}"]
    tests: dict[tuple[str, str], tuple[Paired, tuple[float, float, float]]] = {}
    for line in lines:
        local = by_name[f"local, {line.entry.models}"]
        for column, other in (("local", local), ("fedavg", fedavg)):
            if line is not other:
                tests[line.entry.name, column] = difference(line, other)
    corrected = dict(zip(tests, holm([test.p for test, _ in tests.values()]), strict=True))

    def cell(name: str, column: str) -> str:
        if (name, column) not in tests:
            return ""
        _, (mean, low, high) = tests[name, column]
        p = corrected[name, column]
        shown = "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.01 else f"p = {p:.2f}"
        return f"{mean:+.1f} ({low:+.1f} to {high:+.1f}), {shown}"

    header = ["method", "models", "rate", "chosen", "accuracy %", "as trained / fine-tuned %", "minus Local", "minus FedAvg"]
    rows = []
    for line in sorted(lines, key=lambda each: -each.test.mean()):
        both = " / ".join(f"{line.means[stage]:.1f}" for stage in STAGES)
        by_seed = line.test.mean(0)
        accuracy = f"{by_seed.mean():.1f} ± {by_seed.std(ddof=1):.1f}"
        choice = f"{line.choice.lr:g}", STAGES[line.choice.stage]
        start = [line.entry.method, line.entry.models, *choice, accuracy, both]
        rows.append([*start, *(cell(line.entry.name, column) for column in ("local", "fedavg"))])
    rows.append(["majority", "a constant", "", "", f"{majority(work):.1f}", "", "", ""])
    return text(header, rows, "markdown")


def main() -> None:
    """Run what is missing, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", choices=[[], *WORKS], help="tables; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, default=Path("runs/method-table"), help="where the runs are kept")
    parser.add_argument("--quick", action="store_true", help="tiny work: shows that everything runs, its numbers mean nothing")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name in asked.works or WORKS:
        work = WORKS[name](asked.output.resolve() / name, asked.quick)
        lines = Runs(work, asked.output.resolve(), asked.jobs).lines()
        print(f"\n## {name}\n\n{table(work, lines)}", flush=True)
        plain = {
            each.entry.name: {
                "lr": each.choice.lr,
                "stage": each.choice.stage,
                "test": dict(zip(each.clients, each.test.tolist(), strict=True)),
            }
            for each in lines
        }
        (asked.output / f"{name}.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
