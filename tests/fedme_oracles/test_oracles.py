"""The oracles themselves: steps computed by hand in numpy, identities between methods, and what the settings do.

Nothing here imports the library.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedme_oracles import (
    apfl,
    ditto,
    fd,
    fedamp,
    fedavg,
    fedbn,
    feddf,
    fedper,
    fedproto,
    fedrep,
    heterofl,
    lg_fedavg,
    local,
    networks,
    scaffold,
)
from fedme_oracles.common import SERVER, Problem, Sgd

PHASES = ("train", "shared", "personal", "head", "body")
SIZES = (10, 6, 11, 4)
RATE = 0.1


def problem(
    kinds=(networks.mlp,) * 4,
    shape=(5,),
    rounds=3,
    participants=None,
    same_start=False,
    seed=0,
    sizes=SIZES,
    batch=4,
    skewed=False,
    public=10,
):
    """Clients of different sizes, first weights of their own, and other batches in every round, client and phase."""
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for i, size in enumerate(sizes):
        labels = torch.randint(3, (size,), generator=generator)
        if skewed:  # a client lacks one class
            labels = torch.where(labels == i % 3, (labels + 1) % 3, labels)
        clients.append((torch.randn(size, *shape, generator=generator, dtype=torch.float64), labels))
    participants = participants or [list(range(len(sizes)))] * rounds
    names = [str(kinds.index(kind)) for kind in kinds]

    def order(count):
        return list(torch.split(torch.randperm(count, generator=generator), batch))

    orders = {}
    for t in range(len(participants)):
        for i, size in enumerate(sizes):
            for phase in PHASES:
                orders[t, i, phase] = order(size) + order(size)
        for name in names:
            orders[t, SERVER, name] = order(public)
    first = [networks.first_weights(kind, 7 if same_start else 7 + i) for i, kind in enumerate(kinds)]
    return Problem(
        clients,
        kinds,
        first,
        participants,
        orders,
        server=networks.first_weights(kinds[0], 7),
        architectures=names,
        public=torch.randn(public, *shape, generator=generator, dtype=torch.float64),
    )


def one_step(kinds=(networks.mlp,), sizes=(6,), **more):
    """One round, one batch of all samples for every client, in order."""
    made = problem(kinds, rounds=1, sizes=sizes, batch=100, **more)
    orders = {key: [torch.arange(sizes[key[1]] if key[1] >= 0 else 10)] for key in made.orders}
    return dataclasses.replace(made, orders=orders)


def same(a, b, tolerance=1e-12):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name].double(), b[name].double(), rtol=0, atol=tolerance), name


def differ(a, b, least=1e-4):
    assert max((a[name].double() - b[name].double()).abs().max().item() for name in a) > least


def same_models(a, b):
    for one, other in zip(a, b, strict=True):
        for left, right in zip(one.personal, other.personal, strict=True):
            same(left, right)


# By hand: a network of one hidden layer in numpy.

W1, B1, W2, B2 = "body.0.weight", "body.0.bias", "head.weight", "head.bias"


def arrays(state):
    return {name: value.numpy() for name, value in state.items()}


def softmax(z):
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def forward(w, x):
    a = x @ w[W1].T + w[B1]
    return a, np.maximum(a, 0), np.maximum(a, 0) @ w[W2].T + w[B2]


def error_of_cross_entropy(z, y):
    return (softmax(z) - np.eye(z.shape[1])[y]) / len(y)


def gradient(w, x, error_of_logits=None, y=None, error_of_features=0.0):
    """The gradient from the derivative of the loss with respect to the logits (of the cross-entropy unless given)."""
    a, h, z = forward(w, x)
    dz = error_of_cross_entropy(z, y) if error_of_logits is None else error_of_logits
    da = (dz @ w[W2] + error_of_features) * (a > 0)
    return {W1: da.T @ x, B1: da.sum(axis=0), W2: dz.T @ h, B2: dz.sum(axis=0)}


def stepped(w, g, rate=RATE):
    return {name: w[name] - rate * g[name] for name in w}


def close(state, by_hand):
    for name in by_hand:
        np.testing.assert_allclose(state[name].numpy(), by_hand[name], rtol=0, atol=1e-12)


def data(made, i=0):
    return made.clients[i][0].numpy(), made.clients[i][1].numpy()


def test_fedavg_and_local_by_hand():
    made = one_step((networks.mlp,) * 2, sizes=(6, 3))
    w = arrays(made.server)
    steps = [stepped(w, gradient(w, x, y=y)) for x, y in (data(made, 0), data(made, 1))]
    result = fedavg.run(made)[0]
    close(result.server, {name: (6 * steps[0][name] + 3 * steps[1][name]) / 9 for name in w})
    close(result.trained[1], steps[1])
    own = arrays(made.first[1])
    close(local.run(made)[0].personal[1], stepped(own, gradient(own, data(made, 1)[0], y=data(made, 1)[1])))


def test_momentum_and_weight_decay_by_hand_and_momentum_is_reset():
    made = problem((networks.mlp,), sizes=(6,), rounds=2, batch=3)
    orders = {key: [torch.arange(3), torch.arange(3, 6)] for key in made.orders}
    made = dataclasses.replace(made, orders=orders)
    x, y = data(made)
    w = arrays(made.first[0])
    for _ in range(2):
        buffer = None
        for rows in (slice(0, 3), slice(3, 6)):
            g = gradient(w, x[rows], y=y[rows])
            g = {name: g[name] + 0.05 * w[name] for name in w}
            buffer = g if buffer is None else {name: 0.9 * buffer[name] + g[name] for name in w}
            w = stepped(w, buffer)
    settings = local.Settings(Sgd(RATE, momentum=0.9, weight_decay=0.05))
    close(local.run(made, settings)[1].personal[0], w)


def test_ditto_by_hand():
    made = one_step()
    x, y = data(made)
    w, v = arrays(made.server), arrays({name: value + 0.3 for name, value in made.first[0].items()})
    made = dataclasses.replace(made, first=[{name: torch.from_numpy(value) for name, value in v.items()}])
    g = gradient(v, x, y=y)
    result = ditto.run(made, ditto.Settings(lambda_=0.7))[0]
    close(result.personal[0], {name: v[name] - RATE * (g[name] + 0.7 * (v[name] - w[name])) for name in w})
    close(result.server, stepped(w, gradient(w, x, y=y)))


def test_scaffold_by_hand_for_two_rounds():
    made = problem((networks.mlp,) * 3, sizes=(6, 3, 5), participants=[[0, 1], [0, 2]], batch=100)
    orders = {key: [torch.arange((6, 3, 5)[key[1]])] for key in made.orders if key[1] >= 0}
    made = dataclasses.replace(made, orders=orders)
    x0 = arrays(made.server)
    # Round 1: variates are zero, so a variate becomes its client's gradient at x0.
    g0, g1 = (gradient(x0, data(made, i)[0], y=data(made, i)[1]) for i in (0, 1))
    x1 = {name: x0[name] - 0.5 * RATE * (g0[name] + g1[name]) / 2 for name in x0}
    c = {name: (g0[name] + g1[name]) / 3 for name in x0}
    # Round 2: client 0 has the variate g0, client 2 has none.
    h0, h2 = (gradient(x1, data(made, i)[0], y=data(made, i)[1]) for i in (0, 2))
    y0 = {name: x1[name] - RATE * (h0[name] - g0[name] + c[name]) for name in x0}
    y2 = {name: x1[name] - RATE * (h2[name] + c[name]) for name in x0}
    x2 = {name: x1[name] + 0.5 * ((y0[name] + y2[name]) / 2 - x1[name]) for name in x0}
    # (x - y) / (K eta) is h - c_i + c, so the new variate c_i - c + that is the client's gradient h.
    c2 = {name: c[name] + (h0[name] - g0[name] + h2[name]) / 3 for name in x0}
    result = scaffold.run(made, scaffold.Settings(server_learning_rate=0.5))
    close(result[0].server, x1)
    close(result[0].kept["server_variate"], c)
    close(result[1].server, x2)
    close(result[1].kept["server_variate"], c2)
    close(result[1].kept["client_variates"][0], h0)
    close(result[1].kept["client_variates"][1], g1)


def test_fedper_by_hand():
    made = one_step((networks.mlp,) * 2, sizes=(6, 3))
    steps = []
    for i in (0, 1):
        w = {**arrays(made.server), W2: arrays(made.first[i])[W2], B2: arrays(made.first[i])[B2]}
        steps.append(stepped(w, gradient(w, data(made, i)[0], y=data(made, i)[1])))
    base = {name: (6 * steps[0][name] + 3 * steps[1][name]) / 9 for name in (W1, B1)}
    result = fedper.run(made)[0]
    close(result.server, base)
    close(result.personal[1], {**base, W2: steps[1][W2], B2: steps[1][B2]})


def test_fedrep_by_hand():
    made = one_step((networks.mlp,) * 2, sizes=(6, 3))
    bodies, heads = [], []
    for i in (0, 1):
        x, y = data(made, i)
        w = {**arrays(made.server), W2: arrays(made.first[i])[W2], B2: arrays(made.first[i])[B2]}
        g = gradient(w, x, y=y)
        w = {**w, W2: w[W2] - RATE * g[W2], B2: w[B2] - RATE * g[B2]}
        g = gradient(w, x, y=y)  # of the body, with the new head
        bodies.append({name: w[name] - RATE * g[name] for name in (W1, B1)})
        heads.append({name: w[name] for name in (W2, B2)})
    phi = {name: (bodies[0][name] + bodies[1][name]) / 2 for name in (W1, B1)}
    result = fedrep.run(made)[0]
    close(result.server, phi)
    for i in (0, 1):
        close(result.personal[i], {**phi, **heads[i]})


def test_lg_fedavg_by_hand():
    made = one_step((networks.mlp,) * 2, sizes=(6, 3))
    steps = []
    for i in (0, 1):
        w = {**arrays(made.first[i]), W2: arrays(made.server)[W2], B2: arrays(made.server)[B2]}
        steps.append(stepped(w, gradient(w, data(made, i)[0], y=data(made, i)[1])))
    g = {name: (6 * steps[0][name] + 3 * steps[1][name]) / 9 for name in (W2, B2)}
    result = lg_fedavg.run(made)[0]
    close(result.server, g)
    close(result.personal[1], {W1: steps[1][W1], B1: steps[1][B1], **g})


def test_fedbn_by_hand():
    made = one_step((networks.bn_mlp,) * 2, sizes=(6, 3))
    gamma, beta, running_mean, running_var = (f"body.1.{name}" for name in ("weight", "bias", "running_mean", "running_var"))
    steps = []
    for i in (0, 1):
        x, y = data(made, i)
        shared, own = arrays(made.server), arrays(made.first[i])
        w = {name: own[name] if name.startswith("body.1.") else shared[name] for name in shared}
        a = x @ w[W1].T
        centre, variance = a.mean(axis=0), a.var(axis=0)
        normal = (a - centre) / np.sqrt(variance + 1e-5)
        n = w[gamma] * normal + w[beta]
        h = np.maximum(n, 0)
        dz = error_of_cross_entropy(h @ w[W2].T + w[B2], y)
        dn = (dz @ w[W2]) * (n > 0)
        scaled = dn * w[gamma]
        da = (scaled - scaled.mean(axis=0) - normal * (scaled * normal).mean(axis=0)) / np.sqrt(variance + 1e-5)
        g = {W1: da.T @ x, W2: dz.T @ h, B2: dz.sum(axis=0)}
        g |= {gamma: (dn * normal).sum(axis=0), beta: dn.sum(axis=0)}
        after = stepped({name: w[name] for name in g}, g)
        after[running_mean] = 0.9 * w[running_mean] + 0.1 * centre
        after[running_var] = 0.9 * w[running_var] + 0.1 * variance * len(x) / (len(x) - 1)
        steps.append(after)
    shared = {name: (steps[0][name] + steps[1][name]) / 2 for name in (W1, W2, B2)}
    result = fedbn.run(made)[0]
    close(result.server, shared)
    assert result.server.keys() == shared.keys()
    for i in (0, 1):
        close(result.personal[i], {**steps[i], **shared})


def test_apfl_by_hand():
    made = one_step((networks.mlp,) * 2, sizes=(6, 3))
    made = dataclasses.replace(made, first=[networks.first_weights(networks.mlp, seed) for seed in (1, 2)])
    result = apfl.run(made, apfl.Settings(alpha=0.3))[0]
    copies = []
    for i in (0, 1):
        x, y = data(made, i)
        w, v = arrays(made.server), arrays(made.first[i])
        g = gradient({name: 0.3 * v[name] + 0.7 * w[name] for name in w}, x, y=y)
        alpha = 0.3 - RATE * sum(((v[name] - w[name]) * g[name]).sum() for name in w)
        new_w = stepped(w, gradient(w, x, y=y))
        new_v = {name: v[name] - RATE * 0.3 * g[name] for name in w}
        assert result.kept["alphas"][i] == pytest.approx(alpha, abs=1e-12)
        close(result.kept["v"][i], new_v)
        close(result.personal[i], {name: alpha * new_v[name] + (1 - alpha) * new_w[name] for name in w})
        copies.append(new_w)
    close(result.server, {name: (copies[0][name] + copies[1][name]) / 2 for name in copies[0]})


def test_fedamp_by_hand():
    made = one_step((networks.mlp,) * 3, sizes=(6, 3, 4))
    m = [arrays(state) for state in made.first]
    distance = [[sum(((a[name] - b[name]) ** 2).sum() for name in a) for b in m] for a in m]
    settings = fedamp.Settings(alpha=0.4, lambda_=0.5, sigma=6.0)
    result = fedamp.run(made, settings)[0]
    for i in range(3):
        xi = [0.4 * math.exp(-distance[i][j] / 6) / 6 if j != i else 0.0 for j in range(3)]
        xi[i] = 1 - sum(xi)
        u = {name: sum(xi[j] * m[j][name] for j in range(3)) for name in m[i]}
        g = gradient(m[i], data(made, i)[0], y=data(made, i)[1])
        pull = {name: 0.5 / 0.4 * (m[i][name] - u[name]) for name in u}
        close(result.personal[i], {name: m[i][name] - RATE * (g[name] + pull[name]) for name in u})
        assert result.kept["mixing_weights"][i] == pytest.approx(dict(enumerate(xi)), abs=1e-12)


def test_fd_by_hand():
    made = problem((networks.mlp,) * 3, sizes=(6, 5, 4), rounds=2, batch=100)
    made = dataclasses.replace(made, orders={key: [torch.arange((6, 5, 4)[key[1]])] for key in made.orders if key[1] >= 0})
    w = [arrays(state) for state in made.first]
    tables = []
    for i in range(3):
        x, y = data(made, i)
        z = forward(w[i], x)[2]
        tables.append([z[y == c].mean(axis=0) if (y == c).any() else None for c in range(3)])  # before the step
        w[i] = stepped(w[i], gradient(w[i], x, y=y))
    result = fd.run(made, fd.Settings(gamma=0.8))
    for i in range(3):
        close(result[0].personal[i], w[i])
        x, y = data(made, i)
        z = forward(w[i], x)[2]
        error = error_of_cross_entropy(z, y)
        for row, label in enumerate(y):
            others = [tables[j][label] for j in range(3) if j != i and tables[j][label] is not None]
            if others:
                error[row] += 0.8 * 2 * (z[row] - np.mean(others, axis=0)) / 3 / len(y)
        close(result[1].personal[i], stepped(w[i], gradient(w[i], x, error)))


def test_fd_with_cross_entropy_by_hand():
    made = problem((networks.mlp,) * 2, sizes=(6, 5), rounds=2, batch=100)
    made = dataclasses.replace(made, orders={key: [torch.arange((6, 5)[key[1]])] for key in made.orders if key[1] >= 0})
    settings = fd.Settings(gamma=0.8, distance="cross_entropy")
    result = fd.run(made, settings)
    x, y = data(made, 0)
    other_x, other_y = data(made, 1)
    p = softmax(forward(arrays(made.first[1]), other_x)[2])
    w = arrays(result[0].personal[0])
    z = forward(w, x)[2]
    error = error_of_cross_entropy(z, y)
    for row, label in enumerate(y):
        if (other_y == label).any():
            error[row] += 0.8 * (softmax(z)[row] - p[other_y == label].mean(axis=0)) / len(y)
    close(result[1].personal[0], stepped(w, gradient(w, x, error)))


def test_fedproto_by_hand():
    made = problem((networks.mlp,) * 2, sizes=(6, 4), rounds=2, batch=100)
    made = dataclasses.replace(made, orders={key: [torch.arange((6, 4)[key[1]])] for key in made.orders if key[1] >= 0})
    w = [arrays(state) for state in made.first]
    sums, counts = np.zeros((3, 7)), np.zeros(3)
    for i in range(2):
        x, y = data(made, i)
        w[i] = stepped(w[i], gradient(w[i], x, y=y))
        h = forward(w[i], x)[1]  # after the step
        for c in range(3):
            sums[c] += h[y == c].sum(axis=0)
            counts[c] += (y == c).sum()
    prototypes = sums / np.maximum(counts, 1)[:, None]
    result = fedproto.run(made, fedproto.Settings(lambda_=0.6))
    np.testing.assert_allclose(result[0].server.numpy(), prototypes, rtol=0, atol=1e-12)
    for i in range(2):
        x, y = data(made, i)
        h = forward(w[i], x)[1]
        error = 0.6 * 2 * (h - prototypes[y]) / h.size
        close(result[1].personal[i], stepped(w[i], gradient(w[i], x, y=y, error_of_features=error)))


def with_architectures(made, first_of=7):
    kinds = dict(zip(made.architectures, made.networks, strict=True))
    return dataclasses.replace(made, server={name: networks.first_weights(kind, first_of) for name, kind in kinds.items()})


@pytest.mark.parametrize("teacher", ["logits", "probabilities"])
def test_feddf_by_hand(teacher):
    made = with_architectures(one_step((networks.mlp, networks.mlp, networks.deep_mlp), sizes=(6, 3, 4)))
    settings = feddf.Settings(server_optimizer="sgd", server_learning_rate=0.5, teacher=teacher)
    result = feddf.run(made, settings)[0]
    w = arrays(made.server["0"])
    steps = [stepped(w, gradient(w, data(made, i)[0], y=data(made, i)[1])) for i in (0, 1)]
    public = made.public.numpy()
    deep = networks.deep_mlp().double()
    deep.load_state_dict(result.trained[2])
    with torch.no_grad():
        logits = [*(forward(step, public)[2] for step in steps), deep(made.public).numpy()]
    p = softmax(np.mean(logits, axis=0)) if teacher == "logits" else np.mean([softmax(z) for z in logits], axis=0)
    student = {name: (6 * steps[0][name] + 3 * steps[1][name]) / 9 for name in w}
    error = (softmax(forward(student, public)[2]) - p) / len(public)
    close(result.server["0"], stepped(student, gradient(student, public, error), 0.5))
    # The first step of Adam is the rate times the sign of the gradient, where that is not tiny.
    adam = feddf.run(made, feddf.Settings(teacher=teacher))[0].server["0"]
    g = gradient(student, public, error)
    for name in w:
        expected = student[name] - 1e-3 * g[name] / (np.abs(g[name]) + 1e-8)
        np.testing.assert_allclose(adam[name].numpy(), expected, rtol=0, atol=1e-12)


def quarter():
    return networks.scaled_mlp(0.25)


def half():
    return networks.scaled_mlp(0.5)


def full():
    return networks.scaled_mlp(1.0)


@pytest.mark.parametrize("masked", [True, False])
def test_heterofl_by_hand(masked):
    """One hidden layer, with widths 8 and 4; client 1 (the narrow one) lacks a class."""

    def wide():
        return networks.Network(
            torch.nn.Sequential(torch.nn.Linear(5, 8), networks.Scaler(1.0), torch.nn.ReLU()), torch.nn.Linear(8, 3)
        )

    def narrow():
        return networks.Network(
            torch.nn.Sequential(torch.nn.Linear(5, 4), networks.Scaler(0.5), torch.nn.ReLU()), torch.nn.Linear(4, 3)
        )

    made = one_step((wide, narrow), sizes=(9, 6), skewed=True, seed=1)
    made = dataclasses.replace(made, server=networks.first_weights(wide, 7))
    widest = arrays(made.server)
    narrowest = {W1: widest[W1][:4], B1: widest[B1][:4], W2: widest[W2][:, :4], B2: widest[B2]}
    has = [np.isin(np.arange(3), data(made, i)[1]) for i in (0, 1)]
    assert not has[1].all()
    assert has[0].sum() + has[1].sum() > 3
    steps = []
    for w, rate, i in ((widest, 1.0, 0), (narrowest, 0.5, 1)):
        x, y = data(made, i)
        a = (x @ w[W1].T + w[B1]) / rate
        h = np.maximum(a, 0)
        z = h @ w[W2].T + w[B2]
        dz = error_of_cross_entropy(np.where(has[i], z, 0.0), y) * has[i] if masked else error_of_cross_entropy(z, y)
        da = (dz @ w[W2]) * (a > 0) / rate
        steps.append(stepped(w, {W1: da.T @ x, B1: da.sum(axis=0), W2: dz.T @ h, B2: dz.sum(axis=0)}))
    expected = {name: value.copy() for name, value in steps[0].items()}
    expected[W1][:4] = (steps[0][W1][:4] + steps[1][W1]) / 2
    expected[B1][:4] = (steps[0][B1][:4] + steps[1][B1]) / 2
    if masked:  # rows of the head: only those who have the class
        for c in range(3):
            who = [i for i in (0, 1) if has[i][c]]
            expected[W2][c, :4] = np.mean([steps[i][W2][c, :4] for i in who], axis=0) if who else widest[W2][c, :4]
            expected[W2][c, 4:] = steps[0][W2][c, 4:] if has[0][c] else widest[W2][c, 4:]
            expected[B2][c] = np.mean([steps[i][B2][c] for i in who]) if who else widest[B2][c]
    else:
        expected[W2][:, :4] = (steps[0][W2][:, :4] + steps[1][W2]) / 2
        expected[B2] = (steps[0][B2] + steps[1][B2]) / 2
    result = heterofl.run(made, heterofl.Settings(masked=masked, head_by_class=masked))[0]
    close(result.server, expected)
    close(result.personal[1], {W1: expected[W1][:4], B1: expected[B1][:4], W2: expected[W2][:, :4], B2: expected[B2]})


# Identities. Cohorts change from round to round, and clients have different sizes.

COHORTS = [[0, 1, 2], [1, 3], [0, 2, 3]]
SGD = Sgd(RATE, momentum=0.5)


@pytest.fixture(params=["mlp", "cnn"])
def made(request):
    if request.param == "cnn":
        return problem((networks.cnn,) * 4, shape=(1, 6, 6), participants=COHORTS)
    return problem(participants=COHORTS)


def test_ditto_without_penalty_is_local_and_fedavg(made):
    result = ditto.run(made, ditto.Settings(lambda_=0.0, sgd=SGD))
    same_models(result, local.run(made, local.Settings(SGD), phase="personal"))
    for one, other in zip(result, fedavg.run(made, fedavg.Settings(SGD, "uniform"), phase="shared"), strict=True):
        same(one.server, other.server)


def test_ditto_with_a_strong_penalty_follows_the_shared_model():
    made = problem(rounds=1, batch=1)
    settings = [ditto.Settings(lambda_=value, sgd=Sgd(0.001)) for value in (0.0, 500.0)]
    distances = []
    for setting in settings:
        result = ditto.run(made, setting)[0]
        distances.append(sum(((result.personal[1][name] - made.server[name]) ** 2).sum().item() for name in made.server))
    assert distances[1] < distances[0] / 100


def test_ditto_keeps_to_what_it_received_not_to_its_trained_copy():
    made = problem(rounds=1)
    longer = {key: batches * 3 if key[2] == "shared" else batches for key, batches in made.orders.items()}
    a, b = ditto.run(made), ditto.run(dataclasses.replace(made, orders=longer))
    same_models(a, b)
    differ(a[0].server, b[0].server)


def test_scaffold_begins_as_fedavg(made):
    result = scaffold.run(made, scaffold.Settings(sgd=Sgd(RATE)))
    averaged = fedavg.run(made, fedavg.Settings(Sgd(RATE), "uniform"))
    same(result[0].server, averaged[0].server)
    differ(result[2].server, averaged[2].server)


def test_scaffold_with_one_step_and_all_clients_is_fedavg():
    """The mean of the variates is the server's, so with everybody present the shifts cancel in the mean of one step."""
    made = problem(batch=100)
    made = dataclasses.replace(made, orders={key: batches[:1] for key, batches in made.orders.items()})
    result, averaged = scaffold.run(made), fedavg.run(made, fedavg.Settings(weighting="uniform"))
    for one, other in zip(result, averaged, strict=True):
        same(one.server, other.server)
    mean = {name: sum(c[name] for c in result[2].kept["client_variates"]) / 4 for name in made.server}
    same(mean, result[2].kept["server_variate"])


