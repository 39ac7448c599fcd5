"""Losses over outputs: their values, their closed-form gradients, and who sees whom before or after a step."""

import math

import pytest
import torch
import torch.nn.functional as F

from fedme.core.key import Key
from fedme.core.model import Model
from fedme.core.operations import Batch
from fedme.core.task_types import TASK_LOSSES
from fedme.execution.reference import Autograd
from fedme.learning.objectives import CrossEntropy, Imitate, Mutual
from fedme.learning.optimizers import SGD
from fedme_test_support import DENSE, FEATURES, LINEAR

B, C = 6, 10


def logits(seed, requires_grad=True):
    z = 2 * torch.randn(B, C, generator=Key(seed).torch(), dtype=torch.float64)
    return z.requires_grad_(requires_grad)


Y = torch.randint(0, C, (B,), generator=Key(7).torch())
ONE_HOT = F.one_hot(Y, C).double()


def cross_entropy(z, y):
    kind = TASK_LOSSES["classification"]
    return kind.loss(kind.ready(z), y)


def divergence(peer, z):
    kind = TASK_LOSSES["classification"]
    return kind.divergence(kind.ready(peer), kind.ready(z))


def gradient(loss, z):
    """Of the batch mean, as the engine takes it."""
    return torch.autograd.grad(loss.mean(), z)[0]


def test_losses_come_one_a_sample():
    a, b = logits(1), logits(2)
    assert cross_entropy(a, Y).shape == divergence(b, a).shape == (B,)
    assert torch.allclose(cross_entropy(a, Y), -torch.log((a.softmax(-1) * ONE_HOT).sum(-1)))


def test_divergence_is_summed_over_classes_and_averaged_over_the_batch():
    a, b = logits(1, False), logits(2, False)
    expected = F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean")
    assert divergence(b, a).mean().item() == pytest.approx(expected.item(), abs=1e-12)
    assert divergence(a, a).abs().max() < 1e-12
    assert divergence(b, a).mean().item() != pytest.approx(divergence(a, b).mean().item(), abs=1e-3)  # it has a direction


def test_divergence_by_hand_for_ten_classes():
    """The peer gives class 0 half of its belief, 1/18 to each other; self gives everything 1/10.

    KL = 0.5 ln(0.5 / 0.1) + 9 (1/18) ln((1/18) / 0.1) = 0.5 ln 5 + 0.5 ln(5/9) = 0.5108.
    Averaged over classes it would be a tenth of that.
    """
    peer = torch.full((2, 10), 1 / 18, dtype=torch.float64)
    peer[:, 0] = 0.5
    assert divergence(peer.log() + 3.0, torch.zeros(2, 10, dtype=torch.float64)).tolist() == pytest.approx(
        [0.5 * math.log(5) + 0.5 * math.log(5 / 9)] * 2
    )


def test_divergence_from_a_certain_peer_is_finite():
    sure = torch.tensor([[1000.0, 0.0, -1000.0]])
    z = torch.zeros(1, 3, requires_grad=True)
    loss = divergence(sure, z)
    assert loss.item() == pytest.approx(math.log(3))
    assert torch.isfinite(gradient(loss, z)).all()
    assert torch.isfinite(divergence(torch.zeros(1, 3), sure)).all()


def test_the_peer_gets_exactly_no_gradient():
    a, b = logits(1), logits(2)
    for loss, peer in (
        (Mutual("x", "y")({"x": a, "y": b}, Y)["x"], b),
        (Mutual("x", "y")({"x": a, "y": b}, Y)["y"], a),
    ):
        (slope,) = torch.autograd.grad(loss.sum(), [peer], allow_unused=True)
        assert slope is None or not slope.any()


def test_closed_forms_of_cross_entropy_and_divergence():
    a, b = logits(1), logits(2)
    p, q = a.softmax(-1), b.softmax(-1)
    assert torch.allclose(gradient(cross_entropy(a, Y), a), (p - ONE_HOT) / B, rtol=0, atol=1e-14)
    assert torch.allclose(gradient(divergence(b, a), a), (p - q) / B, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("labels", "peer"), [((1.0, 1.0), (1.0, 1.0)), ((0.3, 0.8), (0.7, 0.2)), ((1.0, 0.0), (0.0, 1.0))])
