"""Does joining help this site? Computed at the site, from its own samples and its saved models; nothing is sent."""

import contextlib
from pathlib import Path

from fedme.artifacts import local_models, model_choice, saved_models
from fedme.core.atomic_files import RunError
from fedme.core.key import Key
from fedme.deployment import transfer_log
from fedme.deployment.site_data import client_data
from fedme.deployment.site_settings import Site
from fedme.execution.lockstep import run_in_lockstep
from fedme.results.verdicts import Verdict
from fedme.running import assembly
from fedme.running.progress import Display


def judge(site: Site, run: str | None, display: Display) -> tuple[Path, Verdict]:
    """The folder of the site's models, and the verdict on those of a run, the newest finished one by default.

    Alone, the site trains every architecture that it accepts, for as many rounds as it sent models in the run.
    """
    name, folder = site.settings.name, _folder(site, run)
    data = client_data(site)
    if not len(data.test):
        raise RunError(f"site {name} has no test samples, so there is nothing to compare on; set data.test in the experiment")
    task, accepted = site.task()
    schema, settings = task.schema, site.experiment.settings
    if not (folder / f"{local_models.FILE}.json").exists():
        rounds = _rounds(site, folder.parents[1].name)
        # A site with a label space of its own trains its own network: the others answer with other classes.
        others = accepted.values() if len(site.labels) == len(schema.classes) else ()
        pool = list({arch.name: arch for arch in [task.members[name].arch, *others]}.values())
        display.note(f"training {name} on its own samples alone, to compare")
        display.start("alone: training", len(pool) * (rounds + 1) + 2, by_operation=True)
        key = Key(settings.seed).at("local", name)
        dtype = assembly.DTYPES[settings.engine.dtype]
        work = local_models.train_client(data, pool, settings.train, rounds, key, dtype, settings.models.update_bn, schema.unit)
        with contextlib.closing(assembly.executor(settings.engine, display.tick)) as execute:
            local = run_in_lockstep({name: work}, execute)[name].value
        local_models.save(folder, data, local, schema, site.labels, rounds)
    return folder, local_models.verdict_of(folder, folder, data, schema)


def _rounds(site: Site, run: str) -> int:
    """The rounds of a run in which the site trained, from its log of transfers."""
    transfers = [transfer for transfer in transfer_log.read(site.records) if "losses" in transfer["with"]]
    sent = {transfer["round"] for transfer in transfers if (transfer["what"], transfer["run"]) == ("sent", run)}
    return min(len(sent), site.experiment.settings.rounds) or site.experiment.settings.rounds


def choice_of(folder: Path) -> str:
    """Which model the site uses, and why."""
    choice = model_choice.read(folder)
    assert choice is not None
    return f"uses its {model_choice.TITLES[choice.name]}: {choice.why}"


def _folder(site: Site, run: str | None) -> Path:
    """The folder of the site's models in a run."""
    name, runs = site.settings.name, site.state / "runs"
    finished = [
        folder for folder in runs.glob("*") if (saved_models.folder_of(folder, name) / f"{model_choice.OWN}.json").exists()
    ]
    if run is not None:
        finished = [folder for folder in finished if folder.name == run]
    if not finished:
        raise RunError(f"{runs}: no models of a finished run{f' {run}' if run else ''}; a site saves them after the last round")
    newest = max(
        finished, key=lambda folder: (saved_models.folder_of(folder, name) / f"{model_choice.OWN}.json").stat().st_mtime
    )
    return saved_models.folder_of(newest, name)
