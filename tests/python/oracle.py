"""Attention as the contract writes it, in NumPy float64: what every test compares with. It has nothing of headway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


def philox(counter: np.ndarray, seed: int) -> np.ndarray:
    """Philox4x32-10: four words (..., 4) for counters (..., 4)."""
    words = counter.astype(np.uint64)
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    for _ in range(10):
        a, b = words[..., 0] * np.uint64(0xD2511F53), words[..., 2] * np.uint64(0xCD9E8D57)
        words = np.stack(
            [(b >> half) ^ words[..., 1] ^ key[0], b & low, (a >> half) ^ words[..., 3] ^ key[1], a & low], -1
        )
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    return words


def kept(shape: tuple[int, ...], dropout: float, seed: int) -> np.ndarray:
    """1/(1-p) where dropout keeps a weight, 0 where it drops one; (B, H, Sq, Sk)."""
    if dropout == 1:
        return np.zeros(shape)
    b, h, i, j = np.indices(shape)
    words = philox(np.stack([j // 4, i, h, b], -1), seed)
    word = np.take_along_axis(words, (j % 4)[..., None], -1)[..., 0]
    return (word >= np.uint64(round(dropout * 2**32))) / (1 - dropout)


@dataclass
class Answer:
    out: np.ndarray
    weights: np.ndarray
    lse: np.ndarray
    stages: dict[str, np.ndarray]
    keep: np.ndarray
    slope: np.ndarray  # of softcap, at each score


def four(array: Any, rank: int) -> np.ndarray:
    """(B, S, D) and (S, D) with their missing axes."""
    array = np.asarray(array, np.float64)
    return {4: array, 3: array[:, None], 2: array[None, None]}[rank] if array.ndim == rank else array


def matrix(array: Any, rank: int, shape: tuple[int, ...]) -> np.ndarray:
    """A mask or a bias, broadcast to (B, H, Sq, Sk)."""
    array = np.asarray(array)
    batch, _, queries, keys = shape
    if rank == 3:
        return np.broadcast_to(np.broadcast_to(array, (batch, queries, keys))[:, None], shape)
    if rank == 2:
        return np.broadcast_to(np.broadcast_to(array, (queries, keys))[None, None], shape)
    return np.broadcast_to(array, shape)


def allowed_pairs(shape, rank, mask, bias, causal, window, valid_lens, query_lens) -> tuple[np.ndarray, np.ndarray]:
    """Which pairs count (B, H, Sq, Sk), and each batch item's offset."""
    batch, _, queries, keys = shape
    lens = None if valid_lens is None else np.asarray(valid_lens, np.int64)
    if lens is not None and rank == 2 and lens.shape != (1,) and lens.ndim < 2:
        lens = lens[None]
    rows = np.full(batch, queries) if query_lens is None else np.asarray(query_lens).reshape(batch)
    offset = np.full(batch, keys - queries)
    if causal in (True, "top_left"):
        offset = np.zeros(batch, int)
    elif causal == "bottom_right":
        ends = lens if lens is not None and lens.ndim == 1 else np.full(batch, keys)
        offset = ends - rows
    i, j = np.arange(queries)[:, None], np.arange(keys)
    at = i + offset[:, None, None]
    allowed = np.ones((batch, queries, keys), bool)
    if causal:
        allowed &= j <= at
    left, right = window or (None, None)
    if left is not None:
        allowed &= j >= at - left
    if right is not None:
        allowed &= j <= at + right
    if lens is not None:
        allowed &= j < (lens[:, None, None] if lens.ndim == 1 else lens[:, :, None])
    allowed &= i < rows[:, None, None]
    allowed = np.broadcast_to(allowed[:, None], shape)
    if mask is not None:
        allowed = allowed & matrix(mask, rank, shape)
    if bias is not None:
        allowed = allowed & (matrix(bias, rank, shape) != -np.inf)
    return allowed, offset


