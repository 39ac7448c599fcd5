"""One malicious client of twenty: what it costs the honest ones, method by method, without and with the defences.

Real data (the bundled digits, skewed labels), one architecture, accuracy on the test parts of the honest clients in the last
round. The same client is malicious in every run; it is in no mean, also of the runs in which it behaves.
"""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from fedme.config.experiment import parse
from fedme.methods import METHODS
from fedme.results import records
from fedme.running import run
from fedme.running.progress import Display
from fedme_reliability.frame import Row

MALICIOUS = "7"
KINDS = ("sign-flip", "label-flip", "huge-norm")
AVERAGING = [name for name in METHODS if name not in ("local", "centralized")]
DEFENCE = {"norm": 1.0, "average": "trimmed", "trim": 0.1, "guest": 2.0}
LOSS = 8.0  # points of accuracy that an attack may cost at most, beside the defended run without an attack
BASE: dict[str, Any] = {
    "rounds": 20,
    "evaluate_every": 20,
    "data": {"name": "digits", "public": 200, "stratify": False},
    "partition": {"name": "dirichlet", "clients": 20, "alpha_label": 1.0, "alpha_size": 10.0},
    "models": {"pool": ["dnn-16"]},
    "train": {"epochs": 2, "lr": 0.1, "momentum": 0.9},
    "engine": {"workers": 1},
}
OWN: dict[str, dict[str, Any]] = {
    "fedme": {"defence": {"average": "mean"}},  # it refuses robust averages: a model has two copies
    "hypcluster": {"defence": {"trim": 0.2}},  # a cluster may have fewer than the ten clients that 0.1 needs
    "fedmd": {"method": {"public_epochs": 5, "digest_loss": "mse"}, "train": {"lr": 0.02}},
    "pfedme": {"method": {"inner_lr": 0.05}},
    "pfml": {"method": {"lam": 1.0}},
}


def config(method: str, kind: str | None, defended: bool, base: Mapping[str, Any]) -> dict[str, Any]:
    """One experiment of the grid."""
    own = OWN.get(method, {})
    tables: dict[str, Any] = {
        "method": {"name": method, **own.get("method", {})},
        "train": {**base["train"], **own.get("train", {})},
        "defence": DEFENCE | own.get("defence", {}) if defended else {},
        "attack": {"clients": [MALICIOUS], "kind": kind} if kind else {},
    }
    return {**base, **tables}


def honest_accuracy(plain: Mapping[str, Any]) -> float:
    """The mean test accuracy of the honest clients' personal models after the last round, in %."""
    with tempfile.TemporaryDirectory() as place, Display(Console(quiet=True), quiet=True) as display:
        experiment = parse({**plain, "output": str(Path(place) / "run")})
        rows = list(records.read(run.start(experiment, display)))
    last = max(row["round"] for row in rows)
    wanted = {"round": last, "model": "personal", "stage": "round", "split": "test"}
    found = [row["accuracy"] for row in rows if wanted.items() <= row.items() and row["client"] != MALICIOUS]
    assert len(found) == plain["partition"]["clients"] - 1
    return 100 * sum(found) / len(found)


def rows(display: Display, quick: bool) -> Iterator[Row]:
    methods = ("fedavg", "fedme") if quick else AVERAGING
    base = {**BASE, "rounds": 3, "evaluate_every": 3} if quick else BASE
    display.start("poisoning", len(methods) * 2 * (1 + len(KINDS)))
    for method in methods:
        found: dict[tuple[bool, str | None], float] = {}
        for defended in (False, True):
            for kind in (None, *KINDS):
                found[defended, kind] = honest_accuracy(config(method, kind, defended, base))
                display.advance(method)
        yield row(method, found, quick)


def row(method: str, found: Mapping[tuple[bool, str | None], float], quick: bool = False) -> Row:
    """What the attacks cost; with the defences no attack may cost more than `LOSS` points."""
    calm = found[True, None]
    held = sum(quick or found[True, kind] >= calm - LOSS for kind in KINDS)
    words = [f"{kind or 'no attack'} {found[False, kind]:.1f} / {found[True, kind]:.1f}" for kind in (None, *KINDS)]
    what = f"{method}: a malicious client of 20 costs the others at most {LOSS:.0f} points with defences"
    return Row(what, len(KINDS), held, "accuracy % without / with: " + ", ".join(words))
