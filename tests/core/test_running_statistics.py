"""Which buffers are running statistics, and that they are estimated as PyTorch does."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.core.running_statistics import estimated, running_statistics


def sequence(*layers):
    return Arch.named(f"sequence of {len(layers)}", lambda: nn.Sequential(*(layer() for layer in layers)))


class Deep(nn.Module):
    """Two normalised layers with dropout between them, a frozen weight and a buffer of its own."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.3)
        self.drop, self.second, self.last = nn.Dropout(dropout), nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.first.weight.requires_grad_(False)
        self.register_buffer("shift", torch.ones(5))

    def forward(self, x):
        return self.last(self.second(self.drop(torch.relu(self.norm(self.first(x)))))) + self.shift


class Twice(nn.Module):
    """One layer that is called twice, with inputs by name."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, left, right):
        return self.norm(left) + self.norm(right)


def inputs(samples, *shape, seed=1):
    return torch.randn(samples, *shape, generator=Key(seed).torch(), dtype=torch.float64) * 3 + 2


def model(arch, seed=0):
    return Model.init(arch, Key(seed), torch.float64)


@pytest.mark.parametrize(
    ("arch", "names"),
    [
        (sequence(lambda: nn.Linear(2, 2)), []),
        (sequence(lambda: nn.LayerNorm(2)), []),
        (sequence(lambda: nn.GroupNorm(1, 2)), []),
        (sequence(lambda: nn.BatchNorm1d(2, track_running_stats=False)), []),
        (sequence(lambda: nn.InstanceNorm2d(2)), []),
        (sequence(lambda: nn.BatchNorm1d(2), nn.ReLU, lambda: nn.BatchNorm2d(2)), ["0.", "2."]),
        (sequence(lambda: nn.BatchNorm3d(2, affine=False)), ["0."]),
        (sequence(lambda: nn.SyncBatchNorm(2)), ["0."]),
        (sequence(lambda: nn.InstanceNorm1d(2, track_running_stats=True)), ["0."]),
        (Arch(nn.BatchNorm1d, num_features=2), [""]),
        (Arch(Deep), ["norm.", "last."]),
    ],
)
def test_statistics_are_the_mean_and_variance_of_every_layer_that_keeps_them(arch, names):
    expected = [f"{name}{of}" for name in names for of in ("running_mean", "running_var")]
    assert list(running_statistics(arch)) == expected
    assert set(expected) <= model(arch).buffers.keys()


def test_two_channels_by_hand():
    start = model(Arch(nn.BatchNorm1d, num_features=2))
    x = torch.tensor([[0.0, 10.0], [2.0, 10.0], [4.0, 40.0]], dtype=torch.float64)
    after = estimated(start, [x])
    assert after.buffers["running_mean"].tolist() == [2.0, 20.0]
    assert after.buffers["running_var"].tolist() == [4.0, 300.0]  # divided by samples - 1
    assert after.buffers["num_batches_tracked"] == 0
    assert after.params is start.params
    assert start.buffers["running_mean"].tolist() == [0.0, 0.0]
    two = estimated(start, [x[:2], x[1:]])  # means of the batches
    assert two.buffers["running_mean"].tolist() == [2.0, 17.5]
    assert two.buffers["running_var"].tolist() == [2.0, 225.0]


@pytest.mark.parametrize("sizes", [[12], [4, 4, 4]])
def test_estimates_are_those_of_update_bn(sizes):
    start, x = model(Arch(Deep)), inputs(12, 3)
    after = estimated(start, x.split(sizes))
    module = start.module()
    update_bn(x.split(sizes), module)
    for name in running_statistics(start.arch):
        assert torch.allclose(after.buffers[name], module.get_buffer(name), rtol=0, atol=1e-12)
        assert not torch.equal(after.buffers[name], start.buffers[name])


def test_a_model_evaluates_its_samples_as_in_training():
    start, x = model(Arch(Deep)), inputs(4000, 3)
    after = estimated(start, [x])
    expected = start.with_buffers({name: b.clone() for name, b in start.buffers.items()})(x, training=True)
    assert torch.allclose(after(x), expected, rtol=0, atol=1e-2)  # unbiased variances
    assert not torch.allclose(start(x), expected, rtol=0, atol=0.1)


def test_dropout_is_off():
    start, dropping, x = model(Arch(Deep)), model(Arch(Deep, dropout=0.9)), inputs(20, 3)
    expected = estimated(start, [x]).buffers
    found = estimated(dropping.with_params(start.params).with_buffers(start.buffers), [x]).buffers
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_other_buffers_stay_as_they_are():
    start, x = model(Arch(Deep)), inputs(6, 3)
    buffers = {name: b + 7 for name, b in start.buffers.items()}
    after = estimated(start.with_buffers(buffers), [x, x])
    others = set(buffers) - set(running_statistics(start.arch))
    assert others == {"first.weight", "shift", "norm.num_batches_tracked", "last.num_batches_tracked"}
    assert all(after.buffers[name] is buffers[name] for name in others)
    assert list(after.buffers) == list(buffers)


def test_earlier_statistics_and_estimates_do_not_matter():
    start, x = model(Arch(Deep)), inputs(6, 3)
    expected = estimated(start, [x]).buffers
    names = running_statistics(start.arch)
    odd = start.with_buffers({name: b * float("nan") if name in names else b for name, b in start.buffers.items()})
    found = estimated(odd, [x]).buffers
    assert all(torch.equal(found[name], expected[name]) for name in names)


def test_a_layer_that_is_called_twice_gets_the_mean_over_its_calls():
    left, right = inputs(5, 2), inputs(5, 2, seed=2) * 4
    after = estimated(model(Arch(Twice)), [{"left": left, "right": right}])
    assert torch.allclose(after.buffers["norm.running_mean"], (left.mean(0) + right.mean(0)) / 2, rtol=0, atol=1e-12)
    assert torch.allclose(after.buffers["norm.running_var"], (left.var(0) + right.var(0)) / 2, rtol=0, atol=1e-12)


def test_images_and_instance_normalisation():
    x = inputs(3, 2, 4, 4)
    batch = estimated(model(sequence(lambda: nn.SyncBatchNorm(2))), [x])
    assert torch.allclose(batch.buffers["0.running_mean"], x.mean((0, 2, 3)), rtol=0, atol=1e-12)
    assert torch.allclose(batch.buffers["0.running_var"], x.transpose(0, 1).flatten(1).var(1), rtol=0, atol=1e-12)
    instance = estimated(model(sequence(lambda: nn.InstanceNorm2d(2, track_running_stats=True))), [x[:1], x[1:2]])
    assert torch.allclose(instance.buffers["0.running_mean"], x[:2].mean((0, 2, 3)), rtol=0, atol=1e-12)
    assert torch.allclose(instance.buffers["0.running_var"], x[:2].flatten(2).var(2).mean(0), rtol=0, atol=1e-12)
