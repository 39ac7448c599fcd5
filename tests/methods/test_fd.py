"""FD: a round by hand, its limit Local, what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedme.core.key import Key
from fedme.core.method import Round
from fedme.core.model import Model
from fedme.core.typed import TypedError
from fedme.execution.compiled import library
from fedme.execution.dispatcher import Dispatcher
from fedme.federation.reply_validation import check_reply
from fedme.learning.class_means import ClassMeans, ClassTargets, class_means, combined
from fedme.learning.objectives import TowardsClass, logit_gradients
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.training_settings import Training
from fedme.methods.fd import FD
from fedme.methods.local import Local
from fedme_test_support import CLASSES, DENSE, DROPPING, LINEAR, NORMALISED, clients, federate, personal, same, task

ONE = Training(epochs=1, batch=1000, lr=0.1)
TRAIN = Training(epochs=2, batch=3, lr=0.1, momentum=0.9, weight_decay=1e-3)


def array(params):
    return np.concatenate([params["0.weight"].numpy(), params["0.bias"].numpy()[:, None]], axis=1)


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


@pytest.mark.parametrize("distance", ["mse", "cross-entropy"])
@pytest.mark.parametrize("means", ["training", "trained"])
def test_two_rounds_by_hand(distance, means):
    data, method = clients(), FD(ONE, gamma=0.7, distance=distance, means=means)
    server, engine = federate(method, task(), data, rounds=2)
    shown = (lambda z: z) if distance == "mse" else softmax
    inputs = {c: np.concatenate([d.train.inputs().numpy(), np.ones((len(d.train), 1))], axis=1) for c, d in data.items()}
    labels = {c: d.train.y.numpy() for c, d in data.items()}
    w = {c: array(Model.init(LINEAR, Key(0).at("init", "client", c), torch.float64).params) for c in data}
    sent = {}
    for _ in range(2):
        seen = dict(w)  # the weights that means are of: those before the only step, or after it
        for c in data:
            x, y = inputs[c], labels[c]
            z = x @ w[c].T
            slopes = softmax(z) - np.eye(CLASSES)[y]
            for k, label in enumerate(y):
                others = [rows[label] for o, rows in sent.items() if o != c and label in rows]
                if others:
                    target = np.mean(others, axis=0)
                    pull = 2 * (z[k] - target) / CLASSES if distance == "mse" else softmax(z)[k] * target.sum() - target
                    slopes[k] += 0.7 * pull
            w[c] = w[c] - 0.1 * slopes.T @ x / len(x)
        seen = w if means == "trained" else seen
        sent = {
            c: {label: shown(inputs[c] @ seen[c].T)[labels[c] == label].mean(0) for label in set(labels[c].tolist())}
            for c in data
        }
    for c in data:
        assert np.allclose(array(engine.states[c].model.params), w[c], rtol=0, atol=1e-12)
        for label, row in sent[c].items():
            assert np.allclose(server.sent[c].means[label].numpy(), row, rtol=0, atol=1e-12)
        assert server.sent[c].counts.tolist() == np.bincount(labels[c], minlength=CLASSES).tolist()


ARCHS = (DROPPING, NORMALISED, DENSE)


def test_without_the_distance_it_is_local_and_by_default_it_is_not():
    data, setting = clients(), task(ARCHS)
    local = Local(TRAIN, optimizer_state="reset")
    alone = personal(local, *federate(local, setting, data))
    none, usual = (personal(m, *federate(m, setting, data)) for m in (FD(TRAIN, gamma=0.0), FD(TRAIN)))
    assert all(same(alone[c], none[c], 1e-12) for c in data)
    assert not any(same(alone[c], usual[c], 1e-3) for c in data)


def test_outputs_of_clients_come_closer():
    def spread(gamma):
        data, method = clients((30, 30, 30)), FD(Training(epochs=3, batch=5, lr=0.05), gamma=gamma)
        server, _ = federate(method, task(ARCHS), data, rounds=8)
        return torch.stack([sent.means for sent in server.sent.values()]).var(0).mean()

    assert spread(5.0) < 0.5 * spread(0.0)


@pytest.mark.parametrize("path", ["auto", "stacked", "workers"])
def test_every_path_agrees_with_different_architectures(path):
    data, setting, method = clients(), task(ARCHS), FD(replace(TRAIN, class_weights="balanced"))
    a = personal(method, *federate(method, setting, data))
    execute = Dispatcher(path=path)
    b = personal(method, *federate(method, setting, data, execute=execute))
    assert all(same(a[c], b[c], 1e-9) for c in data)
    if path == "auto" and not isinstance(library(), str):  # a string says why there is no compiled code
        assert any("unsupported loss ClassWeighted" in line for line in execute.explain())


def test_a_client_gets_the_mean_of_the_others_and_only_of_those_who_have_the_class():
    def sent(value, counts):
        return ClassMeans(torch.full((2, 2), value, dtype=torch.float64), torch.tensor(counts))

    none = ClassTargets.none(2, 2, torch.float64)
    given = [sent(1.0, [1, 0]), sent(4.0, [2, 3])]
    assert combined(given, "uniform", OPEN, none).means[:, 0].tolist() == [2.5, 4.0]
    assert combined(given, "samples", OPEN, none).means[:, 0].tolist() == [3.0, 4.0]
    assert combined(given[:1], "uniform", OPEN, none).known.tolist() == [True, False]
    many = [sent(float(v), [1, 1]) for v in (0, 1, 2, 3, 900)]
    assert combined(many, "samples", Defence(average="median"), none).means[0, 0] == 2.0
    assert class_means(torch.ones(0, 3), torch.ones(0, dtype=torch.int64), 2).counts.tolist() == [0, 0]
    server, _ = federate(FD(TRAIN), task(), clients(), rounds=1)
    downs = {c: FD(TRAIN).deliver(task(), server, c) for c in "012"}
    assert not torch.equal(downs["0"].means, downs["1"].means)


@pytest.mark.parametrize("counts", [[-1, 0, 0, 0], [2**50, 0, 0, 0]])
def test_impossible_numbers_of_samples_are_refused(counts):
    method, down = FD(TRAIN), ClassTargets.none(CLASSES, CLASSES, torch.float64)
    up = ClassMeans(torch.zeros_like(down.means), torch.tensor(counts))
    with pytest.raises(TypedError, match="counts: must be >= 0 and add up to at most"):
        check_reply(method, task(), down, up, Round(0, 1), 7)


def test_the_gradients_of_the_loss_are_those_of_a_finite_difference():
    z, y = torch.randn(1, 5, CLASSES, dtype=torch.float64, generator=Key(3).torch()), torch.tensor([[0, 1, 2, 3, 1]])
    targets, known = (
        torch.randn(CLASSES, CLASSES, dtype=torch.float64, generator=Key(4).torch()).softmax(-1),
        torch.ones(CLASSES),
    )
    for distance in ("mse", "cross-entropy"):
        loss = TowardsClass(targets, known.bool(), 0.6, distance)
        found = logit_gradients(loss, {"own": z}, y)["own"]
        step = torch.zeros_like(z)
        step[0, 2, 1] = 1e-6
        values = [loss({"own": (z + sign * step)[0]}, y[0])["own"].sum() for sign in (1, -1)]
        assert abs((values[0] - values[1]) / 2e-6 - found[0, 2, 1]) < 1e-6
