"""More rounds for a run: `fedme resume DIR rounds=60`, or `fit` with more rounds and the same output.

The rounds so far must be those that a run of 60 rounds has too, so a run whose training depends on the number of rounds is
refused. `environment.json` keeps the earlier numbers of rounds. A power cut loses nothing: until `config.toml` is replaced,
which is the last step, the run is what it was, and afterwards it is one that was stopped.
"""

import shutil
from pathlib import Path

from fedme.artifacts.saved_models import CLIENTS
from fedme.config.experiment import Experiment, to_toml
from fedme.config.named_code import CONFIG
from fedme.core.atomic_files import RunError, sealed, write_json, write_text
from fedme.results import run_directory, summary

STALE = (summary.NAME, "verdicts.json", "verdicts-folds.json", "audit.json", "folds/*/verdicts.json")  # of the shorter run


def extend(folder: Path, experiment: Experiment, rounds: int) -> None:
    """Give the run in a directory, which the caller has locked, this many rounds. `experiment` is the run as it is."""
    before = summary.config_of(folder)["rounds"]
    if rounds == before:
        return
    if rounds < before:
        raise RunError(f"{folder}: has {before} rounds, which can only become more, got rounds={rounds}")
    if reason := obstacle(experiment):
        raise RunError(f"{folder}: cannot be extended from {before} to {rounds} rounds: {reason}; start a new run")
    environment = run_directory.read_environment(folder)
    earlier = [*run_directory.earlier_rounds(folder), before]
    write_json(folder / run_directory.ENVIRONMENT, sealed(environment | {"earlier_rounds": list(dict.fromkeys(earlier))}))
    for pattern in STALE:
        for path in folder.glob(pattern):
            path.unlink()
    write_text(folder / CONFIG, to_toml(summary.config_of(folder) | {"rounds": rounds}))


def remove_models(folder: Path) -> None:
    """Remove the models of the shorter run, before an extended run goes on: it may choose others. Its states are kept."""
    if any(rounds < summary.config_of(folder)["rounds"] for rounds in run_directory.earlier_rounds(folder)):
        shutil.rmtree(folder / CLIENTS, ignore_errors=True)


def obstacle(experiment: Experiment) -> str:
    """Why the rounds so far would have been different in a longer run; empty if they would not."""
    settings, method = experiment.settings, experiment.method
    if experiment.data_name == "sites":
        return "the sites have agreed to this number of rounds"
    if settings.train.lr_schedule != "constant":
        return f"train.lr_schedule = '{settings.train.lr_schedule}' depends on the number of rounds"
    if settings.privacy is not None and settings.privacy.epsilon is not None:
        return f"the noise is calibrated so that all rounds together spend privacy.epsilon = {settings.privacy.epsilon:g}"
    if settings.privacy is not None and settings.privacy.secret:
        return "the secret seed of the noise (privacy.secret) is deleted when a run ends"
    chosen = method.own_architectures and settings.models.assign == "best-local"
    if chosen and settings.models.selection_rounds is None:
        return (
            "models.assign = 'best-local' has chosen the architectures by as many rounds; models.selection_rounds sets a number"
        )
    return method.depends_on_rounds()
