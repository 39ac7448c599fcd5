"""What a network asks of the size of its inputs and of its own layers, and the error that says so."""

import math


class ArchError(ValueError):
    """An architecture that cannot be had; the message names it and says what would work."""


def image(shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """Channels, height and width of an image whose sides are at least `least`."""
    if len(shape) != 3 or min(shape[1:]) < least:
        needed = f"images of shape (channels, height, width), at least {least} x {least}"
        raise ArchError(f"needs {needed}, but inputs are {shape}")
    channels, height, width = shape
    return channels, height, width


def sequence(shape: tuple[int, ...]) -> int:
    """The length of a sequence of symbols."""
    if len(shape) != 1 or shape[0] < 1:
        raise ArchError(f"needs sequences of symbols of shape (length,), but inputs are {shape}")
    return shape[0]


def positive(**sizes: int | float) -> None:
    """Refuse a layer without units."""
    for name, size in sizes.items():
        if not 0 < size < math.inf:
            raise ArchError(f"needs {name} > 0, not {size}")


def scaled(units: int, width: float) -> int:
    """`units` of a full network in one `width` times as wide."""
    return max(1, round(units * width))
