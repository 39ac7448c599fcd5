"""Numbers that change over the rounds."""

import pytest

from fedme.core.method import Round
from fedme.learning.schedules import ramp, since


@pytest.mark.parametrize(
    ("value", "shape", "total", "expected"),
    [
        (0.3, "linear", 4, [0.3] * 4),
        (0.3, "step", 4, [0.3] * 4),
        ((0.0, 1.0), "linear", 5, [0.0, 0.25, 0.5, 0.75, 1.0]),
        ((1.0, 0.4), "linear", 4, [1.0, 0.8, 0.6, 0.4]),
        ((0.2, 0.8), "linear", 1, [0.2]),
        ((0.0, 1.0), "step", 6, [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]),
        ((0.0, 1.0), "step", 7, [0.0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0]),
        ((1.0, 0.0), "step", 3, [1.0, 0.5, 0.0]),
        ((0.0, 1.0), "step", 2, [0.0, 0.5]),
        ((0.2, 0.8), "step", 1, [0.2]),
    ],
)
def test_ramp(value, shape, total, expected):
    assert [ramp(value, shape, Round(t, total)) for t in range(total)] == pytest.approx(expected)


def test_since():
    assert [since(3, t) for t in (0, 9)] == [3, 3]
    table = {15: 2, 0: 1, 22: 3}
    assert [since(table, t) for t in (0, 14, 15, 21, 22, 99)] == [1, 1, 2, 2, 3, 3]
    assert [since({5: 4}, t) for t in (0, 4, 5)] == [1, 1, 4]
    assert since({}, 3) == 1
