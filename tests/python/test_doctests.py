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
def test_every_method_is_in_an_example_that_runs(name):
    """Of its own, or of its class or another method of it."""
    item, methods = getattr(headway, name), methods_of(name)
    for method in methods.values():
        if ">>>" in (method.__doc__ or ""):
            check_examples(method)
    texts = [inspect.getdoc(each) or "" for each in (item, *methods.values())]
    shown = [example.source for text in texts for example in doctest.DocTestParser().get_examples(text)]
    assert [method for method in methods if not any(f".{method}(" in source for source in shown)] == []


def test_the_package_s_own_example():
    result = doctest.testmod(headway)
    assert result.attempted > 0 and result.failed == 0
