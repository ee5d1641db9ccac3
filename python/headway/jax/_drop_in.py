"""jax.nn.dot_product_attention's arguments, Headway's arithmetic."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headway._suggest import suggests_keywords
from headway.functions import renamed
from headway.jax._attention import as_arrays, attend_positions_first, check_matrix
from headway.jax._call import Array

IMPLEMENTATIONS = (None, "xla", "cudnn")

# What attention's options are called here.
_NAMES = {
    "query_lens": "query_seq_lengths",
    "valid_lens": "key_value_seq_lengths",
    "window": "local_window_size",
}


@suggests_keywords
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """A drop-in for jax.nn.dot_product_attention, with its arguments.

    Shapes
        query  (B, T, N, H), or without B; key and value  (B, S, K, H), K dividing N
        bias, mask  broadcast to (B, N, T, S); mask: True = attend
        result  query's shape; with return_residual also the log-sum-exp (B, T, N), through which no gradient flows

    One difference: a query that no key is left for gives 0 (and a residual of -inf), where the original gives the mean
    of all values. Besides, float64 is computed in float64, value may have a width of its own, the (T, S) matrix is
    never stored, and `implementation` is accepted and changes nothing: there is one.

    >>> import jax, jax.numpy as jnp, headway.jax
    >>> x = jax.random.normal(jax.random.key(0), (2, 16, 4, 32))
    >>> ours = headway.jax.dot_product_attention(x, x, x, is_causal=True)
    >>> bool(jnp.allclose(ours, jax.nn.dot_product_attention(x, x, x, is_causal=True), atol=1e-5))
    True
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"dot_product_attention: implementation is {implementation!r}, expected None, 'xla' or 'cudnn'"
        )
    query, key, value = as_arrays("dot_product_attention", {"query": query, "key": key, "value": value}).values()
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim not in (3, 4):
            raise ValueError(
                f"dot_product_attention: {name} has shape {array.shape}, expected (batch, length, heads, width) or "
                "(length, heads, width)"
            )
    q, k, v = _four(query), _four(key), _four(value)
    for name, matrix in (("mask", mask), ("bias", bias)):
        if matrix is not None:
            check_matrix("dot_product_attention", name, jnp.shape(matrix), (len(q), q.shape[2], q.shape[1], k.shape[1]))
    options: dict[str, Any] = {
        "mask": None if mask is None else _four(jnp.asarray(mask)),
        "bias": None if bias is None else _floating(_four(jnp.asarray(bias)), q.dtype),
        "query_lens": _lengths(query_seq_lengths, q.shape[1]),
        "valid_lens": _lengths(key_value_seq_lengths, k.shape[1]),
        "window": _window(local_window_size),
    }
    rows = q.shape[1]
    if options["window"] is not None and not is_causal and rows != k.shape[1]:
        q, k, v, options = _with_aligned_window(q, k, v, options)
    try:
        out, lse = attend_positions_first(
            "attention", q, k, v, causal="top_left" if is_causal else False, scale=scale, **options
        )
    except Exception as error:
        raise renamed(error, "dot_product_attention", **_NAMES) from None
    missing = rows - out.shape[1]  # queries that were left out
    if missing > 0:
        out = jnp.pad(out, ((0, 0), (0, missing), (0, 0), (0, 0)))
        lse = jnp.pad(lse, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)
    if query.ndim < 4:
        out = out.reshape(*query.shape[:-1], v.shape[-1])
    if not return_residual:
        return out
    residual = jnp.swapaxes(lse, 1, 2).reshape(query.shape[:-1])
    return out, jax.lax.stop_gradient(residual.astype(query.dtype))


def _four(array: Array) -> Array:
    return array if array.ndim >= 4 else array.reshape((1,) * (4 - array.ndim) + array.shape)


def _floating(bias: Array, dtype: Any) -> Array:
    return bias if jnp.issubdtype(bias.dtype, jnp.floating) else bias.astype(dtype)


def _lengths(lengths: Any, most: int) -> Any:
    """The original clamps lengths that are past the end."""
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    return jnp.clip(lengths, 0, most) if jnp.issubdtype(lengths.dtype, jnp.integer) else lengths


def _window(size: Any) -> Any:
    return (size, size) if isinstance(size, int | np.integer) else size


def _with_aligned_window(q: Array, k: Array, v: Array, options: dict[str, Any]) -> tuple[Array, Array, Array, Any]:
    """The same call with a window that counts from the ends, as Headway's does, instead of from the starts.

    Keys that no query reaches and queries that reach no key are left out first, so that no side becomes negative.
    """
    sides = options["window"]
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        return q, k, v, options  # an error, with its own text
    left, right = (q.shape[1] + k.shape[1] if side is None else side for side in sides)
    if not isinstance(left, int | np.integer) or not isinstance(right, int | np.integer) or left < 0 or right < 0:
        return q, k, v, options
    keys = min(k.shape[1], q.shape[1] + right)
    rows = min(q.shape[1], keys + left)
    offset = keys - rows

    def cut(matrix: Array | None) -> Array | None:
        if matrix is None:
            return None
        matrix = matrix if matrix.shape[2] == 1 else matrix[:, :, :rows]
        return matrix if matrix.shape[3] == 1 else matrix[..., :keys]

    options = {
        "mask": cut(options["mask"]),
        "bias": cut(options["bias"]),
        "query_lens": _lengths(options["query_lens"], rows),
        "valid_lens": _lengths(options["valid_lens"], keys),
        "window": (left + offset, right - offset),
    }
    return q[:, :rows], k[:, :keys], v[:, :keys], options
