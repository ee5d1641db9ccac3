"""Attention in JAX's own operations, which store the (Sq, Sk) matrix: only the gradients' derivatives use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from headway.jax._call import Array, Operands, Static


def attention(static: Static, operands: Operands, keep: Array | None) -> Array:
    """out, in the layout of the operands; keep (B, H, Sq, Sk) is what dropout multiplies the weights by."""
    query, key, value = (static.heads_first(operands[name]) for name in ("query", "key", "value"))
    kind = jnp.promote_types(query.dtype, jnp.float32)
    group = query.shape[1] // key.shape[1] if key.shape[1] else 1
    query, key, value = (array.astype(kind) for array in (query, *(jnp.repeat(x, group, 1) for x in (key, value))))
    allowed, distance = _pairs(static, operands, (*query.shape[:3], key.shape[2]))
    bias = operands["bias"].astype(kind) if "bias" in operands else None
    if bias is not None:
        allowed = allowed & ~jnp.isneginf(bias)
    # What a key that no row attends to holds must not show; 0 times NaN would.
    seen = allowed.any(-2)[..., None]
    key, value = jnp.where(seen, key, 0), jnp.where(seen, value, 0)
    scale = static.scale if static.scale is not None else 1 / np.sqrt(max(query.shape[-1], 1))
    exact = jax.lax.Precision.HIGHEST
    scores = scale * jnp.einsum("bhid,bhjd->bhij", query, key, precision=exact)
    if static.softcap is not None:
        scores = static.softcap * jnp.tanh(scores / static.softcap)
    if bias is not None:
        scores = scores + jnp.where(jnp.isneginf(bias), 0, bias)
    if "alibi_slopes" in operands:
        scores = scores - operands["alibi_slopes"].astype(kind)[:, None, None] * distance[:, None]
    weights = _softmax(jnp.where(allowed, scores, 0), jnp.broadcast_to(allowed, scores.shape), operands.get("sinks"))
    if keep is not None:
        weights = weights * keep.astype(kind)
    out = jnp.einsum("bhij,bhjd->bhid", weights, value, precision=exact)
    return static.heads_first(out.astype(operands["query"].dtype))


def _pairs(static: Static, operands: Operands, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Which pairs the masks allow (B, 1 or H, Sq, Sk), and how far apart they are (B, Sq, Sk)."""
    batch, _, queries, keys = shape
    lens = operands.get("valid_lens")
    rows = operands["query_lens"] if "query_lens" in operands else jnp.full(batch, queries)
    if static.causal in ("square", "top_left"):
        offset: Any = jnp.zeros(batch, int)
    elif static.causal == "bottom_right":
        offset = (lens if lens is not None and lens.ndim == 1 else keys) - rows
    else:
        offset = jnp.full(batch, keys - queries)
    place = jnp.arange(queries)[:, None] + offset[:, None, None]
    key = jnp.arange(keys)
    # A side wider than all positions hides nothing, and need not fit JAX's integers.
    left, right = (None if side is None else min(side, queries + keys) for side in static.window)
    allowed = jnp.broadcast_to(jnp.arange(queries)[:, None] < rows[:, None, None], (batch, queries, keys))
    allowed = allowed & (key <= place if static.causal else True)
    allowed = allowed & (True if left is None else key >= place - left)
    allowed = allowed & (True if right is None else key <= place + right)
    if lens is not None:
        allowed = allowed & (key < (lens[:, None, None] if lens.ndim == 1 else lens[:, :, None]))
    allowed = allowed[:, None]
    if "spans" in operands:
        spans = operands["spans"]
        inside = ((key >= spans[..., :1]) & (key < spans[..., 1:])).any(-2)  # of each entry
        allowed = allowed & jnp.repeat(inside, static.span_rows, 2)[:, :, :queries]
    return allowed & operands["mask"] if "mask" in operands else allowed, jnp.abs(place - key)


def _softmax(scores: Array, allowed: Array, sinks: Array | None) -> Array:
    """Over the allowed keys and the sink; a row with neither is 0."""
    top = jnp.max(scores, -1, keepdims=True, where=allowed, initial=-jnp.inf)
    sink = None if sinks is None else sinks.astype(scores.dtype)[:, None, None]
    top = top if sink is None else jnp.maximum(top, sink)
    top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), 0, top))
    raised = jnp.where(allowed, jnp.exp(jnp.where(allowed, scores - top, 0)), 0)
    total = raised.sum(-1, keepdims=True) + (0 if sink is None else jnp.exp(sink - top))
    return raised / jnp.where(total == 0, 1, total)
