"""What a reader of the results should know about settings that are there but not used."""

from fedme.config.experiment import Experiment
from fedme.learning.schedules import most
from fedme.methods.fedme.fedme import FedMe


def hints(experiment: Experiment) -> list[str]:
    """One line each."""
    found = []
    settings, own = experiment.settings, experiment.own_models
    if experiment.method_name in ("pfedme", "pfml") and (settings.train.momentum or settings.train.clip):
        found.append(f"{experiment.method_name} takes plain gradient steps: train.momentum and train.clip are not used")
    if isinstance(experiment.method, FedMe) and most(experiment.method.clusters) > 1 and not experiment.has_unlabeled:
        found.append("without unlabeled data all models are in one cluster, whatever method.clusters says; set data.unlabeled")
    shares = experiment.method_name not in ("local", "fedme", "fedmd")
    if shares and settings.models.shared is None:
        specs = list(own.values()) or list(settings.models.pool)
        if any(spec != specs[0] for spec in specs):
            found.append(f"the shared model is {specs[0]}, the first; models.shared chooses another")
    if settings.defence.average != "mean" and not hasattr(experiment.method, "defence"):
        found.append(f"{experiment.method_name} averages nothing: defence.average is not used")
    if settings.defence.guest is not None and not isinstance(experiment.method, FedMe):
        found.append(f"{experiment.method_name} lends no models: defence.guest is not used")
    if not experiment.method.own_architectures and settings.models.assign != "round-robin":
        found.append(f"all clients of {experiment.method_name} have the shared model: models.assign is not used")
    return found
