"""Keys: sources of randomness with names.

A key is derived from a seed and a path of names, never drawn from a stream, so the order in which things run cannot
change what they draw: ``key.at("round", 3, "client", "7")`` is the same source whoever asks for it, and whenever.
"""

import functools
import hashlib
import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import ndtri

Floats = npt.NDArray[np.float64]
_quoted = functools.lru_cache(maxsize=65536)(json.encoder.encode_basestring_ascii)  # names of clients come back every round


@dataclass(frozen=True)
class Key:
    """A source of randomness, identified by a seed and a path of names."""

    seed: int
    path: tuple[int | str, ...] = ()

    def at(self, *path: int | str) -> "Key":
        """The source with the name `path` below this one."""
        return Key(self.seed, self.path + path)

    def _name(self) -> bytes:
        # As json.dumps writes a list, in a quarter of the time.
        return f"[{', '.join([_text(part) for part in (self.seed, *self.path)])}]".encode()

    def integer(self) -> int:
        """A 63-bit integer that depends on the seed and the path only."""
        return _number(self._name())

    def integers(self, count: int) -> list[int]:
        """The integers of the keys ``at(0)``, ``at(1)``, ...: `count` of them."""
        start = self._name()[:-1]
        names = (b"%b, %d]" % (start, index) for index in range(count))
        return [_number(name) for name in names]

    def torch(self) -> torch.Generator:
        """A fresh torch generator seeded by this key."""
        return torch.Generator().manual_seed(self.integer())

    def numpy(self) -> np.random.Generator:
        """A fresh numpy generator seeded by this key."""
        return np.random.default_rng(self.integer())

    def uniform(self, count: int) -> Floats:
        """Cryptographic uniform numbers in (0, 1) with 52 bits, from SHAKE-256.

        Differential privacy needs them; the generators above are faster but predictable.
        """
        drawn = np.frombuffer(hashlib.shake_256(self._name()).digest(8 * count), dtype="<u8")
        return ((drawn >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def normal(self, count: int) -> Floats:
        """Standard normal numbers, up to 8.2 standard deviations, from `uniform`."""
        return ndtri(self.uniform(count))  # type: ignore[no-any-return]


def _text(part: int | str) -> str:
    return _quoted(part) if type(part) is str else str(part) if type(part) is int else json.dumps(part)


def _number(name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1
