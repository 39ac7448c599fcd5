"""Recurrent networks that predict the next symbol of a sequence from the last hidden state."""

from torch import Tensor, nn

from fedme.networks.input_sizes import positive, sequence
from fedme.networks.two_part import two_parts


class LastState(nn.Module):
    """The hidden state of the top LSTM layer after the last symbol; symbol 0 is padding."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=0)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.lstm(self.embedding(x.long()))[0]
        return states[:, -1]


def lstm(
    shape: tuple[int, ...], classes: int, vocabulary: int, layers: int, hidden: int = 256, embedding: int = 8
) -> nn.Sequential:
    """The Shakespeare network of FedMe with 1 to 4 LSTM layers, after Reddi et al. 2021 (Adaptive Federated Optimization).

    Deviations: as in FedMe, only the symbol after the last one is predicted, not the next symbol at every position.
    """
    positive(hidden=hidden, embedding=embedding)
    sequence(shape)
    return two_parts(LastState(vocabulary, embedding, hidden, layers), nn.Linear(hidden, classes))
