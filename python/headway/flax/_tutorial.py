"""The modules that tutorials write by hand, with their names and arguments."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from headway.functions import check_heads
from headway.jax._attention import attend_positions_first


class DotProductAttention(nn.Module):
    """Attention of queries (N, Lq, d), keys (N, Lk, d) and values (N, Lk, dv).

    __call__(queries, keys, values, valid_lens=None, training=False) gives (output (N, Lq, dv), weights (N, Lq, Lk)).
    valid_lens is None, (N,) or (N, Lq): how many of the keys count. Dropout acts in training, with the "dropout" key;
    the weights are those before it.

    >>> import jax, jax.numpy as jnp, headway.flax
    >>> attention = headway.flax.DotProductAttention(dropout=0.5)
    >>> x = jnp.ones((2, 3, 4))
    >>> output, weights = attention.apply({}, x, x, x, jnp.array([1, 2]))
    >>> weights[1, 0].round(3)
    Array([0.5, 0.5, 0. ], dtype=float32)
    """

    dropout: float

    @nn.compact
    def __call__(self, queries: Any, keys: Any, values: Any, valid_lens: Any = None, training: bool = False) -> Any:
        """(output, weights)."""
        output, weights = _attend(self, [x[:, :, None] for x in (queries, keys, values)], valid_lens, training)
        return output[:, :, 0], weights[:, 0]


class MultiHeadAttention(nn.Module):
    """Multi-head attention with learnt projections W_q, W_k, W_v, W_o (nn.Dense, num_hiddens wide).

    __call__(queries, keys, values, valid_lens, training=False) gives (output, weights)
        queries     (B, Lq, width), keys and values (B, Lk, width)
        valid_lens  None, (B,) or (B, Lq): how many of the keys count; a query with none of them gets 0
        output      (B, Lq, num_hiddens)
        weights     (B * num_heads, Lq, Lk), before dropout; under jit they cost nothing where nobody uses them

    Dropout acts in training, with the "dropout" key.

    >>> import jax, jax.numpy as jnp, headway.flax
    >>> attention = headway.flax.MultiHeadAttention(num_hiddens=100, num_heads=5, dropout=0.5)
    >>> X, Y = jnp.ones((2, 4, 100)), jnp.ones((2, 6, 100))
    >>> (output, weights), variables = attention.init_with_output(jax.random.key(0), X, Y, Y, jnp.array([3, 2]))
    >>> output.shape, weights.shape, sorted(variables["params"])
    ((2, 4, 100), (10, 4, 6), ['W_k', 'W_o', 'W_q', 'W_v'])
    """

    num_hiddens: int
    num_heads: int
    dropout: float
    bias: bool = False

    def setup(self) -> None:
        """The four projections."""
        check_heads("MultiHeadAttention", "num_hiddens is", self.num_hiddens, self.num_heads)
        self.W_q = nn.Dense(self.num_hiddens, use_bias=self.bias)
        self.W_k = nn.Dense(self.num_hiddens, use_bias=self.bias)
        self.W_v = nn.Dense(self.num_hiddens, use_bias=self.bias)
        self.W_o = nn.Dense(self.num_hiddens, use_bias=self.bias)

    def __call__(self, queries: Any, keys: Any, values: Any, valid_lens: Any, training: bool = False) -> Any:
        """(output, weights)."""
        for name, array in (("queries", queries), ("keys", keys), ("values", values)):
            if jnp.ndim(array) != 3:
                raise ValueError(
                    f"MultiHeadAttention: {name} has shape {jnp.shape(array)}, expected (batch, length, width)"
                )
        projected = self.W_q(queries), self.W_k(keys), self.W_v(values)
        heads = [x.reshape(*x.shape[:2], self.num_heads, -1) for x in projected]
        output, weights = _attend(self, heads, valid_lens, training)
        return self.W_o(output.reshape(*output.shape[:2], -1)), weights.reshape(-1, *weights.shape[2:])

    def transpose_qkv(self, X: Any) -> Any:
        """(B, L, num_hiddens) -> (B * num_heads, L, num_hiddens / num_heads): every head an item of the batch."""
        X = X.reshape(*X.shape[:2], self.num_heads, -1).swapaxes(1, 2)
        return X.reshape(-1, *X.shape[2:])

    def transpose_output(self, X: Any) -> Any:
        """(B * num_heads, L, num_hiddens / num_heads) -> (B, L, num_hiddens): what transpose_qkv did, undone."""
        X = X.reshape(-1, self.num_heads, *X.shape[1:]).swapaxes(1, 2)
        return X.reshape(*X.shape[:2], -1)


def _attend(module: Any, arrays: list[Any], valid_lens: Any, training: bool) -> Any:
    """Arrays (B, L, heads, d) -> (B, Lq, heads, d) and weights (B, heads, Lq, Lk)."""
    drops = training and module.dropout > 0
    return attend_positions_first(
        type(module).__name__,
        *arrays,
        valid_lens=valid_lens,
        dropout=module.dropout if drops else 0.0,
        seed=module.make_rng("dropout") if drops else None,
        return_weights=True,
    )
