"""Data that stays where it is: every client has a file of its own on its own machine, and all agree on what a sample is."""

from dataclasses import dataclass
from pathlib import Path

from fedme.core.data import Schema
from fedme.datasets.dataset import Dataset
from fedme.datasets.errors import DataError


@dataclass(frozen=True)
class Sites:
    """Every client's own file, on its own machine, for `fedme deploy`; here is only what a sample looks like."""

    shape: tuple[int, ...]  # of one sample; the columns of a CSV file fill it in their order
    classes: tuple[str, ...]  # the label space
    scale: float = 1.0  # raw numbers are multiplied by this
    unlabeled_file: str | None = None  # the server's own samples without labels: a .npz or .csv file beside the experiment

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise DataError(f"shape = {list(self.shape)}; it must be one or more positive numbers")
        if len(set(self.classes)) != len(self.classes) or len(self.classes) < 2:
            raise DataError("classes: at least two different names are needed")

    @property
    def schema(self) -> Schema:
        """What every sample looks like."""
        return Schema(self.shape, self.classes, {"scaling": self.scale})

    def load(self, root: Path) -> Dataset:
        """There is nothing to load here."""
        raise DataError(
            "data.name = 'sites': the data is at the sites, so `fedme deploy` runs this experiment, not `fedme run`"
        )
