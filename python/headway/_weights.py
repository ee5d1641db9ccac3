"""Attention weights that somebody else computed, as layers of a page."""

from __future__ import annotations

from typing import Any

import numpy as np

from headway import _headway
from headway.convert import to_numpy

_WIDE = 2**24  # weights, of which float64 takes 128 MiB
_TOLERANCE = 0.02  # of a row's sum: weights in bfloat16 sum to 1 +- 1/256 or so


def layers_of(weights: Any) -> tuple[list[_headway.ViewLayer], int, int]:
    """One layer for each array (B, H, Sq, Sk), (H, Sq, Sk) or (Sq, Sk), and how many queries and keys they have.

    softmax(log(p)) is p: the logarithms are the bias of a call whose scores are 0.
    """
    arrays = list(weights) if isinstance(weights, list | tuple) else [weights]
    if arrays and isinstance(arrays[0], list | tuple) and len(arrays[0]) > 0 and hasattr(arrays[0][0], "shape"):
        raise TypeError(
            f"view: weights[0] is itself a {type(arrays[0]).__name__} of arrays, expected one array for each layer; "
            "of a generation, whose attentions have an entry for each step, pass one entry"
        )
    found = [_checked(n, to_numpy(array, "view", "weights"), len(arrays) > 1) for n, array in enumerate(arrays)]
    if not found:
        raise ValueError("view: weights is an empty list, expected an array or a list with one for each layer")
    layers = []
    for p in found:
        with np.errstate(divide="ignore"):
            bias = np.log(p)
        query, key = np.zeros((*p.shape[:-1], 1), p.dtype), np.zeros((*p.shape[:-2], p.shape[-1], 1), p.dtype)
        layers.append(_headway.view_layer(query, key, bias=bias))
    return layers, found[0].shape[-2], found[0].shape[-1]


def _checked(number: int, weights: Any, several: bool) -> Any:
    """The weights as (B, H, Sq, Sk), in float64 unless that is too much; every row a distribution, or 0."""
    name = f"weights[{number}]" if several else "weights"
    if not 2 <= weights.ndim <= 4:
        raise ValueError(f"view: {name} has shape {weights.shape}, expected (B, H, Sq, Sk), (H, Sq, Sk) or (Sq, Sk)")
    if weights.dtype.kind not in "biuf":
        raise TypeError(f"view: {name} has type {weights.dtype}, expected floating")
    wide = np.float64 if weights.size <= _WIDE else np.float32
    p = weights.astype(wide).reshape((1,) * (4 - weights.ndim) + weights.shape)
    if not (p >= 0).all():
        raise ValueError(f"view: {name} holds a negative number or NaN, expected weights: what a softmax gives")
    sums = p.sum(axis=-1)
    wrong = np.argwhere((np.abs(sums - 1) > _TOLERANCE) & (sums != 0))
    if len(wrong):
        row = tuple(map(int, wrong[0]))
        raise ValueError(
            f"view: the row {row[4 - weights.ndim :]} of {name} sums to {sums[row]:.3g}, expected 1 "
            "(or 0, where a query sees nothing)"
        )
    return p
