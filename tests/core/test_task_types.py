"""What is predicted: the losses and mutual terms of the three kinds against torch's own distributions, and their slopes."""

import pytest
import torch
from torch.distributions import Bernoulli, Categorical, Independent, Normal, kl_divergence

from fedme.core.key import Key
from fedme.core.task_types import TASK_LOSSES, task_loss, task_type_of
from fedme.learning.objectives import CrossEntropy, Mutual

B, C = 6, 4
DRAW = Key(7).torch()
TARGETS = {
    "classification": torch.randint(0, C, (B,), generator=DRAW),
    "multi-label": torch.rand((B, C), generator=DRAW) < 0.4,
    "regression": torch.randn((B, C), generator=DRAW),
}


def outputs(seed):
    return (2 * torch.randn(B, C, generator=Key(seed).torch(), dtype=torch.float64)).requires_grad_()


def distribution(name, z):
    if name == "classification":
        return Categorical(logits=z)
    return Independent(Bernoulli(logits=z) if name == "multi-label" else Normal(z, torch.ones_like(z)), 1)


@pytest.mark.parametrize("name", TASK_LOSSES)
def test_loss_and_mutual_term_are_those_of_a_distribution(name):
    y, a, b = TARGETS[name], outputs(1), outputs(2)
    assert task_type_of(y) == name
    kind = task_loss(y)
    mine, peer = distribution(name, a), distribution(name, b)
    target = y if name == "classification" else y.double()
    constant = C * torch.tensor(2 * torch.pi).log() / 2 if name == "regression" else 0.0
    assert torch.allclose(kind.loss(kind.ready(a), y), -mine.log_prob(target) - constant, atol=1e-12)
    assert torch.allclose(kind.divergence(kind.ready(b), kind.ready(a)), kl_divergence(peer, mine), atol=1e-12)


@pytest.mark.parametrize("name", TASK_LOSSES)
@pytest.mark.parametrize("objective", [CrossEntropy(), Mutual("x", "y"), Mutual("x", "y", (0.3, 0.8), (0.7, 0.2))], ids=str)
def test_slopes_are_the_derivatives(name, objective):
    y, logits = TARGETS[name], {"x": outputs(1), "y": outputs(2)}
    losses = objective(logits, y)
    expected = torch.autograd.grad(losses["x"].sum() + losses["y"].sum(), [logits["x"], logits["y"]])
    with torch.no_grad():
        found = objective.logit_gradients(logits, y)
    assert torch.allclose(found["x"], expected[0], atol=1e-12)
    assert torch.allclose(found["y"], expected[1], atol=1e-12)


@pytest.mark.parametrize("name", TASK_LOSSES)
def test_large_outputs_stay_finite(name):
    y = TARGETS[name]
    kind = task_loss(y)
    sure = torch.full((B, C), 800.0) * torch.where(torch.arange(C) == 1, 1.0, -1.0)
    assert kind.loss(kind.ready(sure), y).isfinite().all()
    assert kind.divergence(kind.ready(sure), kind.ready(-sure)).isfinite().all()
    assert kind.subtract_targets(kind.mean(sure), y, (1.0,)).isfinite().all()


def test_right_answers():
    z = torch.tensor([[2.0, -1.0], [-3.0, 0.5], [float("nan"), 1.0]])
    assert TASK_LOSSES["multi-label"].accuracy(z, torch.tensor([[True, False], [True, True], [False, True]])) == pytest.approx(
        4 / 6
    )
    assert TASK_LOSSES["regression"].accuracy(z, z) != TASK_LOSSES["regression"].accuracy(z, z)  # nothing is right or wrong
