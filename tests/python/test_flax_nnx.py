"""headway.flax.nnx against flax.nnx: the same parameters, options, weights and gradients."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
pytest.importorskip("flax", reason="flax is not installed")

import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402

import headway.flax  # noqa: E402
from cases import check_examples  # noqa: E402

X = jax.random.normal(jax.random.key(0), (2, 6, 16))


def pair(**options):
    made = {"num_heads": 4, "in_features": 16, "decode": False, **options}
    original = nnx.MultiHeadAttention(**made, rngs=nnx.Rngs(1))
    return original, headway.flax.nnx.MultiHeadAttention(**made, rngs=nnx.Rngs(1))


def test_docstrings_have_examples_that_run():
    for name in headway.flax.nnx.__all__:
        check_examples(getattr(headway.flax.nnx, name))
    check_examples(headway.flax.nnx)


@pytest.mark.parametrize(
    "options", [{}, {"num_kv_heads": 2}, {"qkv_features": 32, "use_bias": False}, {"normalize_qk": True}]
)
@pytest.mark.parametrize("causal", [False, True])
def test_outputs_and_gradients_are_the_original_s(options, causal):
    original, ours = pair(**options)
    mask = nnx.make_causal_mask(jnp.ones((2, 6))) if not causal else None
    np.testing.assert_allclose(
        ours(X, mask=mask, is_causal=causal), original(X, mask=mask, is_causal=causal), atol=2e-6
    )

    def loss(model):
        return (model(X, is_causal=causal) ** 2).sum()

    for found, expected in zip(*(jax.tree.leaves(nnx.grad(loss)(model)) for model in (ours, original))):
        np.testing.assert_allclose(found, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_weights_are_sown_where_the_original_sows_them():
    found = []
    for model in pair():
        model(X, sow_weights=True, is_causal=True)
        found.append(jax.tree.leaves(nnx.state(model, nnx.Intermediate))[0])
    np.testing.assert_allclose(*found, atol=1e-6)


def test_headway_s_functions_are_attention_fns():
    original, _ = pair()
    for function in (headway.flax.dot_product_attention, headway.flax.nnx.dot_product_attention):
        ours, _ = pair(attention_fn=function)
        np.testing.assert_allclose(ours(X, is_causal=True), original(X, is_causal=True), atol=2e-6)


def test_decoding_token_by_token_is_the_original_s():
    caches = pair(decode=True)
    for model in caches:
        model.init_cache(X.shape)
    for n in range(X.shape[1]):
        ours, theirs = (model(X[:, n : n + 1]) for model in caches)
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_dropout_is_drawn_from_the_layer_s_own_stream():
    outs = []
    for _ in range(2):
        _, model = pair(dropout_rate=0.5)
        outs.append([model(X, deterministic=False), model(X, deterministic=False), model(X, deterministic=True)])
    np.testing.assert_array_equal(outs[0][0], outs[1][0])
    assert not np.array_equal(outs[0][0], outs[0][1]) and not np.array_equal(outs[0][0], outs[0][2])
