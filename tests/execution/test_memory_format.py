"""Channels-last is for convolutions whose windows overlap, and the architecture alone decides."""

import pytest
import torch
from torch import nn

from fedme.core.key import Key
from fedme.core.model import Arch, Model
from fedme.execution.memory_format import formatted, formatted_inputs, prefers_channels_last


def net(*layers):
    return Arch.named(str(layers), lambda: nn.Sequential(*(layer() for layer in layers)))


OVERLAPPING = net(lambda: nn.Conv2d(3, 4, 3))
GRAY = net(lambda: nn.Conv2d(1, 4, 3))


class Viewing(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(144, 2)

    def forward(self, x):
        return self.head(self.conv(x).view(x.size(0), -1))


PATCHES = net(lambda: nn.Conv2d(3, 4, 4, 4))


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        (OVERLAPPING, True),
        (net(lambda: nn.Conv2d(3, 4, 3, 2)), True),
        (net(lambda: nn.Conv2d(3, 3, (1, 3), groups=3)), True),
        (net(lambda: nn.ConvTranspose2d(3, 4, 3)), True),
        (PATCHES, False),
        (net(lambda: nn.Conv2d(3, 4, 1)), False),
        (net(lambda: nn.Conv1d(3, 4, 3)), False),
        (net(lambda: nn.GroupNorm(1, 3), lambda: nn.Conv2d(3, 4, 3)), False),
        (Arch(Viewing), False),
        (net(lambda: nn.Linear(3, 4)), False),
    ],
)
def test_which_networks_prefer_it(arch, expected):
    assert prefers_channels_last(arch, (3, 8, 8)) is expected


def test_weights_and_inputs_have_the_format_of_the_network():
    x, gray = torch.rand(2, 3, 8, 8), torch.rand(2, 1, 8, 8)
    last = torch.channels_last
    assert formatted_inputs(x, OVERLAPPING).is_contiguous(memory_format=last)
    assert formatted_inputs(gray, GRAY).stride() == (64, 1, 8, 1)
    assert formatted_inputs(x.contiguous(memory_format=last), PATCHES).is_contiguous()
    model = Model.init(OVERLAPPING, Key(0))
    assert formatted(model, (3, 8, 8)).params["0.weight"].is_contiguous(memory_format=last)
    assert torch.equal(formatted(model, (3, 8, 8)).params["0.weight"], model.params["0.weight"])
    other = Model.init(PATCHES, Key(0))
    assert formatted(other, (3, 8, 8)) is other
