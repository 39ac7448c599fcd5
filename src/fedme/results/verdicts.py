"""Does joining help? The model of the federation beside the best that a client could train alone, on its own test samples.

Every client gets a verdict: join, do not join, or cannot tell. It is decided by the main measure (accuracy, label accuracy or
RMSE): the 95 % confidence interval of the gain is above 0, below 0, or contains 0. AUROC stands beside it. Over all clients the
p values are corrected for the number of clients (Holm), so that one clear verdict among many clients means something.
"""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from fedme.core.atomic_files import RunError, finite, sealed, unsealed, write_json
from fedme.core.data import ClientId
from fedme.core.key import Key
from fedme.core.metrics import MEASURES, Measure
from fedme.core.task_types import TaskType
from fedme.results.run_directory import deployed
from fedme.results.statistics import (
    Array,
    Gain,
    accuracy_gain,
    auroc_gain,
    error_of_samples,
    holm,
    needed_samples,
    over_clients,
    refits,
    rmse_gain,
    same_samples,
    share_gain,
)

NAME, FOLDS = "verdicts.json", "verdicts-folds.json"
LEVEL = 0.05  # of the tests over all clients
MANY = 100_000  # samples; a difference that needs more is not worth looking for
MARGIN = 0.05  # a smaller difference in accuracy, or relative to the RMSE alone, is none for most purposes

Decision = Literal["join", "do not join", "cannot tell"]
DECISIONS: dict[int, Decision] = {1: "join", -1: "do not join", 0: "cannot tell"}
# What the models of a client are called in tables, by the names of their files.
MODELS = {"model": "personal", "best": "best round", "finetuned": "fine-tuned", "global": "global", "local": "trained alone"}


def gains(task: TaskType, outputs: Tensor, other: Tensor, targets: Tensor, unit: Sequence[float] = ()) -> dict[str, Gain]:
    """The gain of one model over another on the same samples, for the main measure and, for classes, AUROC.

    `outputs` and `other` are what the two models answer, samples x outputs; `unit` is that of standardised targets.
    """
    ours, theirs, y = outputs.double().numpy(), other.double().numpy(), targets.numpy()
    if task == "classification":
        measured = {"accuracy": accuracy_gain(_right(ours, y), _right(theirs, y))}
        ranks, other_ranks = (z.double().log_softmax(1).numpy() for z in (outputs, other))  # like probabilities, without ties
        area = auroc_gain(ranks, other_ranks, y)
        return measured if area is None else measured | {"auroc": area}
    if task == "multi-label":
        return {"accuracy": share_gain(_share_right(ours, y), _share_right(theirs, y))}
    squares, squares_of_other = _squares(ours, y, unit), _squares(theirs, y, unit)
    if not np.isfinite(squares.sum()) or not np.isfinite(squares_of_other.sum()):
        return {"rmse": _diverged(len(y), bool(np.isfinite(squares.sum())), bool(np.isfinite(squares_of_other.sum())))}
    return {"rmse": rmse_gain(squares, squares_of_other)}


def scores_per_sample(task: TaskType, outputs: Tensor, targets: Tensor) -> Array:
    """How good a model is on every sample: right or not, the share of right labels, or minus the squared error."""
    z, y = outputs.double().numpy(), targets.numpy()
    if task == "classification":
        return _right(z, y).astype(float)
    return _share_right(z, y) if task == "multi-label" else -_squares(z, y, ())


def _right(outputs: Array, labels: Array) -> Array:
    right: Array = (outputs.argmax(1) == labels) & ~np.isnan(outputs).any(1)  # no prediction is a wrong one
    return right


def _share_right(outputs: Array, labels: Array) -> Array:
    share: Array = (((outputs > 0) == labels) & ~np.isnan(outputs)).mean(1)
    return share


def _squares(outputs: Array, targets: Array, unit: Sequence[float]) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        squares: Array = np.square((outputs - targets) * (np.array(unit) if len(unit) else 1.0)).mean(1)
    return squares


def _diverged(samples: int, ours: bool, theirs: bool) -> Gain:
    """One of two models has no finite error; of two such models, neither is better."""
    if ours == theirs:
        return Gain(samples, math.nan, -math.inf, math.inf, 1.0)
    end = math.inf if ours else -math.inf
    return Gain(samples, end, end, end, 0.0)


