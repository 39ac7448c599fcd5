"""Small convolutional networks: convolutions as `features`, dense layers as `classifier`."""

from torch import nn

from fedme.networks.input_sizes import image, positive, scaled
from fedme.networks.two_part import two_parts


def cnn(shape: tuple[int, ...], classes: int, layers: int, conv_relu: bool = True, width: float = 1.0) -> nn.Sequential:
    """The FEMNIST network of FedMe with 1 to 4 convolutions, after Reddi et al. 2021 (Adaptive Federated Optimization).

    Deviations: FedMe's own code has no ReLU between convolutions (`conv_relu` = False); the network it cites has.
    `width` multiplies the channels and the units of the dense layer.
    """
    positive(width=width)
    channels, height, breadth = image(shape, least=2 * layers + 2)
    features: list[nn.Module] = []
    for full in (32, 64, 128, 256)[:layers]:
        features.append(nn.Conv2d(channels, channels := scaled(full, width), 3))
        features += [nn.ReLU()] if conv_relu else []
    flat = channels * ((height - 2 * layers) // 2) * ((breadth - 2 * layers) // 2)
    units = scaled(128, width)
    return two_parts(
        nn.Sequential(*features, nn.MaxPool2d(2), nn.Dropout(0.25)),
        nn.Sequential(nn.Flatten(), nn.Linear(flat, units), nn.ReLU(), nn.Dropout(0.5), nn.Linear(units, classes)),
    )


def lenet5(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling, as in FML."""
    channels, height, breadth = image(shape, least=16)
    flat = 16 * (((height - 4) // 2 - 4) // 2) * (((breadth - 4) // 2 - 4) // 2)
    return two_parts(
        nn.Sequential(
            *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        ),
        nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(flat, 120), nn.ReLU()),
            *(nn.Linear(120, 84), nn.ReLU()),
            nn.Linear(84, classes),
        ),
    )


def fml_cnn1(shape: tuple[int, ...], classes: int, hidden: int = 64) -> nn.Sequential:
    """CNN1 of FML (Shen et al. 2020): 6 and 16 channels, two dense layers.

    Deviations: the paper does not give the width of the first dense layer; 64 is our choice.
    """
    positive(hidden=hidden)
    channels, height, breadth = image(shape, least=10)
    flat = 16 * (((height - 2) // 2 - 2) // 2) * (((breadth - 2) // 2 - 2) // 2)
    return two_parts(
        nn.Sequential(
            *(nn.Conv2d(channels, 6, 3), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(6, 16, 3), nn.MaxPool2d(2), nn.ReLU()),
        ),
        nn.Sequential(nn.Flatten(), nn.Linear(flat, hidden), nn.ReLU(), nn.Linear(hidden, classes)),
    )


def fml_cnn2(shape: tuple[int, ...], classes: int, channels: int = 128) -> nn.Sequential:
    """CNN2 of FML (Shen et al. 2020): three convolutions, which are shared, and one dense layer, the adaptor."""
    positive(channels=channels)
    inputs, height, breadth = image(shape, least=22)
    features: list[nn.Module] = []
    for _ in range(3):
        features += [nn.Conv2d(inputs, channels, 3), nn.MaxPool2d(2), nn.ReLU()]
        inputs, height, breadth = channels, (height - 2) // 2, (breadth - 2) // 2
    flat = channels * height * breadth
    return two_parts(nn.Sequential(*features), nn.Sequential(nn.Flatten(), nn.Linear(flat, classes)))


def cnn_small(shape: tuple[int, ...], classes: int, channels: int = 16) -> nn.Sequential:
    """One padded convolution and one dense layer: 2,730 weights for 8 x 8 digits."""
    positive(channels=channels)
    inputs, height, breadth = image(shape, least=2)
    flat = channels * (height // 2) * (breadth // 2)
    return two_parts(
        nn.Sequential(nn.Conv2d(inputs, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(flat, classes)),
    )
