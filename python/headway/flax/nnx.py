"""Attention for Flax NNX.

MultiHeadAttention      a drop-in for flax.nnx.MultiHeadAttention, with the same parameters
dot_product_attention   the same for the function flax.nnx.dot_product_attention; an attention_fn

>>> import jax.numpy as jnp, headway.flax.nnx
>>> from flax import nnx
>>> layer = headway.flax.nnx.MultiHeadAttention(num_heads=8, in_features=64, decode=False, rngs=nnx.Rngs(0))
>>> layer(jnp.ones((2, 16, 64)), is_causal=True).shape
(2, 16, 64)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx
from flax.nnx.nn import dtypes

from headway._suggest import suggests_keywords
from headway.flax._drop_in import attend

__all__ = ["MultiHeadAttention", "dot_product_attention"]


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
    module: nnx.Module | None = None,
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
    is_causal: bool = False,
) -> Any:
    """A drop-in for flax.nnx.dot_product_attention, with its arguments.

    Shapes
        query  (batch..., q_length, heads, depth)
        key, value  (batch..., kv_length, kv_heads, depth), kv_heads dividing heads
        bias, mask  broadcast to (batch..., heads, q_length, kv_length); mask: True, or not 0, = attend
        result  (batch..., q_length, heads, value's depth)

    Differences are those of headway.flax.dot_product_attention: a query that no key is left for gives 0, and dropout
    drops each weight by itself.

    >>> import jax.numpy as jnp, headway.flax.nnx
    >>> x = jnp.ones((2, 16, 8, 32))
    >>> headway.flax.nnx.dot_product_attention(x, x, x, is_causal=True).shape
    (2, 16, 8, 32)
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    drops = not deterministic and dropout_rate > 0
    return attend(query, key, value, bias, mask, is_causal, dropout_rate if drops else 0.0, dropout_rng, module)


class MultiHeadAttention(nnx.MultiHeadAttention):
    """A drop-in for flax.nnx.MultiHeadAttention: its options, its parameters, its decoding cache.

    >>> import jax, jax.numpy as jnp, headway.flax.nnx
    >>> from flax import nnx
    >>> x = jax.random.normal(jax.random.key(0), (2, 16, 64))
    >>> original = nnx.MultiHeadAttention(num_heads=8, in_features=64, decode=False, rngs=nnx.Rngs(1))
    >>> ours = headway.flax.nnx.MultiHeadAttention(num_heads=8, in_features=64, decode=False, rngs=nnx.Rngs(1))
    >>> bool(jnp.allclose(ours(x), original(x), atol=1e-5))
    True
    """

    def __init__(self, *sizes: Any, attention_fn: Callable[..., Any] = dot_product_attention, **options: Any) -> None:
        super().__init__(*sizes, attention_fn=attention_fn, **options)
