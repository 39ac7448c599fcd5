"""Epsilon is what it says: accountants agree, methods spend what was planned, and who tries finds no more than it allows."""

import itertools
import logging
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from rich.console import Console
from scipy import stats
from torch import nn

from fedme.auditing.run_audit import EVERYBODY, audit
from fedme.core.data import Arrays, Split
from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, GaussianMechanism, Train
from fedme.execution.dispatcher import Dispatcher
from fedme.learning.accountant import ORDERS, PrivacyCost, epsilon
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD
from fedme.methods import METHODS
from fedme.results import summary
from fedme.running.progress import Display
from fedme_reliability.frame import Row
from fedme_test_runs import do

DELTA = 1e-5
SMALL = ["rounds=3", "train.epochs=1", "finetune.epochs=1"]
MORE = {
    "fedmd": ["method.public_epochs=1", "method.private_epochs=1"],
    "mapper": ["method.lambdas=[0.0, 0.5, 1.0]"],
    "centralized": ["finetune.epochs=0"],
}
AUDITED = [
    "data.test=0.5",
    "data.limit=600",
    "data.val=0.1",
    "data.stratify=false",
    "partition.name=dirichlet",
    "partition.clients=10",
    "partition.alpha_label=1.0",
    "models.pool=['dnn-32','dnn-64']",
    "models.shared=dnn-64",
    "rounds=10",
    "evaluate_every=10",
    "train.epochs=5",
    "train.batch=10",
    "train.lr=0.3",
    "train.momentum=0.0",
    "finetune.epochs=0",
]


def agree(rate: float, noise: float, steps: int) -> bool:
    """Whether ours is what another accountant says with the same orders, and not below what is exact but for rounding."""
    event = SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)
    whole = [order for order in ORDERS if order == int(order)]
    renyi = RdpAccountant(whole).compose(event).get_epsilon(DELTA)
    tight = PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(DELTA)
    ours = epsilon((PrivacyCost(rate, noise, steps),), DELTA)
    return 0.99 * tight <= ours <= renyi * (1 + 1e-6)


def spent(method: str, target: float, place: Path) -> bool:
    """Whether every client of a run ends within its epsilon, and has used nearly all of it."""
    words = [*SMALL, f"method={method}", f"privacy.epsilon={target}", *MORE.get(method, [])]
    folder = do(Path(tempfile.mkdtemp(dir=place)) / "run", *words)
    found = [value for value in summary.read(folder)["privacy"]["epsilon"].values() if value]
    return bool(found) and all(0.98 * target < value <= target for value in found)


def told_apart(noise: float, steps: int, trials: int) -> tuple[float, float]:
    """What is claimed, and what a game shows: trainings with and without one sample, of the largest gradient that there is.

    The other samples have no gradient at all, which is the worst case. A threshold is chosen on half of the trials; on the
    other half, the rates of true and false alarms bound epsilon from below (95 % sure): the smallest that goes with them.
    """
    samples, clip, rate = 10, 1.0, 0.3
    batch = 3
    x = torch.zeros(samples + 1, 4, dtype=torch.float64)
    x[samples] = 100.0
    source = Arrays(x, torch.zeros(samples + 1, dtype=torch.int64))
    model = Model.init(Arch(nn.Linear, in_features=4, out_features=3, bias=False), Key(0), torch.float64)
    optimizer = SGD(CrossEntropy(), 1e-6)  # so small a rate that the gradient stays what it is
    probability = model(x[samples:]).softmax(-1)[0]
    direction = torch.outer(probability - torch.eye(3, dtype=torch.float64)[0], x[samples])
    direction /= direction.norm()

    def scores(rows: torch.Tensor, name: str) -> np.ndarray:
        local = BatchSchedule(batch=batch, steps=steps, poisson=True)
        ops = [
            Train(
                {"own": model},
                optimizer,
                Split(source, rows),
                local,
                Key(1).at(name, i),
                mechanism=GaussianMechanism(clip, noise),
            )
            for i in range(trials)
        ]
        done = [value.models["own"].params["weight"] - model.params["weight"] for value, _ in Dispatcher()(ops)]
        return np.array([float(-(moved * direction).sum()) for moved in done])

    without, having = scores(torch.arange(samples), "without"), scores(torch.arange(1, samples + 1), "with")
    claimed = epsilon((PrivacyCost(rate, noise, steps),), DELTA)
    half = trials // 2
    best = max(
        np.quantile(without[:half], np.linspace(0.5, 0.999, 60)), key=lambda at: _lower(without[:half], having[:half], at)
    )
    return claimed, _lower(without[half:], having[half:], float(best))


