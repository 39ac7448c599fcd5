"""Class weights: the formula, the same training on every path, and what does not combine with them."""

import math

import pytest
import torch
from torch import nn

from fedme.config.experiment import ConfigError, parse
from fedme.core.data import Arrays, Split
from fedme.core.key import Key
from fedme.core.method import Round
from fedme.core.model import Arch, Model
from fedme.core.operations import BatchSchedule, train
from fedme.execution.compiled import library
from fedme.execution.dispatcher import Dispatcher
from fedme.learning.class_weights import ClassWeighted
from fedme.learning.objectives import CrossEntropy, Mutual, logit_gradients
from fedme.learning.training_settings import Training


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


def split(seed: int, count: int = 50) -> Split:
    draw = torch.Generator().manual_seed(seed)
    y = (torch.rand(count, generator=draw) < 0.2).long() * 2  # classes 0 and 2; class 1 does not occur
    return Split(Arrays(torch.randn(count, 4, generator=draw), y), torch.arange(count))


def test_all_classes_have_the_same_total_weight():
    data = split(0)
    weights = torch.tensor(ClassWeighted(CrossEntropy()).fitted_to(data).weights)
    per_sample = weights[data.y]
    assert per_sample.mean() == pytest.approx(1)
    assert per_sample[data.y == 0].sum() == pytest.approx(float(per_sample[data.y == 2].sum()))
    z = torch.randn(50, 3)
    torch_loss = nn.functional.cross_entropy(z, data.y, weights, reduction="none")
    assert torch.allclose(ClassWeighted(CrossEntropy()).fitted_to(data)({"own": z}, data.y)["own"], torch_loss)


def test_gradients_in_closed_form_are_those_of_autograd():
    data = split(1)
    for objective, roles in ((CrossEntropy(), ("own",)), (Mutual("own", "guest"), ("own", "guest"))):
        weighted = ClassWeighted(objective).fitted_to(data)
        logits = {role: torch.randn(1, 50, 3, dtype=torch.float64, requires_grad=True) for role in roles}
        losses = weighted({role: z[0] for role, z in logits.items()}, data.y)
        expected = torch.autograd.grad(sum(loss.sum() for loss in losses.values()), list(logits.values()))
        with torch.no_grad():
            closed = logit_gradients(weighted, logits, data.y[None])
        assert all(torch.allclose(closed[role], grad) for role, grad in zip(roles, expected, strict=True))


def operations(dtype=torch.float64):
    training = Training(class_weights="balanced", lr=0.1, momentum=0.9)
    ops = []
    for seed in (1, 2, 3):
        model = Model.init(Arch(network, width=5 + seed), Key(seed), dtype)
        optimizer = training.local_optimizer(CrossEntropy(), Round(0, 1))
        ops += next(train({"own": model}, optimizer, split(seed), BatchSchedule(3, 8), Key(seed)))
    return ops


@pytest.mark.parametrize("path", ["auto", "stacked", "compiled", "workers"])
def test_every_path_trains_the_same(path):
    dispatcher, reference = Dispatcher(path=path), Dispatcher(path="reference")
    got = [result.models["own"] for result, _ in dispatcher(operations())]
    expected = [result.models["own"] for result, _ in reference(operations())]
    for one, other in zip(got, expected, strict=True):
        assert all(torch.allclose(one.params[name], other.params[name], atol=1e-9) for name in one.params)
    if path == "compiled" and not isinstance(library(), str):  # a string says why there is no compiled code
        assert any("unsupported loss ClassWeighted" in line for line in dispatcher.explain())


def test_targets_that_are_no_classes_have_no_weights():
    data = Split(Arrays(torch.randn(6, 4), torch.randn(6, 2)), torch.arange(6))
    weighted = ClassWeighted(CrossEntropy()).fitted_to(data)
    assert weighted.weights == ()
    z = torch.randn(6, 2)
    assert torch.equal(weighted({"own": z}, data.y)["own"], CrossEntropy()({"own": z}, data.y)["own"])


def test_what_class_weights_do_not_combine_with():
    balanced = {"class_weights": "balanced"}
    with pytest.raises(ConfigError, match="method 'pfedme' defines its own step"):
        parse({"method": {"name": "pfedme"}, "train": balanced})
    with pytest.raises(ConfigError, match=r"samples per class, which \[privacy\] does not protect"):
        parse({"train": balanced, "privacy": {"noise_multiplier": 1.0}})
    assert parse({"train": balanced}).train.class_weights == "balanced"


def test_the_rare_class_is_found_more_often():
    """A model of a skewed client: with weights its sensitivity for the rare class is higher."""
    draw = torch.Generator().manual_seed(0)
    y = (torch.rand(400, generator=draw) < 0.08).long()
    x = torch.randn(400, 4, generator=draw) + y[:, None] * 0.7
    data = Split(Arrays(x, y), torch.arange(400))
    found = {}
    for weights in (None, "balanced"):
        training = Training(class_weights=weights, lr=0.05)
        model = Model.init(Arch(nn.Linear, in_features=4, out_features=2), Key(0), torch.float32)
        work = train({"own": model}, training.local_optimizer(CrossEntropy(), Round(0, 1)), data, BatchSchedule(20, 20), Key(0))
        ((result, _),) = Dispatcher(path="reference")(next(work))
        trained = result.models["own"].params
        z = x @ trained["weight"].T + trained["bias"]
        found[weights] = float((z.argmax(1)[y == 1] == 1).float().mean())
    assert math.isclose(found[None], 0, abs_tol=0.3)
    assert found["balanced"] > found[None] + 0.3
