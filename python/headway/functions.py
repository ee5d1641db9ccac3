"""The functions that tutorials write by hand, with their names and arguments: NumPy in, NumPy out.

Lists and integers are computed in float64, as NumPy would; everything else in its own type.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from headway._arguments import as_numpy, whole_number
from headway._headway import attention


def compute_qkv(X: Any, W_q: Any, W_k: Any, W_v: Any) -> tuple[Any, Any, Any]:
    """Query, key and value: X times each of the three weights.

    X (S, d_model), or with more axes in front; W_q, W_k, W_v (d_model, d_out).

    >>> import numpy as np, headway
    >>> X = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    >>> Q, K, V = headway.compute_qkv(X, np.eye(4), np.eye(4), 2 * np.eye(4))
    >>> V
    array([[ 2.,  4.,  6.,  8.],
           [10., 12., 14., 16.]])
    """
    X, W_q, W_k, W_v = same_type("compute_qkv", X=X, W_q=W_q, W_k=W_k, W_v=W_v)
    for name, weight in (("W_q", W_q), ("W_k", W_k), ("W_v", W_v)):
        if X.ndim < 1 or weight.ndim != 2 or X.shape[-1] != weight.shape[0]:
            raise ValueError(
                f"compute_qkv: {name} has shape {weight.shape}, X has {X.shape}: "
                f"expected {'(d_model, d_out)' if X.ndim < 1 else f'({X.shape[-1]}, d_out)'}"
            )
    products = (X @ weight for weight in (W_q, W_k, W_v))
    # Some of NumPy's types, bfloat16 among them, multiply to a wider one.
    return tuple(product if product.dtype == X.dtype else product.astype(X.dtype) for product in products)


def self_attention(Q: Any, K: Any, V: Any) -> Any:
    """softmax(Q K^T / sqrt(d_k)) V for one head.

    Q (Sq, d_k), K (Sk, d_k), V (Sk, d_v) -> (Sq, d_v); with batch and heads in front as for attention.

    >>> import numpy as np, headway
    >>> Q = np.array([[1, 2], [3, 4]])
    >>> headway.self_attention(Q, Q, Q).round(3)
    array([[2.972, 3.972],
           [3.   , 4.   ]])
    """
    try:
        return attention(*same_type("self_attention", Q=Q, K=K, V=V))
    except Exception as error:
        raise renamed(error, "self_attention", query="Q", key="K", value="V") from None


def multi_head_attention(Q: Any, K: Any, V: Any, n_heads: int) -> Any:
    """Attention of n_heads heads side by side in the last axis, joined again.

    Q (B, Sq, d_model), K and V (B, Sk, d_model) -> (B, Sq, d_model); all without B too.

    >>> import numpy as np, headway
    >>> X = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    >>> headway.multi_head_attention(X, X, X, n_heads=2).round(4)
    array([[4.9992, 5.9992, 7.    , 8.    ],
           [5.    , 6.    , 7.    , 8.    ]])
    """
    Q, K, V = same_type("multi_head_attention", Q=Q, K=K, V=V)
    n_heads = whole_number("multi_head_attention", "the number of heads", n_heads)
    for name, array in (("Q", Q), ("K", K), ("V", V)):
        if array.ndim not in (2, 3) or array.ndim != Q.ndim:
            raise ValueError(
                f"multi_head_attention: {name} has shape {tuple(array.shape)}, "
                "expected (batch, length, d_model) or (length, d_model), and Q, K, V alike"
            )
        check_heads("multi_head_attention", f"{name} has d_model", array.shape[-1], n_heads)
    if Q.ndim == 2:
        return multi_head_attention(Q[None], K[None], V[None], n_heads)[0]
    try:
        joined, _ = attend(*(split_heads(array, n_heads) for array in (Q, K, V)))
    except Exception as error:
        raise renamed(error, "multi_head_attention", query="Q", key="K", value="V") from None
    return joined


# ---- What the layer uses too ----


def same_type(operation: str, **arrays: Any) -> tuple[Any, ...]:
    """The arrays in the one floating type that NumPy would compute in. Arrays of other libraries stay as they are."""
    for name, array in arrays.items():
        if _is_foreign(array) and not (hasattr(array, "ndim") and hasattr(array, "shape")):
            raise TypeError(f"{operation}: {name} is a {type(array).__name__}, expected an array")
    if any(_is_foreign(array) for array in arrays.values()):
        return tuple(arrays.values())
    converted = {name: as_numpy(operation, name, array) for name, array in arrays.items()}
    for name, array in converted.items():
        if not (array.dtype.kind in "biuf" or array.dtype.name == "bfloat16"):
            raise TypeError(f"{operation}: {name} has type {array.dtype}, expected floating or integer numbers")
    kind = np.result_type(*converted.values())
    if kind.kind in "biu":
        kind = np.dtype(np.float64)
    return tuple(array.astype(kind, copy=False) for array in converted.values())


def _is_foreign(array: Any) -> bool:
    return not isinstance(array, np.ndarray) and hasattr(array, "__dlpack__")


def check_heads(operation: str, what: str, width: int, heads: int) -> None:
    """ValueError, with both numbers, unless the width divides into heads."""
    if whole_number(operation, what.removesuffix(" is"), width) < 0:
        raise ValueError(f"{operation}: {what} {width}, expected 0 or more")
    if whole_number(operation, "the number of heads", heads) < 1:
        raise ValueError(f"{operation}: the number of heads is {heads}, expected 1 or more")
    if width % heads != 0:
        raise ValueError(f"{operation}: {what} {width}, expected a multiple of the {heads} heads")


def renamed(error: Exception, operation: str, **names: str) -> Exception:
    """An error of attention with the calling operation's name and its names for the arguments."""
    found = str(error)
    if not found.startswith("attention: "):
        return error
    text = re.sub(rf"\b({'|'.join(names)})\b", lambda word: names[word[0]], found.removeprefix("attention: "))
    return type(error)(f"{operation}: {text}")


def split_heads(X: Any, heads: int) -> Any:
    """(B, S, heads * d) -> (B, heads, S, d), as a view."""
    batch, length, width = X.shape
    return X.reshape(batch, length, heads, width // heads).swapaxes(1, 2)


def attend(query: Any, key: Any, value: Any, return_weights: bool = False, **options: Any) -> tuple[Any, ...]:
    """Attention of (B, heads, S, d) arrays: the heads joined (B, Sq, heads * d), lse, and the weights if asked for."""
    batch, heads, length, _ = query.shape
    width = value.shape[-1]
    asked: dict[str, Any] = {"return_lse": True, "return_weights": return_weights, **options}
    if not isinstance(query, np.ndarray):
        out, *others = attention(query, key, value, **asked)
        joined = out.swapaxes(1, 2)
    else:  # written where it belongs, so that joining the heads moves nothing
        joined = np.empty((batch, length, heads, width), query.dtype)
        _, *others = attention(query, key, value, out=joined.swapaxes(1, 2), **asked)
    return (joined.reshape(batch, length, heads * width), *reversed(others))
