"""One step of every method on softmax regression, against plain numpy with the gradients written out.

For logits z, p = softmax(z), one-hot y and a peer's probabilities q (a constant), the gradients of batch means are
CE: (p - y) / B, KL(q || p): (p - q) / B. A linear layer's gradients are dz^T x and the column sums of dz.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedme.core.key import Key
from fedme.core.method import Plan, Round
from fedme.core.model import Model
from fedme.learning import model_mixtures
from fedme.learning.training_settings import Training
from fedme.methods.apfl import APFL
from fedme.methods.centralized import Centralized
from fedme.methods.ditto import Ditto
from fedme.methods.fedamp import FedAMP
from fedme.methods.fedavg import FedAvg
from fedme.methods.fedmd import FedMD
from fedme.methods.fedme.fedme import FedMe
from fedme.methods.fedprox import FedProx
from fedme.methods.fml import FML
from fedme.methods.hypcluster import HypCluster
from fedme.methods.local import Local
from fedme.methods.mapper import Mapper
from fedme.methods.pfedme import PFedMe
from fedme.methods.pfml import PFML
from fedme_test_support import CLASSES, LINEAR, clients, federate, split, task

ONE = Training(epochs=1, batch=1000, lr=0.1)  # one step on the whole training part
INIT = Key(0).at("init")


def array(model):
    return np.concatenate([model.params["0.weight"].numpy(), model.params["0.bias"].numpy()[:, None]], axis=1)


def start(name):
    """The weights a model starts with: "shared", or a client's."""
    key = INIT.at("shared") if name == "shared" else INIT.at("client", name)
    return array(Model.init(LINEAR, key, torch.float64))


def inputs(split):
    x = split.inputs().numpy()
    return np.concatenate([x, np.ones((len(x), 1))], axis=1), np.eye(CLASSES)[split.y.numpy()]


