"""flax.linen's dot_product_attention and the module around it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.linen.dtypes import promote_dtype

from headway._suggest import suggests_keywords
from headway.jax._attention import attend_positions_first, check_matrix
from headway.jax._call import Array


@suggests_keywords
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Any] | None = None,
    qk_attn_weights_einsum: Callable[..., Any] | None = None,
    attn_weights_value_einsum: Callable[..., Any] | None = None,
    is_causal: bool = False,
) -> Any:
    """A drop-in for flax.linen.dot_product_attention, with its arguments.

    Shapes
        query  (batch..., q_length, heads, depth); key and value  (batch..., kv_length, heads, depth)
        bias, mask  broadcast to (batch..., heads, q_length, kv_length); mask: True, or not 0, = attend
        result  (batch..., q_length, heads, value's depth)

    is_causal, which flax.nnx passes, lets query i see the keys j <= i. module, where the weights are sown, may be a
    module of linen or of nnx.

    One difference: a query that no key is left for gives 0, where the original gives the mean of all values.

    The softmax is always computed in float32 or wider, and products at full precision: `precision` and
    `force_fp32_for_softmax` change nothing. Dropout drops each weight by itself; the original's
    `broadcast_dropout=True` drops the same weights in all heads and batch items. Products of one's own
    (the `einsum` arguments) are an error.

    >>> import jax.numpy as jnp, headway.flax
    >>> x = jnp.ones((2, 5, 4, 8))
    >>> headway.flax.dot_product_attention(x, x, x).shape
    (2, 5, 4, 8)
    """
    for name, replaced in (
        ("einsum_dot_general", einsum_dot_general),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if replaced is not None:
            raise NotImplementedError(
                f"dot_product_attention: {name} is given, but there is no product here that it could replace: "
                "use flax.linen.dot_product_attention"
            )
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    _check_heads(query, key, value)
    drops = not deterministic and dropout_rate > 0
    return attend(query, key, value, bias, mask, is_causal, dropout_rate if drops else 0.0, dropout_rng, module)


def attend(
    query: Array,
    key: Array,
    value: Array,
    bias: Any,
    mask: Any,
    is_causal: bool,
    dropout: float,
    dropout_rng: Any,
    module: Any,
) -> Array:
    """Attention of arrays (batch..., length, heads, depth); a module that is given is told the weights."""
    _check_batch(query, key, value)
    batch = query.shape[:-3]
    for name, matrix in (("mask", mask), ("bias", bias)):
        if matrix is not None:
            full = (*batch, query.shape[-2], query.shape[-3], key.shape[-3])
            check_matrix("dot_product_attention", name, jnp.shape(matrix), full)
    out, weights = attend_positions_first(
        "dot_product_attention",
        *(array.reshape(-1, *array.shape[-3:]) for array in (query, key, value)),
        mask=None if mask is None else _one_batch_axis(jnp.asarray(mask).astype(bool), batch),
        bias=None if bias is None else _one_batch_axis(jnp.asarray(bias), batch),
        causal="top_left" if is_causal else False,
        dropout=dropout,
        seed=dropout_rng if dropout > 0 else None,
        return_weights=module is not None,
    )
    if module is not None:
        kind: Any = "intermediates" if isinstance(module, nn.Module) else nnx.Intermediate
        module.sow(kind, "attention_weights", weights.reshape(*batch, *weights.shape[1:]))
    return out.reshape(*batch, *out.shape[1:])


class MultiHeadDotProductAttention(nn.MultiHeadDotProductAttention):
    """A drop-in for flax.linen.MultiHeadDotProductAttention: its options, its parameters, its decoding cache.

    Differences are those of headway.flax.dot_product_attention, which is the attention_fn here: above all, a query that
    no key is left for gives 0 where the original gives the mean of all values.

    >>> import jax, jax.numpy as jnp, headway.flax
    >>> from flax import linen as nn
    >>> x = jax.random.normal(jax.random.key(0), (2, 16, 64))
    >>> original = nn.MultiHeadDotProductAttention(num_heads=8)
    >>> ours = headway.flax.MultiHeadDotProductAttention(num_heads=8)
    >>> variables = original.init(jax.random.key(1), x)
    >>> bool(jnp.allclose(ours.apply(variables, x), original.apply(variables, x), atol=1e-5))
    True
    """

    attention_fn: Callable[..., Any] = dot_product_attention


def _check_batch(query: Array, key: Array, value: Array) -> None:
    for name, array in (("key", key), ("value", value)):
        if query.ndim < 3 or array.ndim != query.ndim or array.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"dot_product_attention: {name} has shape {array.shape}, query has {query.shape}: "
                "expected (batch..., length, heads, depth), and the same batch"
            )


def _check_heads(query: Array, key: Array, value: Array) -> None:
    for name, array in (("key", key), ("value", value)):
        if min(query.ndim, array.ndim) >= 3 and array.shape[-2] != query.shape[-2]:
            raise ValueError(
                f"dot_product_attention: {name} has {array.shape[-2]} heads, query has {query.shape[-2]}: "
                "expected as many; headway.jax.dot_product_attention shares heads"
            )


def _one_batch_axis(matrix: Array, batch: tuple[int, ...]) -> Array:
    """A mask or bias (batch..., heads, q_length, kv_length), or what broadcasts to it, with one axis for the batch."""
    matrix = matrix.reshape((1,) * (len(batch) + 3 - matrix.ndim) + matrix.shape)
    shared = math.prod(matrix.shape[: len(batch)]) == 1
    if not shared:
        matrix = jnp.broadcast_to(matrix, (*batch, *matrix.shape[-3:]))
    return matrix.reshape(-1 if not shared else 1, *matrix.shape[-3:])
