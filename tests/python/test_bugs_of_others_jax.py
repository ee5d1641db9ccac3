"""What went wrong in jax.nn.dot_product_attention and its neighbours, by number, and does not in headway.jax."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy
hj = pytest.importorskip("headway.jax")

import oracle  # noqa: E402


def draw(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def expected(query, key, value, **options):
    """The oracle's result for (B, T, N, H) arrays."""
    arrays = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (query, key, value))
    return oracle.attention(*arrays, **options).out.swapaxes(1, 2)


def test_a_local_window_acts_without_a_mask():
    """jax#32300: the window was ignored unless a mask was given too."""
    query, key, value = draw(2, 6, 3, 4), draw(2, 9, 3, 4, seed=1), draw(2, 9, 3, 4, seed=2)
    outs = []
    for right in (0, 3):
        out = hj.dot_product_attention(query, key, value, local_window_size=(0, right))
        seen = (np.arange(9) >= np.arange(6)[:, None]) & (np.arange(9) <= np.arange(6)[:, None] + right)
        np.testing.assert_allclose(out, expected(query, key, value, mask=seen), atol=1e-5)
        outs.append(np.asarray(out))
    assert not np.array_equal(*outs)


def test_lengths_of_keys_and_queries_are_heeded():
    """jax#23349: key_value_seq_lengths changed nothing, and padding leaked into the result."""
    x = draw(4, 12, 2, 4)
    lengths = jnp.array([3, 12, 1, 7], jnp.int32)
    out = hj.dot_product_attention(x, x, x, key_value_seq_lengths=lengths)
    np.testing.assert_allclose(out, expected(x, x, x, valid_lens=np.asarray(lengths)), atol=1e-5)
    hidden = jnp.where(jnp.arange(12)[None, :, None, None] < lengths[:, None, None, None], x, jnp.nan)
    assert np.array_equal(out, hj.dot_product_attention(x, hidden, hidden, key_value_seq_lengths=lengths))


def test_a_mask_may_have_one_row_for_all_queries():
    """jax#28974: a mask (B, 1, 1, S) without a bias was an error about the bias."""
    x = draw(3, 8, 2, 4)
    mask = (np.arange(8) < np.array([2, 8, 5])[:, None])[:, None, None, :]
    found = hj.dot_product_attention(x, x, x, mask=jnp.asarray(mask))
    np.testing.assert_allclose(found, expected(x, x, x, mask=mask), atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 2, 5, 5), (1, 2, 5, 5)])
def test_a_bias_has_its_gradient_at_any_batch_size(shape):
    """jax#30593, jax#27184: none, or only for a batch of 1."""
    x, bias = draw(3, 5, 2, 4), draw(*shape, seed=1)
    found = jax.grad(lambda b: hj.dot_product_attention(x, x, x, bias=b).sum())(bias)
    arrays = [np.asarray(x, np.float64).swapaxes(1, 2)] * 3
    wanted = oracle.gradients(np.ones_like(arrays[0]), *arrays, bias=np.asarray(bias, np.float64))["bias"]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_float32_bias_over_bfloat16_inputs_has_finite_gradients():
    """jax#32242: NaN, where a bfloat16 bias gave none."""
    x, bias = draw(2, 16, 4, 32, dtype=jnp.bfloat16), draw(1, 4, 16, 16, seed=1)
    found = jax.jit(jax.grad(lambda b, x: hj.dot_product_attention(x, x, x, bias=b).sum()))(bias, x)
    arrays = [np.asarray(x, np.float64).swapaxes(1, 2)] * 3
    wanted = oracle.gradients(np.ones_like(arrays[0]), *arrays, bias=np.asarray(bias, np.float64))["bias"]
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=0.1)


def test_vmap_maps_what_it_is_told_and_no_more():
    """jax#23401, jax#38498: mapped axes were folded into the batch, and shapes no longer fitted."""
    query, key = draw(3, 2, 5, 2, 4), draw(2, 5, 2, 4, seed=1)
    together = jax.vmap(hj.dot_product_attention, in_axes=(0, None, None))(query, key, key)
    for n in range(3):
        np.testing.assert_allclose(together[n], expected(query[n], key, key), atol=1e-5)
    jacobian = jax.jacrev(lambda q: hj.dot_product_attention(q, key, key).sum(axis=(0, 2, 3)))(query[0])
    assert jacobian.shape == (5, 2, 5, 2, 4) and bool(jnp.isfinite(jacobian).all())


def test_gradients_of_lengths_that_no_block_divides_are_finite_and_right():
    """tokamax#316: memory behind short sequences was read in backward."""
    for queries, keys in ((9, 8), (17, 16), (3, 33)):
        query, key = jnp.ones((1, queries, 2, 8)), draw(1, keys, 2, 8)
        grads = jax.grad(lambda *x: hj.dot_product_attention(*x).sum(), argnums=(0, 1, 2))(query, key, key)
        arrays = [np.asarray(x, np.float64).swapaxes(1, 2) for x in (query, key, key)]
        wanted = oracle.gradients(np.ones((1, 2, queries, 8)), *arrays)
        for found, name in zip(grads, ("query", "key", "value")):
            np.testing.assert_allclose(np.asarray(found).swapaxes(1, 2), wanted[name], atol=1e-5)


def test_flax_s_weights_in_float16_are_finite_under_a_mask():
    """flax#982: attention under a mask gave NaN in float16."""
    flax = pytest.importorskip("headway.flax")
    layer = flax.MultiHeadDotProductAttention(num_heads=2, dtype=jnp.float16)
    x = draw(2, 5, 8, dtype=jnp.float16)
    mask = jnp.tril(jnp.ones((2, 1, 5, 5), bool))
    out, _ = layer.init_with_output(jax.random.key(0), x, mask=mask)
    assert bool(jnp.isfinite(out).all())
