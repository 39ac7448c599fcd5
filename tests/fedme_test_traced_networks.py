"""Networks of several kinds, written as in tutorials, for images of 6 x 6 pixels or sequences of 7 symbols."""

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 5


class Block(nn.Module):
    def __init__(self, channels, outputs, stride, norm):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, outputs, 3, stride, 1, bias=False), norm(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm(outputs)
        self.shortcut = nn.Sequential(nn.Conv2d(channels, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x):
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


def by_groups(channels):
    return nn.GroupNorm(2, channels)


class ResNet(nn.Module):
    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.blocks = nn.Sequential(Block(1, 4, 1, norm), Block(4, 6, 2, norm))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(F.adaptive_avg_pool2d(self.blocks(x), 1).view(x.size(0), -1))


class GroupNormNet(ResNet):
    def __init__(self):
        super().__init__(by_groups)


class Depthwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU6(inplace=True)),
            *(nn.Conv2d(4, 4, 3, 1, 1, groups=4, bias=False), nn.BatchNorm2d(4), nn.SiLU()),
            *(nn.Conv2d(4, 7, 1, bias=False), nn.BatchNorm2d(7), nn.Hardswish()),
        )
        self.head = nn.Linear(7, CLASSES)

    def forward(self, x):
        return self.head(self.features(x).mean([2, 3]))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 2, 2)
        self.token, self.position = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.zeros(1, 10, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.position
        return self.head(self.norm(self.layers(tokens))[:, 0])


class Characters(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(9, 3), nn.LSTM(3, 5, 2, batch_first=True)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(5, CLASSES)

    def forward(self, x):
        hidden, _ = self.lstm(self.embed(x))
        return self.head(self.dropout(hidden[:, -1]))


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(36, 11), nn.Linear(11, CLASSES)

    def forward(self, x):
        return self.second(torch.relu(self.first(x.view(x.shape[0], -1))))


class Grouped(nn.Module):
    """Grouped convolutions, dropout as a function, and a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.groups = nn.Conv2d(1, 6, 3, 1, 1), nn.Conv2d(6, 9, 3, 2, 1, groups=3)
        self.again, self.head = nn.Linear(9, 9), nn.Linear(9, CLASSES)

    def forward(self, x):
        x = F.mish(self.groups(F.softplus(self.first(x)))).amax((2, 3))
        x = torch.tanh(self.again(F.dropout(x, 0.3, training=self.training)))
        return self.head(F.dropout(torch.tanh(self.again(x)), 0.1, training=self.training))


class Gated(nn.Module):
    """Tied embeddings, positions, and a GRU in both directions."""

    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(9, 4), nn.Embedding(7, 4)
        self.gru, self.join = nn.GRU(4, 3, 2, batch_first=True, bidirectional=True), nn.Linear(6, 4)
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x):
        states, last = self.gru(self.embed(x) + self.position(torch.arange(x.shape[1])))
        return self.head(F.linear(self.join(states.sum(1) + last[:2].transpose(0, 1).flatten(1)), self.embed.weight))
