"""Attention weights from torch, Keras and Flax in headway.MultiHeadAttention, and back.

from_torch, to_torch   the state_dict of torch.nn.MultiheadAttention, packed or with separate projections
from_keras, to_keras   the weights of keras.layers.MultiHeadAttention
from_flax, to_flax     the parameters of flax.linen.MultiHeadDotProductAttention

They take and give dicts of arrays: the framework itself is not imported. Arrays are copied; bfloat16 becomes float32.

>>> import numpy as np, headway
>>> rng = np.random.default_rng(0)
>>> state = {"in_proj_weight": rng.standard_normal((24, 8)), "out_proj.weight": rng.standard_normal((8, 8))}
>>> layer = headway.convert.from_torch(state, num_heads=2)
>>> layer
MultiHeadAttention(num_hiddens=8, num_heads=2, dropout=0.0, bias=False)
>>> np.array_equal(layer.W_k, state["in_proj_weight"][8:16].T)
True
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from headway._arguments import as_numpy, shown
from headway.functions import check_heads
from headway.layer import MultiHeadAttention

__all__ = ["from_flax", "from_keras", "from_torch", "to_flax", "to_keras", "to_torch"]

Weights: TypeAlias = dict[str, Any]

_PARTS = {"q": "query", "k": "key", "v": "value"}


# ---- torch ----


def from_torch(state_dict: Mapping[str, Any], num_heads: int, dropout: float = 0.0) -> MultiHeadAttention:
    """The layer with the weights of a torch.nn.MultiheadAttention.

    state_dict has in_proj_weight (3 * d, d), or q_proj_weight (d, d), k_proj_weight (d, kdim), v_proj_weight (d, vdim);
    out_proj.weight (d, d); and, with bias, in_proj_bias (3 * d,) and out_proj.bias (d,). num_heads is not among the
    weights. bias_k and bias_v (add_bias_kv) are keys of their own, which this layer has not: a ValueError.

    >>> import numpy as np, headway
    >>> layer = headway.MultiHeadAttention(8, 2, bias=True)
    >>> state = headway.convert.to_torch(layer)
    >>> {name: array.shape for name, array in state.items()}
    {'in_proj_weight': (24, 8), 'in_proj_bias': (24,), 'out_proj.weight': (8, 8), 'out_proj.bias': (8,)}
    >>> again = headway.convert.from_torch(state, num_heads=2)
    >>> np.array_equal(again.W_v, layer.W_v) and np.array_equal(again.b_v, layer.b_v)
    True
    """
    source = _Source("from_torch", state_dict)
    out_weight = source.take("out_proj.weight", (None, None))
    width = out_weight.shape[0]
    check_heads("from_torch", "out_proj.weight has a width of", width, num_heads)
    if out_weight.shape != (width, width):
        source.refuse("out_proj.weight", out_weight, (width, width))
    if "in_proj_weight" in source:
        packed = source.take("in_proj_weight", (3 * width, width))
        matrices = dict(zip("qkv", np.split(packed, 3)))
    else:
        columns = {"q": width, "k": None, "v": None}
        matrices = {part: source.take(f"{part}_proj_weight", (width, columns[part])) for part in "qkv"}
    parameters = {f"W_{part}": matrix.T for part, matrix in matrices.items()} | {"W_o": out_weight.T}
    if "in_proj_bias" in source or "out_proj.bias" in source:
        packed = source.take("in_proj_bias", (3 * width,))
        parameters |= {f"b_{part}": vector for part, vector in zip("qkv", np.split(packed, 3))}
        parameters["b_o"] = source.take("out_proj.bias", (width,))
    source.finish()
    return MultiHeadAttention._made(width, num_heads, dropout, parameters)


def to_torch(layer: MultiHeadAttention) -> Weights:
    """The layer's weights as the state_dict of a torch.nn.MultiheadAttention, in NumPy arrays.

    Packed where query, key and value have one width, as torch has it; separate elsewhere. Load it with
    module.load_state_dict({name: torch.from_numpy(array) for name, array in ...items()}).

    >>> import headway
    >>> sorted(headway.convert.to_torch(headway.MultiHeadAttention(8, 2)))
    ['in_proj_weight', 'out_proj.weight']
    """
    _require_layer("to_torch", layer)
    matrices = [getattr(layer, f"W_{part}").T for part in "qkv"]
    if len({matrix.shape for matrix in matrices}) == 1:
        weights: Weights = {"in_proj_weight": np.concatenate(matrices)}
    else:
        weights = {f"{part}_proj_weight": matrix.copy() for part, matrix in zip("qkv", matrices)}
    if "b_o" in layer._parameters():
        weights["in_proj_bias"] = np.concatenate([getattr(layer, f"b_{part}") for part in "qkv"])
    weights["out_proj.weight"] = layer.W_o.T.copy()
    if "b_o" in layer._parameters():
        weights["out_proj.bias"] = layer.b_o.copy()
    return weights


# ---- Keras and Flax: kernels with an axis for the heads ----


def from_keras(weights: Mapping[str, Any], dropout: float = 0.0) -> MultiHeadAttention:
    """The layer with the weights of a keras.layers.MultiHeadAttention.

    weights has query/kernel, key/kernel, value/kernel (width, heads, d), attention_output/kernel (heads, d, width),
    and, with bias, query/bias, key/bias, value/bias (heads, d) and attention_output/bias (width,). The names may have
    anything in front of these two parts, and a ":0" behind them; nested dicts are fine.

    {weight.path: weight.numpy() for weight in layer.weights} gives such a dict.

    >>> import numpy as np, headway
    >>> weights = headway.convert.to_keras(headway.MultiHeadAttention(8, 2))
    >>> list(weights)
    ['query/kernel', 'key/kernel', 'value/kernel', 'attention_output/kernel']
    >>> weights["query/kernel"].shape, weights["attention_output/kernel"].shape
    ((8, 2, 4), (2, 4, 8))
    >>> headway.convert.from_keras(weights)
    MultiHeadAttention(num_hiddens=8, num_heads=2, dropout=0.0, bias=False)
    """
    _require_dict("from_keras", "weights", weights)
    return _from_kernels(_Source("from_keras", _flat("from_keras", weights)), "attention_output", dropout)


def to_keras(layer: MultiHeadAttention) -> Weights:
    """The layer's weights under the names of a keras.layers.MultiHeadAttention, in the order of its get_weights().

    Their number and order differ with use_bias: a bias follows its kernel.

    >>> import headway
    >>> list(headway.convert.to_keras(headway.MultiHeadAttention(8, 2, bias=True)))[:3]
    ['query/kernel', 'query/bias', 'key/kernel']
    """
    _require_layer("to_keras", layer)
    return _flat("to_keras", _to_kernels(layer, "attention_output"))


def from_flax(params: Mapping[str, Any], dropout: float = 0.0) -> MultiHeadAttention:
    """The layer with the parameters of a flax.linen.MultiHeadDotProductAttention.

    params is {"query": {"kernel": (width, heads, d), "bias": (heads, d)}, "key": ..., "value": ...,
    "out": {"kernel": (heads, d, width), "bias": (width,)}}, or {"params": that}; biases are optional. The layer norms
    of normalize_qk are a ValueError.

    >>> import headway
    >>> params = headway.convert.to_flax(headway.MultiHeadAttention(8, 2, bias=True))
    >>> params["out"]["kernel"].shape, params["query"]["bias"].shape
    ((2, 4, 8), (2, 4))
    >>> headway.convert.from_flax({"params": params})
    MultiHeadAttention(num_hiddens=8, num_heads=2, dropout=0.0, bias=True)
    """
    _require_dict("from_flax", "params", params)
    if set(params) == {"params"}:
        params = params["params"]
        _require_dict("from_flax", "params['params']", params)
    return _from_kernels(_Source("from_flax", _flat("from_flax", params)), "out", dropout)


def to_flax(layer: MultiHeadAttention) -> Weights:
    """The layer's weights as the parameters of a flax.linen.MultiHeadDotProductAttention, in NumPy arrays.

    >>> import headway
    >>> sorted(headway.convert.to_flax(headway.MultiHeadAttention(8, 2)))
    ['key', 'out', 'query', 'value']
    """
    _require_layer("to_flax", layer)
    return _to_kernels(layer, "out")


def _from_kernels(source: _Source, out: str, dropout: float) -> MultiHeadAttention:
    out_kernel = source.take(f"{out}/kernel", (None, None, None))
    heads, depth, width = out_kernel.shape
    if heads * depth != width:
        raise ValueError(
            f"{source.operation}: {out}/kernel has shape {out_kernel.shape}, "
            f"expected (heads, d, width) with heads * d = width"
        )
    parameters = {"W_o": out_kernel.reshape(width, width)}
    has_bias = f"{out}/bias" in source
    if has_bias:
        parameters["b_o"] = source.take(f"{out}/bias", (width,))
    for part, name in _PARTS.items():
        kernel = source.take(f"{name}/kernel", (None, heads, depth))
        parameters[f"W_{part}"] = kernel.reshape(len(kernel), width)
        if has_bias:
            parameters[f"b_{part}"] = source.take(f"{name}/bias", (heads, depth)).reshape(width)
    source.finish()
    return MultiHeadAttention._made(width, heads, dropout, parameters)


def _to_kernels(layer: MultiHeadAttention, out: str) -> Weights:
    split = (layer.num_heads, -1)
    weights: Weights = {}
    for part, name in _PARTS.items():
        matrix = getattr(layer, f"W_{part}")
        weights[name] = {"kernel": matrix.reshape(len(matrix), *split).copy()}
        if "b_o" in layer._parameters():
            weights[name]["bias"] = getattr(layer, f"b_{part}").reshape(split).copy()
    weights[out] = {"kernel": layer.W_o.reshape(*split, layer.W_o.shape[1]).copy()}
    if "b_o" in layer._parameters():
        weights[out]["bias"] = layer.b_o.copy()
    return weights


# ---- What they share ----


def _require_dict(operation: str, name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{operation}: {name} is {shown(value)}, expected a dict of arrays by name")


def _require_layer(operation: str, layer: Any) -> None:
    if not isinstance(layer, MultiHeadAttention):
        raise TypeError(f"{operation}: layer is {shown(layer)}, expected a headway.MultiHeadAttention")


class _Source:
    """The arrays of a conversion, by name; each is taken once, and none may be left."""

    def __init__(self, operation: str, arrays: Mapping[str, Any]) -> None:
        self.operation = operation
        _require_dict(operation, "state_dict", arrays)
        self._arrays = dict(arrays)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def take(self, name: str, shape: tuple[int | None, ...]) -> Any:
        """A copy of the array; None in the shape is any size."""
        if name not in self._arrays:
            raise ValueError(
                f"{self.operation}: {name} is missing, found {', '.join(sorted(self._arrays)) or 'nothing'}"
            )
        array = to_numpy(self._arrays.pop(name), self.operation, name)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"{self.operation}: {name} has type {array.dtype}, expected numbers")
        fits = array.ndim == len(shape) and all(want in (None, size) for size, want in zip(array.shape, shape))
        if not fits or 0 in array.shape:
            self.refuse(name, array, shape)
        return array.copy()

    def refuse(self, name: str, array: Any, shape: tuple[int | None, ...]) -> None:
        """The error for an array of another shape."""
        expected = ", ".join("any" if size is None else str(size) for size in shape) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{self.operation}: {name} has shape {array.shape}, expected ({expected})")

    def finish(self) -> None:
        """Whatever is left has no place in the layer."""
        if self._arrays:
            raise ValueError(f"{self.operation}: {', '.join(sorted(self._arrays))} has no place in MultiHeadAttention")


def to_numpy(array: Any, operation: str = "to_numpy", name: str = "array") -> Any:
    """Any framework's array as a NumPy array; parameters that record gradients included.

    bfloat16, which NumPy has not, becomes float32: it holds the same numbers.
    """
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        if str(array.dtype) == "torch.bfloat16":
            array = array.float()
    array = as_numpy(operation, name, array)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _flat(operation: str, tree: Mapping[str, Any]) -> Weights:
    """{"query": {"kernel": ...}} and {"layer/query/kernel:0": ...} both as {"query/kernel": ...}."""
    result: Weights = {}
    paths: dict[str, str] = {}
    for path, array in _leaves(operation, tree, ""):
        name = "/".join(path.split("/")[-2:])
        if name in paths:
            raise ValueError(f"{operation}: found {paths[name]} and {path}, expected the weights of one layer")
        paths[name], result[name] = path, array
    return result


def _leaves(operation: str, tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """The arrays of nested dicts with their paths."""
    for name, branch in tree.items():
        if not isinstance(name, str):
            raise TypeError(f"{operation}: found the key {shown(name)}, expected names")
        path = prefix + name.removesuffix(":0")
        if isinstance(branch, Mapping):
            yield from _leaves(operation, branch, path + "/")
        else:
            yield path, branch
