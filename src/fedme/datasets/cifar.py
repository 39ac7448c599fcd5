"""CIFAR-10 and CIFAR-100, binary version: records of one or two label bytes and 3,072 bytes of RGB pixels.

Images are stored as uint8 and scaled when a batch is gathered. ``scaling``: "standard" uses the channel means and standard
deviations of the training images; "half" is (x - 0.5) / 0.5, as in pFedMe and PFML. ``augment`` is the padding of the
random crops, which come with random flips; 0 disables both. FedMe pads by 2, FML by 4.

The Python version is rejected: it is a pickle, and unpickling executes arbitrary code.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from fedme.core.data import Arrays, CropFlip, Scaling, Schema
from fedme.core.settings import setting
from fedme.datasets.data_errors import DataError, require, require_choice
from fedme.datasets.dataset import Dataset
from fedme.datasets.download import Archive, obtain

ColourScaling = Literal["standard", "half"]
Labels = Literal["fine", "coarse"]
Channels = tuple[float, float, float]

IMAGE_BYTES = 3 * 32 * 32
CIFAR10_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

CIFAR10_REMOTE = Archive(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "c32a1d4ab5d03f1284b67883e8d87530",
    {f"cifar-10-batches-bin/{name}": name for name in (*CIFAR10_TRAIN, "test_batch.bin")},
    largest=1 << 26,
)
CIFAR100_REMOTE = Archive(
    "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    "03b5dce01913d631647c71ecec9e9cb8",
    {f"cifar-100-binary/{name}": name for name in ("train.bin", "test.bin")},
    largest=1 << 28,
)


@dataclass(frozen=True)
class Cifar10:
    """Small photographs: 50,000 + 10,000 colour images of 32 x 32 pixels, 10 classes."""

    scaling: ColourScaling = setting("standard", "standard: mean 0 and standard deviation 1 per channel; half: from -1 to 1")
    augment: int = setting(0, "padding of random crops and flips of the training images; 0: no augmentation")

    def __post_init__(self) -> None:
        _check_options(self.scaling, self.augment)

    def load(self, root: Path) -> Dataset:
        """Read `root`/cifar-10-batches-bin, after downloading it if it is missing."""
        folder = root / "cifar-10-batches-bin"
        _reject_pickles("cifar10", folder, root / "cifar-10-batches-py", CIFAR10_REMOTE)
        train, test = CIFAR10_TRAIN, ("test_batch.bin",)
        paths = obtain("cifar10", folder, train + test, CIFAR10_REMOTE)
        return _dataset(
            "cifar10",
            [[_records(paths[name], limits=(10,)) for name in part] for part in (train, test)],
            0,
            CIFAR10_CLASSES,
            (self.scaling, self.augment),
            ((0.4914, 0.4824, 0.4467), (0.2471, 0.2435, 0.2616)),
            {},
        )


@dataclass(frozen=True)
class Cifar100:
    """Small photographs: 50,000 + 10,000 colour images of 32 x 32 pixels, 100 classes in 20 superclasses."""

    labels: Labels = setting("fine", "fine: 100 classes; coarse: 20 superclasses")
    scaling: ColourScaling = setting("standard", "standard: mean 0 and standard deviation 1 per channel; half: from -1 to 1")
    augment: int = setting(0, "padding of random crops and flips of the training images; 0: no augmentation")

    def __post_init__(self) -> None:
        require_choice("labels", self.labels, get_args(Labels))
        _check_options(self.scaling, self.augment)

    def load(self, root: Path) -> Dataset:
        """Read `root`/cifar-100-binary, after downloading it if it is missing."""
        folder = root / "cifar-100-binary"
        _reject_pickles("cifar100", folder, root / "cifar-100-python", CIFAR100_REMOTE)
        paths = obtain("cifar100", folder, ("train.bin", "test.bin"), CIFAR100_REMOTE)
        return _dataset(
            "cifar100",
            [[_records(paths[name], limits=(20, 100))] for name in ("train.bin", "test.bin")],
            1 if self.labels == "fine" else 0,
            tuple(str(c) for c in range(100 if self.labels == "fine" else 20)),
            (self.scaling, self.augment),
            ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
            {"labels": self.labels},
        )


def _check_options(scaling: str, augment: int) -> None:
    require_choice("scaling", scaling, get_args(ColourScaling))
    require(0 <= augment <= 32, "augment", f"must be between 0 (no augmentation) and 32, got {augment}")


def _reject_pickles(name: str, folder: Path, pickles: Path, remote: Archive) -> None:
    if pickles.exists() and not folder.exists():
        raise DataError(
            f"{name}: {pickles} is the Python version, a pickle, and unpickling can execute arbitrary code; "
            f"unpack the binary version, {remote.url}, to {folder}"
        )


def _records(path: Path, limits: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The label bytes and the images of a file; `limits` is the number of classes per label byte."""
    try:
        content = bytearray(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    size = len(limits) + IMAGE_BYTES
    if not content or len(content) % size:
        raise DataError(f"{path}: {len(content)} bytes are not a multiple of the record size, {size}; download the file again")
    records = torch.frombuffer(content, dtype=torch.uint8).reshape(-1, size)
    labels = records[:, : len(limits)].to(torch.int64)
    for column, limit in enumerate(limits):
        if (largest := int(labels[:, column].max())) >= limit:
            raise DataError(f"{path}: label byte {column} must be between 0 and {limit - 1}, got {largest}")
    return labels, records[:, len(limits) :].reshape(-1, 3, 32, 32)


def _dataset(
    name: str,
    parts: list[list[tuple[Tensor, Tensor]]],
    column: int,
    classes: tuple[str, ...],
    options: tuple[ColourScaling, int],
    standard: tuple[Channels, Channels],
    preprocessing: dict[str, object],
) -> Dataset:
    scaling, augment = options
    mean, std = standard if scaling == "standard" else ((0.5,) * 3, (0.5,) * 3)
    per_channel = [torch.tensor(values).reshape(3, 1, 1) for values in (mean, std)]
    files = [file for part in parts for file in part]
    labels = torch.cat([label_bytes[:, column] for label_bytes, _ in files])
    rows = torch.arange(len(labels))
    train = sum(len(images) for _, images in parts[0])
    return Dataset(
        name=name,
        source=Arrays(
            torch.cat([images for _, images in files]),
            labels,
            Scaling(1 / 255, *per_channel),
            CropFlip(augment) if augment else None,
        ),
        schema=Schema((3, 32, 32), classes, {**preprocessing, "scaling": scaling, "mean": mean, "std": std}),
        train=rows[:train],
        test=rows[train:],
    )