def probabilities(w, x):
    e = np.exp(x @ w.T - (x @ w.T).max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def label_gradient(w, x, y):
    return (probabilities(w, x) - y).T @ x / len(x)


def mutual_gradient(w, peer, x, y, labels=1.0, imitation=1.0):
    p, q = probabilities(w, x), probabilities(peer, x)
    return (labels * (p - y) + imitation * (p - q)).T @ x / len(x)


def mean_loss(w, split):
    x, y = inputs(split)
    return -(np.log(probabilities(w, x)) * y).sum(1).mean()


def close(model, expected):
    return np.allclose(array(model), expected, rtol=0, atol=1e-12)


def test_local_two_rounds_with_momentum_and_weight_decay():
    data = clients((7,))
    train = Training(epochs=1, batch=1000, lr=0.1, momentum=0.9, weight_decay=0.01)
    _, engine = federate(Local(train), task((LINEAR,)), data, rounds=2)
    x, y = inputs(data["0"].train)
    w, v = start("0"), 0.0
    for _ in range(2):
        v = 0.9 * v + label_gradient(w, x, y) + 0.01 * w
        w = w - 0.1 * v
    assert close(engine.states["0"].model, w)


def test_local_scales_or_drops_the_last_batch():
    data = clients((7,))
    x, y = inputs(data["0"].train)
    train = Training(epochs=1, batch=4, lr=0.1, shuffle=False, last_batch="scale")
    _, engine = federate(Local(train), task((LINEAR,)), data, rounds=1)
    first = start("0") - 0.1 * label_gradient(start("0"), x[:4], y[:4])
    assert close(engine.states["0"].model, first - 0.1 * 3 / 4 * label_gradient(first, x[4:], y[4:]))
    _, engine = federate(Local(replace(train, last_batch="drop")), task((LINEAR,)), data, rounds=1)
    assert close(engine.states["0"].model, first)


def test_local_with_adam_over_two_rounds_with_warm_up():
    data = clients((7,))
    train = Training(epochs=1, batch=1000, optimizer="adam", lr=0.1, warmup=1)
    _, engine = federate(Local(train), task((LINEAR,)), data, rounds=2)
    x, y = inputs(data["0"].train)
    w, mean, square = start("0"), 0.0, 0.0
    for step, lr in ((1, 0.05), (2, 0.1)):
        g = label_gradient(w, x, y)
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
        w = w - lr * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
    assert close(engine.states["0"].model, w)


def test_local_clips_the_gradient_before_weight_decay():
    data = clients((7,))
    _, engine = federate(
        Local(Training(epochs=1, batch=1000, lr=0.1, clip=0.05, weight_decay=0.01)), task((LINEAR,)), data, rounds=1
    )
    x, y = inputs(data["0"].train)
    w = start("0")
    g = label_gradient(w, x, y)
    g *= 0.05 / (np.sqrt((g**2).sum()) + 1e-6)
    assert close(engine.states["0"].model, w - 0.1 * (g + 0.01 * w))


def test_local_patience_stops_a_client_that_does_not_improve():
    data = clients((7,))
    method = Local(Training(epochs=1, batch=1000, lr=5.0), patience=2)  # far too large a step: the loss rises
    _, engine = federate(method, task((LINEAR,)), data, rounds=12)
    state = engine.states["0"]
    again, _, report = engine.run_on_server(method.client_round(state, up_to_date(), data["0"], Round(12, 20), Key(0))).value
    assert state.waited >= 2
    assert again is state
    assert report.notes == {"stopped": True}


def up_to_date():
    return Local(ONE).deliver(task(), None, "0")


def test_centralized_steps_on_all_data_at_once():
    data = clients()
    server, _ = federate(Centralized(ONE), task(), data, rounds=1)
    x, y = (np.concatenate(parts) for parts in zip(*(inputs(d.train) for d in data.values()), strict=True))
    w = start("shared")
    assert close(server.model, w - 0.1 * label_gradient(w, x, y))


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_fedavg_averages_one_step_of_each_client(weighting):
    data = clients()
    server, _ = federate(FedAvg(ONE, weighting=weighting), task(), data, rounds=1)
    w = start("shared")
    copies = [w - 0.1 * label_gradient(w, *inputs(d.train)) for d in data.values()]
    sizes = [7, 12, 4] if weighting == "samples" else [1, 1, 1]
    assert close(server.model, sum(n * c for n, c in zip(sizes, copies, strict=True)) / sum(sizes))


def test_fedprox_second_step_is_pulled_back():
    data = clients((6,))
    server, _ = federate(FedProx(Training(epochs=2, batch=1000, lr=0.1), mu=0.5), task((LINEAR,)), data, rounds=1)
    x, y = inputs(data["0"].train)
    w0 = start("shared")
    w = w0 - 0.1 * label_gradient(w0, x, y)
    w = w - 0.1 * (label_gradient(w, x, y) + 0.5 * (w - w0))
    assert close(server.model, w)


def test_ditto_two_rounds_of_the_copy_and_of_the_personal_model():
    data = clients((7, 12))
    server, engine = federate(Ditto(ONE, lam=0.6), task((LINEAR,) * 2), data, rounds=2)
    w, personal = start("shared"), {c: start(c) for c in data}
    for _ in range(2):  # the pull is towards w as it was received, not towards the trained copy
        gradients = {c: label_gradient(v, *inputs(data[c].train)) + 0.6 * (v - w) for c, v in personal.items()}
        personal = {c: v - 0.1 * gradients[c] for c, v in personal.items()}
        w = np.mean([w - 0.1 * label_gradient(w, *inputs(d.train)) for d in data.values()], axis=0)
    assert close(server.model, w)
    assert all(close(engine.states[c].personal, v) for c, v in personal.items())


@pytest.mark.parametrize(("alpha", "sigma"), [(0.3, 1.0), (2.0, 0.5)], ids=["mixed", "scaled to one"])
def test_fedamp_second_round_is_pulled_to_a_mixture_of_similar_models(alpha, sigma):
    data = clients()
    _, engine = federate(FedAMP(ONE, alpha=alpha, lam=0.8, sigma=sigma), task(), data, rounds=2)
    w = start("shared")
    first = {c: w - 0.1 * label_gradient(w, *inputs(d.train)) for c, d in data.items()}  # the pull is zero at its centre
    sums = []
    for c, m in first.items():
        others = {o: alpha / sigma * np.exp(-((m - v) ** 2).sum() / sigma) for o, v in first.items() if o != c}
        sums.append(sum(others.values()))
        others = {o: xi / max(1.0, sums[-1]) for o, xi in others.items()}
        u = (1 - sum(others.values())) * m + sum(xi * first[o] for o, xi in others.items())
        assert close(engine.states[c].personal, m - 0.1 * (label_gradient(m, *inputs(data[c].train)) + 0.8 / alpha * (m - u)))
        assert np.abs(u - m).max() > 1e-4
    assert [bool(total > 1) for total in sums] == [alpha == 2.0] * 3


def test_fedamp_mixes_for_all_clients_as_for_some(monkeypatch):
    monkeypatch.setattr(model_mixtures, "TILE", 7)  # of 10 weights and 5
    models = [Model.init(LINEAR, Key(number), torch.float64) for number in range(7)]
    models[3] = models[2].with_params({name: value + 1e-9 for name, value in models[2].params.items()})  # close to each other
    every, some = (model_mixtures.squared_distances(models, clients) for clients in (range(7), [1, 3, 4]))
    wanted = [[((array(a) - array(b)) ** 2).sum() for b in models] for a in models]
    assert np.allclose(every, wanted, rtol=1e-7, atol=0)
    assert np.allclose(some, every[[1, 3, 4]], rtol=1e-12, atol=0)
    xi = FedAMP(ONE, sigma=4.0).mixing_weights(some, [1, 3, 4])
    for row, params in zip(xi, model_mixtures.mixtures(models, xi), strict=True):
        mixture = models[0].with_params(params)
        assert np.allclose(array(mixture), sum(float(x) * array(m) for x, m in zip(row, models, strict=True)), rtol=1e-12)


def test_hypcluster_chooses_by_training_loss_and_averages_members():
    data = clients((7, 12, 4), seed=3)
    method = HypCluster(ONE, clusters=3)
    server, _ = federate(method, task(), data, rounds=1)
    models = [array(m) for m in method.init_server(task(), INIT).models]
    choice = {c: int(np.argmin([mean_loss(w, d.train) for w in models])) for c, d in data.items()}
    for k, w in enumerate(models):
        members = [data[c] for c in data if choice[c] == k]
        if not members:
            assert close(server.models[k], w)
            continue
        copies = [len(d.train) * (w - 0.1 * label_gradient(w, *inputs(d.train))) for d in members]
        assert close(server.models[k], sum(copies) / sum(len(d.train) for d in members))


@pytest.mark.parametrize("scale_global", [False, True])
def test_mapper_one_round_of_one_client(scale_global):
    data = clients((9,))
    method = Mapper(ONE, lambdas=(0.0, 0.5, 1.0), scale_global=scale_global)
    server, engine = federate(method, task((LINEAR,)), data, rounds=1)
    a, b, c = (data["0"].train.take(part) for part in engine.states["0"].parts)
    assert sorted(torch.cat([a.rows, b.rows, c.rows]).tolist()) == data["0"].train.rows.tolist()
    shared, local = start("shared"), start("0")
    best = None
    for lam in (0.0, 0.5, 1.0):
        u = lam * local + (1 - lam) * shared
        u = u - 0.1 * label_gradient(u, *inputs(a)) if lam else u
        if best is None or mean_loss(u, b) < best[0]:
            best = (mean_loss(u, b), lam, u)
    _, lam, u = best
    v = u - 0.1 * label_gradient(u, *inputs(c))
    assert close(server.model, shared + (1 - lam if scale_global else 1) * (v - u))
    assert close(engine.states["0"].local, (u - (1 - lam) * shared) / lam if lam else local)


@pytest.mark.parametrize(("loss", "slope"), [("mae", lambda e: np.sign(e)), ("mse", lambda e: 2 * e)])
def test_fedmd_digests_the_mean_of_logits_then_revisits(loss, slope):
    data = clients((7, 12), public=8)
    method = FedMD(ONE, public_epochs=1, private_epochs=1, digest_batch=1000, digest_loss=loss)
    _, engine = federate(method, task((LINEAR,) * 2, public=8), data, rounds=1)
    px, py = inputs(data["0"].public)
    models = {}
    for c in data:
        w = start(c)
        for start_at in range(0, 8, 1000):
            w = w - 0.1 * label_gradient(w, px[start_at:], py[start_at:])
        models[c] = w - 0.1 * label_gradient(w, *inputs(data[c].train))
    consensus = np.mean([px @ w.T for w in models.values()], axis=0)
    for c, w in models.items():
        w = w - 0.1 * slope(px @ w.T - consensus).T @ px / (8 * CLASSES)
        w = w - 0.1 * label_gradient(w, *inputs(data[c].train))
        assert close(engine.states[c].model, w)


def test_fml_one_step_of_both_models():
    data = clients((7, 12))
    server, engine = federate(FML(ONE, alpha=0.7, beta=0.2), task((LINEAR,) * 2), data, rounds=1)
    meme = start("shared")
    memes = []
    for c in data:
        x, y = inputs(data[c].train)
        local = start(c)
        assert close(engine.states[c].own, local - 0.1 * mutual_gradient(local, meme, x, y, 0.7, 0.3))
        memes.append(meme - 0.1 * mutual_gradient(meme, local, x, y, 0.2, 0.8))
    merged = np.mean(memes, axis=0)
    assert np.allclose(server.params["0.weight"].numpy(), merged[:, :-1], rtol=0, atol=1e-12)
    assert np.allclose(server.params["0.bias"].numpy(), merged[:, -1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [FML, FedAvg, FedProx, APFL, Ditto])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_numbers_of_samples_are_sent_only_where_they_are_weights(method, weighting):
    told = []

    class Watched(method):
        def aggregate(self, server, replies, when, key):
            told.extend(reply.samples for reply in replies.values())
            return super().aggregate(server, replies, when, key)

    federate(Watched(train=ONE, weighting=weighting), task((LINEAR,) * 2), clients((7, 12)), rounds=1)
    assert told == ([7, 12] if weighting == "samples" else [1, 1])


def test_fedmd_trains_on_public_data_until_the_validation_loss_stops_falling():
    data = clients((7, 12), public=8)
    method = FedMD(ONE, public_epochs=40, patience=2, private_epochs=1, digest_batch=1000)
    _, engine = federate(method, task((LINEAR,) * 2, public=8), data, rounds=1)
    px, py = inputs(data["0"].public)
    models, epochs = {}, {}
    for c in data:
        w, losses = start(c), []
        while len(losses) < 40 and (len(losses) < 3 or min(losses[-2:]) < min(losses[:-2])):
            w = w - 0.1 * label_gradient(w, px, py)
            losses.append(mean_loss(w, data[c].val))
        models[c], epochs[c] = w - 0.1 * label_gradient(w, *inputs(data[c].train)), len(losses)
    assert min(epochs.values()) < 40  # otherwise it would say nothing about patience
    consensus = np.mean([px @ w.T for w in models.values()], axis=0)
    for c, w in models.items():
        w = w - 0.1 * np.sign(px @ w.T - consensus).T @ px / (8 * CLASSES)
        assert close(engine.states[c].model, w - 0.1 * label_gradient(w, *inputs(data[c].train)))


def test_fml_as_fedme_runs_it_has_twice_the_gradient_and_weighs_by_samples():
    data = clients((7, 12))
    server, engine = federate(FML(ONE, loss="sum", weighting="samples"), task((LINEAR,) * 2), data, rounds=1)
    meme = start("shared")
    memes = []
    for c in data:
        x, y = inputs(data[c].train)
        local = start(c)
        assert close(engine.states[c].own, local - 0.1 * mutual_gradient(local, meme, x, y))
        memes.append(meme - 0.1 * mutual_gradient(meme, local, x, y))
    assert np.allclose(server.params["0.weight"].numpy(), ((7 * memes[0] + 12 * memes[1]) / 19)[:, :-1], rtol=0, atol=1e-12)


def test_pfedme_two_batches_of_one_client():
    data = clients((8,))
    train = Training(steps=2, batch=4, lr=0.02, shuffle=False)
    method = PFedMe(train, lam=3.0, inner_steps=2, inner_lr=0.1, l2=0.01, beta=2.0)
    server, engine = federate(method, task((LINEAR,)), data, rounds=1)
    x, y = inputs(data["0"].train)
    start_w = start("shared")
    w = theta = start_w
    for rows in (slice(0, 4), slice(4, 8)):
        for _ in range(2):
            theta = theta - 0.1 * (label_gradient(theta, x[rows], y[rows]) + 3.0 * (theta - w) + 0.01 * theta)
        w = w - 0.02 * 3.0 * (w - theta)
    assert close(engine.states["0"].theta, theta)
    assert close(server.model, (1 - 2.0) * start_w + 2.0 * w)


@pytest.mark.parametrize("aux", ["persistent", "anchored", "reset"])
def test_pfml_two_rounds_of_one_client(aux):
    data = clients((8,))
    train = Training(steps=2, batch=4, lr=0.05, shuffle=False)
    method = PFML(train, lam=2.0, inner_steps=2, inner_lr=0.1, beta=1.5, l2=0.01, aux=aux)
    server, engine = federate(method, task((LINEAR,)), data, rounds=2)
    x, y = inputs(data["0"].train)
    shared, previous = start("shared"), None
    for _ in range(2):
        known = shared if previous is None else previous
        anchor = shared if aux == "reset" else known
        m, w = (known if aux == "persistent" else shared), shared
        for rows in (slice(0, 4), slice(4, 8)):
            bx, by = x[rows], y[rows]
            theta, what = m, w
            for _ in range(2):
                step_theta = mutual_gradient(theta, what, bx, by) + 2.0 * (theta - anchor) + 0.01 * theta
                step_what = mutual_gradient(what, theta, bx, by) + 2.0 * (what - shared) + 0.01 * what
                theta, what = theta - 0.1 * step_theta, what - 0.1 * step_what
            step_m = mutual_gradient(m, w, bx, by) + 2.0 * (m - theta) + 0.01 * m
            step_w = mutual_gradient(w, m, bx, by) + 2.0 * (w - what) + 0.01 * w
            m, w = m - 0.05 * step_m, w - 0.05 * step_w
        previous, shared = m, (1 - 1.5) * shared + 1.5 * w
    assert close(engine.states["0"].theta, theta)
    assert close(engine.states["0"].aux, m)
    assert close(server.model, shared)


def test_fedme_one_round_of_two_clients():
    data = clients((7, 12))
    method = FedMe(ONE)
    server, _ = federate(method, task((LINEAR,) * 2), data, rounds=1)
    own = {"0": start("0"), "1": start("1")}
    other = {"0": "1", "1": "0"}  # with two clients each borrows the other's model
    trained, guests, adopts = {}, {}, {}
    for c, o in other.items():
        x, y = inputs(data[c].train)
        trained[c] = own[c] - 0.1 * mutual_gradient(own[c], own[o], x, y)
        guests[c] = own[o] - 0.1 * mutual_gradient(own[o], own[c], x, y)
        adopts[c] = mean_loss(guests[c], data[c].val) < mean_loss(trained[c], data[c].val)
    averaged = {c: (trained[c] + guests[o]) / 2 for c, o in other.items()}
    for c, o in other.items():
        assert close(server.models[c], averaged[o if adopts[c] else c])


def test_fedme_alternating_lets_the_second_model_see_the_first_after_its_step():
    data = clients((7, 12))
    method = FedMe(ONE, order="alternating", tuning=False)
    server, _ = federate(method, task((LINEAR,) * 2), data, rounds=1)
    own = {"0": start("0"), "1": start("1")}
    copies = {"0": [], "1": []}
    for c, o in (("0", "1"), ("1", "0")):
        x, y = inputs(data[c].train)
        first = own[c] - 0.1 * mutual_gradient(own[c], own[o], x, y)
        copies[c].append(first)
        copies[o].append(own[o] - 0.1 * mutual_gradient(own[o], first, x, y))
    for c in own:
        assert close(server.models[c], sum(copies[c]) / 2)


def test_fedme_clusters_models_by_their_logits_on_unlabeled_data():
    unlabeled = split(10, Key(4))
    method = FedMe(ONE, clusters=2)
    setting = task((LINEAR,) * 4, unlabeled=unlabeled)
    _, engine = federate(method, setting, clients((5, 5, 5, 5)), rounds=0)
    near, far = Model.init(LINEAR, Key(1), torch.float64), Model.init(LINEAR, Key(2), torch.float64)
    shifted = far.with_params({name: 5 + value for name, value in far.params.items()})
    moved = [
        m.with_params({n: v + 1e-3 * i for n, v in m.params.items()}) for i, m in enumerate([near, shifted, near, shifted])
    ]
    server = type(method.init_server(setting, INIT))({str(i): model for i, model in enumerate(moved)})
    for t in range(5):
        downs = engine.run_on_server(method.dispatch(setting, server, Plan.all(list("0123")), Round(t, 5), Key(t))).value
        assert {c: d.lender for c, d in downs.items()} == {"0": "2", "2": "0", "1": "3", "3": "1"}


def test_fedmd_says_that_validation_samples_decide_when_its_first_training_ends():
    assert "validation samples" in FedMD(ONE).disclosures()[0]
    assert FedMD(ONE, patience=None).disclosures() == []
