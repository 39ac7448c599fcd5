"""MNIST, Fashion-MNIST and EMNIST: greyscale images of 28 x 28 pixels in IDX files.

Images are stored as uint8 and scaled when a batch is gathered. ``scaling``: "unit" divides by 255; "standard" also subtracts
the mean and divides by the standard deviation of all pixels; "per-pixel", as in pFedMe, is ``(x - mean) / (std + 0.001)``
for every pixel over all training and test images, on the scale from 0 to 255. ``pad`` repeats the border pixels outwards
(2 gives the 32 x 32 pixels of FML).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedme.core.data import Arrays, Scaling, Schema
from fedme.core.settings import setting
from fedme.datasets.data_errors import DataError, require, require_choice
from fedme.datasets.dataset import Dataset
from fedme.datasets.download import Archive, File, Remote, obtain
from fedme.datasets.idx import read_idx

GreyScaling = Literal["unit", "standard", "per-pixel"]
EmnistSplit = Literal["balanced", "byclass", "bymerge", "letters", "digits"]

FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
DIGITS, CAPITALS = "0123456789", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DISTINCT_LOWERCASE = "abdefghnqrt"  # lowercase letters that EMNIST does not merge with their capitals
EMNIST_CLASSES: dict[str, str] = {
    "balanced": DIGITS + CAPITALS + DISTINCT_LOWERCASE,
    "byclass": DIGITS + CAPITALS + CAPITALS.lower(),
    "bymerge": DIGITS + CAPITALS + DISTINCT_LOWERCASE,
    "letters": CAPITALS,
    "digits": DIGITS,
}
FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def _emnist_files(split: str) -> tuple[str, ...]:
    return tuple(f"emnist-{split}-{name.replace('t10k', 'test')}" for name in FILES)


def _remote(base: str, *md5: str) -> tuple[File, ...]:
    return tuple(File(name, base + name, checksum) for name, checksum in zip(FILES, md5, strict=True))


MNIST_REMOTE = _remote(
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
)
FASHION_REMOTE = _remote(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "25c81989df183df01b3e8a0aad5dffbe",
    "bef4ecab320f06d8554ea6380940ec79",
    "bb300cfdad3c16e7a12a480ee83cd310",
)
EMNIST_REMOTE = Archive(
    "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
    "58c8d27c78d21e728a6bc7b3cc06412e",
    {f"gzip/{name}": name for split in get_args(EmnistSplit) for name in _emnist_files(split)},
    largest=1 << 29,
)


@dataclass(frozen=True)
class Mnist:
    """Handwritten digits: 60,000 + 10,000 greyscale images of 28 x 28 pixels, 10 classes."""

    scaling: GreyScaling = setting("unit", "unit: 0 to 1; standard: mean 0, deviation 1; per-pixel: the same per pixel")
    pad: int = setting(0, "pixels added at every edge")

    def __post_init__(self) -> None:
        _check_options(self.scaling, self.pad)

    def load(self, root: Path) -> Dataset:
        """Read `root`/mnist, after downloading missing files."""
        images, labels, train = _read("mnist", root / "mnist", FILES, MNIST_REMOTE, classes=10)
        return _dataset("mnist", images, labels, train, tuple(DIGITS), self.scaling, self.pad, (0.1307, 0.3081))


@dataclass(frozen=True)
class FashionMnist(Mnist):
    """Clothes: 60,000 + 10,000 greyscale images of 28 x 28 pixels, 10 classes; harder than MNIST, same format."""

    def load(self, root: Path) -> Dataset:
        """Read `root`/fashion-mnist, after downloading missing files."""
        images, labels, train = _read("fashion-mnist", root / "fashion-mnist", FILES, FASHION_REMOTE, classes=10)
        standard = (0.2860, 0.3530)
        return _dataset("fashion-mnist", images, labels, train, FASHION_CLASSES, self.scaling, self.pad, standard)


@dataclass(frozen=True)
class Emnist:
    """Handwritten characters: up to 814,255 greyscale images of 28 x 28 pixels; 10 to 62 classes, depending on the split."""

    split: EmnistSplit = setting("balanced", "balanced, byclass, bymerge, letters or digits")
    scaling: GreyScaling = setting("unit", "unit: 0 to 1; standard: mean 0, deviation 1; per-pixel: the same per pixel")
    pad: int = setting(0, "pixels added at every edge")

    def __post_init__(self) -> None:
        require_choice("split", self.split, get_args(EmnistSplit))
        _check_options(self.scaling, self.pad)

    def load(self, root: Path) -> Dataset:
        """Read `root`/emnist, after downloading missing files."""
        classes = tuple(EMNIST_CLASSES[self.split])
        images, labels, train = _read(
            f"emnist ({self.split})",
            root / "emnist",
            _emnist_files(self.split),
            EMNIST_REMOTE,
            classes=len(classes),
            first_label=1 if self.split == "letters" else 0,
        )
        upright = images.transpose(1, 2).contiguous()  # the files store columns first
        return _dataset("emnist", upright, labels, train, classes, self.scaling, self.pad, standard=None)


def _check_options(scaling: str, pad: int) -> None:
    require_choice("scaling", scaling, get_args(GreyScaling))
    require(0 <= pad <= 28, "pad", f"must be between 0 and 28, got {pad}")


def _read(
    name: str, folder: Path, files: tuple[str, ...], remote: Remote, classes: int, first_label: int = 0
) -> tuple[Tensor, Tensor, int]:
    """All images, all labels counted from 0, and the number of training samples."""
    paths = obtain(name, folder, files, remote)
    images, labels = [], []
    for image_file, label_file in zip(files[::2], files[1::2], strict=True):
        images.append(read_idx(paths[image_file], (28, 28)))
        labels.append(read_idx(paths[label_file], ()).to(torch.int64) - first_label)
        if len(labels[-1]) != len(images[-1]):
            raise DataError(f"{paths[label_file]}: {len(labels[-1])} labels, but {len(images[-1])} images")
        if len(wrong := labels[-1][(labels[-1] < 0) | (labels[-1] >= classes)]):
            expected = f"between {first_label} and {first_label + classes - 1}"
            raise DataError(f"{paths[label_file]}: labels of {name} must be {expected}, got {wrong[0] + first_label}")
    return torch.cat(images), torch.cat(labels), len(labels[0])


def _dataset(
    name: str,
    images: Tensor,
    labels: Tensor,
    train: int,
    classes: tuple[str, ...],
    scaling: GreyScaling,
    pad: int,
    standard: tuple[float, float] | None,
) -> Dataset:
    if pad:
        images = torch.from_numpy(np.pad(images.numpy(), ((0, 0), (pad, pad), (pad, pad)), mode="edge"))
    images = images[:, None]
    preprocessing: dict[str, object] = {"scaling": scaling, "pad": pad}
    if scaling == "unit":
        scaled = Scaling(1 / 255)
    elif scaling == "standard":
        mean, std = standard or _moments(images[:train])
        scaled = Scaling(1 / 255, torch.tensor(mean), torch.tensor(std))
        preprocessing |= {"mean": mean, "std": std}
    else:
        scaled = _per_pixel(images)
    side = images.shape[-1]
    rows = torch.arange(len(labels))
    return Dataset(
        name=name,
        source=Arrays(images, labels, scaled),
        schema=Schema((1, side, side), classes, preprocessing),
        train=rows[:train],
        test=rows[train:],
    )


def _moments(images: Tensor) -> tuple[float, float]:
    """Exact mean and standard deviation of all pixels on the scale from 0 to 1, from the counts of the 256 values."""
    counts = sum(torch.bincount(part.flatten(), minlength=256) for part in images.split(10_000))
    weights = torch.as_tensor(counts, dtype=torch.float64) / images.numel()
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = (weights * values).sum()
    return float(mean), float((weights * (values - mean).square()).sum().sqrt())


def _per_pixel(images: Tensor) -> Scaling:
    total = torch.zeros(images.shape[1:], dtype=torch.float64)
    squares = torch.zeros_like(total)
    for part in images.split(10_000):
        values = part.to(torch.float64)
        total += values.sum(0)
        squares += values.square().sum(0)
    mean = total / len(images)
    std = (squares / len(images) - mean.square()).clamp(min=0).sqrt()
    return Scaling(1.0, mean.to(torch.float32), (std + 0.001).to(torch.float32))
