"""Values that a forward pass keeps in attributes of its modules."""

from collections import Counter, deque

import pytest
import torch
from torch import nn

from fedme.core.own_attributes import changing_attribute


class Keeps(nn.Module):
    """Its forward pass does what the test says."""

    def __init__(self, value, change):
        super().__init__()
        self.part = nn.Linear(2, 2)
        self.part.value, self.change = value, change

    def forward(self, x):
        self.part.value = self.change(self.part.value)
        return self.part(x)


def grown(values):
    values.append(torch.zeros(1))
    return values


CHANGING = [
    (0, lambda value: value + 1),
    (1.0, lambda value: value / 2),
    (False, lambda value: not value),
    ("a", lambda value: value + "b"),
    ([], grown),
    (deque(), grown),
    ({}, lambda value: {**value, len(value): {"deep": [1]}}),
    (Counter(), lambda value: value + Counter(["call"])),
    (set(), lambda value: value | {len(value)}),
    ((0, (0,)), lambda value: (0, (value[1][0] + 1,))),
]
STEADY = [
    (None, lambda value: 3),  # set once
    (None, lambda value: torch.rand(2)),  # of the latest batch
    (0, lambda value: value),
    (float("nan"), lambda value: float("nan")),
    (object(), lambda value: object()),
]


@pytest.mark.parametrize(("value", "change"), CHANGING)
def test_a_value_that_differs_after_every_call_is_named(value, change):
    module = Keeps(value, change)
    assert changing_attribute(module, lambda: module(torch.zeros(1, 2))) == "part.value"


@pytest.mark.parametrize(("value", "change"), STEADY)
def test_a_value_that_is_set_once_or_is_no_plain_value_is_not_named(value, change):
    module = Keeps(value, change)
    assert changing_attribute(module, lambda: module(torch.zeros(1, 2))) == ""
