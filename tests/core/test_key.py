"""A key names a source of randomness: the name decides everything, the order of asking nothing."""

import hashlib
import json

import numpy as np
import torch
from hypothesis import given, strategies as st

from fedme.core.key import Key

NAMES = st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=8))
PATHS = st.lists(NAMES, max_size=4).map(tuple)


def test_the_same_path_gives_the_same_bits() -> None:
    first, second = Key(7).at("round", 3, "client", "a"), Key(7).at("round", 3).at("client").at("a")
    assert first == second
    assert first.integer() == second.integer()
    assert torch.equal(torch.rand(5, generator=first.torch()), torch.rand(5, generator=second.torch()))
    assert np.array_equal(first.numpy().random(5), second.numpy().random(5))


def test_bits_never_change() -> None:
    # Written down once: results of old runs depend on it.
    assert Key(0).integer() == 5621864261735219286
    assert Key(42).at("round", 0, "client", "7").integer() == 1237363886440073565


@given(st.integers(-(2**70), 2**70), st.lists(st.one_of(NAMES, st.booleans(), st.floats(allow_nan=False))).map(tuple))
def test_the_name_is_what_json_writes(seed: int, path: tuple[int | str, ...]) -> None:
    name = json.dumps([seed, *path]).encode()
    digest = hashlib.blake2b(name, digest_size=8).digest()
    assert Key(seed).at(*path).integer() == int.from_bytes(digest, "little") >> 1
    assert Key(seed, path).integer() == Key(seed).at(*path).integer()
    assert Key(seed).below(*path) + b"]" == name
    assert Key(seed).at(*path).below(1, "a") + b"]" == json.dumps([seed, *path, 1, "a"]).encode()


@given(PATHS, PATHS)
def test_different_paths_give_different_bits(first: tuple[int | str, ...], second: tuple[int | str, ...]) -> None:
    assert (Key(1).at(*first).integer() == Key(1).at(*second).integer()) == (first == second)


def test_numbers_text_and_seeds_are_told_apart() -> None:
    keys = [Key(1).at(2), Key(1).at("2"), Key(2).at(1), Key(1, (2, "")), Key(12), Key(1).at("2", "3"), Key(1).at("23")]
    assert len({key.integer() for key in keys}) == len(keys)


def test_asking_changes_nothing_for_others() -> None:
    key = Key(3).at("client", "b")
    undisturbed = torch.rand(4, generator=key.torch())
    for other in ("a", "c"):
        torch.rand(100, generator=Key(3).at("client", other).torch())
    key.torch()
    key.numpy().random(10)
    assert torch.equal(torch.rand(4, generator=key.torch()), undisturbed)


def test_generators_are_seeded_with_63_bits_and_leave_the_global_ones_alone() -> None:
    before = torch.get_rng_state()
    integers = [Key(0).at(i).integer() for i in range(200)]
    torch.rand(3, generator=Key(0).torch())
    assert all(0 <= i < 2**63 for i in integers)
    assert max(integers) > 2**62
    assert torch.equal(torch.get_rng_state(), before)
