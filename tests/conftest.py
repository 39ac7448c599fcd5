import os
import sys

import pytest
import torch
from hypothesis import settings

from fedme import cli

# The same examples every time, so that a red run can be repeated; FEDME_EXPLORE=1 looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("exploring", deadline=None)
settings.load_profile("exploring" if os.environ.get("FEDME_EXPLORE") else "repeatable")


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors: a second thread only costs time."""
    torch.set_num_threads(1)


@pytest.fixture
def fedme(monkeypatch, capsys):
    """Give a command as a person would: its exit code, what it printed, and what it said beside."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["fedme", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return end.value.code or 0, said.out, said.err

    return call
