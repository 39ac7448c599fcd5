"""VGG (Simonyan and Zisserman 2015) for small images, with the small classifier of FedMA and without normalisation."""

import math

from torch import nn

from fedme.networks.input_sizes import image, positive, scaled
from fedme.networks.two_part import two_parts

# Number of 3x3 convolutions with 64, 128, 256, 512 and 512 channels before each of the five pooling layers.
CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def vgg(shape: tuple[int, ...], classes: int, depth: int, width: float = 1.0) -> nn.Sequential:
    """VGG with 11, 13, 16 or 19 layers; `width` multiplies the channels and the units of the dense layers."""
    positive(width=width)
    channels, height, breadth = image(shape, least=32)
    features: list[nn.Module] = []
    for full, convolutions in zip((64, 128, 256, 512, 512), CONVOLUTIONS[depth], strict=True):
        for _ in range(convolutions):
            features += [_convolution(channels, channels := scaled(full, width)), nn.ReLU()]
        features.append(nn.MaxPool2d(2))
    flat, units = channels * (height // 32) * (breadth // 32), scaled(512, width)
    return two_parts(
        nn.Sequential(*features),
        nn.Sequential(
            nn.Flatten(),
            *(nn.Dropout(0.5), nn.Linear(flat, units), nn.ReLU()),
            *(nn.Dropout(0.5), nn.Linear(units, units), nn.ReLU()),
            nn.Linear(units, classes),
        ),
    )


def _convolution(channels: int, out: int) -> nn.Conv2d:
    layer = nn.Conv2d(channels, out, 3, padding=1)
    nn.init.normal_(layer.weight, std=math.sqrt(2 / (3 * 3 * out)))
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
