"""Attention for JAX: inside jit, with gradients, vmap and every option of headway.attention.

attention               headway.attention for JAX arrays: (B, H, S, D), the same options, gradients
dot_product_attention   a drop-in for jax.nn.dot_product_attention: (B, T, N, H)
ring_attention          attention over a sequence sharded among devices, inside jax.shard_map

Compiled programs call Headway directly on XLA's buffers: nothing is copied, and Python is not asked. CPU arrays only.

>>> import jax, jax.numpy as jnp, headway.jax
>>> x = jnp.ones((2, 8, 128, 64))
>>> loss = jax.jit(lambda x: headway.jax.attention(x, x, x, causal=True).sum())
>>> jax.grad(loss)(x).shape
(2, 8, 128, 64)
"""

from headway._needs import need as _need

_need("headway.jax", "jax")

from headway.jax._attention import attention
from headway.jax._drop_in import dot_product_attention
from headway.jax._ring import ring_attention

__all__ = ["attention", "dot_product_attention", "ring_attention"]
