"""Our statistics against scipy's."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats as reference

from fedme.reproduction.stats import compare, paired
from fedme.results.summary import spread

numbers = st.lists(st.floats(-100, 100), min_size=2, max_size=10)


@given(numbers)
def test_mean_and_deviation(values):
    mean, std = spread(values)
    assert mean == pytest.approx(np.mean(values), abs=1e-9)
    assert std == pytest.approx(np.std(values, ddof=1), rel=1e-6, abs=1e-6)


def test_deviation_against_scipy():
    values = [76.5, 78.25, 74.0]
    assert spread(values) == pytest.approx((reference.tmean(values), reference.tstd(values)))


@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(-100, 100)), min_size=2, max_size=10))
def test_paired_comparison(pairs):
    left, right = ([pair[i] for pair in pairs] for i in (0, 1))
    found = paired(dict(enumerate(left)), dict(enumerate(right)))
    if np.std(np.subtract(left, right)) < 1e-6:
        return  # scipy divides by zero there
    expected = reference.ttest_rel(left, right)
    interval = expected.confidence_interval(0.95)
    assert found.mean == pytest.approx(np.mean(left) - np.mean(right), abs=1e-9)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-6, abs=1e-6)


def test_only_shared_seeds_are_compared():
    found = paired({0: 5.0, 1: 7.0, 2: 100.0}, {0: 4.0, 1: 4.0, 3: 0.0})
    assert found.differences == (1.0, 3.0)
    assert found.count == 2
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_one_pair_has_no_interval():
    one = compare([2.0])
    assert (one.mean, one.low, one.high) == (2.0, -math.inf, math.inf)
    assert math.isnan(one.p)


def test_equal_differences():
    assert compare([0.0, 0.0]).p == 1.0
    same = compare([1.0, 1.0, 1.0])
    assert (same.low, same.high, same.p) == (1.0, 1.0, 0.0)