def test_scaffold_server_variate_is_the_mean_of_all_clients(made):
    for after in scaffold.run(made):
        variates = after.kept["client_variates"]
        same({name: sum(c[name] for c in variates) / 4 for name in variates[0]}, after.kept["server_variate"])


def test_scaffold_removes_the_drift_of_many_steps():
    """With full batches it nears a stationary point of the mean loss, where FedAvg with many steps stays off."""

    def tiny():
        return networks.mlp(hidden=1)

    made = problem((tiny,) * 2, rounds=40, batch=100, same_start=True, sizes=(12, 12), seed=3)
    made = dataclasses.replace(made, orders={key: batches[:1] * 8 for key, batches in made.orders.items()})
    norms = []
    for method in (scaffold, fedavg):
        model = tiny().double()
        model.load_state_dict(method.run(made, method.Settings(sgd=Sgd(0.3), weighting="uniform"))[-1].server)
        sum(F.cross_entropy(model(x), y) for x, y in made.clients).backward()
        norms.append(sum((parameter.grad**2).sum().item() for parameter in model.parameters()))
    assert norms[0] < norms[1] / 10


def test_fedper_without_personal_layers_is_fedavg(made):
    same_models(fedper.run(made, fedper.Settings(personal=("none.",), sgd=SGD)), fedavg.run(made, fedavg.Settings(SGD)))


