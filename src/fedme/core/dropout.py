"""Dropout whose mask is a pure function of a seed and a position.

Masks come from integer hashing (the finalisers of splitmix64 for seeds and of a 32-bit hash for positions), without generator
state. A stack of clients, with one seed per client, therefore gets in one operation the masks that each client gets alone.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

_INCREMENT = -7046029254386353131  # of splitmix64: 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MULTIPLIER_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = -7723592293110705685  # 0x94D049BB133111EB
_MULTIPLIER_3 = 0x7FEB352D
_MULTIPLIER_4 = -2073254261  # 0x846CA68B as a signed 32-bit integer


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of signed 64-bit integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mixed(x: Tensor) -> Tensor:
    """A 64-bit hash of each element."""
    x = (x ^ _shift(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift(x, 27)) * _MULTIPLIER_2
    return x ^ _shift(x, 31)


def at_draw(seed: Tensor, draw: int | Tensor) -> Tensor:
    """The seed of the `draw`-th mask of a layer, or of several."""
    return mixed(seed + torch.as_tensor(draw, device=seed.device) * _INCREMENT)


def uniform(seed: Tensor, count: int, first: int = 0) -> Tensor:
    """`count` uniform numbers in [0, 1) per seed, starting at position `first`: shape ``seed.shape + (count,)``."""
    return _hashed(seed, count, first).to(torch.float32) * 2.0**-24


def kept(seed: Tensor, count: int, p: float, first: int = 0) -> Tensor:
    """Whether each of the uniform numbers is at least `p`, a single-precision number as they are."""
    return _hashed(seed, count, first) >= math.ceil(torch.tensor(p, dtype=torch.float32).item() * 2.0**24)


def _hashed(seed: Tensor, count: int, first: int) -> Tensor:
    """Integers of 24 bits. Positions are hashed in 32 bits, because 32-bit multiplication vectorises.

    Both halves of the seed are used.
    """
    low, high = seed.to(torch.int32).unsqueeze(-1), (seed >> 32).to(torch.int32).unsqueeze(-1)
    x = torch.arange(first + 1, first + count + 1, dtype=torch.int32, device=seed.device) ^ low
    x = (x ^ _shift32(x, 16)) * _MULTIPLIER_3
    x = (x ^ _shift32(x, 15) ^ high) * _MULTIPLIER_4
    return _shift32(x ^ _shift32(x, 16), 8)


def _shift32(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of signed 32-bit integers."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


class KeyedDropout(nn.Module):
    """`nn.Dropout` with a seed, stored as a buffer, instead of the global generator."""

    seed: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.calls = 0  # a layer called twice in one forward pass draws two masks
        self.first = 0  # position of the first sample in its batch: a single sample gets the mask it has in the full batch
        self.ahead: Callable[[int], Tensor] | None = None  # what the first call keeps of so many values, if known already
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        seed = at_draw(self.seed, -self.calls) if self.calls else self.seed
        start = self.first * x[0].numel() if self.first else 0
        ahead = self.ahead if not self.calls else None
        keep = (kept(seed, x.numel(), self.p, start) if ahead is None else ahead(x.numel())).reshape(x.shape)
        self.calls += 1
        return x * keep / (1.0 - self.p) if self.p < 1.0 else torch.zeros_like(x)
