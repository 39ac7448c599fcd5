"""Replies compared with each other, where nothing that was sent says how they must look."""

from dataclasses import dataclass

import torch

from fedme.core.key import Key
from fedme.core.method import Round
from fedme.federation.reply_agreement import different_from_most, full_form, tensor_kinds
from fedme.federation.round import _aggregated


@dataclass(frozen=True)
class Up:
    colours: torch.Tensor


class Adding:
    """A method of a user: it adds what it gets, and torch broadcasts."""

    def averaged_with(self, up):
        return None

    def aggregate(self, server, replies, when, key):
        return server + sum(up.colours for up in replies.values())


HONEST = Up(torch.ones(3))


def aggregated(bad):
    replies = {"a": HONEST, "b": HONEST, "c": Up(bad)}
    return _aggregated(Adding(), torch.zeros(3), replies, Round(0, 1), Key(0))[:2]


def test_a_reply_that_torch_would_broadcast_does_not_count():
    """No exception gives it away: the sum would have another shape, or another type."""
    for bad in (torch.ones(2, 1, 3), torch.ones(3, dtype=torch.float64), torch.ones(())):
        server, odd = aggregated(bad)
        assert torch.equal(server, torch.full((3,), 2.0))
        assert server.dtype == torch.float32
        assert odd == {"c": "refused: its reply has not the form of the others"}


def test_a_reply_that_cannot_be_added_does_not_count():
    server, odd = aggregated(torch.ones(4))
    assert torch.equal(server, torch.full((3,), 2.0))
    assert odd["c"].startswith("refused: its reply has not the form of the others: RuntimeError: ")


def test_without_a_majority_nobody_is_different():
    assert different_from_most({}, tensor_kinds) == []
    assert different_from_most({"a": HONEST, "b": Up(torch.ones(1, 3))}, tensor_kinds) == []
    assert different_from_most({"a": HONEST, "b": HONEST, "c": Up(torch.ones(4))}, tensor_kinds) == []  # sizes may differ
    assert different_from_most({"a": HONEST, "b": HONEST, "c": Up(torch.ones(4))}, full_form) == ["c"]
