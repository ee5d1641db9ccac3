"""Objects that lie, raise and change: answered with a Python error, never with a crash."""

import numpy as np
import pytest

import headway

X = np.ones((3, 4), np.float32)


class Wide(np.ndarray):
    """Says that its elements are wider than they are."""

    dtype = property(lambda self: np.dtype(np.float64))


class Raises:
    """Every question raises."""

    def _raise(self, *args, **keywords):
        raise ZeroDivisionError("on purpose")

    __dlpack__ = __dlpack_device__ = __len__ = __getitem__ = __float__ = __index__ = __bool__ = __array__ = _raise
    __repr__ = _raise


class NoCapsule:
    def __init__(self, answer):
        self.answer = answer

    def __dlpack__(self, **keywords):
        return self.answer


class Pair:
    """A pair of nothing, and never of the same."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index > 1:
            raise IndexError
        return object()


def test_an_array_that_lies_about_its_type():
    lying = X.view(Wide)
    with pytest.raises(TypeError, match="query has type float64 and elements of 4 bytes"):
        headway.attention(lying, lying, lying)


@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_inputs_that_raise(place):
    with pytest.raises(TypeError, match=f"attention: {place} cannot be read through DLPack: .*on purpose"):
        headway.attention(**{**dict.fromkeys(["query", "key", "value"], X), place: Raises()})


@pytest.mark.parametrize("answer", [None, 3, object(), [], "dltensor"])
def test_what_is_no_capsule(answer):
    with pytest.raises(TypeError, match="query has a __dlpack__ that gives no DLPack capsule"):
        headway.attention(NoCapsule(answer), X, X)


OPTIONS = "mask bias causal window valid_lens query_lens scale softcap alibi_slopes sinks dropout seed out engine"


@pytest.mark.parametrize("option", [*OPTIONS.split(), "return_weights", "return_lse"])
@pytest.mark.parametrize("value", [Raises(), Pair(), NoCapsule(None), object(), {}, b"", type, ...])
def test_options_that_are_nonsense(option, value):
    try:
        headway.attention(X, X, X, **{option: value})
    except (TypeError, ValueError, ZeroDivisionError):
        pass
    assert np.array_equal(headway.attention(X, X, X), X)


def test_errors_stay_short():
    with pytest.raises(ValueError) as caught:
        headway.attention(X, X, X, window=list(range(10**5)))
    assert len(str(caught.value)) < 300


def test_an_array_that_changes_between_calls():
    x = np.ones((3, 4))
    headway.attention(x, x, x)
    x.resize((5, 4), refcheck=False)
    assert headway.attention(x, x, x).shape == (5, 4)
    x.shape = (4, 5)
    x.dtype = np.int64
    with pytest.raises(TypeError, match="query has type i64"):
        headway.attention(x, x, x)


def test_keyword_names_of_any_kind():
    class Name(str):
        pass

    assert headway.attention(X, X, X, **{Name("causal"): False}).shape == (3, 4)
    for name in ("", "mask\0", "\ud800", "x" * 10**5):
        with pytest.raises((TypeError, UnicodeEncodeError)):
            headway.attention(X, X, X, **{name: None})
