"""The multi-head attention layer in NumPy: projections, attention, output projection, and their gradients."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np

from headway import _headway
from headway._arguments import as_numpy, flag, path_bytes, real_number, shown
from headway._errors import named
from headway._headway import attention, attention_backward
from headway.functions import attend, check_heads, renamed, same_type, split_heads

_CUDA = (2, 13)  # DLPack's numbers for memory on a GPU, the second for managed memory


class _Forward(NamedTuple):
    """What backward needs of the last forward."""

    inputs: tuple[Any, Any, Any]  # queries, keys, values (B, S, num_hiddens)
    heads: tuple[Any, Any, Any]  # projected and split (B, num_heads, S, d)
    joined: Any  # (B, Sq, num_hiddens), before W_o
    lse: Any
    options: dict[str, Any]


class MultiHeadAttention:
    """Multi-head attention with learnt projections, in NumPy.

    MultiHeadAttention(num_hiddens, num_heads, dropout=0.0, bias=False) draws W_q, W_k, W_v, W_o
    (num_hiddens, num_hiddens) and, with bias, b_q, b_k, b_v, b_o (num_hiddens,) from np.random.rand, in this order.
    They are plain arrays: replace them or change them in place.

        q = queries W_q + b_q,  k = keys W_k + b_k,  v = values W_v + b_v      each split into num_heads heads
        y = join(attention(q, k, v)) W_o + b_o

    >>> import numpy as np, headway
    >>> np.random.seed(0)
    >>> layer = headway.MultiHeadAttention(num_hiddens=100, num_heads=5, dropout=0.5)
    >>> X, Y = np.random.rand(2, 4, 100), np.random.rand(2, 6, 100)
    >>> layer.forward(X, Y, Y, np.array([3, 2])).shape
    (2, 4, 100)
    >>> gradients = layer.backward(np.ones((2, 4, 100)))
    >>> gradients["W_q"].shape, gradients["keys"].shape
    ((100, 100), (2, 6, 100))
    >>> heads = layer.transpose_qkv(X)
    >>> heads.shape, np.array_equal(layer.transpose_output(heads), X)
    ((10, 4, 20), True)
    >>> layer.scaled_dot_product_attention(heads, heads, heads).shape
    (10, 4, 20)

    astype(np.float32) gives the layer whose parameters, and with float32 inputs whose computations, are float32; save
    and load are for files, which the headway command reads and writes too.
    """

    def __init__(self, num_hiddens: int, num_heads: int, dropout: float = 0.0, bias: bool = False) -> None:
        check_heads("MultiHeadAttention", "num_hiddens is", num_hiddens, num_heads)
        dropout = real_number("MultiHeadAttention", "dropout", dropout)
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"MultiHeadAttention: dropout is {dropout}, expected 0 to 1")
        bias = flag("MultiHeadAttention", "bias", bias)
        self.num_hiddens = num_hiddens
        self.num_heads = num_heads
        self.dropout = dropout
        self.d_k = self.d_v = num_hiddens // num_heads

        self.W_q = np.random.rand(num_hiddens, num_hiddens)
        self.W_k = np.random.rand(num_hiddens, num_hiddens)
        self.W_v = np.random.rand(num_hiddens, num_hiddens)
        self.W_o = np.random.rand(num_hiddens, num_hiddens)
        draw = np.random.rand if bias else np.zeros
        self.b_q = draw(num_hiddens)
        self.b_k = draw(num_hiddens)
        self.b_v = draw(num_hiddens)
        self.b_o = draw(num_hiddens)
        self._bias = bias
        self._last: _Forward | None = None

    def __repr__(self) -> str:
        return (
            f"MultiHeadAttention(num_hiddens={self.num_hiddens}, num_heads={self.num_heads}, "
            f"dropout={self.dropout}, bias={self._bias})"
        )

    def transpose_qkv(self, X: Any) -> Any:
        """(B, S, num_hiddens) -> (B * num_heads, S, d): every head an item of the batch."""
        X = as_numpy("MultiHeadAttention.transpose_qkv", "X", X)
        if X.ndim != 3 or X.shape[2] % self.num_heads != 0:
            raise ValueError(
                f"MultiHeadAttention.transpose_qkv: X has shape {X.shape}, "
                f"expected (batch, length, a multiple of the {self.num_heads} heads)"
            )
        X = split_heads(X, self.num_heads)
        return X.reshape(X.shape[0] * self.num_heads, X.shape[2], X.shape[3])

    def transpose_output(self, X: Any) -> Any:
        """(B * num_heads, S, d) -> (B, S, num_hiddens): the inverse of transpose_qkv."""
        X = as_numpy("MultiHeadAttention.transpose_output", "X", X)
        if X.ndim != 3 or X.shape[0] % self.num_heads != 0:
            raise ValueError(
                f"MultiHeadAttention.transpose_output: X has shape {X.shape}, "
                f"expected (a multiple of the {self.num_heads} heads, length, d)"
            )
        X = X.reshape(X.shape[0] // self.num_heads, self.num_heads, X.shape[1], X.shape[2]).swapaxes(1, 2)
        return X.reshape(X.shape[0], X.shape[1], X.shape[2] * X.shape[3])

    def scaled_dot_product_attention(self, Q: Any, K: Any, V: Any, valid_lens: Any = None) -> Any:
        """Attention of arrays as transpose_qkv gives them: Q (N, Sq, d), K and V (N, Sk, d) -> (N, Sq, d).

        valid_lens is None, (N,) or (N, Sq): the number of real keys. There is no dropout here.
        """
        operation = "MultiHeadAttention.scaled_dot_product_attention"
        try:
            return attention(*same_type(operation, Q=Q, K=K, V=V), valid_lens=valid_lens)
        except Exception as error:
            raise renamed(error, operation, query="Q", key="K", value="V") from None

    def forward(
        self,
        queries: Any,
        keys: Any,
        values: Any,
        valid_lens: Any = None,
        training: bool = False,
        *,
        mask: Any = None,
        causal: bool | str = False,
        return_weights: bool = False,
    ) -> Any:
        """queries (B, Sq, num_hiddens), keys and values (B, Sk, num_hiddens) -> (B, Sq, num_hiddens).

        valid_lens is None, (B,) or (B, Sq): the number of real keys. mask is True where a query may attend, and
        broadcasts to (B, num_heads, Sq, Sk); causal is attention's. With return_weights, the weights (B, num_heads, Sq,
        Sk), before dropout, come second. Dropout acts in training; its seed is drawn from np.random.
        """
        try:
            inputs = self._check_inputs(queries, keys, values)
            q, k, v = self._project(inputs)
        except Exception:
            self._check_parameters()
            raise
        options: dict[str, Any] = {"valid_lens": valid_lens, "mask": mask, "causal": causal}
        if flag("MultiHeadAttention", "training", training) and self.dropout > 0:
            options.update(dropout=self.dropout, seed=int(np.random.randint(2**63, dtype=np.int64)))
        try:
            joined, lse, *weights = attend(q, k, v, return_weights, **options)
        except Exception as error:
            raise renamed(error, "MultiHeadAttention", query="queries", key="keys", value="values") from None
        self._last = _Forward(inputs, (q, k, v), joined, lse, options)
        try:
            out = np.dot(joined, self.W_o) + self.b_o
        except Exception:
            self._check_parameters()
            raise
        return (out, *weights) if return_weights else out

    __call__ = forward

    def backward(self, grad: Any) -> dict[str, Any]:
        """The gradients of sum(grad * y) for the last forward; grad is like its output y (B, Sq, num_hiddens).

        A dict by name: W_q, W_k, W_v, W_o, b_q, b_k, b_v, b_o, and queries, keys, values. What forward was given, and
        the parameters, must not have changed since.
        """
        last = self._last
        if last is None:
            raise ValueError("MultiHeadAttention.backward: expected a forward before it, found none")
        grad = as_numpy("MultiHeadAttention.backward", "grad", grad)
        expected = last.joined.shape[:-1] + self.W_o.shape[1:]
        if grad.shape != expected:
            raise ValueError(f"MultiHeadAttention.backward: grad has shape {grad.shape}, expected {expected}")
        gradients = _linear_gradients("o", last.joined, self.W_o, grad)
        grad_out = split_heads(gradients.pop("joined").astype(last.joined.dtype, copy=False), self.num_heads)
        out = split_heads(last.joined, self.num_heads)
        by_head = attention_backward(grad_out, *last.heads, out, last.lse, **last.options)
        for name, letter, source, part in zip(
            ("queries", "keys", "values"), "qkv", last.inputs, (by_head.query, by_head.key, by_head.value)
        ):
            joined = part.swapaxes(1, 2).reshape(*source.shape[:-1], self.num_heads * part.shape[-1])
            gradients.update(_linear_gradients(letter, source, getattr(self, f"W_{letter}"), joined))
            gradients[name] = gradients.pop("joined")
        return gradients

    # ---- Types and files ----

    def astype(self, dtype: Any) -> MultiHeadAttention:
        """The same layer with parameters of another type.

        >>> import numpy as np, headway
        >>> layer = headway.MultiHeadAttention(8, 2).astype(np.float32)
        >>> layer.forward(*[np.ones((1, 3, 8), np.float32)] * 3).dtype
        dtype('float32')
        """
        try:
            kind = np.dtype(dtype)
        except TypeError:
            raise TypeError(f"MultiHeadAttention.astype: dtype is {shown(dtype)}, expected floating") from None
        if kind.kind != "f":
            raise TypeError(f"MultiHeadAttention.astype: dtype is {kind}, expected floating")
        return self._with({name: array.astype(kind) for name, array in self._parameters().items()})

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        """Writes the layer to a .safetensors file, which the headway command reads too. An existing file is an error.

        A name that says another format, layer.npz, is a ValueError. The dropout, which belongs to training, is not in
        the file.
        """
        if self.num_hiddens != self.W_o.shape[1]:
            raise ValueError(f"MultiHeadAttention.save: W_o has shape {self.W_o.shape}, expected square")
        with named("MultiHeadAttention.save"):
            target = path_bytes("MultiHeadAttention.save", path)
            replace = flag("MultiHeadAttention.save", "overwrite", overwrite)
            _headway.save_layer(self._parameters(), self.num_heads, target, replace)

    @classmethod
    def load(cls, path: str | os.PathLike[str], dropout: float = 0.0) -> MultiHeadAttention:
        """The layer in a file that save, or headway layer-init, wrote.

        >>> import headway, tempfile
        >>> layer = headway.MultiHeadAttention(8, 2, bias=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     layer.save(f"{folder}/layer.safetensors")
        ...     again = headway.MultiHeadAttention.load(f"{folder}/layer.safetensors")
        >>> again, bool((again.W_v == layer.W_v).all())
        (MultiHeadAttention(num_hiddens=8, num_heads=2, dropout=0.0, bias=True), True)
        """
        with named("MultiHeadAttention.load"):
            parameters, heads = _headway.load_layer(path_bytes("MultiHeadAttention.load", path))
        width = parameters["W_o"].shape[1]
        return cls._made(width, heads, dropout, parameters)

    def _parameters(self) -> dict[str, Any]:
        """By name; biases where the layer has some."""
        biased = self._bias or any(np.any(getattr(self, f"b_{part}")) for part in "qkvo")
        names = [f"{kind}_{part}" for kind in ("W", "b")[: 1 + biased] for part in "qkvo"]
        return {name: getattr(self, name) for name in names}

    def _with(self, parameters: dict[str, Any]) -> MultiHeadAttention:
        return self._made(self.num_hiddens, self.num_heads, self.dropout, parameters)

    @classmethod
    def _made(cls, width: int, heads: int, dropout: float, parameters: dict[str, Any]) -> MultiHeadAttention:
        """A layer with these parameters; biases that are not given are 0. It changes no other draw of np.random."""
        drawn = np.random.get_state()
        layer = cls(width, heads, dropout, bias="b_o" in parameters)
        np.random.set_state(drawn)
        zeros = {f"b_{part}": np.zeros(width, parameters[f"W_{part}"].dtype) for part in "qkvo"}
        for name, array in (zeros | parameters).items():
            setattr(layer, name, np.ascontiguousarray(array))
        return layer

    def _project(self, inputs: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """Query, key and value by head, (B, num_heads, S, d)."""
        projected = same_type(
            "MultiHeadAttention",
            queries=np.dot(inputs[0], self.W_q) + self.b_q,
            keys=np.dot(inputs[1], self.W_k) + self.b_k,
            values=np.dot(inputs[2], self.W_v) + self.b_v,
        )
        query, key, value = (split_heads(array, self.num_heads) for array in projected)
        return query, key, value

    def _check_inputs(self, queries: Any, keys: Any, values: Any) -> tuple[Any, Any, Any]:
        for name, array in zip(("queries", "keys", "values"), (queries, keys, values)):
            if hasattr(array, "__dlpack_device__") and int(array.__dlpack_device__()[0]) in _CUDA:
                raise NotImplementedError(
                    f"MultiHeadAttention: {name} is on cuda, and this layer is NumPy's: use headway.torch's modules"
                )
        names = ("queries", "keys", "values")
        arrays = tuple(
            as_numpy("MultiHeadAttention", name, array) for name, array in zip(names, (queries, keys, values))
        )
        for name, array, weight in zip(names, arrays, (self.W_q, self.W_k, self.W_v)):
            if array.ndim != 3 or array.shape[-1] != weight.shape[0]:
                raise ValueError(
                    f"MultiHeadAttention: {name} has shape {array.shape}, expected (batch, length, {weight.shape[0]})"
                )
        return arrays[0], arrays[1], arrays[2]

    def _check_parameters(self) -> None:
        """What is wrong with them, where a call failed: they may have been replaced by anything."""
        widths = {}
        for part in "qkvo":
            weight, bias = (
                as_numpy("MultiHeadAttention", name, getattr(self, name)) for name in (f"W_{part}", f"b_{part}")
            )
            for name, array in ((f"W_{part}", weight), (f"b_{part}", bias)):
                if not (array.dtype.kind in "biuf" or array.dtype.name == "bfloat16"):
                    raise TypeError(f"MultiHeadAttention: {name} has type {array.dtype}, expected floating")
            if weight.ndim != 2:
                raise ValueError(f"MultiHeadAttention: W_{part} has shape {weight.shape}, expected (in, out)")
            widths[part] = weight.shape[1]
            if part != "o" and widths[part] % self.num_heads != 0:
                raise ValueError(
                    f"MultiHeadAttention: W_{part} has shape {weight.shape}, "
                    f"expected a multiple of the {self.num_heads} heads in its second axis"
                )
            if bias.shape not in ((), (1,), weight.shape[1:]):
                raise ValueError(f"MultiHeadAttention: b_{part} has shape {bias.shape}, expected ({weight.shape[1]},)")
        if self.W_o.shape[0] != widths["v"]:
            raise ValueError(
                f"MultiHeadAttention: W_o has shape {self.W_o.shape}, expected ({widths['v']}, out) as W_v gives"
            )


def _linear_gradients(letter: str, source: Any, weight: Any, grad: Any) -> dict[str, Any]:
    """Of source @ weight + bias: the weight's and the bias's, and as "joined" the source's."""
    rows, grads = source.reshape(-1, source.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return {f"W_{letter}": rows.T @ grads, f"b_{letter}": grads.sum(axis=0), "joined": grad @ weight.T}
