"""Networks with batch normalisation, importable by name."""

from torch import nn


class Dense(nn.Sequential):
    """A dense network with one normalised layer."""

    def __init__(self, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(9 * 128, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, classes))


class Convolutional(nn.Sequential):
    """Two normalised convolutions."""

    def __init__(self, classes: int) -> None:
        layers = [
            layer
            for inputs, outputs in ((3, 16), (16, 32))
            for layer in (nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))
        ]
        super().__init__(*layers, nn.Flatten(), nn.Linear(32 * 8 * 8, classes))