def test_fedper_with_all_layers_personal_is_local(made):
    settings = fedper.Settings(personal=("body.", "head."), sgd=SGD)
    same_models(fedper.run(made, settings), local.run(made, local.Settings(SGD)))


def test_fedrep_without_body_epochs_keeps_the_body(made):
    empty = {key: [] if key[2] == "body" else batches for key, batches in made.orders.items()}
    result = fedrep.run(dataclasses.replace(made, orders=empty), fedrep.Settings(sgd=SGD))
    for after in result:
        same(after.server, {name: value for name, value in made.server.items() if name.startswith("body.")})
    differ(result[2].personal[0], {name: made.first[0][name] for name in (W2, B2)} | result[2].server)


def test_fedrep_freezes_the_head_while_the_body_learns(made):
    empty = {key: [] if key[2] == "head" else batches for key, batches in made.orders.items()}
    result = fedrep.run(dataclasses.replace(made, orders=empty), fedrep.Settings(sgd=SGD))
    for after, first in zip(result[2].personal, made.first, strict=True):
        assert all(torch.equal(after[name], first[name]) for name in (W2, B2))
    differ(result[2].server, {name: value for name, value in made.server.items() if name.startswith("body.")})


def test_lg_fedavg_without_shared_layers_is_local(made):
    settings = lg_fedavg.Settings(shared=("none.",), sgd=SGD)
    same_models(lg_fedavg.run(made, settings), local.run(made, local.Settings(SGD)))


