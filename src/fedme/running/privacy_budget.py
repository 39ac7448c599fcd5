"""The `[privacy]` table in a run: the noise of every client, what epsilon covers, and what lies outside of it."""

import functools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from fedme.config.experiment import ConfigError, Experiment
from fedme.config.settings import PrivacyOptions
from fedme.core.data import ClientData, ClientId
from fedme.core.method import POOL, PlannedTraining
from fedme.core.model import Arch
from fedme.core.operations import GaussianMechanism
from fedme.execution.sample_independence import require_separate
from fedme.federation.in_process import Occasion, Policies
from fedme.learning.accountant import Ledger, PrivacyCost, added, epsilon, noise_for, one_step, require_accountant
from fedme.learning.differential_privacy import PrivacyPolicy

SECRET = "noise.secret"  # the file with the seed of the noise, while a run with privacy.secret goes on


def require_private(experiment: Experiment) -> None:
    """Raise a ConfigError for what cannot be private, before anything is loaded or trained."""
    settings = experiment.settings
    if settings.privacy is None:
        return
    require_accountant()
    if experiment.method.not_private:
        raise ConfigError(
            f"privacy: cannot cover method '{experiment.method_name}': {experiment.method.not_private}; remove the table, or "
            "use a method that shares trained models"
        )
    if settings.models.assign == "best-local" and experiment.method.own_architectures:
        raise ConfigError(
            "models.assign: 'best-local' trains every architecture at every client without noise, which [privacy] would not "
            "cover; use 'round-robin', the name of one, or a table client = name"
        )
    if experiment.method.pooled and settings.finetune.epochs:
        raise ConfigError(
            "finetune.epochs: a client's samples would be used twice, in the pool and at the client, and counted separately; "
            f"it must be 0 with [privacy] and method '{experiment.method_name}'"
        )
    if settings.privacy.secret and settings.engine.name == "flower":
        raise ConfigError(
            "privacy.secret: it would have to be sent to the processes of Flower's simulation; use engine=inprocess"
        )


def require_private_training(experiment: Experiment, archs: Iterable[Arch], clients: Iterable[ClientData]) -> None:
    """Raise an error if the experiment asks for privacy and cannot be private: the gradient must be a sum over samples."""
    if experiment.settings.privacy is None:
        return
    require_private(experiment)
    largest = max((data.train for data in clients), key=len)
    for arch in archs if len(largest) else ():
        require_separate(arch, largest.inputs(torch.arange(3) % len(largest)))


def policies(experiment: Experiment, secret: int | None = None, limited: bool = True) -> Policies | None:
    """How the trainings of every client are made private; None if they are not. `limited` enforces epsilon and the plan."""
    options = experiment.settings.privacy
    if options is None:
        return None

    @functools.cache
    def noise(samples: int) -> float:
        return _noise(experiment, samples)

    @functools.cache
    def planned(samples: int, occasions: frozenset[Occasion]) -> Ledger:
        """What the trainings at these occasions cost."""
        costs: Ledger = ()
        for training in trainings(experiment, samples):
            steps = training.times * training.schedule.count(training.samples)
            if training.when in occasions and steps:
                noise_per_step = one_step(noise(samples), training.gradients)
                costs = added(costs, (PrivacyCost(training.schedule.rate(training.samples), noise_per_step, steps),))
        return costs

    def policy(data: ClientData, occasions: frozenset[Occasion]) -> PrivacyPolicy:
        mechanism = GaussianMechanism(options.clip, noise(len(data.train)))
        limit, plan = (options.epsilon, planned(len(data.train), occasions)) if limited else (None, None)
        return PrivacyPolicy(mechanism, options.delta, limit, secret, plan, experiment.method.reads_training_scores)

    return policy


def _noise(experiment: Experiment, samples: int) -> float:
    """The noise multiplier of a client with so many training samples."""
    options = experiment.settings.privacy
    assert options is not None
    if options.noise_multiplier is not None:
        return options.noise_multiplier
    assert options.epsilon is not None
    planned = [
        (training.schedule.rate(training.samples), times * training.schedule.count(training.samples), training.gradients)
        for training, times in whole_run(experiment, samples)
        if training.schedule.count(training.samples)
    ]
    return noise_for(options.epsilon, options.delta, planned) if planned else 0.0


