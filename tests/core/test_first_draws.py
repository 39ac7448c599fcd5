"""The first draws of many keys are those of NumPy's generators, one by one."""

import pytest
from hypothesis import given, strategies as st

from fedme.core.first_draws import first_draws
from fedme.core.key import Key

KEYS = [Key(3).at("lender", index) for index in range(300)]


@given(st.integers(1, 2**40), st.integers(0, 2**63))
def test_draws_are_those_of_generators(below: int, seed: int) -> None:
    keys = [Key(seed).at(index) for index in range(5)]
    assert first_draws(keys, below) == [int(key.numpy().integers(below)) for key in keys]


@pytest.mark.parametrize("below", [1, 2, 3, 99, 2**31 + 1, 3 * 2**30, 2**32 - 1, 2**32, 2**40])  # some are drawn again often
def test_draws_near_the_limits_are_those_of_generators(below: int) -> None:
    assert first_draws(KEYS, below) == [int(key.numpy().integers(below)) for key in KEYS]
    assert first_draws([], below) == []
