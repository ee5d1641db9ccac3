"""layout="bshd": the same numbers, bit for bit, with the heads after the sequence."""

import numpy as np
import pytest

import headway

rng = np.random.default_rng(0)
QUERY = rng.standard_normal((2, 6, 9, 16), dtype=np.float32)  # (B, H, Sq, D)
KEY = rng.standard_normal((2, 3, 11, 16), dtype=np.float32)
VALUE = rng.standard_normal((2, 3, 11, 8), dtype=np.float32)
OPTIONS = {"causal": "bottom_right", "bias": rng.standard_normal((6, 1, 11), dtype=np.float32), "sinks": np.ones(6)}


def swapped(array):
    """(B, H, S, D) as a contiguous (B, S, H, D), or the other way round."""
    return np.ascontiguousarray(array.swapaxes(1, 2))


BSHD = tuple(map(swapped, (QUERY, KEY, VALUE)))


def test_attention_takes_and_gives_heads_after_the_sequence():
    expected = headway.attention(QUERY, KEY, VALUE, return_weights=True, return_lse=True, **OPTIONS)
    out, weights, lse = headway.attention(*BSHD, return_weights=True, return_lse=True, layout="bshd", **OPTIONS)
    assert out.shape == (2, 9, 6, 8) and out.flags.c_contiguous
    np.testing.assert_array_equal(out, swapped(expected[0]))
    np.testing.assert_array_equal(weights, expected[1])
    np.testing.assert_array_equal(lse, expected[2])


def test_a_given_out_has_the_same_layout():
    out = np.empty((2, 9, 6, 8), np.float32)
    assert headway.attention(*BSHD, layout="bshd", out=out) is out
    np.testing.assert_array_equal(out, swapped(headway.attention(QUERY, KEY, VALUE)))


def test_gradients_have_the_layout_of_what_they_belong_to():
    out, lse = headway.attention(QUERY, KEY, VALUE, return_lse=True, **OPTIONS)
    grad_out = rng.standard_normal(out.shape, dtype=np.float32)
    expected = headway.attention_backward(grad_out, QUERY, KEY, VALUE, out, lse, **OPTIONS)
    found = headway.attention_backward(swapped(grad_out), *BSHD, swapped(out), lse, layout="bshd", **OPTIONS)
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(getattr(found, name), swapped(getattr(expected, name)))
    np.testing.assert_array_equal(found.bias, expected.bias)
    np.testing.assert_array_equal(found.sinks, expected.sinks)


def test_scores_plans_and_analysis_know_it_too():
    query, key, value = BSHD
    np.testing.assert_array_equal(
        headway.attention_scores(query, key, layout="bshd"), headway.attention_scores(QUERY, KEY)
    )
    assert headway.explain(query, key, value, layout="bshd").shape == headway.explain(QUERY, KEY, VALUE).shape
    found, expected = headway.analyze(query, key, layout="bshd"), headway.analyze(QUERY, KEY)
    np.testing.assert_array_equal(found.received, expected.received)
    part = headway.weights_in(query, key, (2, 5), (0, 4), lse=found.lse, layout="bshd")
    np.testing.assert_array_equal(part, headway.weights_in(QUERY, KEY, (2, 5), (0, 4), lse=expected.lse))
    mean = headway.mean_weights(query, key, found.lse, layout="bshd")
    np.testing.assert_array_equal(mean, headway.mean_weights(QUERY, KEY, expected.lse))


def test_arrays_without_heads_have_one_layout():
    x = QUERY[:, 0]
    np.testing.assert_array_equal(headway.attention(x, x, x, layout="bshd"), headway.attention(x, x, x))


def test_what_is_no_layout_is_named():
    with pytest.raises(ValueError, match="attention: layout is 'sbhd', expected 'bhsd' or 'bshd'"):
        headway.attention(QUERY, KEY, VALUE, layout="sbhd")
    with pytest.raises(TypeError, match="attention: layout is 4, expected 'bhsd' or 'bshd'"):
        headway.attention(QUERY, KEY, VALUE, layout=4)
    packed = QUERY[0].swapaxes(0, 1)
    with pytest.raises(ValueError, match=r"attention_varlen: layout is 'bshd', expected none: .*\(total, H, D\)"):
        headway.attention_varlen(packed, packed, packed, [0, 9], [0, 9], layout="bshd")


def test_batch_invariant_changes_nothing_on_the_cpu():
    expected = headway.attention(QUERY, KEY, VALUE)
    np.testing.assert_array_equal(headway.attention(QUERY, KEY, VALUE, batch_invariant=True), expected)
