"""The runs of a federation: one folder per run, which the operator's command or the server app prepares."""

import json
import secrets
from pathlib import Path

from fedme.config.experiment import Experiment, to_toml
from fedme.core.atomic_files import RunError, is_locked, write_json, write_text
from fedme.core.method import Member
from fedme.deployment import attempts
from fedme.deployment.operator_folder import Federation
from fedme.deployment.site_data import with_server_data
from fedme.deployment.site_settings import agreed_task, read_experiment, with_members
from fedme.learning.robust_aggregation import defence_of, require_enough_copies
from fedme.results import loggers, records, summary
from fedme.running.privacy_budget import require_private
from fedme.running.run import environment

TOKEN, SITES, LOG = "run.json", "sites.json", "server.log"


def read(federation: Federation, file: Path) -> Experiment:
    """Read an experiment and check that sites can run it."""
    experiment = read_experiment(file)
    loggers.require_packages(experiment.settings.log)
    require_private(experiment)
    agreed, archs = agreed_task(experiment)
    task = with_server_data(agreed, federation.folder, experiment)
    experiment.method.check(task)
    if experiment.method.own_architectures:
        for name, arch in archs.items():  # otherwise the run would wait for sites that it can only refuse
            experiment.method.check(with_members(task, {name: Member(name, arch, task.schema.classes)}))
    known = [] if federation.settings.insecure else [len(federation.keys())]  # without keys anybody may come
    for clients in (*known, experiment.settings.train.cohort):
        if clients is not None:
            require_enough_copies(defence_of(experiment.method), clients)
    return experiment


def free_folder(federation: Federation, experiment: Experiment) -> Path:
    """A folder for a new run, which does not exist yet."""
    name, number = experiment.settings.name, 1
    while (federation.runs / name).exists():
        number += 1
        name = f"{experiment.settings.name}-{number}"
    return federation.runs / name


def same_experiment(federation: Federation, experiment: Experiment) -> Path | None:
    """The newest run of this experiment that is not done and was not ended on purpose."""
    wanted = experiment.plain() | {"output": None}
    for folder in reversed(all_runs(federation)):
        failed = attempts.failure(folder)
        ended = done(folder) or (failed is not None and failed.final)
        if not ended and read_experiment(folder / summary.CONFIG).plain() | {"output": None} == wanted:
            return folder
    return None


def create(federation: Federation, experiment: Experiment) -> Path:
    """Create the folder of a new run of this experiment."""
    folder = free_folder(federation, experiment)
    federation.runs.mkdir(mode=0o700, exist_ok=True)  # models and what sites have written: for the operator only
    federation.runs.chmod(0o700)
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


def rounds_done(folder: Path) -> int:
    """The number of rounds in the records."""
    if not (folder / records.NAME).exists():
        return 0
    return max((row["round"] + 1 for row in records.read(folder)), default=0)


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
    return is_locked(folder)
