"""The examples in the docstrings, and that every public name has one."""

import doctest
import inspect

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


def methods_of(name):
    """{name: method} of a public class, without those that it inherits from other packages."""
    item = getattr(headway, name)
    if not isinstance(item, type):
        return {}
    listed = {name: getattr(item, name) for name in vars(item) if not name.startswith("_")}
    return {name: method for name, method in listed.items() if callable(method)}


@pytest.mark.parametrize("name", [name for name in PUBLIC if methods_of(name)])
def test_every_method_has_an_example_that_runs_of_its_own_or_in_its_class(name):
    shown = doctest.DocTestParser().get_examples(inspect.getdoc(getattr(headway, name)))
    for method_name, method in methods_of(name).items():
        if ">>>" in (method.__doc__ or ""):
            check_examples(method)
        else:
            assert any(f".{method_name}(" in example.source for example in shown), f"{name}.{method_name}"


def test_the_package_s_own_example():
    result = doctest.testmod(headway)
    assert result.attempted > 0 and result.failed == 0