def _lower(without: np.ndarray, having: np.ndarray, threshold: float) -> float:
    """The least epsilon with which these alarms are likely: true <= e^epsilon * false + delta."""
    false, true, count = int((without > threshold).sum()), int((having > threshold).sum()), len(without)
    most_false = float(stats.beta.ppf(0.975, false + 1, count - false)) if false < count else 1.0
    least_true = float(stats.beta.ppf(0.025, true, count - true + 1)) if true else 0.0
    return max(0.0, math.log(max(least_true - DELTA, 1e-12) / most_false))


def leaks(method: str, words: list[str], place: Path) -> tuple[float, list[dict[str, object]]]:
    """The accuracy of a run's personal models, and what an audit of it finds over all clients."""
    folder = do(Path(tempfile.mkdtemp(dir=place)) / "run", *AUDITED, f"method={method}", *words)
    result = summary.read(folder)["results"]
    accuracy = next(r["accuracy"]["client_mean"] for r in result if (r["model"], r["split"]) == ("personal", "test"))
    found = audit(folder, Display(Console(quiet=True), quiet=True), 16)["rows"]
    return accuracy, [row for row in found if row["client"] == EVERYBODY]


def rows(display: Display, quick: bool) -> Iterator[Row]:
    """All of it."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    grid = list(itertools.product((0.004, 0.05, 0.3, 0.8, 1.0), (0.8, 2.0, 6.0), (1, 30, 900)))[:: 9 if quick else 1]
    display.start("accountants", len(grid))
    held = 0
    for point in grid:
        held += agree(*point)
        display.advance()
    yield Row("epsilon: a second accountant agrees, and no epsilon is below the exact one", len(grid), held)
    games = [(1.0, 1), (2.0, 10)] if quick else [(0.7, 1), (1.0, 1), (2.0, 1), (1.0, 5), (2.0, 20)]
    display.start("games", len(games))
    held, shown = 0, []
    for noise, steps in games:
        claimed, lower = told_apart(noise, steps, 400 if quick else 3000)
        held += 0 < lower <= claimed or (quick and lower <= claimed)
        shown.append(f"{lower:.2f} of {claimed:.2f}")
        display.advance()
    yield Row(
        "epsilon: a sample with the largest gradient is detected no better than epsilon allows",
        len(games),
        held,
        ", ".join(shown),
    )
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        methods = ["fedme", "fedavg"] if quick else list(METHODS)
        targets = [4.0] if quick else [1.0, 8.0]
        display.start("methods", len(methods) * len(targets))
        held = 0
        for method, target in itertools.product(methods, targets):
            held += spent(method, target, place)
            display.advance()
        yield Row(
            "epsilon: runs end within their budget and use nearly all of it",
            len(methods) * len(targets),
            held,
            f"{len(methods)} methods",
        )
        audited = ["fedavg"] if quick else ["fedme", "fedavg", "fml"]
        display.start("audits", len(audited))
        for method in audited:
            (open_accuracy, before), (closed_accuracy, after) = (leaks(method, w, place) for w in ([], ["privacy.epsilon=8"]))
            pairs = [(a, b) for a, b in zip(before, after, strict=True) if a["seen by"] == "server"]
            figures = [_figures(a, b) for a, b in zip(before, after, strict=True)]
            worst = max(float(a["auc"]) for a, _ in pairs), max(float(b["auc"]) for _, b in pairs)
            display.advance()
            detail = f"accuracy {100 * open_accuracy:.1f} and {100 * closed_accuracy:.1f} %; AUC " + "; ".join(figures)
            yield Row(
                f"audit of {method}: the server learns less with epsilon 8 than without", 1, int(worst[1] < worst[0]), detail
            )


def _figures(a: dict[str, object], b: dict[str, object]) -> str:
    def one(row: dict[str, object]) -> str:
        return (
            f"{row['auc']:.3f} ± {(float(row['auc_high']) - float(row['auc_low'])) / 2:.3f}, {100 * float(row['found']):.1f} %"
        )

    return f"{a['seen by']} {a['model']} {a['attack']}: {one(a)} / {one(b)}"
