"""Common to the tests of others' bugs: one call compared with the float64 oracle, forward and backward."""

from typing import Any

import numpy as np

import headway
import oracle
from cases import DTYPES, assert_close, without_batch_and_heads


def draw(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


def check(query: np.ndarray, key: np.ndarray, value: np.ndarray, tolerance: float = 1.0, **options: Any) -> np.ndarray:
    """Out, weights, lse and all gradients are the oracle's; returns out. `tolerance` widens the bound."""
    dtype = str(query.dtype)
    out, weights, lse = headway.attention(query, key, value, return_weights=True, return_lse=True, **options)
    expected = oracle.attention(query, key, value, **options)
    rank = np.ndim(query)
    assert_close(out, without_batch_and_heads(expected.out, rank), dtype, tolerance)
    assert_close(weights, without_batch_and_heads(expected.weights, rank), dtype, tolerance)
    statistics = "float64" if dtype == "float64" else "float32"
    assert_close(lse, without_batch_and_heads(expected.lse, rank), statistics, tolerance)
    grad_out = np.random.default_rng(1).standard_normal(out.shape).astype(query.dtype)
    found = headway.attention_backward(grad_out, query, key, value, out, lse, **options)
    for name, gradient in oracle.gradients(grad_out, query, key, value, **options).items():
        assert_close(getattr(found, name), gradient, dtype, 2 * tolerance)
    return out
