"""Verdicts over folds: the federation is trained again for each of k test parts, so that every sample is a test sample once.

Every fold is an ordinary run in `folds/` of the run directory, with `data.fold` set. A fold that is finished is never computed
again, and one that was stopped goes on from its last checkpoint.
"""

from dataclasses import replace
from pathlib import Path

from fedme.config.experiment import Experiment
from fedme.config.named_code import command_for
from fedme.core.atomic_files import RunError
from fedme.results import summary, verdicts
from fedme.results.verdicts import Verdict
from fedme.running import local_baseline, run
from fedme.running.local_training_name import FOLDER as LOCAL
from fedme.running.progress import Display
from fedme.running.round_loop import Interrupted

FOLDER = "folds"  # in a run directory


def judge(folder: Path, experiment: Experiment, folds: int, display: Display, cache: Path | None = None) -> list[Verdict]:
    """The verdict for every client of a finished run, over all its samples. `cache` is that of `local_baseline.judge`."""
    if folds < 2:
        raise RunError(f"folds must be >= 2, got {folds}")
    if experiment.data.fold is not None:
        raise RunError(f"{folder}: is a fold itself ({experiment.data.fold}); ask for the folds of a run without data.fold")
    if not (folder / summary.NAME).exists():
        raise RunError(f"{folder}: the run is not finished; `{command_for(folder)}` continues it")
    if experiment.data_name == "sites":
        raise RunError(f"{folder}: the samples are at the sites, which would have to train again for every fold")
    judged = []
    for number in range(1, folds + 1):
        at = folder / FOLDER / f"{number}-of-{folds}"
        if (at / verdicts.NAME).exists():
            judged.append(verdicts.read(at) or [])
            continue
        display.note(f"fold {number} of {folds}: training the federation, in {at}", always=True)
        supplied = experiment.supplied and replace(experiment.supplied, callbacks=())  # they observe the run, not its folds
        again = replace(
            experiment,
            supplied=supplied,
            data=replace(experiment.data, test=None, fold=f"{number}/{folds}"),
            settings=replace(experiment.settings, output=str(at), log=()),
        )
        try:
            run.start_or_resume(at, again, display)
            judged.append(local_baseline.judge(at, again, display, cache or folder.resolve().parent / LOCAL))
        except Interrupted:
            finished = f"{number - 1} of {folds} folds are finished"
            command = f"`{command_for(folder, 'verdict')} --folds {folds}`"
            raise Interrupted(f"stopped; {finished}, and {command} continues") from None
    combined = verdicts.over_folds(judged)
    verdicts.write(folder, combined, verdicts.FOLDS)
    return combined
