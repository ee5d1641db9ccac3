"""The examples in the docstrings, and that every public name has one."""

import doctest

import numpy as np
import pytest

import headway
from cases import check_examples

PUBLIC = [name for name in headway.__all__ if name != "__version__"]


@pytest.fixture(autouse=True)
def as_found():
    """Examples may set threads and seeds."""
    threads = headway.get_threads()
    yield
    headway.set_threads(threads)
    np.random.seed(None)


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_have_examples_that_run(name):
    if name.startswith("plot_"):
        pytest.importorskip("matplotlib", reason="matplotlib is not installed").use("Agg")
    check_examples(getattr(headway, name))


def test_the_package_s_own_example():
    result = doctest.testmod(headway)
    assert result.attempted > 0 and result.failed == 0
