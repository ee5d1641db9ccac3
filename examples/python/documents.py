"""The five documents' own code, timed: for the table of ./dev demo.

    python examples/python/documents.py 003     prints two times in ms: of the document's example, of 1024 tokens

The listings are the documents', word for word where they run; what a document takes from elsewhere is noted.
"""

import math
import sys
import time

LARGE = (1, 1024, 512)  # 1024 tokens of width 512, in 8 heads


def milliseconds(action):
    """The shortest of five runs, or of those that begin within a second."""
    times = []
    while len(times) < 5 and sum(times) < 1:
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def document_000():
    """A NumPy function."""
    import numpy as np

    def multi_head_attention(Q, K, V, n_heads):
        batch_size, seq_len, d_model = Q.shape
        assert d_model % n_heads == 0
        d_k = d_model // n_heads

        def split_heads(x):
            # (batch, seq, d_model) -> (batch, heads, seq, d_k)
            x = x.reshape(batch_size, seq_len, n_heads, d_k)
            return x.transpose(0, 2, 1, 3)

        def scaled_dot_product_attention(q, k, v):
            scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(d_k)
            weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
            weights = weights / np.sum(weights, axis=-1, keepdims=True)
            return weights @ v

        attn_output = scaled_dot_product_attention(split_heads(Q), split_heads(K), split_heads(V))
        # Concatenate heads: (batch, heads, seq, d_k) -> (batch, seq, d_model)
        return attn_output.transpose(0, 2, 1, 3).reshape(batch_size, seq_len, d_model)

    rng = np.random.default_rng(0)
    small, large = rng.standard_normal((3, 2, 64, 64)), rng.standard_normal(LARGE)
    return (lambda: multi_head_attention(*small, 8)), (lambda: multi_head_attention(large, large, large, 8))


def document_001():
    """A PyTorch class."""
    import torch
    from torch import nn

    class MultiHeadAttention:
        def __init__(self, d_model: int, num_heads: int):
            self.num_heads = num_heads
            self.d_k = d_model // num_heads
            self.W_q = nn.Linear(d_model, d_model)
            self.W_k = nn.Linear(d_model, d_model)
            self.W_v = nn.Linear(d_model, d_model)
            self.W_o = nn.Linear(d_model, d_model)

        def forward(self, Q, K, V):
            B, S_q, _ = Q.shape
            S_k = K.shape[1]
            q = self.W_q(Q).view(B, S_q, self.num_heads, self.d_k).transpose(1, 2)
            k = self.W_k(K).view(B, S_k, self.num_heads, self.d_k).transpose(1, 2)
            v = self.W_v(V).view(B, S_k, self.num_heads, self.d_k).transpose(1, 2)
            scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
            weights = torch.softmax(scores, dim=-1)
            attn = torch.matmul(weights, v)
            out = attn.transpose(1, 2).contiguous().view(B, S_q, -1)
            return self.W_o(out)

    torch.manual_seed(0)
    mha, wide = MultiHeadAttention(d_model=32, num_heads=4), MultiHeadAttention(512, 8)
    x, large = torch.randn(2, 6, 32), torch.randn(LARGE)
    return (lambda: mha.forward(x, x, x)), (lambda: wide.forward(large, large, large))


