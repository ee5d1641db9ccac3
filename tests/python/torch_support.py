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


def no_cuda() -> str | None:
    """Why the tests on a GPU cannot run here; None where they can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device here"
    if "cuda" not in headway.engines():
        return "this build of headway has no CUDA engine"
    return None
