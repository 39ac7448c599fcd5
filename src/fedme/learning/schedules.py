"""Numbers that change over the rounds."""

from collections.abc import Mapping
from typing import Literal

from fedme.core.method import Round


def ramp(value: float | tuple[float, float], shape: Literal["linear", "step"], when: Round) -> float:
    """A constant, or a pair (first, last): a straight line, or three equal stretches of rounds."""
    if not isinstance(value, tuple):
        return value
    progress = when.t / max(when.total - 1, 1)
    if shape == "step":
        progress = min(3 * when.t // when.total, 2) / 2
    return value[0] + (value[1] - value[0]) * progress


def since(value: int | Mapping[int, int], t: int) -> int:
    """A constant, or a table {from round: number}; 1 before the first entry."""
    if not isinstance(value, Mapping):
        return value
    reached = [start for start in value if start <= t]
    return value[max(reached)] if reached else 1


def most(value: int | Mapping[int, int]) -> int:
    """The largest number that `since` gives."""
    return max(value.values(), default=1) if isinstance(value, Mapping) else value
