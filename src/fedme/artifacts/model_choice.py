"""Which of its models a client uses at the end: chosen on its validation part, never on its test part.

The candidates were computed anyway: its personal model ("model"), the fine-tuned one, the server's model ("global"), its
personal model after the best round by validation ("best"), and the model trained alone ("local") where that was trained. The
client keeps its personal model unless another is better by more than one standard error of the paired difference on the
validation samples; of several such models it takes the best.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from fedme.artifacts import model_pack
from fedme.artifacts.model_pack import PackWriter
from fedme.core.atomic_files import RunError, finite, sealed, unsealed, write_json
from fedme.core.task_types import TaskType, task_type_of
from fedme.results.statistics import Array
from fedme.results.verdicts import scores_per_sample

NAME = "choice.json"
OWN = "model"
ROUNDING = 1e-9  # a single better sample is better by exactly one standard error, which is not enough
TITLES = {
    "model": "own model",
    "finetuned": "fine-tuned model",
    "global": "server's model",
    "best": "model of its best round",
    "local": "model trained alone",
}


@dataclass(frozen=True)
class Candidate:
    """A model beside the client's own on the validation part: mean difference per sample, and its standard error."""

    difference: float
    error: float


@dataclass(frozen=True)
class Choice:
    """The name of the chosen model, the reason, and all candidates."""

    name: str
    why: str
    candidates: Mapping[str, Candidate]


def choose(outputs: Mapping[str, Tensor], targets: Tensor | None) -> Choice:
    """Choose by the outputs of every model on the validation part, with the client's own under "model"."""
    if targets is None or len(targets) < 2:
        return Choice(OWN, "there are no two validation samples to compare models on", {})
    task = task_type_of(targets)
    scores = {name: scores_per_sample(task, outputs[name], targets) for name in TITLES if name in outputs}
    own = scores.pop(OWN)
    candidates = {name: _compared(of_model, own) for name, of_model in scores.items()}
    better = {name: c for name, c in candidates.items() if c.difference > (1 + ROUNDING) * c.error}
    if not better:
        others = " or ".join(f"the {TITLES[name]}" for name in candidates)
        why = f"{others} is not better by one standard error on the validation part" if others else "there is no other"
        return Choice(OWN, why, candidates)
    # Not by the difference: beside the errors of an own model that diverged, those of all others are rounded off.
    name = max(better, key=lambda name: float(scores[name].mean()))  # of equal ones the first
    return Choice(name, f"better than the own model on the validation part by {_amount(task, better[name])}", candidates)


def _compared(scores: Array, own: Array) -> Candidate:
    """The mean difference and its standard error; a model whose errors are not finite is never better."""
    finite_scores, finite_own = bool(np.isfinite(scores).all()), bool(np.isfinite(own).all())
    if not finite_scores or not finite_own:
        return Candidate(math.inf if finite_scores else -math.inf, 0.0)
    differences = scores - own
    return Candidate(float(differences.mean()), float(differences.std(ddof=1)) / math.sqrt(len(differences)))


def _amount(task: TaskType, candidate: Candidate) -> str:
    if task == "regression":
        return f"{candidate.difference:.3g} in squared error (standard error {candidate.error:.2g}; standardised targets)"
    return f"{100 * candidate.difference:.1f} points (standard error {100 * candidate.error:.1f})"


def write(folder: Path, choice: Choice, pack: PackWriter | None = None) -> None:
    """Write a client's choice beside its models, or add it to a pack."""
    if pack is not None:
        return pack.add_choice(folder.name, asdict(choice))
    folder.mkdir(parents=True, exist_ok=True)  # of a client whose models are packed
    write_json(folder / NAME, sealed(finite(asdict(choice))))


def read(folder: Path) -> Choice | None:
    """A client's choice; None in the runs of earlier versions."""
    path = folder / NAME
    try:
        packed = None if path.exists() else model_pack.choice(folder)
        table = unsealed(json.loads(path.read_text(encoding="utf-8"))) if packed is None else packed
        name, why = table["name"], table["why"]
        if name not in TITLES or not isinstance(why, str):
            raise ValueError(f"unknown model {name!r}")
        numbers = {
            key: Candidate(*(math.nan if value[f] is None else float(value[f]) for f in ("difference", "error")))
            for key, value in table["candidates"].items()
        }
        return Choice(name, why, numbers)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error


def chosen(folder: Path) -> str:
    """The name of the model that a client uses."""
    choice = read(folder)
    return OWN if choice is None else choice.name
