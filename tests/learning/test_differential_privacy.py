from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.operations import (
    BatchSchedule,
    Collect,
    Evaluate,
    GaussianMechanism,
    Train,
    estimate_statistics,
    evaluate,
    in_parallel,
    predict,
    train,
)
from fedme.learning.accountant import PrivacyCost, PrivacyError
from fedme.learning.differential_privacy import PrivacyPolicy, gradients, guarded, normal, with_privacy
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD, Moreau, MutualMoreau
from fedme_test_support import NORMALISED, clients

STEP = SGD(CrossEntropy(), 0.1)
POLICY = PrivacyPolicy(GaussianMechanism(1.0, 2.0), 1e-5)


def test_uniform_and_normal_numbers_are_what_they_say():
    key = Key(3).at("noise")
    u, z = key.uniform(200_000), key.normal(200_000)
    assert u.min() > 0
    assert u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 0.01
    assert stats.kstest(z, "norm").pvalue > 0.01
    squares = (z**2).sum()  # chi-square with as many degrees of freedom
    assert 0.005 < stats.chi2.cdf(squares, len(z)) < 0.995
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 0.01
    assert np.array_equal(z, key.normal(200_000))
    assert not np.array_equal(z, Key(3).at("noise", 1).normal(200_000))
    assert abs(np.corrcoef(z, Key(4).at("noise").normal(200_000))[0, 1]) < 0.01
    assert key.normal(0).shape == (0,)


def test_noise_has_the_deviation_asked_for_and_the_shape_of_weights():
    like = {"b": torch.zeros(300, dtype=torch.float64), "a": torch.zeros(200, 150, dtype=torch.float64)}
    drawn = normal(Key(1), like, 0.25)
    assert {name: value.shape for name, value in drawn.items()} == {name: value.shape for name, value in like.items()}
    flat = torch.cat([value.flatten() for value in drawn.values()]).numpy()
    assert stats.kstest(flat / 0.25, "norm").pvalue > 0.01
    turned = normal(Key(1), dict(reversed(like.items())), 0.25)  # the order of names does not matter
    assert all(torch.equal(turned[name], drawn[name]) for name in like)
    assert normal(Key(1), {"a": torch.zeros(3)}, 0.0)["a"].tolist() == [0, 0, 0]


def test_batches_drawn_by_chance():
    local = BatchSchedule(epochs=400, batch=5, poisson=True)
    batches = local.batches(20, Key(1))
    assert len(batches) == local.count(20) == 1600
    assert local.rate(20) == 0.25
    sizes = np.array([len(batch) for batch in batches])
    expected = stats.binom.pmf(np.arange(21), 20, 0.25) * len(sizes)
    common = expected > 5
    seen = np.bincount(sizes, minlength=21)
    observed = [*seen[common], seen[~common].sum()]
    assert stats.chisquare(observed, [*expected[common], expected[~common].sum()]).pvalue > 0.01
    often = torch.cat(batches).bincount(minlength=20).numpy()
    assert stats.chisquare(often).pvalue > 0.01  # nobody is preferred
    assert 0 in sizes  # empty batches are legal
    assert [len(batch) for batch in BatchSchedule(1, 50, poisson=True).batches(20, Key(1))] == [20]  # a batch of everybody
    assert BatchSchedule(poisson=True).batches(0, Key(1)) == []


def run_in_lockstep(steps):
    """The operations of a client, answered with nothing of interest."""
    asked, answers = [], None
    while True:
        try:
            ops = steps.send(answers)
        except StopIteration as done:
            return asked, done.value
        asked += ops
        answers = ["answer"] * len(ops)


def test_every_training_on_own_samples_is_made_private_and_written_down():
    data = guarded(clients((8, 12), public=5)["1"])
    model = {"own": Model.init(Arch(nn.Linear, in_features=3, out_features=4), Key(0))}

    def work():
        a = yield from in_parallel([train(model, STEP, data.train, BatchSchedule(2, 3), Key(1).at(i)) for i in range(2)])
        b = yield from train(model, STEP, data.public.take(torch.arange(3)), BatchSchedule(1, 2), Key(2))
        c = yield from evaluate(model["own"], data.train)
        d = yield from train(model, STEP, data.train.take(torch.arange(4)), BatchSchedule(1, 2), Key(3))
        return [*a, b, c, d]

    ops, (value, ledger) = run_in_lockstep(
        with_privacy(work(), "1", replace(POLICY, evaluates=True), (PrivacyCost(0.25, 2.0, 1),))
    )
    assert value == ["answer"] * 5
    assert [type(op) for op in ops] == [Train, Train, Train, Evaluate, Train]
    private = [op for op in ops if isinstance(op, Train) and op.mechanism is not None]
    assert [len(op.data) for op in private] == [12, 12, 4]
    assert all(op.batch_schedule.poisson and op.mechanism == POLICY.mechanism for op in private)
    assert ops[2].mechanism is None  # public samples
    assert not ops[2].batch_schedule.poisson
    assert set(ledger) == {PrivacyCost(0.25, 2.0, 8 + 8), PrivacyCost(0.5, 2.0, 2)}
    assert len({op.key for op in private}) == 3


