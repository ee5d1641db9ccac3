"""JAX arrays on the CPU: what comes in is what goes out."""

import numpy as np
import pytest

import headway

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_jax_gives_jax(dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 5, 8)), dtype)
    out, weights, lse = headway.attention(x, x, x, mask=jnp.ones((5, 5), bool), return_weights=True, return_lse=True)
    assert type(out) is type(weights) is type(lse) is type(x)
    assert out.dtype == weights.dtype == x.dtype and lse.dtype == jnp.float32
    wide = np.asarray(x).astype(np.float32)
    expected = headway.attention(wide, wide, wide)
    np.testing.assert_allclose(np.asarray(out).astype(np.float32), expected, atol=1e-5 if dtype == "float32" else 2e-2)
    gradients = headway.attention_backward(out, x, x, x, out, lse)
    assert type(gradients.key) is type(x) and gradients.key.dtype == x.dtype


def test_jax_arrays_never_change():
    x = jnp.ones((3, 4))
    with pytest.raises(ValueError, match="out is read-only"):
        headway.attention(x, x, x, out=jnp.zeros((3, 4)))


def test_tracers_are_no_arrays():
    with pytest.raises(TypeError, match="attention: query"):
        jax.jit(lambda x: headway.attention(x, x, x))(jnp.ones((3, 4)))
