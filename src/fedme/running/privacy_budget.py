"""The `[privacy]` table at work: every client's noise, what its epsilon covers, and what lies outside."""

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from fedme.config.experiment import ConfigError, Experiment
from fedme.config.settings import PrivacyOptions
from fedme.core.data import ClientData, ClientId
from fedme.core.method import POOL
from fedme.core.model import Arch
from fedme.core.operations import BatchSchedule, GaussianMechanism
from fedme.execution.sample_independence import require_separate
from fedme.learning.accountant import Ledger, epsilon, noise_for, require_accountant
from fedme.learning.differential_privacy import PrivacyPolicy
from fedme.methods.centralized import Centralized
from fedme.methods.fedavg import FedAvg
from fedme.methods.fedmd import FedMD
from fedme.methods.fedme.fedme import FedMe
from fedme.methods.fml import FML
from fedme.methods.hypcluster import HypCluster
from fedme.methods.mapper import Mapper
from fedme.methods.pfedme import PFedMe
from fedme.methods.pfml import PFML

SECRET = "noise.secret"  # the seed of the noise, while a run with privacy.secret goes on

Part = tuple[float, int, int]  # of a plan: the chance of a sample, steps, gradients a step
Guards = Callable[[ClientData], PrivacyPolicy]


def require_private(experiment: Experiment) -> None:
    """Refuse what cannot be private before anything is loaded or trained."""
    settings = experiment.settings
    if settings.privacy is None:
        return
    require_accountant()
    if settings.models.assign == "best-local" and experiment.method.own_architectures:
        raise ConfigError(
            "models.assign: 'best-local' trains every architecture at every client without noise, which [privacy] would not "
            "cover; use 'round-robin', the name of one, or a table client = name"
        )
    if experiment.method.pooled and settings.finetune.epochs:
        raise ConfigError(
            "finetune.epochs: a client's samples would be spent twice, in the pool and at home, and counted apart; "
            f"it must be 0 with [privacy] and method '{experiment.method_name}'"
        )
    if settings.privacy.secret and settings.engine.name == "flower":
        raise ConfigError("privacy.secret: processes of Flower's simulation would need it sent; use engine=inprocess")


def require_private_training(experiment: Experiment, archs: Iterable[Arch], clients: Iterable[ClientData]) -> None:
    """Refuse to begin what is to be private and cannot be."""
    if experiment.settings.privacy is not None:
        require_private(experiment)
        require_separate_samples(archs, clients)


def require_separate_samples(archs: Iterable[Arch], clients: Iterable[ClientData]) -> None:
    """Refuse networks whose gradients cannot be told apart by sample."""
    largest = max((data.train for data in clients), key=len)
    if len(largest):
        three = largest.inputs(torch.arange(3) % len(largest))
        for arch in archs:
            require_separate(arch, three)


def guards(experiment: Experiment, secret: int | None = None) -> Guards | None:
    """How the trainings of every client are made private; None if they are not."""
    options = experiment.settings.privacy
    if options is None:
        return None

    @functools.cache
    def noise(samples: int) -> float:
        if options.noise_multiplier is not None:
            return options.noise_multiplier
        assert options.epsilon is not None
        return noise_for(options.epsilon, options.delta, plan(experiment, samples)) if samples else 0.0

    def guard(data: ClientData) -> PrivacyPolicy:
        return PrivacyPolicy(GaussianMechanism(options.clip, noise(len(data.train))), options.delta, options.epsilon, secret)

    return guard


