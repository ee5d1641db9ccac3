"""Headway in Flax: the drop-in module with a checkpoint of the original, and a tutorial's module that learns.

pip install . flax
python examples/python/flax_attention.py
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

import headway.flax

x = jax.random.normal(jax.random.key(0), (4, 32, 64))

# ---- The parameters of the original fit ----

original = nn.MultiHeadDotProductAttention(num_heads=8)
variables = original.init(jax.random.key(1), x)
ours = headway.flax.MultiHeadDotProductAttention(num_heads=8)
mask = nn.make_causal_mask(jnp.ones((4, 32)))
difference = jnp.abs(ours.apply(variables, x, mask=mask) - original.apply(variables, x, mask=mask)).max()
print("largest difference from flax.linen:", float(difference))
assert difference < 1e-5

# ---- The module of the tutorials: it learns to copy the first position ----

layer = headway.flax.MultiHeadAttention(num_hiddens=64, num_heads=8, dropout=0.1)
parameters = layer.init(jax.random.key(2), x, x, x, None)


@jax.jit
def step(parameters, key):
    """One step of gradient descent."""

    def loss(parameters):
        output, _ = layer.apply(parameters, x, x, x, None, training=True, rngs={"dropout": key})
        return ((output - x[:, :1]) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(parameters)
    return value, jax.tree.map(lambda p, g: p - 2.0 * g, parameters, gradients)


losses = []
for key in jax.random.split(jax.random.key(3), 100):
    loss, parameters = step(parameters, key)
    losses.append(float(loss))
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < 0.8 * losses[0]

_, weights = layer.apply(parameters, x, x, x, jnp.array([32, 20, 10, 1]))
print("weights", weights.shape, "of item 3, head 0, query 0:", weights[3 * 8, 0, :3])