def test_lg_fedavg_sharing_everything_is_fedavg(made):
    same_models(
        lg_fedavg.run(made, lg_fedavg.Settings(shared=("body.", "head."), sgd=SGD)), fedavg.run(made, fedavg.Settings(SGD))
    )


def test_fedbn_without_batchnorm_is_fedavg(made):
    same_models(fedbn.run(made, fedbn.Settings(SGD)), fedavg.run(made, fedavg.Settings(SGD, "uniform")))


def test_fedbn_keeps_batchnorm_at_the_client():
    made = problem((networks.bn_mlp,) * 4, participants=COHORTS)
    result = fedbn.run(made, fedbn.Settings(SGD))
    assert not any(name.startswith("body.1.") for name in result[2].server)
    differ(result[2].personal[0], result[2].personal[1])
    absent = {name: value for name, value in made.first[3].items() if name.startswith("body.1.")}
    same({name: result[0].personal[3][name] for name in absent}, absent)
    averaged = fedavg.run(made, fedavg.Settings(SGD, "uniform"))
    differ(result[2].server, {name: averaged[2].server[name] for name in result[2].server})


def test_apfl_with_alpha_zero_is_fedavg(made):
    result = apfl.run(made, apfl.Settings(alpha=0.0, alpha_moves="never", sgd=SGD))
    averaged = fedavg.run(made, fedavg.Settings(SGD, "uniform"))
    for one, other in zip(result, averaged, strict=True):
        same(one.server, other.server)
        for i, state in other.trained.items():
            same(one.personal[i], state)
        for i in range(4):
            same(one.kept["mixed_with_newest"][i], other.server)