@dataclass(frozen=True)
class Verdict:
    """Whether joining helps one client, with the numbers on its test part.

    `model` is what it has from the federation and `arch` its architecture, `local_arch` the architecture that was best alone.
    `constant` is the score of always answering with the most frequent class or the mean of the client's training samples.
    """

    client: ClientId
    task: TaskType
    model: str
    arch: str
    local_arch: str
    samples: int
    value: float | None
    local: float | None
    constant: float | None
    gains: Mapping[str, Gain]
    trained: int = 0  # training samples of the client, for verdicts over several seeds
    seeds: int = 1
    tested: str = ""  # a fingerprint of the test samples
    folds: int = 1
    margin: float = MARGIN  # of accuracy, or of the RMSE alone, below which the two are called equivalent

    @property
    def measure(self) -> Measure:
        """The measure that decides."""
        return MEASURES[self.task][0]

    @property
    def main(self) -> Gain:
        """The gain by the measure that decides."""
        return self.gains[self.measure.key]

    @property
    def decision(self) -> Decision:
        """Join, do not join, or cannot tell."""
        return DECISIONS[self.main.direction]

    @property
    def equivalent(self) -> bool:
        """Whether a difference of the margin or more can be excluded."""
        scale = 1.0 if self.measure.percent else self.local or 0.0
        return self.main.within(self.margin * scale)

    @property
    def label(self) -> str:
        """The decision in a few words; where it is open, also whether the two are equivalent."""
        small = self.decision == "cannot tell" and self.equivalent
        return f"cannot tell, within {margin_text(self.measure, self.margin)}" if small else self.decision

    def words(self) -> str:
        """The verdict in a sentence."""
        parts = [self._gain(key, gain) for key, gain in self.gains.items()]
        numbers = ", ".join(parts)
        over = f" over {self.seeds} seeds" if self.seeds > 1 else f" over {self.folds} folds" if self.folds > 1 else ""
        start = {"join": "joining helps", "do not join": "joining hurts", "cannot tell": "cannot tell"}[self.decision]
        text = f"{start}: {numbers}{over}"
        opposite = [key for key, gain in self.gains.items() if gain.direction * self.main.direction < 0]
        text += (
            f"; but by {', '.join(titles(self.task)[key] for key in opposite)} it is the other way round" if opposite else ""
        )
        return text + (f"; {self.remedy()}" if self.decision == "cannot tell" else "")

    def remedy(self) -> str:
        """That there is no difference worth looking for, or how many samples it would take to see it."""
        needed, margin = self.main.needed, margin_text(self.measure, self.margin)
        if self.equivalent:
            return f"no difference larger than {margin}: the two are equivalent within that"
        if needed is None or needed > MANY:
            equal = f"the two are practically equal on {self.samples} test samples"
            return f"{equal}, which are too few to exclude a difference of {margin}"
        if needed <= self.samples:
            return f"a few more test samples than {self.samples} would show a difference of this size"
        return f"about {needed:,} test samples would show a difference of this size, there are {self.samples}"

    def _gain(self, key: str, gain: Gain) -> str:
        measure = next(m for m in MEASURES[self.task] if m.key == key)
        unit = " points" if measure.percent else ""
        name = f"{measure.title} {signed(measure, gain.gain)}{unit}"
        return f"{name} (95 % interval {signed(measure, gain.low)} to {signed(measure, gain.high)})"


def margin_text(measure: Measure, margin: float) -> str:
    """The margin of equivalence with its unit."""
    return f"{100 * margin:g} {'points' if measure.percent else '% of the RMSE alone'}"


def titles(task: TaskType) -> dict[str, str]:
    """The name of every measure."""
    return {measure.key: measure.title for measure in MEASURES[task]}


def signed(measure: Measure, value: float) -> str:
    """A gain with its sign, positive is better."""
    if not math.isfinite(value):
        return "unknown" if math.isnan(value) else "+infinity" if value > 0 else "-infinity"
    return f"{'+' if value >= 0 else ''}{measure.text(value, 1 if measure.percent else None)}"


