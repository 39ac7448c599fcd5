"""Names for sources of randomness.

A key is derived from a seed and a path of names, never drawn from a stream, so the order in which things run cannot
change what they draw: ``key.at("round", 3, "client", "7")`` is the same source whoever asks for it, and whenever.
"""

import hashlib
import json
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Key:
    """A source of randomness, by name."""

    seed: int
    path: tuple[int | str, ...] = ()

    def at(self, *path: int | str) -> "Key":
        """The source called `path` below this one."""
        return Key(self.seed, self.path + path)

    def integer(self) -> int:
        """A 63-bit number that depends on the seed and every name of the path, and on nothing else."""
        text = json.dumps([self.seed, *self.path])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def torch(self) -> torch.Generator:
        """A fresh torch generator seeded by this key."""
        return torch.Generator().manual_seed(self.integer())

    def numpy(self) -> np.random.Generator:
        """A fresh numpy generator seeded by this key."""
        return np.random.default_rng(self.integer())
