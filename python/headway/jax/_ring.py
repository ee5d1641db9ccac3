"""Attention over a sequence that is sharded among devices: keys and values go round the ring of a mesh axis."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headway.jax._attention import _DEFAULTS, _check, _integers, _static, as_arrays
from headway.jax._call import Array, Operands, ShapeDtype, Static, _call, _like, _lse_like

lax: Any = jax.lax  # parts of it have no annotations


def ring_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis_name: str,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    valid_lens: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    return_lse: bool = False,
) -> Any:
    """headway.jax.attention for arrays whose sequence axis is sharded over a mesh axis; call it inside jax.shard_map.

    query (B, H, Sq/n, D), key (B, Hkv, Sk/n, D), value (B, Hkv, Sk/n, Dv) -> (B, H, Sq/n, Dv): the blocks of one
    device, the sequence split contiguously. Options are those of headway.jax.attention for the whole sequence;
    valid_lens is (B,). While a device computes one block of keys, the next one is on its way; rows keep their sums in
    float32 (float64 for float64). Blocks that no device sees under a causal window are not sent. Gradients flow to
    query, key and value.

    A causal mask over contiguous blocks leaves the first devices idle half of the time; headway.torch.distributed and
    headway::distributed have shards that balance it.

    >>> import jax, jax.numpy as jnp, headway.jax
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> mesh = Mesh(jax.devices()[:1], ("s",))
    >>> ring = lambda q, k, v: headway.jax.ring_attention(q, k, v, axis_name="s", causal=True)
    >>> rows = P(None, None, "s")
    >>> x = jnp.ones((1, 2, 8, 4))
    >>> jax.jit(jax.shard_map(ring, mesh=mesh, in_specs=rows, out_specs=rows))(x, x, x).shape
    (1, 2, 8, 4)
    """
    inputs = as_arrays("ring_attention", {"query": query, "key": key, "value": value})
    if any(x.ndim != 4 for x in inputs.values()):
        shapes = ", ".join(str(x.shape) for x in inputs.values())
        raise ValueError(f"ring_attention: expected (B, H, S, D) arrays, found shapes {shapes}")
    if valid_lens is not None and causal == "bottom_right":
        raise NotImplementedError("ring_attention: valid_lens with causal='bottom_right' is not supported yet")
    devices = lax.psum(1, axis_name)
    others: Operands = {}
    if valid_lens is not None:
        others["valid_lens"] = _integers(valid_lens)
        if others["valid_lens"].ndim != 1:
            raise ValueError(f"ring_attention: valid_lens has shape {others['valid_lens'].shape}, expected (B,)")
    if alibi_slopes is not None:
        others["alibi_slopes"] = jnp.asarray(alibi_slopes)
    options = {**_DEFAULTS, "causal": causal, "window": window, "scale": scale, "softcap": softcap}
    described = [
        (name, (*x.shape[:2], x.shape[2] * devices, x.shape[3]), np.dtype(x.dtype)) for name, x in inputs.items()
    ]
    described += [(name, x.shape, np.dtype(x.dtype)) for name, x in others.items()]
    _check(("ring_attention", "BHSD", tuple(described), None, tuple(options.items())))  # as the whole call
    static = _static("BHSD", **options)
    results: Any = _ring(static, axis_name, inputs["query"], inputs["key"], inputs["value"], others)
    out, lse = results
    return (out, lse) if return_lse else out


# ---- Which block, when ----


class _Place:
    """Where this device's blocks stand in the whole."""

    def __init__(self, static: Static, axis_name: str, query: Array, key: Array) -> None:
        self.axis_name, self.devices = axis_name, lax.psum(1, axis_name)
        self.queries, self.keys = query.shape[2], key.shape[2]
        self.device = lax.axis_index(axis_name)
        aligned_at_start = static.causal in ("square", "top_left")
        self.offset = 0 if aligned_at_start else self.devices * (self.keys - self.queries)
        left, right = static.window
        self.left, self.right = left, 0 if static.causal else right
        # A part has its offset given, so how the whole was aligned makes no difference there.
        self.static = replace(static, causal="top_left" if static.causal else None)

    def part(self, step: int, others: Operands) -> Operands:
        """The operands that say which keys have come: those of the device `step` places before this one."""
        source = (self.device - step) % self.devices
        offset = self.device * self.queries - source * self.keys + self.offset
        operands: Operands = {"offset": offset.astype(jnp.int32)}
        if "valid_lens" in others:
            operands["valid_lens"] = jnp.clip(others["valid_lens"] - source * self.keys, 0, self.keys)
        if "alibi_slopes" in others:
            operands["alibi_slopes"] = others["alibi_slopes"]
        return operands

    def steps(self) -> int:
        """How many blocks a device looks at: up to the last distance at which some device sees a key."""
        for step in range(self.devices - 1, 0, -1):
            if any(self._sees(device, (device - step) % self.devices) for device in range(self.devices)):
                return step + 1
        return 1

    def _sees(self, device: int, source: int) -> bool:
        first = device * self.queries + self.offset  # the first query's position among the keys
        last = first + self.queries - 1
        begin, end = source * self.keys, (source + 1) * self.keys
        return (self.left is None or end > first - self.left) and (self.right is None or begin <= last + self.right)

    def shift(self, arrays: Any, places: int) -> Any:
        """Every device's arrays to the device so many places after it."""
        order = [(device, (device + places) % self.devices) for device in range(self.devices)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, order), arrays)


