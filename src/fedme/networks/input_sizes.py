"""Checks of input shapes and layer sizes, and the error they raise."""

import math


class ArchError(ValueError):
    """An architecture cannot be built; the message names it and the remedy."""


def image(shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """Channels, height and width of an image; height and width must be at least `least`."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ArchError(f"needs images of shape (channels, height, width), at least {least} x {least}, got {shape}")
    channels, height, width = shape
    return channels, height, width


def sequence(shape: tuple[int, ...]) -> int:
    """The length of a sequence of symbols."""
    if len(shape) != 1 or shape[0] < 1:
        raise ArchError(f"needs sequences of symbols of shape (length,), got {shape}")
    return shape[0]


def positive(**sizes: int | float) -> None:
    """Raise an ArchError for a size that is not positive and finite."""
    for name, size in sizes.items():
        if not 0 < size < math.inf:
            raise ArchError(f"needs {name} > 0, got {size}")


def scaled(units: int, width: float) -> int:
    """The number of units in a network of relative width `width`."""
    return max(1, round(units * width))
