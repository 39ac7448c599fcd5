"""The global random generators of torch, Python and NumPy: networks of users may draw from them in a forward pass.

The library itself draws from keys only.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def states() -> list[Any]:
    """The states of the generators, to be compared."""
    kind, numbers, *rest = np.random.get_state()
    return [torch.default_generator.get_state().tolist(), random.getstate(), kind, np.asarray(numbers).tolist(), rest]


@contextmanager
def seeded(seed: int, others: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Seed the generators, and `others` of devices, and restore their states afterwards."""
    generators = [torch.default_generator, *others]
    before = [generator.get_state() for generator in generators]
    of_python, of_numpy = random.getstate(), np.random.get_state()
    for generator in generators:
        generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
