"""Networks in which samples meet are told from those in which they do not."""

import pytest
import torch
from torch import nn

from fedme.core.key import Key
from fedme.core.model import Arch
from fedme.execution.sample_independence import require_separate
from fedme.learning.accountant import PrivacyError


class Shy(nn.Module):
    """Subtracts the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 4)

    def forward(self, x):
        return self.out(x - x.mean(0))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += x.sum()
        return self.out(x)


def plain(*layers):
    return nn.Sequential(nn.Linear(3, 6), *layers, nn.Linear(6, 4))


def batch_norm():
    return plain(nn.BatchNorm1d(6))


def layer_norm():
    return plain(nn.LayerNorm(6), nn.Dropout(0.5))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(1, 5, 2, batch_first=True, dropout=0.2), nn.Linear(5, 4)

    def forward(self, x):
        return self.out(self.lstm(x[..., None])[0][:, -1])


@pytest.mark.parametrize(
    ("network", "why"),
    [
        (batch_norm, r"layer 1 \(BatchNorm1d\) normalises by other samples"),
        (Shy, "its output for a sample depends on the other samples of the batch"),
        (Counting, "training changes its buffers"),
    ],
)
def test_networks_in_which_samples_meet_are_refused(network, why):
    with pytest.raises(PrivacyError, match=why):
        require_separate(Arch(network), torch.randn(3, 3, generator=Key(1).torch()))


@pytest.mark.parametrize("network", [layer_norm, Recurrent])
def test_networks_in_which_they_do_not_are_taken(network):
    require_separate(Arch(network), torch.randn(3, 3, generator=Key(1).torch()))
