"""What the torch tests share."""

import pytest

import headway


@pytest.fixture
def one_thread():
    """For many small calls: threads that wait for each other would take most of the time."""
    import torch

    before = torch.get_num_threads(), headway.get_threads()
    torch.set_num_threads(1)
    headway.set_threads(1)
    yield
    torch.set_num_threads(before[0])
    headway.set_threads(before[1])
