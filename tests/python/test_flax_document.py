"""Document 004: its module, and ours in its place."""

import math
import types

import numpy as np
import pytest

from cases import check_examples

jax = pytest.importorskip("jax", reason="jax is not installed")
nn = pytest.importorskip("flax.linen", reason="flax is not installed")
hf = pytest.importorskip("headway.flax")
jnp = jax.numpy


class Masked(nn.Module):
    """The attention that the document takes from its own library: scores past valid_lens become -1e6."""

    dropout: float

    @nn.compact
    def __call__(self, queries, keys, values, valid_lens=None, training=False):
        scores = queries @ keys.swapaxes(1, 2) / math.sqrt(queries.shape[-1])
        if valid_lens is not None:
            lens = valid_lens[:, None, None] if valid_lens.ndim == 1 else valid_lens[:, :, None]
            scores = jnp.where(jnp.arange(scores.shape[-1]) < lens, scores, -1e6)
        weights = nn.softmax(scores, axis=-1)
        return nn.Dropout(self.dropout, deterministic=not training)(weights) @ values, weights


def document_s_class(attention):
    """Its listing, with the attention of its library or of ours."""

    class MultiHeadAttention(nn.Module):
        num_hiddens: int
        num_heads: int
        dropout: float
        bias: bool = False

        def setup(self):
            self.attention = attention(self.dropout)
            self.W_q = nn.Dense(self.num_hiddens, use_bias=self.bias)
            self.W_k = nn.Dense(self.num_hiddens, use_bias=self.bias)
            self.W_v = nn.Dense(self.num_hiddens, use_bias=self.bias)
            self.W_o = nn.Dense(self.num_hiddens, use_bias=self.bias)

        @nn.compact
        def __call__(self, queries, keys, values, valid_lens, training=False):
            queries = self.transpose_qkv(self.W_q(queries))
            keys = self.transpose_qkv(self.W_k(keys))
            values = self.transpose_qkv(self.W_v(values))
            if valid_lens is not None:
                valid_lens = jnp.repeat(valid_lens, self.num_heads, axis=0)
            output, attention_weights = self.attention(queries, keys, values, valid_lens, training=training)
            return self.W_o(self.transpose_output(output)), attention_weights

        def transpose_qkv(self, X):
            X = X.reshape((X.shape[0], X.shape[1], self.num_heads, -1))
            X = jnp.transpose(X, (0, 2, 1, 3))
            return X.reshape((-1, X.shape[2], X.shape[3]))

        def transpose_output(self, X):
            X = X.reshape((-1, self.num_heads, X.shape[1], X.shape[2]))
            X = jnp.transpose(X, (0, 2, 1, 3))
            return X.reshape((X.shape[0], X.shape[1], -1))

    return MultiHeadAttention


LENS = [None, jnp.array([3, 2]), jnp.array([[1, 2, 3, 4], [6, 5, 2, 1]])]


def close(found, expected, atol=1e-5):
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=atol)


def inputs(width=100):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 4, width), (2, 6, width)))


def test_the_examples_run():
    for name in hf.__all__:
        check_examples(getattr(hf, name))
    check_examples(hf)


def test_the_document_s_check_as_it_stands():
    MultiHeadAttention = hf.MultiHeadAttention
    d2l = types.SimpleNamespace(tensor=jnp.array, ones=jnp.ones, get_key=lambda: jax.random.key(0))

    num_hiddens, num_heads = 100, 5
    attention = MultiHeadAttention(num_hiddens, num_heads, 0.5)
    batch_size, num_queries, num_kvpairs = 2, 4, 6
    valid_lens = d2l.tensor([3, 2])
    X = d2l.ones((batch_size, num_queries, num_hiddens))
    Y = d2l.ones((batch_size, num_kvpairs, num_hiddens))
    result = attention.init_with_output(d2l.get_key(), X, Y, Y, valid_lens, training=False)[0][0]
    assert result.shape == (batch_size, num_queries, num_hiddens)


