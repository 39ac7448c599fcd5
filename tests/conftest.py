import os

import pytest
import torch
from hypothesis import settings

# The same examples every time, so that a red run can be repeated; FEDME_EXPLORE=1 looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("exploring", deadline=None)
settings.load_profile("exploring" if os.environ.get("FEDME_EXPLORE") else "repeatable")


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors: a second thread only costs time."""
    torch.set_num_threads(1)