def test_apfl_with_alpha_one_is_local(made):
    result = apfl.run(made, apfl.Settings(alpha=1.0, alpha_moves="never", sgd=SGD))
    same_models(result, local.run(made, local.Settings(SGD)))


def test_apfl_alpha_moves_and_stays_in_bounds(made):
    steps = apfl.run(made, apfl.Settings())
    assert all(alpha != 0.5 and 0 <= alpha <= 1 for alpha in steps[2].kept["alphas"])
    rounds = apfl.run(made, apfl.Settings(alpha_moves="round"))
    assert steps[0].kept["alphas"][0] != rounds[0].kept["alphas"][0]
    assert steps[0].kept["alphas"][3] == 0.5  # absent
    high = apfl.run(made, apfl.Settings(sgd=Sgd(5.0)))
    assert all(0 <= alpha <= 1 for alpha in high[2].kept["alphas"])


def test_fedamp_with_one_client_has_only_itself():
    made = problem((networks.mlp,), sizes=(9,))
    result = fedamp.run(made)
    assert result[0].kept["mixing_weights"][0] == {0: 1.0}
    same(result[1].kept["clouds"][0], result[0].personal[0])
    # u is where the round begins: one step is then one of Local.
    single = dataclasses.replace(made, orders={key: batches[:1] for key, batches in made.orders.items()})
    same_models(fedamp.run(single), local.run(single))


