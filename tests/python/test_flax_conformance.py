"""headway.flax.MultiHeadDotProductAttention against flax.linen's, over the original's own options."""

import itertools

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
nn = pytest.importorskip("flax.linen", reason="flax is not installed")
hf = pytest.importorskip("headway.flax")
jnp = jax.numpy


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Hundreds of compiled programs take gigabytes."""
    yield
    jax.clear_caches()


COMBINATIONS = 152  # of each profile, drawn once and for all
KEY = jax.random.key(0)
WIDTH = 12

# Few shapes: the original runs operation by operation, and each operation compiles once a shape.
PROFILES = {
    "a batch": ({"num_heads": 4}, (2,), 5, 5),
    "two batch axes, other widths": ({"num_heads": 2, "qkv_features": 24, "out_features": 7}, (2, 3), 5, 7),
}
CONSTRUCTOR = {
    "use_bias": [True, False],
    "normalize_qk": [False, True],
    "force_fp32_for_softmax": [False, True],
    "precision": [None, "highest"],
    "dropout_rate": [0.0, 0.5],  # with deterministic=True
}
CALL = {
    "inputs": [1, 2, 3],  # queries; and keys; and values
    "mask": [None, "bool", "float causal", "heads"],
    "sow_weights": [False, True],
}


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def grid(rng):
    everything = list(itertools.product(*CONSTRUCTOR.values(), *CALL.values()))
    for index in sorted(rng.choice(len(everything), COMBINATIONS, replace=False)):
        values = dict(zip([*CONSTRUCTOR, *CALL], everything[index]))
        yield {name: values.pop(name) for name in CONSTRUCTOR}, values


def arguments(rng, call, heads, batch, queries, keys):
    """Inputs (batch..., length, width) and the mask."""
    keys = queries if call["inputs"] == 1 else keys
    inputs = [normal(rng, *batch, length, WIDTH) for length in (queries, keys, keys)[: call["inputs"]]]
    if call["mask"] is None:
        return inputs, None
    if call["mask"] == "bool":
        mask = rng.random((*batch, 1, queries, keys)) < 0.7
    elif call["mask"] == "heads":
        mask = rng.random((heads, 1, keys)) < 0.7
    else:  # as flax.linen.make_causal_mask gives it
        mask = np.broadcast_to(np.tri(queries, keys, dtype=np.float32), (*batch, 1, queries, keys)).copy()
    mask[..., 0] = True  # no row without a key: there the two differ
    return inputs, jnp.asarray(mask)


def outcome(layer, variables, inputs, mask, call, grad):
    """Output, sown weights, and the gradients of parameters and inputs."""

    def apply(variables, inputs):
        return layer.apply(
            variables,
            *inputs,
            mask=mask,
            deterministic=True,
            sow_weights=call["sow_weights"],
            mutable=["intermediates"],
        )

    output, pull, sown = jax.vjp(apply, variables, inputs, has_aux=True)
    return output, sown, pull(grad)


@pytest.mark.parametrize("profile", ["two batch axes, other widths", pytest.param("a batch", marks=pytest.mark.slow)])
def test_the_grid(profile):
    sizes, batch, queries, keys = PROFILES[profile]
    rng = np.random.default_rng(0)
    ran = 0
    for constructor, call in grid(rng):
        layers = [
            module(**sizes, **constructor)
            for module in (nn.MultiHeadDotProductAttention, hf.MultiHeadDotProductAttention)
        ]
        inputs, mask = arguments(rng, call, sizes["num_heads"], batch, queries, keys)
        shapes, ours = (
            jax.eval_shape(lambda *x, layer=layer: layer.init(*x, deterministic=True), KEY, *inputs) for layer in layers
        )
        assert jax.tree.map(str, shapes) == jax.tree.map(str, ours)
        variables = jax.tree.map(lambda leaf: normal(rng, *leaf.shape) / 3, {"params": shapes["params"]})
        grad = normal(rng, *batch, queries, sizes.get("out_features", WIDTH))
        expected, found = (
            jax.tree.map(np.asarray, outcome(layer, variables, inputs, mask, call, grad)) for layer in layers
        )
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        assert call["sow_weights"] == ("intermediates" in found[1])
        tolerance = 2e-4 if constructor["normalize_qk"] else 3e-5  # a norm over 3 numbers may divide by little
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
            assert one.shape == other.shape and one.dtype == other.dtype
            size = max(1.0, np.abs(other).max(initial=0))
            np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * size, err_msg=f"{constructor} {call}")
        ran += 1
    # Two profiles: 304 combinations. Refused, and tested below: products of one's own (qk_attn_weights_einsum_cls and
    # attn_weights_value_einsum_cls), which have no place in a fused computation.
    assert ran == COMBINATIONS


def test_the_same_key_gives_the_same_parameters():
    x = jnp.ones((2, 5, 12))
    expected = nn.MultiHeadDotProductAttention(num_heads=4, normalize_qk=True).init(jax.random.key(3), x)
    found = hf.MultiHeadDotProductAttention(num_heads=4, normalize_qk=True).init(jax.random.key(3), x)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(expected)))

    class Inside(nn.Module):  # and the same name inside another module
        layer: type

        @nn.compact
        def __call__(self, x):
            return self.layer(num_heads=2)(x)

    expected = Inside(nn.MultiHeadDotProductAttention).init(jax.random.key(3), x)
    found = Inside(hf.MultiHeadDotProductAttention).init(jax.random.key(3), x)
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(expected)))
    assert list(found["params"]) == list(expected["params"]) == ["MultiHeadDotProductAttention_0"]


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 4e-2), ("float16", 5e-3)])
def test_half_precision(dtype, tolerance):
    x = normal(np.random.default_rng(1), 2, 5, 12)
    options = {"num_heads": 4, "dtype": dtype}
    variables = nn.MultiHeadDotProductAttention(**options).init(jax.random.key(0), x)
    expected = nn.MultiHeadDotProductAttention(**options).apply(variables, x)
    found = hf.MultiHeadDotProductAttention(**options).apply(variables, x)
    assert found.dtype == expected.dtype == dtype
    np.testing.assert_allclose(found.astype("float32"), expected.astype("float32"), atol=tolerance)


def test_the_decoding_cache_works():
    x = normal(np.random.default_rng(1), 2, 5, 12)
    results = []
    for module in (nn.MultiHeadDotProductAttention, hf.MultiHeadDotProductAttention):
        layer = module(num_heads=4, decode=True)
        variables = layer.init(jax.random.key(0), x)
        step = jax.jit(lambda v, x, layer=layer: layer.apply(v, x, mutable=["cache"]))
        outputs = []
        for position in range(5):
            output, changed = step(variables, x[:, position : position + 1])
            variables = {**variables, **changed}
            outputs.append(output)
        results.append(np.concatenate(outputs, 1))
    np.testing.assert_allclose(results[1], results[0], atol=1e-5)
    plain = hf.MultiHeadDotProductAttention(num_heads=4)
    whole = plain.apply({"params": variables["params"]}, x, mask=nn.make_causal_mask(jnp.ones((2, 5))))
    np.testing.assert_allclose(results[1], whole, atol=1e-5)


def test_dropout_drops_each_weight_by_itself_and_follows_its_key():
    x = normal(np.random.default_rng(1), 3, 64, 8)
    layer = hf.MultiHeadDotProductAttention(num_heads=2, dropout_rate=0.25, deterministic=False)
    variables = layer.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    run = jax.jit(lambda key: layer.apply(variables, x, rngs={"dropout": key}))
    assert np.array_equal(run(jax.random.key(5)), run(jax.random.key(5)))
    assert not np.array_equal(run(jax.random.key(5)), run(jax.random.key(6)))
    assert np.array_equal(
        layer.apply(variables, x, dropout_rng=jax.random.key(7)),
        layer.apply(variables, x, dropout_rng=jax.random.key(7)),
    )

    # The unit matrix as value shows the weights that are left.
    query, value = jnp.zeros((3, 64, 2, 4)), jnp.broadcast_to(jnp.eye(64)[:, None], (3, 64, 2, 64))
    kept = hf.dot_product_attention(query, query, value, dropout_rng=jax.random.key(0), dropout_rate=0.25) > 0
    assert abs(float(kept.mean()) - 0.75) < 0.01
    assert not np.array_equal(kept[0], kept[1]) and not np.array_equal(kept[:, :, 0], kept[:, :, 1])


def test_a_query_with_no_key_gives_zero():
    x = normal(np.random.default_rng(1), 2, 5, 2, 4)
    mask = np.ones((2, 1, 5, 5), bool)
    mask[1, :, 2] = False
    found = hf.dot_product_attention(x, x, x, mask=jnp.asarray(mask))
    expected = nn.dot_product_attention(x, x, x, mask=jnp.asarray(mask))
    assert not found[1, 2].any() and np.allclose(expected[1, 2], x[1].mean(0), atol=1e-6)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-6)


def test_biases_and_their_gradients():
    rng = np.random.default_rng(2)
    x = normal(rng, 2, 3, 5, 2, 4)
    for shape in ((1, 3, 1, 5, 5), (2, 5, 5)):
        bias = normal(rng, *shape)
        for one, other in zip(
            *(
                jax.jit(jax.value_and_grad(lambda b, f=f: (f(x, x, x, bias=b) ** 2).sum()))(bias)
                for f in (hf.dot_product_attention, nn.dot_product_attention)
            )
        ):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_named():
    x = jnp.ones((2, 5, 4, 8))
    with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum is given.*flax.linen.dot_product_attention"):
        hf.dot_product_attention(x, x, x, qk_attn_weights_einsum=jnp.einsum, attn_weights_value_einsum=jnp.einsum)
    layer = hf.MultiHeadDotProductAttention(
        num_heads=2, qk_attn_weights_einsum_cls=lambda: jnp.einsum, attn_weights_value_einsum_cls=lambda: jnp.einsum
    )
    with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum"):
        layer.init(jax.random.key(0), x[0])
    with pytest.raises(ValueError, match=r"key has shape \(5, 4, 8\), query has \(2, 5, 4, 8\)"):
        hf.dot_product_attention(x, x[0], x[0])
    with pytest.raises(ValueError, match="key has 2 heads, query has 4"):
        hf.dot_product_attention(x, x[:, :, :2], x[:, :, :2])
    with pytest.raises(ValueError, match=r"dot_product_attention: mask has shape \(3, 3\), which does not"):
        hf.dot_product_attention(x, x, x, mask=jnp.ones((3, 3), bool))
    with pytest.raises(
        ValueError, match=r"mask has shape \(1, 2, 1, 5, 5\), which does not broadcast to \(2, 4, 5, 5\)"
    ):
        hf.dot_product_attention(x, x, x, mask=jnp.ones((1, 2, 1, 5, 5), bool))
    with pytest.raises(ValueError, match="dot_product_attention: dropout is 1.5"):
        hf.dot_product_attention(x, x, x, dropout_rate=1.5, dropout_rng=jax.random.key(0))
    with pytest.raises(TypeError, match="did you mean 'dropout_rate'"):
        hf.dot_product_attention(x, x, x, dropout=0.5)
