"""Networks as people write them."""

import torch
from torch import nn


class MyNet(nn.Module):
    def __init__(self, classes, width=8):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, width), nn.Linear(width, classes)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x):
        return self.net(x)


class Branches(nn.Module):
    """Its attributes decide what it computes."""

    def __init__(self, width=4, sign=1):
        super().__init__()
        self.inner, self.outer, self.sign = nn.Linear(3, width), nn.Linear(width, 3), sign

    def forward(self, x):
        return self.sign * self.outer(torch.tanh(self.inner(x)))


class Deciding(nn.Module):
    """It decides by the values of a batch, which no graph can express."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(x) if x.sum() > 0 else -self.head(x)


class Reader(nn.Module):
    """A small transformer over a dictionary of symbols and a mask."""

    def __init__(self, classes, vocabulary, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids, attention_mask):
        hidden = self.layer(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * weights).sum(1) / weights.sum(1))
