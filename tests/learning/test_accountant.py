import math
import sys

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from fedme.core.typed import TypedError, build
from fedme.learning import accountant
from fedme.learning.accountant import ORDERS, Ledger, PrivacyCost, PrivacyError, added, epsilon, noise_for, one_step

MNIST = 60000


def as_published(rate, noise, steps, delta):
    """With the conversion from Rényi divergences that was used then: Mironov 2017, Proposition 3."""
    divergences = steps * accountant._renyi(rate, noise)
    return float((divergences + math.log(1 / delta) / (np.array(ORDERS) - 1)).min())


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "published"),
    [
        (0.01, 4.0, 10_000, 1.26),  # Abadi et al. 2016, section 3.2: 100 epochs, delta 1e-5
        (256 / MNIST, 1.1, 60 * MNIST // 256, 3.01),  # TensorFlow Privacy, tutorials/README.md, the table for MNIST, delta 1e-5
        (256 / MNIST, 1.3, 15 * MNIST // 256, 1.19),
        (256 / MNIST, 0.7, 45 * MNIST // 256, 7.10),
    ],
)
def test_values_that_others_have_published(rate, noise, steps, published):
    assert as_published(rate, noise, steps, 1e-5) == pytest.approx(published, rel=0.01)
    assert 0.75 * published < epsilon((PrivacyCost(rate, noise, steps),), 1e-5) < published  # today's conversion is tighter


@pytest.mark.parametrize("rate", [0.004, 0.05, 0.3, 0.8, 1.0])
@pytest.mark.parametrize(("noise", "steps"), [(0.8, 30), (2.0, 180), (6.0, 900)])
def test_another_accountant_says_the_same(rate, noise, steps):
    event = SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)
    renyi = RdpAccountant([order for order in ORDERS if order == int(order)]).compose(event).get_epsilon(1e-5)
    tight = PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(1e-5)
    ours = epsilon((PrivacyCost(rate, noise, steps),), 1e-5)
    assert 0.9 * renyi <= ours <= renyi * (1 + 1e-6)  # the same divergences, and a few orders more
    assert ours >= 0.99 * tight  # never less than what is true


def test_ledgers_add_up():
    ledger = added((PrivacyCost(0.1, 1.0, 5),), (PrivacyCost(0.1, 1.0, 7), PrivacyCost(0.2, 1.0, 3)))
    assert set(ledger) == {PrivacyCost(0.1, 1.0, 12), PrivacyCost(0.2, 1.0, 3)}
    assert epsilon(ledger, 1e-5) > epsilon(ledger[:1], 1e-5) > 0
    assert epsilon((), 1e-5) == 0.0
    assert epsilon((PrivacyCost(0.1, 0.0, 1),), 1e-5) == math.inf


def test_several_gradients_on_a_batch_are_one_with_less_noise():
    # without subsampling k Gaussian mechanisms are one with 1 / sqrt(k) of the noise, exactly
    apart = epsilon((PrivacyCost(1.0, 3.0, 40),), 1e-5)
    assert epsilon((PrivacyCost(1.0, one_step(3.0, 4), 10),), 1e-5) == pytest.approx(apart, rel=1e-9)
    # with it, looking four times at one batch costs more than once at each of four
    assert epsilon((PrivacyCost(0.1, one_step(3.0, 4), 10),), 1e-5) > epsilon((PrivacyCost(0.1, 3.0, 40),), 1e-5)


@pytest.mark.parametrize("target", [0.5, 3.0, 20.0])
def test_the_noise_for_an_epsilon_is_just_enough(target):
    plan = [(0.4, 60, 1), (0.2, 10, 3)]

    def cost(noise):
        return epsilon(tuple(PrivacyCost(rate, one_step(noise, k), steps) for rate, steps, k in plan), 1e-5)

    found = noise_for(target, 1e-5, plan)
    assert cost(found) <= target < cost(found / 1.01)


def test_what_no_noise_can_do_is_said():
    with pytest.raises(PrivacyError, match="no noise is enough"):
        noise_for(1e-9, 1e-12, [(1.0, 10_000, 1)])


@pytest.mark.parametrize(
    "entry", [(0.0, 1.0, 1), (1.5, 1.0, 1), (math.nan, 1.0, 1), (0.5, -1.0, 1), (0.5, math.inf, 1), (0.5, 1.0, -1)]
)
def test_entries_that_cannot_be_are_refused(entry):
    with pytest.raises(ValueError, match="invalid privacy cost"):
        PrivacyCost(*entry)
    with pytest.raises(TypedError):
        build(Ledger, [dict(zip(("rate", "noise", "steps"), entry, strict=True))])


def test_without_the_accountant_nothing_begins(monkeypatch):
    accountant._opacus.cache_clear()
    monkeypatch.setitem(sys.modules, "opacus.accountants.analysis", None)
    with pytest.raises(PrivacyError, match=r"pip install 'fedme\[privacy\]'"):
        accountant.require_accountant()
