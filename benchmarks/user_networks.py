"""Networks as people write them: classes with layers and a forward, after the tutorials of PyTorch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp_sequential() -> nn.Sequential:
    """MLP 3072-128-10 as one `nn.Sequential`."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 128), nn.ReLU(), nn.Linear(128, 10))


class MLPClass(nn.Module):
    """MLP 3072-128-10 as a class around an `nn.Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class MLP(nn.Module):
    """MLP 3072-128-10 with a functional forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3072, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        return self.fc2(x)


class MLPBatchNorm(nn.Module):
    """The MLP with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3072, 128)
        self.norm = nn.BatchNorm1d(128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(x, 1)
        x = F.relu(self.norm(self.fc1(x)))
        return self.fc2(x)


class MLPLayerNorm(nn.Module):
    """The MLP with layer normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3072, 128)
        self.norm = nn.LayerNorm(128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(x, 1)
        x = F.relu(self.norm(self.fc1(x)))
        return self.fc2(x)


class MLPGelu(nn.Module):
    """The MLP with GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3072, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(x, 1)
        x = F.gelu(self.fc1(x))
        return self.fc2(x)


class MLPDropout(nn.Module):
    """The MLP with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3072, 128)
        self.dropout = nn.Dropout(0.25)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(x, 1)
        x = self.dropout(F.relu(self.fc1(x)))
        return self.fc2(x)


class SmallMLP(nn.Module):
    """MLP 60-20-10."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(60, 20)
        self.fc2 = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x))
        return self.fc2(x)


class LeNet(nn.Module):
    """The network of PyTorch's CIFAR-10 tutorial: two convolutions with max-pooling, three dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


class StridedCNN(nn.Module):
    """Two convolutions of stride 2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.fc = nn.Linear(64 * 8 * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return self.fc(torch.flatten(x, 1))


class AveragePoolCNN(nn.Module):
    """Two convolutions with average pooling, and a mean over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.relu(self.conv1(x)), 2)
        x = F.avg_pool2d(F.relu(self.conv2(x)), 2)
        x = F.adaptive_avg_pool2d(x, 1)
        return self.fc(torch.flatten(x, 1))


def normalisation(kind: str, channels: int) -> nn.Module:
    """Batch normalisation, or group normalisation in groups of 8 channels."""
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(channels // 8, channels)


class BasicBlock(nn.Module):
    """The block of small residual networks: two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = normalisation(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = normalisation(norm, outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), normalisation(norm, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out = out + self.shortcut(x)
        return F.relu(out)


class ResNet8(nn.Module):
    """ResNet-8 for CIFAR-10: three blocks of 16, 32 and 64 channels."""

    def __init__(self, norm: str = "batch") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm1 = normalisation(norm, 16)
        self.layer1 = BasicBlock(16, 16, 1, norm)
        self.layer2 = BasicBlock(16, 32, 2, norm)
        self.layer3 = BasicBlock(32, 64, 2, norm)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = F.adaptive_avg_pool2d(x, 1)
        return self.fc(torch.flatten(x, 1))


class Separable(nn.Module):
    """A depthwise and a pointwise convolution, as in MobileNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(inputs, inputs, 3, stride=stride, padding=1, groups=inputs, bias=False)
        self.norm1 = nn.BatchNorm2d(inputs)
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.depthwise(x)))
        return F.relu(self.norm2(self.pointwise(x)))


class MobileNet(nn.Module):
    """A small MobileNet for images of 32 x 32 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(Separable(16, 32, 2), Separable(32, 64, 2), Separable(64, 64, 1), Separable(64, 128, 2))
        self.fc = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        x = self.blocks(x)
        x = F.adaptive_avg_pool2d(x, 1)
        return self.fc(torch.flatten(x, 1))


class Attention(nn.Module):
    """Self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.out(x.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """Attention and an MLP, each with layer normalisation before it and a residual connection around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A small vision transformer: 64 patches of 4 x 4 pixels, width 64, two layers, mean over the tokens."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.position = nn.Parameter(0.02 * torch.randn(1, 64, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.blocks(x + self.position)
        return self.head(self.norm(x).mean(1))


class EncoderViT(nn.Module):
    """The same transformer made of `nn.TransformerEncoderLayer`."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.position = nn.Parameter(0.02 * torch.randn(1, 64, width))
        layers = [
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
            for _ in range(depth)
        ]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class CharLSTM(nn.Module):
    """The network of the FedMe paper for Shakespeare: symbols embedded in 8 numbers, two LSTM layers of 256."""

    def __init__(self, vocabulary: int = 90) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.fc = nn.Linear(256, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x.long())
        out, _ = self.lstm(x)
        return self.fc(out[:, -1])


class Swish(torch.autograd.Function):
    """x * sigmoid(x) with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s + x * s * (1 - s))


class CustomFunction(nn.Module):
    """The MLP with an activation that is a custom `autograd.Function`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3072, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(x, 1)
        x = Swish.apply(self.fc1(x))
        return self.fc2(x)


class DataDependent(nn.Module):
    """The MLP with a forward that depends on the values of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3072, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(x, 1)
        hidden = self.fc1(x)
        hidden = F.relu(hidden) if x.mean() > 0 else torch.tanh(hidden)
        return self.fc2(hidden)


class TiedWeights(nn.Module):
    """An MLP with two hidden layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3072, 128)
        self.fc2 = nn.Linear(128, 128)
        self.fc3 = nn.Linear(128, 128)
        self.fc3.weight = self.fc2.weight
        self.fc4 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        x = F.relu(self.fc3(x))
        return self.fc4(x)
