"""Headway in JAX: the drop-in, options that jax.nn does not have, gradients, vmap; all compiled.

pip install . jax
python examples/python/jax_attention.py
"""

import jax
import jax.numpy as jnp

import headway.jax

keys = jax.random.split(jax.random.key(0), 4)
query = jax.random.normal(keys[0], (2, 128, 8, 64))  # (batch, length, heads, width), as in jax.nn
key, value = jax.random.normal(keys[1], (2, 2, 128, 2, 64))

# ---- One line changes ----

theirs = jax.jit(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True))(query, key, value)
ours = jax.jit(lambda *x: headway.jax.dot_product_attention(*x, is_causal=True))(query, key, value)
print("largest difference from jax.nn:", float(jnp.abs(ours - theirs).max()))
assert jnp.allclose(ours, theirs, atol=1e-5)

# ---- Headway's own options, with heads before positions: a learnt sink and a capped score ----

q, k, v = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))


@jax.jit
def loss(sinks):
    """Something to differentiate."""
    out = headway.jax.attention(q, k, v, causal=True, window=(16, 0), softcap=20.0, sinks=sinks)
    return (out**2).sum()


gradient = jax.jit(jax.grad(loss))(jnp.zeros(8))
print("gradient of the sinks:", gradient.round(1))
assert gradient.shape == (8,) and (gradient < 0).all()

# ---- Dropout from a key; every item of a vmap with its own ----

dropped = jax.vmap(lambda key: headway.jax.attention(q, k, v, dropout=0.1, seed=key))(keys)
print("four draws:", dropped.shape)
assert not jnp.array_equal(dropped[0], dropped[1])

# ---- Sequences of different lengths; a query with no key gives 0 ----

lengths = jnp.array([128, 0])
out = headway.jax.attention(q, k, v, valid_lens=lengths)
assert not out[1].any() and jnp.isfinite(out).all()
