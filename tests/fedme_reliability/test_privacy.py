"""The parts of `make reliability` about privacy, in small; and that the game finds out noise that is missing."""

import torch

from fedme_reliability.privacy import agree, told_apart


def test_accountants_agree():
    assert agree(0.3, 2.0, 30)


def test_a_sample_is_told_apart_no_better_than_epsilon_allows():
    claimed, lower = told_apart(1.0, 1, 1000)
    assert 0.2 < lower <= claimed


def test_the_game_notices_noise_that_is_too_small(monkeypatch):
    monkeypatch.setattr("fedme.execution.stacked_privacy.deviation", lambda mechanism: 0.1)
    claimed, lower = told_apart(2.0, 1, 1000)
    assert lower > claimed


def test_the_game_notices_gradients_that_are_not_clipped(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "clamp", lambda self, **limits: torch.ones_like(self), raising=False)
    claimed, lower = told_apart(2.0, 1, 1000)
    assert lower > claimed
