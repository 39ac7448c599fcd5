"""Networks for the windows of UCI HAR (9 signals, 128 moments), all with 64 features before their last layer."""

from torch import Tensor, nn

FEATURES = 64


class Waves(nn.Module):
    """Convolutions along time, then a dense layer."""

    def __init__(self, channels: int = 8, kernel: int = 9, classes: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv2d(9, channels, (1, kernel), (1, 2))
        self.second = nn.Conv2d(channels, 2 * channels, (1, 5), (1, 2))
        length = ((128 - kernel) // 2 + 1 - 5) // 2 + 1
        self.pool = nn.MaxPool2d((1, 4))
        self.hidden, self.head = nn.Linear(2 * channels * (length // 4), FEATURES), nn.Linear(FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of windows."""
        x = self.first(x.unsqueeze(2)).relu()
        x = self.pool(self.second(x).relu())
        return self.head(self.hidden(x.flatten(1)).relu())  # type: ignore[no-any-return]