def test_closed_forms_of_mutual_learning(labels, peer):
    """(2p - y - q)/B for deep mutual learning, a(p - y) + (1 - a)(p - q) over B for FML; each role has its own weights."""
    a, b = logits(1), logits(2)
    p, q = a.softmax(-1), b.softmax(-1)
    losses = Mutual("x", "y", labels, peer)({"y": b, "x": a}, Y)
    assert list(losses) == ["x", "y"]
    expected_a = (labels[0] * (p - ONE_HOT) + peer[0] * (p - q)) / B
    expected_b = (labels[1] * (q - ONE_HOT) + peer[1] * (q - p)) / B
    # The engine differentiates the sum of both: what one role adds must not reach the other.
    got_a, got_b = torch.autograd.grad(losses["x"].mean() + losses["y"].mean(), [a, b])
    assert torch.allclose(got_a, expected_a, rtol=0, atol=1e-14)
    assert torch.allclose(got_b, expected_b, rtol=0, atol=1e-14)
    if labels == peer == (1.0, 1.0):
        assert torch.allclose(got_a, (2 * p - ONE_HOT - q) / B, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        ("mae", lambda z, t: (z - t).abs().mean(-1), lambda z, t: (z - t).sign() / (B * C)),
        ("mse", lambda z, t: ((z - t) ** 2).mean(-1), lambda z, t: 2 * (z - t) / (B * C)),
        (
            "kl",
            lambda z, t: (t.softmax(-1) * (t.softmax(-1) / z.softmax(-1)).log()).sum(-1),
            lambda z, t: (z.softmax(-1) - t.softmax(-1)) / B,
        ),
    ],
)
def test_imitation_fits_raw_logits(kind, value, slope):
    z, target = logits(1), logits(2, False)
    loss = Imitate(kind)({"own": z}, target)["own"]
    assert torch.allclose(loss, value(z, target))
    assert torch.allclose(gradient(loss, z), slope(z.detach(), target), rtol=0, atol=1e-14)
    mixed = Imitate(kind)({"own": z}, target.float())["own"]  # logits of clients with other precision
    assert mixed.dtype == torch.float64


def test_cross_entropy_of_several_roles_is_each_ones_own():
    a, b = logits(1), logits(2)
    losses = CrossEntropy()({"a": a, "b": b}, Y)
    assert torch.equal(losses["a"], cross_entropy(a, Y))
    assert torch.equal(losses["b"], cross_entropy(b, Y))


# Both forwards before both steps, on real models.


def batch():
    return Batch(torch.randn(B, FEATURES, generator=Key(8).torch(), dtype=torch.float64), Y % 4, 0)


def pair():
    return {"own": Model.init(DENSE, Key(1), torch.float64), "guest": Model.init(LINEAR, Key(2), torch.float64)}


def slope_by_hand(model, peer, data):
    """The gradient of CE + KL to a constant peer, by plain autograd on a module."""
    module = model.module()
    z, q = module(data.x), peer(data.x).detach().softmax(-1)
    p = z.detach().softmax(-1)
    z.backward((2 * p - F.one_hot(data.y, 4) - q) / len(data.y))
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def moved(model, slope, lr=0.5):
    return model.with_params({name: p - lr * slope[name] for name, p in model.params.items()})


def close(a, b):
    return all(torch.allclose(a.params[name], b.params[name], rtol=0, atol=1e-13) for name in a.params)


def test_simultaneous_steps_both_see_each_other_as_they_were():
    data, models, objective = batch(), pair(), Mutual("own", "guest")
    after, _ = SGD(objective, 0.5)(Autograd(objective, {}), models, {}, {}, data)
    own, guest = models["own"], models["guest"]
    assert close(after["own"], moved(own, slope_by_hand(own, guest, data)))
    assert close(after["guest"], moved(guest, slope_by_hand(guest, own, data)))


def test_alternating_steps_show_the_second_the_first_after_its_step():
    data, models, objective = batch(), pair(), Mutual("own", "guest")
    after, _ = SGD(objective, 0.5, alternating=True)(Autograd(objective, {}), models, {}, {}, data)
    own = moved(models["own"], slope_by_hand(models["own"], models["guest"], data))
    guest = models["guest"]
    assert close(after["own"], own)
    assert close(after["guest"], moved(guest, slope_by_hand(guest, own, data)))
    assert not close(after["guest"], moved(guest, slope_by_hand(guest, models["own"], data)))
