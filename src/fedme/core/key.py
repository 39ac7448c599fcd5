"""Keys: sources of randomness with names.

A key is derived from a seed and a path of names, never drawn from a stream, so the order in which things run cannot
change what they draw: ``key.at("round", 3, "client", "7")`` is the same source whoever asks for it, and whenever.
"""

import functools
import hashlib
import json

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import ndtri

from fedme.core.value_class import value_class

Floats = npt.NDArray[np.float64]


@value_class
class Key:
    """A source of randomness, identified by a seed and a path of names."""

    seed: int
    path: tuple[int | str, ...] = ()

    def at(self, *path: int | str) -> "Key":
        """The source with the name `path` below this one."""
        key = Key(self.seed, self.path + path)
        vars(key)["_start"] = self.below(*path)
        return key

    def below(self, *path: int | str) -> bytes:
        """How the names of all keys begin that are below `path`; a key's own name is ``below() + b"]"``."""
        return (vars(self).get("_start") or self._begin()) + _end(*path)

    def _begin(self) -> bytes:
        """The seed and the path as json.dumps writes a list, without its end; begun by the key that this one was made from."""
        start: bytes | None = vars(self).get("_start")
        if start is None:
            start = vars(self)["_start"] = b"[" + b"".join(map(_text, (self.seed, *self.path)))[2:]
        return start

    def integer(self) -> int:
        """A 63-bit integer that depends on the seed and the path only."""
        return int.from_bytes(hashlib.blake2b(self._begin() + b"]", digest_size=8).digest(), "little") >> 1

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
        drawn = np.frombuffer(hashlib.shake_256(self._begin() + b"]").digest(8 * count), dtype="<u8")
        return ((drawn >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def normal(self, count: int) -> Floats:
        """Standard normal numbers, up to 8.2 standard deviations, from `uniform`."""
        return ndtri(self.uniform(count))  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=65536, typed=True)
def _end(*path: int | str) -> bytes:
    """What a path adds to the name of a key; those of clients and of their work come back every round."""
    return b"".join(map(_text, path))


def _text(part: int | str) -> bytes:
    return b", %d" % part if type(part) is int else f", {json.dumps(part)}".encode()
