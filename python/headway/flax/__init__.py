"""Attention modules for Flax: linen here, NNX in headway.flax.nnx.

MultiHeadDotProductAttention   a drop-in for flax.linen.MultiHeadDotProductAttention, with the same parameters
dot_product_attention          the same for the function flax.linen.dot_product_attention; an attention_fn
MultiHeadAttention             the module of the tutorials: MultiHeadAttention(num_hiddens, num_heads, dropout)
DotProductAttention            its attention alone
nnx                            a drop-in for flax.nnx.MultiHeadAttention, and its attention_fn

>>> import jax, jax.numpy as jnp, headway.flax
>>> layer = headway.flax.MultiHeadDotProductAttention(num_heads=8)
>>> x = jnp.ones((2, 16, 64))
>>> variables = layer.init(jax.random.key(0), x)
>>> layer.apply(variables, x).shape
(2, 16, 64)
"""

from headway._needs import need as _need

_need("headway.flax", "jax", "flax")

from headway.flax import nnx
from headway.flax._drop_in import MultiHeadDotProductAttention, dot_product_attention
from headway.flax._tutorial import DotProductAttention, MultiHeadAttention

__all__ = ["DotProductAttention", "MultiHeadAttention", "MultiHeadDotProductAttention", "dot_product_attention", "nnx"]