def test_fedamp_without_penalty_is_local(made):
    same_models(fedamp.run(made, fedamp.Settings(lambda_=0.0, sgd=SGD)), local.run(made, local.Settings(SGD)))


def test_fedamp_far_apart_is_a_proximal_local_training(made):
    """With a tiny sigma nobody is near anybody: u is the client's own model."""
    result = fedamp.run(made, fedamp.Settings(sigma=1e-3))
    for after in result:
        for i, xi in after.kept["mixing_weights"].items():
            assert xi[i] == pytest.approx(1.0)


def test_fedamp_pull_moves_weights(made):
    settings = fedamp.Settings(sigma=100.0, alpha=10.0, lambda_=10.0)
    differ(fedamp.run(made, settings)[2].personal[0], local.run(made)[2].personal[0])
    gap = []
    for lambda_ in (0.0, 10.0):
        a, b, *_ = fedamp.run(made, dataclasses.replace(settings, lambda_=lambda_))[2].personal
        gap.append(sum(((a[name] - b[name]) ** 2).sum().item() for name in a))
    assert gap[1] < gap[0]


def test_fedamp_first_round_and_absent_clients():
    made = problem(participants=COHORTS)
    unknown = fedamp.run(made, fedamp.Settings(sigma=100.0, knows_first=False))
    assert unknown[0].kept["mixing_weights"] == {i: {i: 1.0} for i in (0, 1, 2)}
    assert set(unknown[1].kept["mixing_weights"][1]) == {0, 1, 2}
    assert set(unknown[1].kept["mixing_weights"][3]) == {3}
    present = fedamp.run(made, fedamp.Settings(sigma=100.0, among="participants"))
    assert set(present[1].kept["mixing_weights"][1]) == {1, 3}
    differ(fedamp.run(made, fedamp.Settings(sigma=100.0, start="cloud"))[0].personal[0], present[0].personal[0])


