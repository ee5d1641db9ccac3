"""Checks of headway.jax.ring_attention on four host devices; test_jax_ring.py runs them in a process of their own."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import headway.jax
import oracle

ROWS = PartitionSpec(None, None, "s")


def inputs(queries, keys, dtype):
    random = np.random.default_rng(queries + keys)
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 6), (2, 4, queries, 6))
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def ring(devices, **options):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("s",))

    def call(query, key, value):
        return headway.jax.ring_attention(query, key, value, axis_name="s", return_lse=True, **options)

    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(ROWS,) * 3, out_specs=(ROWS, ROWS)))


def check(devices, options, queries=24, keys=24, dtype=jnp.float32, tolerance=2e-5):
    query, key, value, grad_out = inputs(queries, keys, dtype)
    plain = [np.asarray(x, np.float64) for x in (query, key, value)]
    expected = oracle.attention(*plain, **options)
    call = ring(devices, **options)
    (out, lse), pull = jax.vjp(call, query, key, value)
    gradients = pull((grad_out, jnp.zeros_like(lse)))
    exact = oracle.gradients(np.asarray(grad_out, np.float64), *plain, **options)
    near = {"rtol": tolerance, "atol": tolerance, "err_msg": f"{devices} devices, {options}"}
    np.testing.assert_allclose(np.asarray(out, np.float64), expected.out, **near)
    np.testing.assert_allclose(np.asarray(lse, np.float64), expected.lse, **near)
    for found, name in zip(gradients, ("query", "key", "value"), strict=True):
        np.testing.assert_allclose(np.asarray(found, np.float64), exact[name], **near)


def check_batch():
    """headway.jax.attention itself inside shard_map: a batch over two devices needs no ring."""
    query, key, value, grad_out = inputs(24, 24, jnp.float32)
    mesh, items = Mesh(np.array(jax.devices()[:2]), ("b",)), PartitionSpec("b")
    call = jax.jit(jax.shard_map(headway.jax.attention, mesh=mesh, in_specs=(items,) * 3, out_specs=items))
    found = jax.vjp(call, query, key, value)[1](grad_out)
    exact = oracle.gradients(*(np.asarray(x, np.float64) for x in (grad_out, query, key, value)))
    for x, name in zip(found, ("query", "key", "value"), strict=True):
        np.testing.assert_allclose(np.asarray(x), exact[name], rtol=2e-5, atol=2e-5)


def check_infinite_scores(devices):
    """A part in which all scores of a row are -inf leaves the row to the other parts; NaN and a whole row of -inf stay."""
    query, key, value, grad_out = inputs(24, 24, jnp.float32)
    query = abs(query)
    for begin in range(24 // devices, 24, 24 // devices):  # with the window, a row sees its own key and the one before
        key = key.at[0, :, begin - 1].set(-jnp.inf)  # of the device before
        key = key.at[1, 0, begin - 1 : begin + 1].set(-jnp.inf).at[1, 1, begin - 1].set(jnp.nan)
    options = {"window": (1, 0)}
    expected = headway.jax.attention(query, key, value, return_lse=True, **options)
    assert np.isfinite(expected[1][0]).all() and np.isnan(expected[1][1]).any()
    call = ring(devices, **options)
    for found, whole in zip(call(query, key, value), expected, strict=True):
        np.testing.assert_allclose(found, whole, rtol=2e-5, atol=2e-5)
    found = jax.vjp(lambda value: call(query, key, value)[0], value)[1](grad_out)[0]
    whole = jax.vjp(lambda value: headway.jax.attention(query, key, value, **options), value)[1](grad_out)[0]
    np.testing.assert_allclose(found, whole, rtol=2e-5, atol=2e-5)


def permutes(devices, **options):
    """How often the compiled program sends keys and values on."""
    query, key, value, _ = inputs(24, 24, jnp.float32)
    return ring(devices, **options).lower(query, key, value).as_text().count("collective_permute")


if __name__ == "__main__":
    slopes = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    check(1, {"causal": True})  # each is compiled anew: options and numbers of devices take turns
    check(2, {})
    check(2, {"causal": True}, dtype=jnp.bfloat16, tolerance=5e-2)
    check(3, {"causal": True, "window": (5, None), "softcap": 2.0, "scale": 0.5})
    check(3, {"causal": "bottom_right"}, queries=12, keys=36)
    check(4, {"window": (2, 7), "alibi_slopes": slopes})
    check(4, {"valid_lens": np.array([13, 0])})
    check_infinite_scores(3)
    check_batch()
    # A causal window of 5 keys reaches one block back on three devices of eight rows: one step of K and V.
    assert permutes(3, causal=True, window=(5, None)) == 2
    assert permutes(3, causal=True) == 4
    call = ring(4, causal=True)
    query, key, value, _ = inputs(24, 24, jnp.float32)
    assert len({np.asarray(call(query, key, value)[0]).tobytes() for _ in range(20)}) == 1
    try:
        ring(2, causal="bottom_right", valid_lens=np.array([3, 4]))(query, key, value)
    except NotImplementedError as error:
        assert "valid_lens with causal='bottom_right'" in str(error)
    else:
        raise AssertionError("nothing was raised")
