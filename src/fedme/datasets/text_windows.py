"""Text windows without copies: a sample is a position in the text, and its window is cut when a batch is gathered."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedme.core.key import Key


@dataclass(frozen=True, eq=False)
class Windows:
    """Samples of `length` symbols that begin at the positions `starts` of one text of symbols (uint8)."""

    text: Tensor
    starts: Tensor
    labels: Tensor
    length: int

    def inputs(self, rows: Tensor, augment: Key | None = None) -> Tensor:
        """The symbols of these windows as int64, for an embedding; text is never augmented."""
        return self.text[self.starts[rows][:, None] + torch.arange(self.length)].to(torch.int64)