@pytest.mark.parametrize("bias", [False, True])
def test_the_same_key_gives_the_document_s_parameters_and_numbers(bias):
    X, Y = inputs()
    original = document_s_class(Masked)(100, 5, 0.5, bias)
    ours = hf.MultiHeadAttention(100, 5, 0.5, bias)
    with_ours = document_s_class(hf.DotProductAttention)(100, 5, 0.5, bias)
    for lens in LENS:
        (output, weights), variables = original.init_with_output(jax.random.key(2), X, Y, Y, lens)
        assert weights.shape == (10, 4, 6)
        for layer in (ours, with_ours):
            (found, found_weights), found_variables = layer.init_with_output(jax.random.key(2), X, Y, Y, lens)
            assert jax.tree.structure(found_variables) == jax.tree.structure(variables)
            assert all(map(np.array_equal, jax.tree.leaves(found_variables), jax.tree.leaves(variables)))
            close(found, output)
            close(found_weights, weights)


def test_gradients_under_jit_and_vmap():
    X, Y = inputs(20)
    original, ours = document_s_class(Masked)(20, 5, 0.5), hf.MultiHeadAttention(20, 5, 0.5)
    variables = original.init(jax.random.key(2), X, Y, Y, LENS[1])

    def loss(layer, variables, X, Y):
        output, weights = layer.apply(variables, X, Y, Y, LENS[1])
        return (output**2).sum() + (weights**3).sum()

    expected = jax.grad(lambda *x: loss(original, *x), argnums=(0, 1, 2))(variables, X, Y)
    found = jax.jit(jax.grad(lambda *x: loss(ours, *x), argnums=(0, 1, 2)))(variables, X, Y)
    jax.tree.map(lambda one, other: close(one, other, 1e-4), found, expected)
    mapped = jax.vmap(lambda x, y, n: ours.apply(variables, x[None], y[None], y[None], n[None])[0][0])(X, Y, LENS[1])
    close(mapped, ours.apply(variables, X, Y, Y, LENS[1])[0])


def test_dropout_acts_in_training_and_weights_are_those_before_it():
    X, Y = inputs(20)
    layer = hf.MultiHeadAttention(20, 5, 0.5)
    variables = layer.init(jax.random.key(2), X, Y, Y, None)
    plain, weights = layer.apply(variables, X, Y, Y, None)
    rngs = [{"dropout": jax.random.key(seed)} for seed in (1, 2)]
    first, first_weights = layer.apply(variables, X, Y, Y, None, training=True, rngs=rngs[0])
    assert np.array_equal(first, layer.apply(variables, X, Y, Y, None, training=True, rngs=rngs[0])[0])
    assert not np.array_equal(first, layer.apply(variables, X, Y, Y, None, training=True, rngs=rngs[1])[0])
    assert not np.array_equal(first, plain) and np.array_equal(first_weights, weights)
    assert np.array_equal(layer.apply(variables, X, Y, Y, None, rngs=rngs[0])[0], plain)


def test_a_valid_length_of_zero_gives_zero():
    X, Y = inputs(20)
    layer = hf.MultiHeadAttention(20, 5, 0.0)
    (output, weights), _ = layer.init_with_output(jax.random.key(0), X, Y, Y, jnp.array([0, 6]))
    assert not output[0].any() and not weights[:5].any() and output[1].any()


def test_what_does_not_fit_is_named():
    X, Y = inputs(20)
    with pytest.raises(ValueError, match="MultiHeadAttention: num_hiddens is 20, expected a multiple of the 6 heads"):
        hf.MultiHeadAttention(20, 6, 0.0).init(jax.random.key(0), X, Y, Y, None)
    layer = hf.MultiHeadAttention(20, 5, 0.0)
    with pytest.raises(ValueError, match=r"MultiHeadAttention: keys has shape \(6, 20\), expected \(batch, length"):
        layer.init(jax.random.key(0), X, Y[0], Y, None)
    with pytest.raises(ValueError, match="MultiHeadAttention: .*batch"):
        layer.init(jax.random.key(0), X, Y[:1], Y[:1], None)
    with pytest.raises(ValueError, match="MultiHeadAttention: valid_lens"):
        layer.init(jax.random.key(0), X, Y, Y, jnp.array([1, 2, 3]))
    assert repr(layer).startswith("MultiHeadAttention(\n    # attributes\n    num_hiddens = 20\n")