def plan(experiment: Experiment, samples: int) -> list[Part]:
    """The trainings of a client that takes part in every round: what its noise must be enough for."""
    settings, method, local = experiment.settings, experiment.method, experiment.settings.train.batch_schedule()
    evaluations = settings.rounds // settings.evaluate_every + bool(settings.rounds % settings.evaluate_every)

    def part(count: int, how: BatchSchedule, times: int, gradients: int = 1) -> Part:
        return how.rate(max(1, count)), times * how.count(count), gradients

    if isinstance(method, Mapper):
        mixed, last = (samples // 3, (samples + 2) // 3) if samples > 2 else (samples, samples)
        attempts = sum(share > 0 for share in method.lambdas)
        found = [part(mixed, local, attempts * (settings.rounds + evaluations)), part(last, local, settings.rounds)]
    else:
        found = [part(samples, local, settings.rounds, _gradients(method))]
    if isinstance(method, FedMD):
        found.append(part(samples, BatchSchedule(method.private_epochs, settings.train.batch), 1))
    if settings.finetune.epochs:
        tuned = evaluations if settings.finetune.when == "always" else 1
        found.append(part(samples, BatchSchedule(settings.finetune.epochs, settings.train.batch), tuned))
    return [each for each in found if each[1]]


def _gradients(method: object) -> int:
    """How many gradients a step takes on its batch."""
    if isinstance(method, PFedMe):
        return max(1, method.inner_steps)
    if isinstance(method, PFML):
        return method.inner_steps + 1
    return 2 if isinstance(method, FedMe | FML) and method.order == "alternating" else 1


def costs(options: PrivacyOptions, spent: Mapping[ClientId, Ledger]) -> dict[ClientId, float]:
    """Every client's epsilon until now; where data is pooled, that of the pool is everybody's."""
    found = {client: epsilon(ledger, options.delta) for client, ledger in spent.items() if ledger}
    return defaultdict(lambda: found.get(POOL, 0.0), found)


def outside(experiment: Experiment) -> list[str]:
    """What a client gives away, or uses, beyond what its epsilon bounds."""
    method, settings = experiment.method, experiment.settings
    found = ["the validation and test parts", "losses, scores and sample counts in records and replies"]
    if isinstance(method, FedMe) and method.tuning:
        found.append("which model a client adopts (decided on its validation part)")
    if isinstance(method, HypCluster):
        found.append("which cluster a client chooses (decided on its training part, without noise)")
    if isinstance(method, Mapper):
        found.append("which mixture a client chooses (decided on a third of its training part, without noise)")
    if getattr(method, "patience", None) is not None:
        found.append("when a client stops (decided on its validation part)")
    if isinstance(method, FedAvg) and method.weighting == "samples":
        found.append("the weight of a client in the average (its number of samples)")
    if settings.privacy is not None and not settings.privacy.secret:
        found.append("noise that can be taken off by who knows the seed in config.toml")
    return found


def cautions(experiment: Experiment, clients: Mapping[ClientId, ClientData]) -> list[str]:
    """What a reader of the epsilons should know."""
    options = experiment.settings.privacy
    if options is None:
        return []
    few = [client for client, data in clients.items() if len(data.train) and options.delta * len(data.train) >= 1]
    notes = [f"privacy.delta is not below 1 / samples for client {each}: it allows for a whole sample" for each in few[:1]]
    if experiment.settings.train.cohort and options.epsilon is not None:
        notes.append("the noise is enough for clients that take part in every round; with train.cohort most spend less")
    whole = isinstance(experiment.method, Centralized)
    what = "all pooled training samples" if whole else "every client's training samples"
    notes.append(f"epsilon bounds what trained models tell of {what}; outside it: {'; '.join(outside(experiment))}")
    return notes


def secret_of(folder: Path, options: PrivacyOptions | None, begun: bool) -> int | None:
    """The seed of the noise of this run, drawn from the operating system; None if it is the experiment's."""
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
        raise ConfigError(f"{path}: gone or damaged, and with other noise the run cannot go on: start a new one") from None


def drawn_secret() -> int:
    """A seed that nobody knows."""
    return int.from_bytes(os.urandom(32))


def forget_secret(folder: Path) -> None:
    """Once a run is finished nobody needs the seed of its noise."""
    (folder / SECRET).unlink(missing_ok=True)