def document_003():
    """A NumPy class with valid lengths."""
    import numpy as np

    class MultiHeadAttention:
        def __init__(self, num_hiddens, num_heads, dropout=0.0, bias=False):
            self.num_heads = num_heads
            self.num_hiddens = num_hiddens
            self.d_k = self.d_v = num_hiddens // num_heads
            self.W_q = np.random.rand(num_hiddens, num_hiddens)
            self.W_k = np.random.rand(num_hiddens, num_hiddens)
            self.W_v = np.random.rand(num_hiddens, num_hiddens)
            self.W_o = np.random.rand(num_hiddens, num_hiddens)
            self.b_q = self.b_k = self.b_v = self.b_o = np.zeros(num_hiddens)

        def transpose_qkv(self, X):
            X = X.reshape(X.shape[0], X.shape[1], self.num_heads, -1)
            X = X.transpose(0, 2, 1, 3)
            return X.reshape(-1, X.shape[2], X.shape[3])

        def transpose_output(self, X):
            X = X.reshape(-1, self.num_heads, X.shape[1], X.shape[2])
            X = X.transpose(0, 2, 1, 3)
            return X.reshape(X.shape[0], X.shape[1], -1)

        def scaled_dot_product_attention(self, Q, K, V, valid_lens):
            d_k = Q.shape[-1]
            scores = np.matmul(Q, K.transpose(0, 2, 1)) / np.sqrt(d_k)
            if valid_lens is not None:
                mask = np.arange(scores.shape[-1]) < valid_lens[:, None]
                scores = np.where(mask[:, None, :], scores, -np.inf)
                attention_weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
                attention_weights /= attention_weights.sum(axis=-1, keepdims=True)
            return np.matmul(attention_weights, V)

        def forward(self, queries, keys, values, valid_lens):
            queries = self.transpose_qkv(np.dot(queries, self.W_q) + self.b_q)
            keys = self.transpose_qkv(np.dot(keys, self.W_k) + self.b_k)
            values = self.transpose_qkv(np.dot(values, self.W_v) + self.b_v)
            if valid_lens is not None:
                valid_lens = np.repeat(valid_lens, self.num_heads, axis=0)
            output = self.scaled_dot_product_attention(queries, keys, values, valid_lens)
            return np.dot(self.transpose_output(output), self.W_o) + self.b_o

    attention, wide = MultiHeadAttention(100, 5, dropout=0.5), MultiHeadAttention(512, 8)
    X, Y, large = np.random.rand(2, 4, 100), np.random.rand(2, 6, 100), np.random.rand(*LARGE)
    some, all_keys = np.array([3, 2]), np.array([1024])
    return (lambda: attention.forward(X, Y, Y, some)), (lambda: wide.forward(large, large, large, all_keys))


def document_004():
    """A Flax module. Its attention is the one of the book it belongs to, d2l.DotProductAttention, written out here."""
    import jax
    import jax.numpy as jnp
    from flax import linen as nn

    class DotProductAttention(nn.Module):
        dropout: float

        @nn.compact
        def __call__(self, queries, keys, values, valid_lens=None, training=False):
            scores = queries @ keys.swapaxes(1, 2) / math.sqrt(queries.shape[-1])
            if valid_lens is not None:
                mask = jnp.arange(scores.shape[-1])[None, None, :] < valid_lens[:, None, None]
                scores = jnp.where(mask, scores, -1e6)
            weights = nn.softmax(scores, axis=-1)
            return nn.Dropout(self.dropout, deterministic=not training)(weights) @ values, weights

    class MultiHeadAttention(nn.Module):
        num_hiddens: int
        num_heads: int
        dropout: float
        bias: bool = False

        def setup(self):
            self.attention = DotProductAttention(self.dropout)
            self.W_q = nn.Dense(self.num_hiddens, use_bias=self.bias)
            self.W_k = nn.Dense(self.num_hiddens, use_bias=self.bias)
            self.W_v = nn.Dense(self.num_hiddens, use_bias=self.bias)
            self.W_o = nn.Dense(self.num_hiddens, use_bias=self.bias)

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

    def timed(module, X, Y, lens):
        variables = module.init(jax.random.key(0), X, Y, Y, lens)
        return lambda: jax.block_until_ready(module.apply(variables, X, Y, Y, lens))

    X, Y, large = jnp.ones((2, 4, 100)), jnp.ones((2, 6, 100)), jnp.ones(LARGE)
    return (
        timed(MultiHeadAttention(100, 5, 0.5), X, Y, jnp.array([3, 2])),
        timed(MultiHeadAttention(512, 8, 0.5), large, large, None),
    )


if __name__ == "__main__":
    # Document 002 is an exercise: there is no listing to time.
    documents = {"000": document_000, "001": document_001, "003": document_003, "004": document_004}
    small, large = documents[sys.argv[1]]()
    print(f"{milliseconds(small):.6f}\t{milliseconds(large):.6f}")