def attention(
    query,
    key,
    value,
    *,
    mask=None,
    bias=None,
    causal=False,
    window=None,
    valid_lens=None,
    query_lens=None,
    scale=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    dropout=0.0,
    seed=None,
) -> Answer:
    """Everything in (B, H, ...), whatever the rank of the inputs."""
    rank = np.ndim(query)
    q, k, v = (four(array, rank) for array in (query, key, value))
    batch, heads, queries, width = q.shape
    group = heads // k.shape[1] if k.shape[1] else 1
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    shape = (batch, heads, queries, k.shape[2])
    scale = (1 / np.sqrt(width) if width else 1.0) if scale is None else scale
    allowed, offset = allowed_pairs(shape, rank, mask, bias, causal, window, valid_lens, query_lens)

    stages = {"scaled": scale * (q @ k.swapaxes(-1, -2))}
    capped = stages["scaled"] if softcap is None else softcap * np.tanh(stages["scaled"] / softcap)
    slope = np.ones(shape) if softcap is None else 1 - (capped / softcap) ** 2
    stages["capped"] = capped
    scores = capped
    if bias is not None:
        scores = scores + np.asarray(matrix(bias, rank, shape), np.float64)
    if alibi_slopes is not None:
        i, j = np.arange(queries)[:, None], np.arange(shape[3])
        distance = np.abs(i + offset[:, None, None] - j)[:, None]
        scores = scores - np.asarray(alibi_slopes, np.float64).reshape(heads)[:, None, None] * distance
    scores = np.where(allowed, scores, -np.inf)
    stages["biased"] = scores

    rows = np.full(batch, queries) if query_lens is None else np.asarray(query_lens).reshape(batch)
    padding = np.broadcast_to((np.arange(queries) >= rows[:, None])[:, None], shape[:3])
    sink = np.full(heads, -np.inf) if sinks is None else np.asarray(sinks, np.float64).reshape(heads)
    top = np.maximum(scores.max(-1, initial=-np.inf), sink[:, None])
    safe = np.where(np.isneginf(top), 0, top)
    total = np.exp(scores - safe[..., None]).sum(-1) + np.exp(sink[:, None] - safe)
    with np.errstate(divide="ignore"):
        lse = np.where(padding, -np.inf, np.log(total) + safe)
    weights = np.where(allowed, np.exp(scores - np.where(np.isneginf(lse), 0, lse)[..., None]), 0)
    stages["weights"] = weights
    keep = kept(shape, dropout, seed) if dropout else np.ones(shape)
    return Answer((weights * keep) @ v, weights, lse, stages, keep, slope)


def gradients(grad_out, query, key, value, **options) -> dict[str, np.ndarray]:
    """The gradients of sum(grad_out * out), in the shapes of what they belong to."""
    rank = np.ndim(query)
    q, k, v, g = (four(array, rank) for array in (query, key, value, grad_out))
    heads, kv_heads, width = q.shape[1], k.shape[1], q.shape[3]
    group = heads // kv_heads
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = options.get("scale")
    scale = 1 / np.sqrt(width) if scale is None else scale
    answer = attention(query, key, value, **options)
    rows = options.get("query_lens")
    if rows is not None:
        live = np.arange(q.shape[2]) < np.asarray(rows).reshape(-1, 1)
        g = np.where(live[:, None, :, None], g, 0)
    d_weights = (g @ v.swapaxes(-1, -2)) * answer.keep
    delta = (answer.weights * d_weights).sum(-1)
    d_scores = answer.weights * (d_weights - delta[..., None])
    d_scaled = d_scores * answer.slope * scale

    def grouped(array):
        return array.reshape(array.shape[0], kv_heads, group, *array.shape[2:]).sum(2)

    result = {
        "query": (d_scaled @ k).reshape(np.shape(query)),
        "key": grouped(d_scaled.swapaxes(-1, -2) @ q).reshape(np.shape(key)),
        "value": grouped((answer.weights * answer.keep).swapaxes(-1, -2) @ g).reshape(np.shape(value)),
    }
    if options.get("bias") is not None:
        result["bias"] = summed_to(d_scores, rank, np.shape(options["bias"]))
    if options.get("sinks") is not None:
        sink = np.asarray(options["sinks"], np.float64).reshape(heads)
        with np.errstate(invalid="ignore"):
            share = np.where(np.isneginf(answer.lse), 0, np.exp(sink[:, None] - answer.lse))
        result["sinks"] = -(share * delta).sum((0, 2)).reshape(np.shape(options["sinks"]))
    return result


def summed_to(d_scores: np.ndarray, rank: int, shape: tuple[int, ...]) -> np.ndarray:
    """(B, H, Sq, Sk) summed over the axes along which a bias of this shape was repeated."""
    d_scores = {4: d_scores, 3: d_scores[:, 0], 2: d_scores[0, 0]}[rank]
    d_scores = d_scores.sum(tuple(range(d_scores.ndim - len(shape))))
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return d_scores.sum(axes, keepdims=True).reshape(shape)
