"""Private training: every training on a client's own samples becomes a Gaussian mechanism and is written to its ledger.

A method does not know about it. Under [privacy] it receives its training samples as a `PrivateSplit`, which can be trained on
and counted but not read. The operations that a method yields pass through `with_privacy` on their way to the engine:

* `Train` on private samples gets Poisson-sampled batches, clipping and noise, and its cost enters the ledger;
* `Predict` on private samples is refused: its outputs would leave the client without noise;
* `Evaluate` on private samples is refused unless the method declares it (`Method.reads_training_scores`);
* `EstimateStatistics` on private samples is refused: the statistics would be part of a model without noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from fedme.core.data import ClientData, Split
from fedme.core.key import Key
from fedme.core.operations import (
    Computation,
    EstimateStatistics,
    Evaluate,
    GaussianMechanism,
    LocalOptimizer,
    Models,
    Op,
    Predict,
    Role,
    T,
    Train,
)
from fedme.learning.accountant import Ledger, PrivacyCost, PrivacyError, added, epsilon, one_step
from fedme.learning.optimizers import SGD, Adam, Mixing, Moreau, MutualMoreau


@dataclass(frozen=True)
class PrivacyPolicy:
    """How a client's trainings are made private, and the epsilon that they must not exceed."""

    mechanism: GaussianMechanism
    delta: float
    limit: float | None = None
    secret: int | None = None  # the seed of batches and noise, instead of the experiment's
    planned: Ledger | None = None  # what a round or an evaluation may cost at most; None: anything within `limit`
    evaluates: bool = False  # whether the method declares that it evaluates models on training samples


class PrivateSplit(Split):
    """Training samples of a private client: a method can train on them, count them and take parts, but not read them."""

    def __init__(self, split: Split) -> None:
        object.__setattr__(self, "_split", split)

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def _samples(self) -> Split:
        return self.__dict__["_split"]  # type: ignore[no-any-return]

    def __getattribute__(self, name: str) -> Any:
        if name in ("source", "rows", "targets", "y", "inputs"):
            _refuse(f"reads `data.train.{name}`")
        return super().__getattribute__(name)

    def take(self, positions: Tensor) -> "PrivateSplit":
        return PrivateSplit(self._samples.take(positions))

    def labelled(self, targets: Tensor) -> "PrivateSplit":
        return PrivateSplit(self._samples.labelled(targets))


def guarded(data: ClientData) -> ClientData:
    """The client's data with training samples that a method cannot read."""
    return replace(data, train=PrivateSplit(data.train))


_VERBS = {Evaluate: "evaluates a model", Predict: "predicts", EstimateStatistics: "estimates running statistics"}


def _refuse(what: str) -> NoReturn:
    raise PrivacyError(
        f"the method {what} of a private client, and nothing bounds what that tells about single samples; [privacy] covers "
        "`train` only. Use validation samples, declare it (Method.reads_training_scores, disclosures), or leave out [privacy]"
    )


def gradients(optimizer: LocalOptimizer, roles: int) -> int:
    """How many gradients per batch one step of this optimizer takes."""
    if type(optimizer) is SGD or type(optimizer) is Adam:
        return roles if optimizer.alternating else 1
    if type(optimizer) is Mixing:  # of both models at once; alpha follows from the noisy gradient
        return 1
    if type(optimizer) is Moreau:
        return optimizer.inner
    if type(optimizer) is MutualMoreau:
        return optimizer.inner + 1
    raise PrivacyError(f"[privacy] does not know how many gradients per batch {type(optimizer).__name__} takes; leave it out")


def with_privacy(
    work: Computation[T], client: str, policy: PrivacyPolicy, before: Ledger, used: Ledger = ()
) -> Computation[tuple[T, Ledger]]:
    """The same work with every training on private samples made private; its result, and what it costs.

    `before` is the client's ledger, `used` the part of it that counts against `policy.planned`.
    """
    costs: Ledger = ()
    results = None
    while True:
        try:
            operations = work.send(results)  # type: ignore[arg-type]
        except StopIteration as done:
            return done.value, costs
        allowed: list[Op] = []
        for op in operations:
            if isinstance(op.data, PrivateSplit):
                op = replace(op, data=op.data._samples)
                if isinstance(op, Train) and op.collect is not None:
                    _refuse("collects the outputs for the training samples")
                if isinstance(op, Train) and len(op.data):
                    op, cost = made_private(op, policy, added(before, costs))
                    costs = added(costs, (cost,))
                    _require_within(client, policy, added(before, costs), added(used, costs))
                elif not isinstance(op, Train) and not (isinstance(op, Evaluate) and policy.evaluates):
                    _refuse(f"{_VERBS[type(op)]} on the training samples")
            allowed.append(op)
        results = yield tuple(allowed)


def made_private(op: Train, policy: PrivacyPolicy, before: Ledger) -> tuple[Train, PrivacyCost]:
    """The training with Poisson-sampled batches and noise, and its cost."""
    samples, schedule = len(op.data), replace(op.batch_schedule, poisson=True)
    # No noise is used twice, even if a round is repeated: two results with the same noise would reveal it.
    path = (*op.key.path, "after", sum(cost.steps for cost in before))
    key = Key(op.key.seed if policy.secret is None else policy.secret, path)
    count = max(1, gradients(op.optimizer, len(op.models)))
    cost = PrivacyCost(schedule.rate(samples), one_step(policy.mechanism.noise, count), schedule.count(samples))
    return replace(op, batch_schedule=schedule, key=key, mechanism=policy.mechanism), cost


def _require_within(client: str, policy: PrivacyPolicy, ledger: Ledger, used: Ledger) -> None:
    if policy.limit is None:
        return
    if policy.planned is not None and epsilon(used, policy.delta) > epsilon(policy.planned, policy.delta) * (1 + 1e-9):
        raise PrivacyError(
            f"client {client}: trains more in one round than the method announces, and the noise was chosen for that; list "
            "every training in Method.planned_trainings, or set privacy.noise_multiplier instead of privacy.epsilon"
        )
    if (cost := epsilon(ledger, policy.delta)) > policy.limit:
        raise PrivacyError(
            f"client {client}: its next training would take it to epsilon {cost:.3g}, beyond privacy.epsilon = "
            f"{policy.limit:g}; set privacy.noise_multiplier instead, or use fewer rounds"
        )


def noise(key: Key, mechanism: GaussianMechanism, models: Models, step: int, draw: int) -> dict[Role, dict[str, Tensor]]:
    """The noise on a sum of clipped gradients; drawn in 64 bits, whatever the type of the weights."""
    source, size = key.at("noise", step, draw), deviation(mechanism)
    return {role: normal(source.at(role), model.params, size) for role, model in models.items()}


def deviation(mechanism: GaussianMechanism) -> float:
    """The standard deviation of the noise; 0 without noise, even if the clipping norm is infinite."""
    return mechanism.noise and mechanism.noise * mechanism.clip


def normal(key: Key, like: Mapping[str, Tensor], deviation: float) -> dict[str, Tensor]:
    """Normal noise shaped like weights; zeros for a deviation of 0."""
    if not deviation:
        return {name: torch.zeros_like(p) for name, p in like.items()}
    names = sorted(like)  # received weights may have another order
    flat = torch.from_numpy(key.normal(sum(p.numel() for p in like.values())) * deviation)
    parts = dict(zip(names, flat.split([like[name].numel() for name in names]), strict=True))
    return {name: parts[name].view(p.shape).to(p.dtype).to(p.device) for name, p in like.items()}
