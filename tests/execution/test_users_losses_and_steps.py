"""What a user's method may bring: a loss of a whole batch, and a step that trains its roles one after another."""

from dataclasses import dataclass, replace

import pytest
import torch

from fedme.core import tree
from fedme.core.key import Key
from fedme.core.model import Model
from fedme.core.operations import BatchSchedule, GaussianMechanism, Train
from fedme.execution.dispatcher import Dispatcher
from fedme.execution.private_batches import PerSample
from fedme.execution.reference import run as run_on_reference, train as train_on_reference
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD
from fedme_test_support import DENSE, LINEAR, WIDE, clients, same


@dataclass(frozen=True)
class Centred:
    """A loss of a batch: logits are compared with their mean over the batch, as contrastive losses do."""

    def __call__(self, logits, y):
        return {
            role: torch.nn.functional.cross_entropy(z - z.mean(0, keepdim=True).detach(), y, reduction="none")
            for role, z in logits.items()
        }


@dataclass(frozen=True)
class Focal:
    """A user's loss of single samples."""

    def __call__(self, logits, y):
        losses = CrossEntropy()(logits, y)
        return {role: loss * (1 - (-loss).exp()) for role, loss in losses.items()}


def trainings(objective, archs=(DENSE, WIDE, DENSE)):
    return [
        Train({"own": Model.init(arch, Key(i), torch.float64)}, SGD(objective, 0.1), each.train, BatchSchedule(2, 4), Key(i))
        for i, (arch, each) in enumerate(zip(archs, clients((7, 12, 5)).values(), strict=True))
    ]


@pytest.mark.parametrize("path", ["auto", "stacked", "workers"])
def test_a_loss_of_the_batch_sees_the_batch_of_its_client_only(path):
    ops, execute = trainings(Centred()), Dispatcher(path=path)
    for op, (found, _) in zip(ops, execute(ops), strict=True):
        wanted = run_on_reference(op)
        assert same(found.models["own"], wanted.models["own"], 1e-12)
        assert abs(found.losses["own"] - wanted.losses["own"]) < 1e-12
    if path != "workers":
        assert any("the loss Centred of a sample depends on its batch" in line for line in execute.explain())


def test_a_users_loss_of_single_samples_is_still_stacked():
    ops, execute = trainings(Focal()), Dispatcher(path="stacked")
    for op, (found, _) in zip(ops, execute(ops), strict=True):
        assert same(found.models["own"], run_on_reference(op).models["own"], 1e-9)
    assert {path for _, path, _ in execute.paths} == {"stacked"}


@dataclass(frozen=True)
class OneAfterAnother:
    """Two roles, each with a gradient of its own: the second has another draw of dropout masks."""

    objective: CrossEntropy = CrossEntropy()

    def init(self, models):
        return {}

    def __call__(self, gradient, models, opt, frozen, batch):
        after = {}
        for draw, (role, model) in enumerate(models.items()):
            grads, buffers = gradient({role: model}, batch, draw)
            after[role] = Model(model.arch, tree.add(model.params, grads[role], -0.1), buffers[role])
        return after, opt


def two_roles():
    ops = []
    for i, each in enumerate(clients((7, 12, 5)).values()):
        models = {role: Model.init(arch, Key(i).at(role), torch.float64) for role, arch in (("a", LINEAR), ("b", DENSE))}
        ops.append(Train(models, OneAfterAnother(), each.train, BatchSchedule(2, 4), Key(i)))
    return ops


def test_losses_of_all_roles_are_reported_whatever_their_draw():
    ops, execute = two_roles(), Dispatcher(path="stacked")
    for op, (found, _) in zip(ops, execute(ops), strict=True):
        wanted = run_on_reference(op)
        assert wanted.losses.keys() == found.losses.keys() == {"a", "b"}
        for role, loss in wanted.losses.items():
            alone = replace(op, models={role: op.models[role]}, optimizer=SGD(CrossEntropy(), 0.1))
            assert abs(loss - run_on_reference(alone).losses[role]) < 1e-12
            assert abs(loss - found.losses[role]) < 1e-12
    assert {path for _, path, _ in execute.paths} == {"stacked"}


def test_losses_of_all_roles_in_private_training():
    mechanism = GaussianMechanism(0.5, 0.0)
    for op in two_roles():
        private = replace(op, batch_schedule=BatchSchedule(2, 4, poisson=True), mechanism=mechanism)
        results = [train_on_reference(private), train_on_reference(private, PerSample)]
        (stacked, _) = Dispatcher(path="stacked")([private])[0]
        for result in (*results, stacked):
            assert result.losses.keys() == {"a", "b"}
            assert all(abs(result.losses[role] - loss) < 1e-9 for role, loss in results[0].losses.items())
