"""headway.jax.dot_product_attention against jax.nn.dot_product_attention, over the original's own options.

The original runs operation by operation: its operations compile once and then serve the whole grid.
"""

import itertools

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy
hj = pytest.importorskip("headway.jax")


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Hundreds of compiled programs take gigabytes."""
    yield
    jax.clear_caches()


COMBINATIONS = 160  # of each shape's grid, drawn once and for all


def normal(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def grid(shape, rng):
    """Arrays and every value that an option may take; (B, T, S, N, K, H), B = 0 for inputs without a batch."""
    B, T, S, N, K, H = shape
    batch = (B,) if B else ()
    b = B or 1
    arrays = normal(rng, *batch, T, N, H), normal(rng, *batch, S, K, H), normal(rng, *batch, S, K, H)
    lengths = [jnp.asarray(rng.integers(1, most + 1, b), jnp.int32) for most in (T, S)]
    options = {
        "bias": [None, normal(rng, b, N, T, S), normal(rng, 1, N, 1, S), normal(rng, T, S)],
        "mask": [None, jnp.asarray(rng.random((b, 1, T, S)) < 0.6), jnp.asarray(rng.random((N, T, 1)) < 0.9)],
        "is_causal": [False, True],
        "local_window_size": [None, 2, (1, 4), (5, 0), (0, 3)],
        "query_seq_lengths": [None, lengths[0]],
        "key_value_seq_lengths": [None, lengths[1]],
        "scale": [None, 0.3, -0.5],
        "implementation": [None, "xla"],
    }
    everything = [dict(zip(options, values)) for values in itertools.product(*options.values())]
    chosen = rng.choice(len(everything), COMBINATIONS, replace=False)
    return arrays, [everything[index] for index in sorted(chosen)]


def call(function, arrays, options, pull):
    """Result and residual; and from the result's gradient, which pull makes of them, those of the inputs and bias."""
    rest = {name: value for name, value in options.items() if name != "bias"}

    def of_inputs(query, key, value, bias):
        return function(query, key, value, bias, return_residual=True, **rest)

    (out, residual), back = jax.vjp(of_inputs, *arrays, options["bias"])
    return out, residual, back((pull(out, residual), jnp.zeros_like(residual)))


def compare(arrays, combinations, rng, tolerance):
    """All the combinations; how many of them had rows without keys."""
    grad_outs, expected = [], []

    def pull(out, residual):
        # A row with no key gives 0 here, the mean of the values there: nothing flows into it, and the rest compares.
        keyless = np.asarray(residual, np.float64) < -1e4
        grad_outs.append(jnp.asarray(np.where(keyless[..., None], 0, rng.standard_normal(out.shape)), out.dtype))
        return grad_outs[-1]

    for options in combinations:
        expected.append(call(jax.nn.dot_product_attention, arrays, options, pull))

    @jax.jit
    def everything(arrays, grad_outs):  # one program: to compile each combination would take most of the time
        return [
            call(hj.dot_product_attention, arrays, options, lambda *_, g=g: g)
            for options, g in zip(combinations, grad_outs)
        ]

    with_keyless_rows = 0
    found = jax.tree.map(np.asarray, everything(arrays, grad_outs))
    for options, one, other in zip(combinations, found, jax.tree.map(np.asarray, expected)):
        for part in (0, 1):
            assert one[part].shape == other[part].shape and one[part].dtype == other[part].dtype
        keyless = np.isneginf(one[1].astype(np.float64))
        assert np.array_equal(keyless, other[1].astype(np.float64) < -1e4)
        assert not one[0][keyless].any()
        with_keyless_rows += keyless.any()
        pairs = [("out", one[0][~keyless], other[0][~keyless]), ("residual", one[1][~keyless], other[1][~keyless])]
        pairs += zip(("query", "key", "value", "bias"), one[2], other[2])
        for name, found, wanted in pairs:
            if found is not None:
                assert found.dtype == wanted.dtype and found.shape == wanted.shape
                np.testing.assert_allclose(
                    *(array.astype(np.float64) for array in (found, wanted)),
                    rtol=tolerance,
                    atol=tolerance,
                    err_msg=f"{name} with {options}",
                )
    return with_keyless_rows


@pytest.mark.parametrize("shape", [(2, 6, 9, 4, 2, 8), (0, 8, 5, 3, 3, 4)], ids=["batch", "no batch"])
def test_the_grid(shape):
    rng = np.random.default_rng(1)
    arrays, combinations = grid(shape, rng)
    chunks = [combinations[begin : begin + 40] for begin in range(0, COMBINATIONS, 40)]
    with_keyless_rows = sum(compare(arrays, chunk, rng, 2e-5) for chunk in chunks)
    # Two shapes: 320 combinations. None is refused.
    assert sum(map(len, chunks)) == COMBINATIONS
    assert 10 < with_keyless_rows < COMBINATIONS


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 4e-2), ("float16", 5e-3), ("float64", 1e-5)])
def test_the_other_types(dtype, tolerance):
    """The original computes the softmax of float64 in float32, and rounds the weights of halves."""
    with jax.enable_x64(dtype == "float64"):
        rng = np.random.default_rng(2)
        arrays, combinations = grid((2, 6, 9, 4, 2, 8), rng)
        compare(tuple(array.astype(dtype) for array in arrays), combinations[::40], rng, tolerance)


