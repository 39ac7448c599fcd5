"""Private training: every training of a client on its own samples becomes a Gaussian mechanism, and is written down.

A method does not know of it: what it yields passes through `privately` on its way to the engine. So no training can be
forgotten, in a method of one's own neither. What is not a training (scores, choices made by them) passes as it is and lies
outside epsilon.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedme.core.data import ClientData, Split
from fedme.core.key import Key
from fedme.core.operations import Computation, GaussianMechanism, LocalOptimizer, Models, Op, Role, T, Train
from fedme.learning.accountant import Ledger, PrivacyCost, PrivacyError, added, epsilon, one_step
from fedme.learning.optimizers import SGD, Moreau, MutualMoreau


@dataclass(frozen=True)
class PrivacyPolicy:
    """How a client's trainings are made private: the mechanism, and the epsilon that it must not pass."""

    mechanism: GaussianMechanism
    delta: float
    limit: float | None = None
    secret: int | None = None  # the seed of batches and noise, in place of the experiment's


def gradients(optimizer: LocalOptimizer, roles: int) -> int:
    """How many gradients on one batch a step of this rule asks for."""
    if type(optimizer) is SGD:
        return roles if optimizer.alternating else 1
    if type(optimizer) is Moreau:
        return optimizer.inner
    if type(optimizer) is MutualMoreau:
        return optimizer.inner + 1
    raise PrivacyError(f"[privacy] does not know how many gradients a step of {type(optimizer).__name__} takes; leave it out")


def with_privacy(
    steps: Computation[T], data: ClientData, guard: PrivacyPolicy, ledger: Ledger
) -> Computation[tuple[T, Ledger]]:
    """The same work with every training on the client's own samples private; its result, and the ledger after it."""
    answers = None
    while True:
        try:
            ops = steps.send(answers)  # type: ignore[arg-type]
        except StopIteration as done:
            return done.value, ledger
        ready = []
        for op in ops:
            if isinstance(op, Train) and len(op.data) and not is_public(op.data, data):
                op, spent = made_private(op, guard, ledger)
                ledger = _within(added(ledger, (spent,)), data, guard)
            ready.append(op)
        answers = yield tuple(ready)


def made_private(op: Train, guard: PrivacyPolicy, before: Ledger) -> tuple[Op, PrivacyCost]:
    """The training with batches drawn by chance and noise, and what it costs."""
    samples, local = len(op.data), replace(op.batch_schedule, poisson=True)
    # No noise is used twice, even if a round is repeated: two answers with the same noise would give it away.
    path = (*op.key.path, "after", sum(each.steps for each in before))
    key = Key(op.key.seed if guard.secret is None else guard.secret, path)
    count = max(1, gradients(op.optimizer, len(op.models)))
    spent = PrivacyCost(local.rate(samples), one_step(guard.mechanism.noise, count), local.count(samples))
    return replace(op, batch_schedule=local, key=key, mechanism=guard.mechanism), spent


def is_public(split: Split, data: ClientData) -> bool:
    """Whether all samples are among those that everybody has."""
    public = data.public
    return public is not None and split.source is public.source and bool(torch.isin(split.rows, public.rows).all())


def _within(ledger: Ledger, data: ClientData, guard: PrivacyPolicy) -> Ledger:
    if guard.limit is not None and (cost := epsilon(ledger, guard.delta)) > guard.limit:
        raise PrivacyError(
            f"client {data.id}: its next training would take it to epsilon {cost:.3g}, beyond privacy.epsilon = "
            f"{guard.limit:g}; give privacy.noise_multiplier instead, or fewer rounds"
        )
    return ledger


def noise(key: Key, mechanism: GaussianMechanism, models: Models, step: int, draw: int) -> dict[Role, dict[str, Tensor]]:
    """The noise on a sum of clipped gradients; drawn in 64 bits, whatever the weights have."""
    source, size = key.at("noise", step, draw), deviation(mechanism)
    return {role: normal(source.at(role), model.params, size) for role, model in models.items()}


def deviation(mechanism: GaussianMechanism) -> float:
    """Of the noise; none at all if there is none, even if nothing is clipped."""
    return mechanism.noise and mechanism.noise * mechanism.clip


def normal(key: Key, like: Mapping[str, Tensor], deviation: float) -> dict[str, Tensor]:
    """Normal noise shaped like weights; zeros, drawn from nothing, for no deviation."""
    if not deviation:
        return {name: torch.zeros_like(p) for name, p in like.items()}
    names = sorted(like)  # weights that came from elsewhere may have another order
    flat = torch.from_numpy(key.normal(sum(p.numel() for p in like.values())) * deviation)
    parts = dict(zip(names, flat.split([like[name].numel() for name in names]), strict=True))
    return {name: parts[name].view(p.shape).to(p.dtype).to(p.device) for name, p in like.items()}