@dataclass(frozen=True)
class Overall:
    """The verdicts of all clients, corrected for their number."""

    better: tuple[ClientId, ...]
    worse: tuple[ClientId, ...]
    open: tuple[ClientId, ...]
    measure: Measure
    mean: float
    low: float
    high: float
    equivalent: tuple[ClientId, ...] = ()  # of the open ones, those that differ by less than the margin
    margin: float = MARGIN

    def words(self, against: str = "the best that each client could train alone") -> str:
        """The summary in a few sentences; `against` says what the clients are compared with."""
        count = len(self.better) + len(self.worse) + len(self.open)
        unit = " points" if self.measure.percent else ""
        text = (
            f"Compared with {against}: {len(self.better):,} of {count:,} clients clearly better, "
            f"{len(self.worse):,} clearly worse, {len(self.open):,} cannot be told apart (corrected for {count:,} tests)."
        )
        if self.equivalent:
            small = margin_text(self.measure, self.margin)
            equal, unclear = len(self.equivalent), len(self.open)
            which = f"{equal:,} of these {unclear:,}" if equal < unclear else "All of these" if equal > 1 else "This one"
            text += f" {which} {'is' if equal == 1 else 'are'} equivalent: no difference larger than {small}."
        mean = f"{self.measure.title} {signed(self.measure, self.mean)}{unit}"
        interval = f"95 % interval {signed(self.measure, self.low)} to {signed(self.measure, self.high)}"
        return f"{text} Mean gain: {mean}" + (f" ({interval})." if math.isfinite(self.low) else ".")


def overall(verdicts: Sequence[Verdict], seed: int = 0) -> Overall:
    """Over all clients: p values corrected by Holm, and the mean gain with an interval over clients."""
    known = [verdict for verdict in verdicts if math.isfinite(verdict.main.p)]
    corrected = dict(zip([v.client for v in known], holm([v.main.p for v in known]), strict=True))
    groups: dict[int, list[ClientId]] = {1: [], -1: [], 0: []}
    for verdict in verdicts:
        clear = corrected.get(verdict.client, 1.0) < LEVEL
        groups[verdict.main.direction if clear else 0].append(verdict.client)
    mean, low, high = over_clients([v.main for v in verdicts if math.isfinite(v.main.gain)], Key(seed).at("verdicts"))
    equal = tuple(v.client for v in verdicts if v.equivalent and v.client in set(groups[0]))
    first = verdicts[0]
    return Overall(tuple(groups[1]), tuple(groups[-1]), tuple(groups[0]), first.measure, mean, low, high, equal, first.margin)


def alarms(verdicts: Sequence[Verdict]) -> list[str]:
    """One line for every client that joining hurts, the surest first."""
    clear = overall(verdicts).worse if verdicts else ()
    lines = []
    count = max(1, round(LEVEL / 2 * len(verdicts)))  # expected without any difference
    such = "one such result" if count == 1 else f"about {count} such results"
    for v in sorted(verdicts, key=lambda v: v.main.p):
        if v.decision == "do not join":
            chance = "" if v.client in clear else f" Among {len(verdicts)} clients, {such} can be chance."
            lines.append(f"ALARM: client {v.client}: {v.words()}. Its model trained alone ({v.local_arch}) is better.{chance}")
    return lines


def over_seeds(runs: Sequence[Sequence[Verdict]]) -> list[Verdict]:
    """The verdicts of runs that differ in their seed, one per client that is in all of them.

    Mostly every seed draws other training and test samples, which overlap; the intervals take that into account (`refits`), and
    also if the samples are the same for all seeds (`same_samples`).
    """
    if len(runs) == 1:
        return list(runs[0])
    of_clients = {client: of_client for client, of_client in _by_client(runs).items() if len(of_client) == len(runs)}
    return [_combined(of_client, of_client[0].samples, seeds=len(runs)) for of_client in of_clients.values()]


def over_folds(folds: Sequence[Sequence[Verdict]]) -> list[Verdict]:
    """The verdicts of runs whose test parts are the folds of every client, one per client.

    A client with fewer samples than folds is not tested in all of them; one that is tested once has no interval.
    """
    return [
        _combined(of_client, sum(v.samples for v in of_client), folds=len(of_client))
        for of_client in _by_client(folds).values()
    ]