def test_jit_vmap_and_grad_together():
    rng = np.random.default_rng(3)
    q, k, v = normal(rng, 3, 6, 4, 8), normal(rng, 3, 6, 2, 8), normal(rng, 3, 6, 2, 8)
    lengths = jnp.array([[6], [3], [1]], jnp.int32)

    def loss(function, q, k, v):
        def one(q, k, v, lengths):
            return function(q, k, v, is_causal=True, key_value_seq_lengths=lengths)

        return (jax.vmap(one)(q, k, v, lengths) ** 2).sum()

    for found, expected in zip(
        *(
            jax.jit(jax.grad(lambda *x, f=f: loss(f, *x), argnums=(0, 1, 2)))(q, k, v)
            for f in (hj.dot_product_attention, jax.nn.dot_product_attention)
        )
    ):
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_lengths_past_the_end_are_the_end():
    rng = np.random.default_rng(4)
    x = normal(rng, 2, 5, 2, 4)
    lengths = {
        "query_seq_lengths": jnp.array([9, 3], jnp.int32),
        "key_value_seq_lengths": jnp.array([99, 4], jnp.int32),
    }
    found, expected = (f(x, x, x, **lengths) for f in (hj.dot_product_attention, jax.nn.dot_product_attention))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_window_far_from_every_key():
    rng = np.random.default_rng(5)
    for T, S, windows in ((9, 3, [(1, 1), (20, 0)]), (3, 9, [(1, 1), (0, 20)])):
        q, k = normal(rng, 1, T, 2, 4), normal(rng, 1, S, 2, 4)
        mask = jnp.asarray(rng.random((1, 1, T, S)) < 0.7)
        bias = normal(rng, 1, 2, T, 1)
        compare((q, k, k), [dict(bias=bias, mask=mask, local_window_size=window) for window in windows], rng, 2e-5)


def test_a_window_without_a_side_is_unlimited_there():
    rng = np.random.default_rng(6)
    for T, S in ((9, 3), (3, 9), (5, 5)):
        q, k = normal(rng, 1, T, 2, 4), normal(rng, 1, S, 2, 4)
        for window, same in (((1, None), (1, 20)), ((None, 1), (20, 1)), ((None, None), (20, 20))):
            found = hj.dot_product_attention(q, k, k, local_window_size=window)
            expected = hj.dot_product_attention(q, k, k, local_window_size=same)
            np.testing.assert_allclose(found, expected, atol=1e-6)


# ---- What the original refuses, and what it does not have ----


def test_what_does_not_fit_is_named():
    x = jnp.ones((2, 5, 4, 8))
    call = hj.dot_product_attention
    with pytest.raises(ValueError, match="dot_product_attention: implementation is 'triton'"):
        call(x, x, x, implementation="triton")
    with pytest.raises(ValueError, match="dot_product_attention: .*heads"):
        call(x, x[:, :, :3], x[:, :, :3])
    with pytest.raises(TypeError, match="dot_product_attention: mask has type"):
        call(x, x, x, mask=jnp.ones((1, 1, 5, 5)))
    with pytest.raises(ValueError, match="^dot_product_attention: local_window_size left is -1, expected 0 or more"):
        call(x, x, x, local_window_size=(-1, 0))
    with pytest.raises(ValueError, match="^dot_product_attention: local_window_size left is -1, expected 0 or more"):
        call(x, x[:, :3], x[:, :3], local_window_size=(-1, 0))
    with pytest.raises(TypeError, match="^dot_product_attention: local_window_size is 1.5, expected a pair"):
        call(x, x[:, :3], x[:, :3], local_window_size=1.5)
    with pytest.raises(TypeError, match="dot_product_attention: key is a NoneType, expected an array"):
        call(x, None, x)
    with pytest.raises(TypeError, match="^dot_product_attention: key_value_seq_lengths has type f32"):
        call(x, x, x, key_value_seq_lengths=jnp.ones(2))
    with pytest.raises(
        ValueError, match=r"^dot_product_attention: query_seq_lengths has shape \(3,\), expected \(2,\)"
    ):
        call(x, x, x, query_seq_lengths=jnp.ones(3, int))
    with pytest.raises(TypeError, match="did you mean 'is_causal'"):
        call(x, x, x, causal=True)
    with pytest.raises(TypeError, match="did you mean 'local_window_size'"):
        call(x, x, x, window=(1, 1))
    with pytest.raises(
        ValueError, match=r"query has shape \(5, 8\), expected \(batch, length, heads, width\) or \(length"
    ):
        call(x[0, :, 0], x[0, :, 0], x[0, :, 0])
    with pytest.raises(ValueError, match=r"query has shape \(1, 2, 5, 4, 8\), expected \(batch"):
        call(x[None], x[None], x[None])
    with pytest.raises(ValueError, match=r"mask has shape \(2, 5\), .* \(2, 4, 5, 5\); .*, make it \(2, 1, 1, 5\)$"):
        call(x, x, x, mask=jnp.ones((2, 5), bool))
    with pytest.raises(ValueError, match=r"bias has shape \(2, 5, 5\), .*, make it \(2, 1, 5, 5\)$"):
        call(x, x, x, bias=jnp.ones((2, 5, 5)))


def test_values_may_have_their_own_width_and_biases_be_integers():
    rng = np.random.default_rng(6)
    x = normal(rng, 2, 5, 4, 8)
    wide = jnp.concatenate([x, x], -1)
    assert np.array_equal(hj.dot_product_attention(x, x, wide)[..., :8], hj.dot_product_attention(x, x, x))
    bias = jnp.arange(5)
    np.testing.assert_allclose(
        hj.dot_product_attention(x, x, x, bias), jax.nn.dot_product_attention(x, x, x, bias), atol=1e-6
    )
