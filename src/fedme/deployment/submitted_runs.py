"""The runs of a federation: a folder each, which the operator's command or the server app makes ready."""

import json
import secrets
from pathlib import Path

from fedme.config.experiment import Experiment, to_toml
from fedme.core.atomic_files import RunError, locked, write_json, write_text
from fedme.deployment.operator_folder import Federation
from fedme.deployment.site_data import with_own_data
from fedme.deployment.site_settings import agreed, read_experiment
from fedme.results import loggers, summary
from fedme.running.run import environment

TOKEN, SITES, LOG, FAILED = "run.json", "sites.json", "server.log", "failed.txt"


def read(federation: Federation, file: Path) -> Experiment:
    """The experiment of a file, if sites can run it."""
    experiment = read_experiment(file)
    loggers.require_packages(experiment.settings.log)
    task, _ = agreed(experiment)  # every architecture of the catalogue can be built
    experiment.method.check(with_own_data(task, federation.folder, experiment))
    return experiment


def free(federation: Federation, experiment: Experiment) -> Path:
    """A folder for a new run, which is not there yet."""
    name, number = experiment.settings.name, 1
    while (federation.runs / name).exists():
        number += 1
        name = f"{experiment.settings.name}-{number}"
    return federation.runs / name


def new(federation: Federation, file: Path) -> Path:
    """Make the folder of a new run of this experiment."""
    experiment = read(federation, file)
    folder = free(federation, experiment)
    folder.mkdir(parents=True)
    write_text(folder / summary.CONFIG, to_toml(experiment.plain() | {"output": str(folder)}))
    token(folder)
    return folder


def token(folder: Path) -> str:
    """What a run is called at the sites: a name that nobody can guess, and that no other run has."""
    path = folder / TOKEN
    if not path.exists():
        write_json(folder / "environment.json", environment())
        write_json(path, {"run": secrets.token_hex(8)})
    return str(json.loads(path.read_text())["run"])


def every(federation: Federation) -> list[Path]:
    """The folders of all runs, the oldest first."""
    found = [path.parent for path in federation.runs.glob(f"*/{TOKEN}")]
    return sorted(found, key=lambda folder: (folder / TOKEN).stat().st_mtime_ns)


def done(folder: Path) -> bool:
    """Whether all rounds are done."""
    return (folder / summary.NAME).exists()


def without_model(folder: Path) -> list[str]:
    """The sites that have taken part in a run that is done, but were away when the models were handed out."""
    path = folder / SITES
    if not done(folder) or not path.exists():
        return []
    return [name for name, known in json.loads(path.read_text()).items() if not known["has_model"]]


def unfinished(federation: Federation) -> Path:
    """The newest run with rounds to do, else the newest that owes a site its model."""
    known = every(federation)
    found = [run for run in known if not done(run)] or [run for run in known if without_model(run)]
    if not found:
        raise RunError(f"{federation.runs}: there is no unfinished run to go on with")
    return found[-1]


def running(folder: Path) -> bool:
    """Whether a process has this folder: a server app its run, or the server its own."""
    try:
        with locked(folder):
            return False
    except RunError:
        return True
