import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors: a second thread only costs time."""
    torch.set_num_threads(1)
