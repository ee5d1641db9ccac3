"""Packed sequences: each must be what it would be alone."""

import numpy as np
import pytest

import headway
from cases import DTYPES


def packed_case(seed, dtype="float64"):
    rng = np.random.default_rng(seed)
    lens_q, lens_k = rng.integers(0, 9, (2, int(rng.integers(1, 5))))
    starts_q, starts_k = (np.concatenate([[0], np.cumsum(lens)]) for lens in (lens_q, lens_k))
    heads = 4
    query = rng.standard_normal((starts_q[-1], heads, 6)).astype(DTYPES[dtype])
    key = rng.standard_normal((starts_k[-1], 2, 6)).astype(DTYPES[dtype])
    value = rng.standard_normal((starts_k[-1], 2, 5)).astype(DTYPES[dtype])
    options = {"causal": "bottom_right", "window": (3, None), "softcap": 2.0, "sinks": rng.standard_normal(heads)}
    return query, key, value, starts_q, starts_k, options


def alone(array, starts, b):
    """Sequence b as (1, H, S, D)."""
    return array[starts[b] : starts[b + 1]].swapaxes(0, 1)[None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(12))
def test_packed_sequences_are_as_each_alone(seed, dtype):
    query, key, value, starts_q, starts_k, options = packed_case(seed, dtype)
    out, lse = headway.attention_varlen(query, key, value, starts_q, starts_k, **options, return_lse=True)
    assert out.shape == (len(query), 4, 5) and lse.shape == (4, len(query)) and out.dtype == query.dtype
    for b in range(len(starts_q) - 1):
        single, single_lse = headway.attention(
            alone(query, starts_q, b), alone(key, starts_k, b), alone(value, starts_k, b), **options, return_lse=True
        )
        assert np.array_equal(alone(out, starts_q, b), single)
        assert np.array_equal(lse[:, starts_q[b] : starts_q[b + 1]], single_lse[0])


@pytest.mark.parametrize("seed", range(12))
def test_gradients_of_packed_sequences_are_as_each_alone(seed):
    query, key, value, starts_q, starts_k, options = packed_case(seed)
    out, lse = headway.attention_varlen(query, key, value, starts_q, starts_k, **options, return_lse=True)
    grad_out = np.random.default_rng(seed).standard_normal(out.shape)
    found = headway.attention_varlen_backward(grad_out, query, key, value, out, lse, starts_q, starts_k, **options)
    sinks = np.zeros(4)
    for b in range(len(starts_q) - 1):
        inputs = alone(query, starts_q, b), alone(key, starts_k, b), alone(value, starts_k, b)
        single_out, single_lse = headway.attention(*inputs, **options, return_lse=True)
        single = headway.attention_backward(
            np.ascontiguousarray(alone(grad_out, starts_q, b)), *inputs, single_out, single_lse, **options
        )
        np.testing.assert_allclose(alone(found.query, starts_q, b), single.query, atol=1e-13)
        np.testing.assert_allclose(alone(found.key, starts_k, b), single.key, atol=1e-13)
        np.testing.assert_allclose(alone(found.value, starts_k, b), single.value, atol=1e-13)
        sinks += single.sinks
    np.testing.assert_allclose(found.sinks, sinks, atol=1e-12)
    assert found.bias is None


def test_starts_may_be_lists_and_out_may_be_given():
    rows = np.random.default_rng(0).standard_normal((5, 2, 4)).astype(np.float32)
    given = np.empty_like(rows)
    assert headway.attention_varlen(rows, rows, rows, [0, 2, 5], (0, 2, 5), out=given) is given
    assert np.array_equal(given, headway.attention_varlen(rows, rows, rows, np.int32([0, 2, 5]), np.int8([0, 2, 5])))


@pytest.mark.parametrize(
    "starts, text",
    [
        ([1, 5], r"cu_seqlens_q\[0\] is 1, expected 0"),
        ([0, 4], "cu_seqlens_q ends at 4, expected the 5 rows"),
        ([0, 4, 3, 5], r"cu_seqlens_q\[2\] is 3"),
        ([[0, 5]], r"cu_seqlens_q must have shape"),
        ([0, 2**64], "cu_seqlens_q"),
    ],
)
def test_starts_that_do_not_fit_are_named(starts, text):
    rows = np.zeros((5, 2, 4))
    with pytest.raises(ValueError, match="attention_varlen: " + text):
        headway.attention_varlen(rows, rows, rows, starts, [0, 5])


def test_starts_must_be_integers_and_weights_have_no_shape():
    rows = np.zeros((5, 2, 4))
    with pytest.raises(TypeError, match="attention_varlen: cu_seqlens_q has type f64"):
        headway.attention_varlen(rows, rows, rows, [0.0, 5.0], [0, 5])
    with pytest.raises(ValueError, match="attention_varlen: weights of packed sequences"):
        headway.attention_varlen(rows, rows, rows, [0, 5], [0, 5], return_weights=True)