def test_the_same_round_twice_has_other_noise():
    data = guarded(clients((8,))["0"])
    model = {"own": Model.init(Arch(nn.Linear, in_features=3, out_features=4), Key(0))}

    def again(ledger):
        (op,), (_, after) = run_in_lockstep(
            with_privacy(train(model, STEP, data.train, BatchSchedule(), Key(5)), "0", POLICY, ledger)
        )
        return op.key, after

    first, ledger = again(())
    assert again(()) == (first, ledger)  # what is computed again after a crash has the same
    assert again(ledger)[0] != first


def test_the_secret_replaces_the_seed():
    data = guarded(clients((8,))["0"])
    model = {"own": Model.init(Arch(nn.Linear, in_features=3, out_features=4), Key(0))}
    guard = PrivacyPolicy(GaussianMechanism(1.0, 2.0), 1e-5, secret=1 << 200)
    (op,), _ = run_in_lockstep(with_privacy(train(model, STEP, data.train, BatchSchedule(), Key(5)), "0", guard, ()))
    assert op.key.seed == 1 << 200


def test_nobody_trains_beyond_the_limit():
    data = guarded(clients((8,))["0"])
    model = {"own": Model.init(Arch(nn.Linear, in_features=3, out_features=4), Key(0))}
    guard = PrivacyPolicy(GaussianMechanism(1.0, 2.0), 1e-5, limit=3.0)
    with pytest.raises(
        PrivacyError, match=r"client 0: its next training would take it to epsilon .*, beyond privacy.epsilon = 3"
    ):
        run_in_lockstep(with_privacy(train(model, STEP, data.train, BatchSchedule(20, 3), Key(5)), "0", guard, ()))


def test_training_samples_cannot_be_read_or_predicted_on():
    data = guarded(clients((8,))["0"])
    model = Model.init(Arch(nn.Linear, in_features=3, out_features=4), Key(0))
    for read in (
        lambda d: d.y,
        lambda d: d.inputs(),
        lambda d: d.source,
        lambda d: d.rows,
        lambda d: d.take(torch.arange(2)).y,
    ):
        with pytest.raises(PrivacyError, match=r"the method reads `data\.train\.\w+` of a private client"):
            read(data.train)
    assert len(data.train) == 8
    assert len(data.val.y) == 6  # validation samples are outside epsilon, and said to be
    with pytest.raises(PrivacyError, match="predicts on the training samples of a private client"):
        run_in_lockstep(with_privacy(predict(model, data.train), "0", replace(POLICY, evaluates=True), ()))
    collecting = train({"own": model}, SGD(CrossEntropy(), 0.1), data.train, BatchSchedule(1, 4), Key(0), collect=Collect(4))
    with pytest.raises(PrivacyError, match="collects the outputs for the training samples of a private client"):
        run_in_lockstep(with_privacy(collecting, "0", POLICY, ()))
    with pytest.raises(PrivacyError, match="evaluates a model on the training samples"):
        run_in_lockstep(with_privacy(evaluate(model, data.train), "0", POLICY, ()))
    normed = Model.init(NORMALISED, Key(0))
    with pytest.raises(PrivacyError, match="estimates running statistics on the training samples of a private client"):
        run_in_lockstep(with_privacy(estimate_statistics(normed, data.train), "0", replace(POLICY, evaluates=True), ()))


def test_a_training_beyond_the_announced_ones_is_refused_before_it_runs():
    data = guarded(clients((8,))["0"])
    model = {"own": Model.init(Arch(nn.Linear, in_features=3, out_features=4), Key(0))}
    once = PrivacyCost(3 / 8, 2.0, 3)
    policy = replace(POLICY, limit=100.0, planned=(once,))

    def twice():
        yield from train(model, STEP, data.train, BatchSchedule(1, 3), Key(5))
        yield from train(model, STEP, data.train, BatchSchedule(1, 3), Key(6))

    work = with_privacy(twice(), "0", policy, ())
    next(work)  # the announced one
    with pytest.raises(PrivacyError, match=r"trains more in one round than the method announces.*planned_trainings"):
        work.send(["answer"])
    run_in_lockstep(with_privacy(twice(), "0", replace(policy, planned=(once, replace(once, steps=3))), ()))


def test_how_often_a_step_looks_at_its_batch():
    assert gradients(STEP, 2) == 1
    assert gradients(SGD(CrossEntropy(), 0.1, alternating=True), 2) == 2
    assert gradients(Moreau(0.1, 0.1, 1.0, 5), 2) == 5
    assert gradients(MutualMoreau(0.1, 0.1, 1.0, 3), 3) == 4
    with pytest.raises(PrivacyError, match="does not know how many gradients per batch Odd takes"):
        gradients(type("Odd", (), {})(), 1)