@pytest.mark.parametrize("distance", ["mse", "cross_entropy"])
def test_fd_without_distillation_is_local(made, distance):
    same_models(fd.run(made, fd.Settings(gamma=0.0, distance=distance, sgd=SGD)), local.run(made, local.Settings(SGD)))


def test_fd_with_one_client_is_local():
    made = problem((networks.mlp,), sizes=(9,))
    same_models(fd.run(made), local.run(made))
    differ(fd.run(made, fd.Settings(exclude_own=False))[2].personal[0], local.run(made)[2].personal[0])


def test_fd_settings():
    made = problem((networks.mlp, networks.deep_mlp) * 2, participants=COHORTS, skewed=True)
    plain = fd.run(made)
    for changed in (
        {"collect": "after"},
        {"exclude_own": False},
        {"weighting": "samples"},
        {"remember": True},
        {"distance": "cross_entropy"},
    ):
        differ(fd.run(made, fd.Settings(**changed))[2].personal[0], plain[2].personal[0], 1e-9)
    means, counts = plain[0].kept["sent"][0]
    assert counts.sum() == 2 * SIZES[0]  # two epochs
    assert counts[0] == 0
    assert (means[0] == 0).all()


def test_fedproto_without_penalty_is_local(made):
    same_models(fedproto.run(made, fedproto.Settings(lambda_=0.0, sgd=SGD)), local.run(made, local.Settings(SGD)))


def test_fedproto_begins_as_local_and_pulls_features_together(made):
    plain, pulled = local.run(made), fedproto.run(made, fedproto.Settings(lambda_=5.0))
    same(pulled[0].personal[0], plain[0].personal[0])
    distances = []
    for result in (plain, pulled):
        model = made.networks[0]().double()
        model.load_state_dict(result[2].personal[0])
        x, y = made.clients[0]
        distances.append(((model.features(x) - pulled[1].server[y]) ** 2).mean().item())
    assert distances[1] < distances[0]


def test_fedproto_settings():
    made = problem((networks.mlp, networks.deep_mlp) * 2, participants=[[0], [1], [0, 1, 2, 3]], skewed=True)
    plain = fedproto.run(made)
    assert plain[0].kept["classes_there"].tolist() == [False, *[bool((made.clients[0][1] == c).any()) for c in (1, 2)]]
    for changed in ({"collect": "training"}, {"remember": "nothing"}, {"remember": "clients"}, {"weighting": "uniform"}):
        result = fedproto.run(made, fedproto.Settings(**changed))
        assert not torch.allclose(result[2].server, plain[2].server, rtol=0, atol=1e-9), changed


def test_nearest_prototype():
    prototypes = torch.tensor([[0.0, 0.0], [1.0, 1.0], [5.0, 5.0]])
    features = torch.tensor([[0.1, 0.0], [0.9, 1.2]])
    assert fedproto.nearest_prototype(features, prototypes, torch.tensor([True, True, True])).tolist() == [0, 1]
    assert fedproto.nearest_prototype(features, prototypes, torch.tensor([False, True, True])).tolist() == [1, 1]


def test_feddf_without_server_steps_is_fedavg_per_architecture():
    cohorts = [[0, 1, 2], [1, 2, 3], [0, 3]]
    made = with_architectures(problem((networks.mlp, networks.deep_mlp) * 2, participants=cohorts))
    still = dataclasses.replace(made, orders={key: [] if key[1] == SERVER else b for key, b in made.orders.items()})
    result = feddf.run(still, feddf.Settings(sgd=SGD))
    for name, members in (("0", [0, 2]), ("1", [1, 3])):
        number = {i: k for k, i in enumerate(members)}
        part = Problem(
            [made.clients[i] for i in members],
            [made.networks[i] for i in members],
            [made.first[i] for i in members],
            [[number[i] for i in cohort if i in number] for cohort in cohorts],
            {(t, number[i], phase): b for (t, i, phase), b in made.orders.items() if i in number},
            server=made.server[name],
        )
        for one, other in zip(result, fedavg.run(part, fedavg.Settings(SGD)), strict=True):
            same(one.server[name], other.server)
    differ(feddf.run(made)[2].server["1"], result[2].server["1"])