def trainings(experiment: Experiment, samples: int) -> list[PlannedTraining]:
    """The trainings that the method announces, and fine-tuning, with Poisson-sampled batches as they run."""
    planned, settings = list(experiment.method.planned_trainings(samples)), experiment.settings
    if settings.finetune.epochs:
        schedule = settings.train.whole_epochs(settings.finetune.epochs)
        planned.append(PlannedTraining(schedule, samples, when="evaluation"))
    return [replace(training, schedule=replace(training.schedule, poisson=True)) for training in planned]


def whole_run(experiment: Experiment, samples: int) -> Iterator[tuple[PlannedTraining, int]]:
    """Every training of a client that takes part in every round, and how often: the noise must be enough for these."""
    settings = experiment.settings
    evaluations = -(-settings.rounds // settings.evaluate_every)
    occasions = {"start": 1, "round": settings.rounds, "evaluation": evaluations}
    planned = trainings(experiment, samples)
    tuning = planned.pop() if settings.finetune.epochs else None
    for training in planned:
        yield training, training.times * occasions[training.when]
    if tuning is not None:
        yield tuning, evaluations if settings.finetune.when == "always" else 1


def planned_cost(experiment: Experiment, samples: int) -> Ledger:
    """What a client with so many training samples spends if it takes part in every round; nothing without [privacy]."""
    total: Ledger = ()
    if experiment.settings.privacy is None:
        return total
    noise = _noise(experiment, samples)
    for training, times in whole_run(experiment, samples):
        if steps := times * training.schedule.count(training.samples):
            noise_per_step = one_step(noise, training.gradients)
            total = added(total, (PrivacyCost(training.schedule.rate(training.samples), noise_per_step, steps),))
    return total


def costs(options: PrivacyOptions, ledgers: Mapping[ClientId, Ledger]) -> dict[ClientId, float]:
    """Every client's epsilon so far; where data is pooled, the pool's epsilon is every client's."""
    spent = {client: epsilon(ledger, options.delta) for client, ledger in ledgers.items() if ledger}
    return defaultdict(lambda: spent.get(POOL, 0.0), spent)


def outside(experiment: Experiment) -> list[str]:
    """What a client discloses, or uses, beyond what its epsilon bounds."""
    disclosed = ["the validation and test parts", "losses, scores and sample counts in records and replies"]
    disclosed += experiment.method.disclosures()
    if experiment.method.reads_training_scores:
        disclosed.append("losses of models on training samples, computed without noise")
    if experiment.settings.privacy is not None and not experiment.settings.privacy.secret:
        disclosed.append("noise that anyone who knows the seed in config.toml can subtract")
    return disclosed


def cautions(experiment: Experiment, clients: Mapping[ClientId, ClientData]) -> list[str]:
    """Notes that a reader of the epsilons needs."""
    options = experiment.settings.privacy
    if options is None:
        return []
    few = [client for client, data in clients.items() if len(data.train) and options.delta * len(data.train) >= 1]
    notes = [f"privacy.delta is not below 1 / samples for client {client}: it allows for a whole sample" for client in few[:1]]
    if experiment.settings.train.cohort and options.epsilon is not None:
        notes.append("the noise is enough for clients that take part in every round; with train.cohort most spend less")
    what = "all pooled training samples" if experiment.method.pooled else "every client's training samples"
    notes.append(f"epsilon bounds what trained models tell about {what}; outside it: {'; '.join(outside(experiment))}")
    return notes


def secret_of(folder: Path, options: PrivacyOptions | None, begun: bool) -> int | None:
    """The seed of the noise of this run, drawn from the operating system; None: the seed of the experiment."""
    if options is None or not options.secret:
        return None
    path = folder / SECRET
    if not begun:
        with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            file.write(drawn_secret().to_bytes(32).hex())
            file.flush()
            os.fsync(file.fileno())
    try:
        return int(path.read_text(), 16)
    except (OSError, ValueError):
        raise ConfigError(f"{path}: missing or damaged; the run cannot continue with other noise: start a new one") from None


def drawn_secret() -> int:
    """A seed from the operating system."""
    return int.from_bytes(os.urandom(32))


def forget_secret(folder: Path) -> None:
    """Delete the seed of the noise of a finished run."""
    (folder / SECRET).unlink(missing_ok=True)
