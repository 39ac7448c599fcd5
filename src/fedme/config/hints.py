"""Notes about settings that have no effect."""

from fedme.config.experiment import Experiment
from fedme.learning.schedules import most
from fedme.methods.fedme.fedme import FedMe


def hints(experiment: Experiment) -> list[str]:
    """One line per setting that is set but not used."""
    notes = []
    name, settings = experiment.method_name, experiment.settings
    if name in ("pfedme", "pfml") and (settings.train.momentum or settings.train.clip):
        notes.append(f"{name} uses plain gradient steps: train.momentum and train.clip have no effect")
    if isinstance(experiment.method, FedMe) and most(experiment.method.clusters) > 1 and not experiment.has_unlabeled:
        notes.append("method.clusters has no effect: without unlabeled data all models are in one cluster; set data.unlabeled")
    if name not in ("local", "fedme", "fedmd") and settings.models.shared is None:
        specs = list(experiment.own_models.values()) or list(settings.models.pool)
        if any(spec != specs[0] for spec in specs):
            notes.append(f"the shared model is {specs[0]}, the first architecture; set models.shared to use another")
    if settings.defence.average != "mean" and not hasattr(experiment.method, "defence"):
        notes.append(f"{name} does not average models: defence.average has no effect")
    if settings.defence.guest is not None and not isinstance(experiment.method, FedMe):
        notes.append(f"{name} does not exchange models: defence.guest has no effect")
    if not experiment.method.own_architectures and settings.models.assign != "round-robin":
        notes.append(f"all clients of {name} use the shared model: models.assign has no effect")
    return notes
