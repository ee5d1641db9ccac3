"""Checks of headway.jax on sharded arrays, on four host devices; test_jax_sharding.py runs them in a process."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import headway.jax

MESH = Mesh(np.array(jax.devices()).reshape(2, 2), ("b", "h"))
BATCH, HEADS, KV_HEADS, QUERIES, KEYS, WIDTH = 4, 8, 4, 6, 10, 8


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def inputs(kv_heads=KV_HEADS):
    shapes = ((BATCH, HEADS, QUERIES, WIDTH), *2 * [(BATCH, kv_heads, KEYS, WIDTH)])
    return [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def sharded(array, *axes):
    return jax.device_put(array, NamedSharding(MESH, PartitionSpec(*axes)))


def moves(function, *arrays):
    """What the compiled program sends between devices."""
    text = jax.jit(function).lower(*arrays).compile().as_text()
    return [word for word in ("all-gather", "all-to-all", "collective-permute", "all-reduce") if f"{word}(" in text]


def check(axes, options=None, names=(), arrays=None, moved=()):
    """Results and gradients are those of one device, to the bit; nothing is sent but what `moved` names."""
    arrays = arrays or inputs()
    options = options or {}

    def call(query, key, value, *more):
        constant = {name: jax.lax.stop_gradient(x) if name == "alibi_slopes" else x for name, x in zip(names, more)}
        return headway.jax.attention(query, key, value, return_lse=True, **{**options, **constant})

    def gradients(*given):
        (out, lse), pull = jax.vjp(call, *given)
        return out, lse, pull((jnp.ones_like(out), jnp.zeros_like(lse)))

    given = [*arrays, *(options[name] for name in names)]
    placed = [sharded(x, *axes) for x in arrays] + [options[name] for name in names]
    assert not moves(call, *placed), moves(call, *placed)
    assert set(moves(gradients, *placed)) <= set(moved), (axes, list(options), moves(gradients, *placed))
    expected, found = jax.jit(gradients)(*given), jax.jit(gradients)(*placed)
    jax.tree.map(np.testing.assert_array_equal, expected, found)
    if not moved:
        own = found[0].sharding.spec
        assert tuple(own)[: len(axes)] == axes, own


if __name__ == "__main__":
    for axes in (("b",), (None, "h"), ("b", "h"), (("b", "h"),), (None, ("b", "h"))):
        check(axes, {"causal": "bottom_right"})
    check(("b", "h"), arrays=inputs(HEADS))
    mask = normal(BATCH, 1, 1, KEYS) > -1
    check(("b", "h"), {"mask": mask, "valid_lens": jnp.asarray([10, 3, 0, 7]), "softcap": 5.0}, ("mask", "valid_lens"))
    check(("b", "h"), {"bias": normal(BATCH, HEADS, QUERIES, KEYS)}, ("bias",))
    check(("b", "h"), {"alibi_slopes": normal(HEADS)}, ("alibi_slopes",))
    # Gradients that are summed over what is sharded gather it first; one kv head cannot be shared out.
    gathered = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    check(
        ("b", "h"), {"bias": normal(1, HEADS, QUERIES, KEYS), "sinks": normal(HEADS)}, ("bias", "sinks"), moved=gathered
    )
    # Dropout counts batch items and heads: the same weights are dropped wherever they lie.
    x = inputs()
    drop = jax.jit(lambda q, k, v: headway.jax.attention(q, k, v, dropout=0.5, seed=3))
    np.testing.assert_array_equal(drop(*x), drop(*(sharded(one, "b", "h") for one in x)))
    # Positions before heads, and a vmap over sharded items.
    placed = [sharded(jnp.swapaxes(one, 1, 2), "b", None, "h") for one in x]
    call = jax.jit(lambda q, k, v: headway.jax.dot_product_attention(q, k, v))
    assert not moves(lambda q, k, v: headway.jax.dot_product_attention(q, k, v), *placed)
    np.testing.assert_array_equal(call(*placed), call(*(jnp.swapaxes(one, 1, 2) for one in x)))
    mapped = jax.jit(jax.vmap(lambda q, k, v: headway.jax.attention(q, k, v)))
    items = [jnp.stack([one, one + 1]) for one in x]
    np.testing.assert_array_equal(mapped(*items), mapped(*(sharded(one, None, "b", "h") for one in items)))
    weights = jax.jit(lambda q, k, v: headway.jax.attention(q, k, v, return_weights=True)[1])
    np.testing.assert_array_equal(weights(*x), weights(*(sharded(one, "b", "h") for one in x)))