def _by_client(runs: Sequence[Sequence[Verdict]]) -> dict[ClientId, list[Verdict]]:
    by_client: dict[ClientId, list[Verdict]] = {}
    for run in runs:
        for verdict in run:
            by_client.setdefault(verdict.client, []).append(verdict)
    return by_client


def _combined(of_client: Sequence[Verdict], samples: int, seeds: int = 1, folds: int = 1) -> Verdict:
    """One verdict of several on the same client; `samples` are the different test samples of a client."""
    first = of_client[0]
    test_fraction = sum(v.samples for v in of_client) / max(sum(v.trained for v in of_client), 1)
    means = {}
    for key in first.gains:
        of_key = [v.gains[key] for v in of_client if key in v.gains]
        if len(of_key) < len(of_client) or not all(math.isfinite(gain.gain) for gain in of_key):
            continue
        if first.tested and all(v.tested == first.tested for v in of_client):
            test = same_samples(of_key)
        else:
            test = refits([gain.gain for gain in of_key], test_fraction, error_of_samples(of_key))
        needed = needed_samples(samples, test.mean, test.high - test.mean)
        low, high = (test.low, test.high) if key == "rmse" else (max(-1.0, test.low), min(1.0, test.high))
        means[key] = Gain(samples, test.mean, low, high, test.p, needed)
    if first.measure.key not in means:  # a model diverged
        means = {first.measure.key: Gain(samples, math.nan, -math.inf, math.inf, 1.0)}
    return replace(
        first,
        model=_common([v.model for v in of_client]),
        arch=_common([v.arch for v in of_client]),
        local_arch=_common([v.local_arch for v in of_client]),
        value=_mean([v.value for v in of_client]),
        local=_mean([v.local for v in of_client]),
        constant=_mean([v.constant for v in of_client]),
        gains=means,
        samples=samples,
        seeds=seeds,
        folds=folds,
    )


def _common(words: Sequence[str]) -> str:
    return words[0] if len(set(words)) == 1 else "several"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def write(run: Path, verdicts: Sequence[Verdict], name: str = NAME) -> None:
    """Write the verdicts of a run."""
    write_json(run / name, sealed(finite({"verdicts": [plain(verdict) for verdict in verdicts]})))


def plain(verdict: Verdict) -> dict[str, Any]:
    """As plain data, with the decision, whether the two are equivalent within the margin, and the sentence."""
    return asdict(verdict) | {name: getattr(verdict, name) for name in ("decision", "equivalent")} | {"words": verdict.words()}


def command(run: Path) -> str:
    """The command that tells whether joining helped. The sites of a deployment ask themselves."""
    return "fedme deploy verdict site.toml" if deployed(run) else f"fedme verdict {shlex.quote(str(run))}"


def strongest(run: Path) -> list[Verdict] | None:
    """The verdicts of a run over folds, if they were asked for, else those on its test parts."""
    over = read(run, FOLDS)
    return over if over is not None else read(run)


def read(run: Path, name: str = NAME) -> list[Verdict] | None:
    """The verdicts of a run; None if they were not computed."""
    path = run / name
    try:
        table = unsealed(json.loads(path.read_text(encoding="utf-8")))
        return [_verdict(row) for row in table["verdicts"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path}: cannot be read: {error}; `fedme verdict` writes it again") from error


def _verdict(row: Mapping[str, Any]) -> Verdict:
    values = {key: value for key, value in row.items() if key not in ("decision", "equivalent", "words", "gains")}
    measured = {}
    for key, gain in row["gains"].items():  # a number that is not finite was written as null
        end = {"join": math.inf, "do not join": -math.inf}.get(row["decision"])
        low, high = (gain[name] if gain[name] is not None else missing for name, missing in (("low", end), ("high", end)))
        low, high = -math.inf if low is None else low, math.inf if high is None else high
        p = math.nan if gain["p"] is None else gain["p"]
        middle = gain["gain"] if gain["gain"] is not None else math.nan if end is None else end
        measured[key] = Gain(gain["samples"], middle, low, high, p, gain["needed"])
    return Verdict(**values, gains=measured)