def _wide(x: Array) -> Array:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


# ---- Forward and backward ----


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(static: Static, axis_name: str, query: Array, key: Array, value: Array, others: Operands) -> Any:
    place = _Place(static, axis_name, query, key)
    steps = place.steps()
    wide = _wide(query)
    out_like = ShapeDtype((*query.shape[:-1], value.shape[-1]), wide.dtype)
    out: Any = None
    lse: Any = None
    blocks = (key, value)
    for step in range(steps):
        arrived = blocks
        if step + 1 < steps:
            blocks = place.shift(blocks, 1)  # nothing below depends on it: XLA sends while the part is computed
        operands = {"query": wide, "key": _wide(arrived[0]), "value": _wide(arrived[1]), **place.part(step, others)}
        results = {"out": out_like, "lse": _lse_like(place.static, wide)}
        found = _call("headway_attention", place.static, operands, results)
        out, lse = (found["out"], found["lse"]) if out is None else _merged(out, lse, found["out"], found["lse"])
    return out.astype(query.dtype), lse


def _merged(out: Array, lse: Any, more: Array, more_lse: Array) -> tuple[Array, Array]:
    """Merges the results of two parts of the keys."""
    top = jnp.maximum(lse, more_lse)
    safe = jnp.where(jnp.isneginf(top), 0, top)
    first, second = jnp.exp(lse - safe), jnp.exp(more_lse - safe)
    total = first + second
    some = jnp.where(total == 0, 1, total)
    merged = out * (first / some)[..., None] + more * (second / some)[..., None]
    return merged, jnp.where(total == 0, -jnp.inf, safe + jnp.log(some))


def _ring_forward(static: Static, axis_name: str, query: Array, key: Array, value: Array, others: Operands) -> Any:
    found: Any = _ring(static, axis_name, query, key, value, others)
    return found, (query, key, value, others, *found)


def _ring_backward(static: Static, axis_name: str, residuals: Any, cotangents: Any) -> Any:
    """Gradients of keys and values travel with their rows, and are sent home at the end."""
    query, key, value, others, out, lse = residuals
    grad_out, _ = cotangents  # lse is a result to read, not to differentiate
    place = _Place(static, axis_name, query, key)
    steps = place.steps()
    rows = {"grad_out": _wide(grad_out), "query": _wide(query), "out": _wide(out), "lse": lse}
    d_query = jnp.zeros_like(rows["query"])
    blocks = (key, value)
    sums = (jnp.zeros_like(_wide(key)), jnp.zeros_like(_wide(value)))
    for step in range(steps):
        arrived = blocks
        if step + 1 < steps:
            blocks = place.shift(blocks, 1)
        operands = {**rows, "key": _wide(arrived[0]), "value": _wide(arrived[1]), **place.part(step, others)}
        results = {name: _like(operands[name]) for name in ("query", "key", "value")}
        found = _call("headway_attention_backward", place.static, operands, results)
        d_query = d_query + found["query"]
        sums = (sums[0] + found["key"], sums[1] + found["value"])
        if step + 1 < steps:
            sums = place.shift(sums, 1)
    if steps > 1:
        sums = place.shift(sums, place.devices - steps + 1)
    gradients = (d_query.astype(query.dtype), sums[0].astype(key.dtype), sums[1].astype(value.dtype))
    return (*gradients, jax.tree.map(_no_gradient, others))


def _no_gradient(x: Array) -> Any:
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0)


_ring.defvjp(_ring_forward, _ring_backward)
