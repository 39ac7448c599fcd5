"""Text as samples without copying it: a sample is a place in the text, and its window is cut when a batch is gathered."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedme.core.key import Key


@dataclass(frozen=True, eq=False)
class Windows:
    """Samples that begin at `starts` of one text of symbols (bytes) and are `length` symbols long."""

    text: Tensor
    starts: Tensor
    labels: Tensor
    length: int

    def inputs(self, rows: Tensor, augment: Key | None = None) -> Tensor:
        """The symbols of these windows as int64, ready for an embedding; text is never augmented."""
        return self.text[self.starts[rows][:, None] + torch.arange(self.length)].to(torch.int64)
