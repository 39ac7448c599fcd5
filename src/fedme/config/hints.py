"""Notes about settings that are given but have no effect with the chosen method."""

from fedme.config.experiment import Experiment
from fedme.config.settings import Settings
from fedme.core.method import Round


def hints(experiment: Experiment) -> list[str]:
    """One line per setting without effect."""
    settings, method, name = experiment.settings, experiment.method, experiment.method_name
    notes = [
        f"{name} does not use {setting}: it has no effect"
        for setting in method.unused_settings
        if _value(settings, setting) != _value(Settings(), setting)
    ]
    notes += method.hints(experiment.has_unlabeled)
    if method.uses_shared_model and settings.models.shared is None:
        specs = list(experiment.own_models.values()) or list(settings.models.pool)
        if any(spec != specs[0] for spec in specs):
            notes.append(f"the shared model is {specs[0]}, the first; models.shared chooses another")
    if settings.defence.average != "mean" and not hasattr(method, "defence"):
        notes.append(f"{name} does not average models: defence.average has no effect")
    if settings.privacy is not None and settings.train.last_batch != Settings().train.last_batch:
        notes.append("batches are Poisson samples under [privacy] and have no last one: train.last_batch has no effect")
    rate = settings.train.lr_at(Round(settings.rounds - 1, settings.rounds))
    if settings.finetune.epochs and settings.train.lr_schedule == "cosine" and rate < settings.train.lr / 10:
        notes.append(f"fine-tuning has the learning rate of the last round, {rate:.2g}; train.lr_min raises it")
    if not method.own_architectures and settings.models.assign != "round-robin":
        notes.append(f"all clients of {name} have the shared model: models.assign has no effect")
    return notes


def _value(settings: Settings, dotted: str) -> object:
    table, _, field = dotted.partition(".")
    return getattr(getattr(settings, table), field)
