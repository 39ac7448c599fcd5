"""The runs of a federation: one folder per run, which the operator's command or the server app prepares."""

import json
import secrets
from pathlib import Path

from fedme.config.experiment import Experiment, to_toml
from fedme.core.atomic_files import RunError, locked, write_json, write_text
from fedme.deployment.operator_folder import Federation
from fedme.deployment.site_data import with_server_data
from fedme.deployment.site_settings import agreed_task, read_experiment
from fedme.results import loggers, summary
from fedme.running.run import environment

TOKEN, SITES, LOG, FAILED = "run.json", "sites.json", "server.log", "failed.txt"


def read(federation: Federation, file: Path) -> Experiment:
    """Read an experiment and check that sites can run it."""
    experiment = read_experiment(file)
    loggers.require_packages(experiment.settings.log)
    task, _ = agreed_task(experiment)
    experiment.method.check(with_server_data(task, federation.folder, experiment))
    return experiment


def free_folder(federation: Federation, experiment: Experiment) -> Path:
    """A folder for a new run, which does not exist yet."""
    name, number = experiment.settings.name, 1
    while (federation.runs / name).exists():
        number += 1
        name = f"{experiment.settings.name}-{number}"
    return federation.runs / name


def create(federation: Federation, file: Path) -> Path:
    """Create the folder of a new run of this experiment."""
    experiment = read(federation, file)
    folder = free_folder(federation, experiment)
    folder.mkdir(parents=True)
    write_text(folder / summary.CONFIG, to_toml(experiment.plain() | {"output": str(folder)}))
    token(folder)
    return folder


def token(folder: Path) -> str:
    """The run's name at the sites: unique and impossible to guess."""
    path = folder / TOKEN
    if not path.exists():
        write_json(folder / "environment.json", environment())
        write_json(path, {"run": secrets.token_hex(8)})
    return str(json.loads(path.read_text())["run"])


def all_runs(federation: Federation) -> list[Path]:
    """The folders of all runs, oldest first."""
    folders = [path.parent for path in federation.runs.glob(f"*/{TOKEN}")]
    return sorted(folders, key=lambda folder: (folder / TOKEN).stat().st_mtime_ns)


def done(folder: Path) -> bool:
    """Whether all rounds are done."""
    return (folder / summary.NAME).exists()


def without_model(folder: Path) -> list[str]:
    """The sites of a finished run that were not connected when the models were delivered."""
    path = folder / SITES
    if not done(folder) or not path.exists():
        return []
    return [name for name, site in json.loads(path.read_text()).items() if not site["has_model"]]


def unfinished(federation: Federation) -> Path:
    """The newest run that is not done, else the newest with sites that have no model yet."""
    runs = all_runs(federation)
    candidates = [run for run in runs if not done(run)] or [run for run in runs if without_model(run)]
    if not candidates:
        raise RunError(f"{federation.runs}: there is no unfinished run to resume")
    return candidates[-1]


def running(folder: Path) -> bool:
    """Whether a process uses this folder: a server app its run, or the server its own folder."""
    try:
        with locked(folder):
            return False
    except RunError:
        return True