def test_feddf_nears_the_teacher_and_distils_architectures_without_participants():
    made = with_architectures(problem((networks.mlp, networks.deep_mlp) * 2, participants=[[0, 2]]))
    many = {key: batches * 40 if key[1] == SERVER else batches for key, batches in made.orders.items()}
    result = feddf.run(dataclasses.replace(made, orders=many), feddf.Settings(server_learning_rate=0.01))[0]
    same(result.kept["averaged"]["1"], made.server["1"])
    for name, kind in (("0", networks.mlp), ("1", networks.deep_mlp)):
        distances = []
        for state in (result.kept["averaged"][name], result.server[name]):
            model = kind().double()
            model.load_state_dict(state)
            teacher = result.kept["teacher"]
            distances.append(F.kl_div(F.log_softmax(model(made.public), dim=1), teacher, reduction="batchmean").item())
        assert distances[1] < distances[0] / 2


def test_heterofl_with_one_width_is_fedavg(made):
    settings = heterofl.Settings(masked=False, head_by_class=False, sgd=SGD)
    same_models(heterofl.run(made, settings), fedavg.run(made, fedavg.Settings(SGD, "uniform")))
    by_samples = dataclasses.replace(settings, weighting="samples")
    same_models(heterofl.run(made, by_samples), fedavg.run(made, fedavg.Settings(SGD)))


@pytest.mark.parametrize("kind", [networks.scaled_mlp, networks.scaled_cnn])
def test_heterofl_entries_of_nobody_stay(kind):
    def narrow():
        return kind(0.5)

    def wide():
        return kind(1.0)

    shape = (5,) if kind is networks.scaled_mlp else (1, 6, 6)
    made = problem((wide, narrow, narrow, narrow), shape=shape, participants=[[1, 2], [0, 3]])
    result = heterofl.run(made)
    slices = heterofl.slice_of(made.server, made.first[1])
    for name, value in made.server.items():
        beyond = torch.ones_like(value, dtype=torch.bool)
        beyond[tuple(slice(0, size) for size in slices[name].shape)] = False
        assert torch.equal(result[0].server[name][beyond], value[beyond])
        if name == "body.0.weight":
            assert beyond.any()
            assert not torch.equal(result[1].server[name][beyond], value[beyond])
    differ(result[0].personal[1], slices)
    same(result[1].personal[2], heterofl.slice_of(result[1].server, made.first[2]))


def test_heterofl_slice_of_a_network_is_the_network_with_units_left_out():
    made = problem((full, half, quarter, quarter))
    part = heterofl.slice_of(made.server, made.first[2])
    wide, narrow = full().double().eval(), quarter().double().eval()
    narrow.load_state_dict(part)
    padded = {name: torch.zeros_like(value) for name, value in made.server.items()}
    for name, value in part.items():
        padded[name][tuple(slice(0, size) for size in value.shape)] = value
    wide.load_state_dict(padded)
    x = made.clients[0][0]
    assert torch.allclose(wide(x), narrow(x), rtol=0, atol=1e-12)


# Defaults do something.


def test_defaults_differ_from_the_trivial_method():
    made = problem(participants=COHORTS, skewed=True)
    alone, averaged = local.run(made)[2], fedavg.run(made)[2]
    uniform = fedavg.run(made, fedavg.Settings(weighting="uniform"))[2]
    same_phase = {key: made.orders[key[0], key[1], "train"] if key[1] >= 0 else b for key, b in made.orders.items()}
    made = dataclasses.replace(made, orders=same_phase)
    for method in (ditto, fedper, fedrep, lg_fedavg, apfl, fedproto, fd):
        differ(method.run(made)[2].personal[0], alone.personal[0])
    near = dataclasses.replace(made, first=[made.first[0]] * 4)  # FedAMP with sigma 1 mixes only models that are near
    differ(fedamp.run(near)[2].personal[0], local.run(near)[2].personal[0])
    for method in (ditto, fedper, fedrep, lg_fedavg, apfl, scaffold, heterofl):
        result = method.run(made)[2]
        for other in (averaged, uniform):
            differ(result.personal[0], other.personal[0])
    bn = problem((networks.bn_mlp,) * 4)
    differ(fedbn.run(bn)[2].personal[0], fedavg.run(bn, fedavg.Settings(weighting="uniform"))[2].personal[0])
    many = with_architectures(made)
    differ(feddf.run(many)[2].personal[0], averaged.personal[0])


def test_oracles_leave_their_problem_alone():
    made = problem(participants=COHORTS)
    before = [{name: value.clone() for name, value in state.items()} for state in (*made.first, made.server)]
    for method in (local, fedavg, ditto, scaffold, fedper, fedrep, lg_fedavg, fedbn, apfl, fedamp, fd, fedproto, heterofl):
        once, twice = method.run(made), method.run(made)
        same_models(once, twice)
    for state, earlier in zip((*made.first, made.server), before, strict=True):
        assert all(torch.equal(state[name], earlier[name]) for name in earlier)
