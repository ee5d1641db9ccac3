"""Attention over a sequence that is sharded among devices: keys and values go round the ring of a mesh axis."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headway._headway import Mask
from headway.jax._attention import _DEFAULTS, _as_array, _check, _integers, _parts_of, _static, _to_rank, as_arrays
from headway.jax._call import Array, Operands, ShapeDtype, Static, _call, _like, _lse_like, _varying_axes

lax: Any = jax.lax  # parts of it have no annotations


def ring_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis_name: str,
    mask: Any = None,
    bias: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    valid_lens: Any = None,
    query_lens: Any = None,
    spans: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    return_lse: bool = False,
) -> Any:
    """headway.jax.attention for arrays whose sequence axis is sharded over a mesh axis; call it inside jax.shard_map.

    query (B, H, Sq/n, D), key (B, Hkv, Sk/n, D), value (B, Hkv, Sk/n, Dv) -> (B, H, Sq/n, Dv): the blocks of one
    device, the sequence split contiguously. Options are those of headway.jax.attention for the whole sequence, also
    structured masks (headway.masks). Arrays with a row for each query have the rows of this device: mask and bias
    (B, H, Sq/n, Sk), spans (B, H, Sq/n, R, 2), valid_lens (B, Sq/n); axes of mask, bias and spans may be 1. While a
    device computes one block of keys, the next one is on its way; rows keep their sums in float32 (float64 for
    float64). Blocks that no device sees under a causal window are not sent. Gradients flow to query, key, value, bias
    and sinks. There is no dropout, which goes by the places of batch items and heads in the whole: a device does not
    know them.

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
    by_length = query_lens is not None or (valid_lens is not None and jnp.ndim(valid_lens) == 1)
    if by_length and causal == "bottom_right":
        raise NotImplementedError(
            "ring_attention: lengths of batch items with causal='bottom_right' are not supported: each item would have "
            "its own offset"
        )
    devices = lax.psum(1, axis_name)
    whole = {name: jax.ShapeDtypeStruct((*x.shape[:2], x.shape[2] * devices, x.shape[3]), x.dtype)
             for name, x in inputs.items()}  # fmt: skip
    others: Operands = {}
    if isinstance(mask, Mask):
        if spans is not None:
            raise ValueError("ring_attention: found spans and a structured mask, expected one")
        others |= _rows_of_mask(mask, inputs["query"].shape[2], whole, lax.axis_index(axis_name))
        mask = None
    given = {"mask": mask, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    others |= {name: _as_array("ring_attention", name, x) for name, x in given.items() if x is not None}
    given = {"valid_lens": valid_lens, "query_lens": query_lens, "spans": spans}
    others |= {name: _integers("ring_attention", name, x) for name, x in given.items() if x is not None}
    options = {**_DEFAULTS, "causal": causal, "window": window, "scale": scale, "softcap": softcap}
    described = [(name, x.shape, np.dtype(x.dtype)) for name, x in whole.items()]
    described += [
        (name, _whole_shape(name, x, inputs["query"], devices), np.dtype(x.dtype)) for name, x in others.items()
    ]
    _check(("ring_attention", "BHSD", tuple(described), None, tuple(options.items())))  # as the whole call
    for name, axes in (("mask", 4), ("bias", 4), ("spans", 5)):
        if name in others:
            others[name] = _to_rank(others[name], axes)
    static = _static("BHSD", **options)
    results: Any = _ring(static, axis_name, inputs["query"], inputs["key"], inputs["value"], others)
    out, lse = results
    return (out, lse) if return_lse else out


_ROW_AXIS = {"mask": -2, "bias": -2, "spans": -3, "valid_lens": 1}  # of arrays that may have a row for each query


def _whole_shape(name: str, x: Array, query: Array, devices: int) -> tuple[int, ...]:
    """The shape for all devices of an array with the rows of one."""
    shape, axis = list(x.shape), _ROW_AXIS.get(name)
    if axis is not None and -len(shape) <= axis < len(shape) and shape[axis] == query.shape[2] > 1:
        shape[axis] *= devices
    return tuple(shape)


def _rows_of_mask(mask: Mask, rows: int, whole: dict[str, Any], device: Array) -> Operands:
    """This device's rows of the arrays that a structured mask becomes."""
    parts = _parts_of("ring_attention", "BHSD", mask, whole, None)
    found: Operands = {}
    for name in ("spans", "mask"):
        if parts.get(name) is not None:
            array = jnp.asarray(parts[name])
            if name == "spans":
                array = jnp.repeat(array, parts["span_rows"], axis=2)
            axis = array.ndim + _ROW_AXIS[name]
            found[name] = (
                array if array.shape[axis] == 1 else lax.dynamic_slice_in_dim(array, device * rows, rows, axis)
            )
    return found


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
        for name, x in others.items():
            if name in ("valid_lens", "spans"):
                operands[name] = jnp.clip(x - self.first_key(step), 0, self.keys)
            elif name == "query_lens":
                operands[name] = jnp.clip(x - self.device * self.queries, 0, self.queries)
            elif name in ("mask", "bias"):
                operands[name] = self.columns(x, step)
            elif name == "alibi_slopes":
                operands[name] = x
        return operands  # a sink counts once, at the end

    def first_key(self, step: int) -> Array:
        """In the whole sequence, of the keys that have come."""
        return (self.device - step) % self.devices * self.keys

    def columns(self, matrix: Array, step: int) -> Array:
        """Those of the keys that have come."""
        if matrix.shape[3] == 1:
            return matrix
        return lax.dynamic_slice_in_dim(matrix, self.first_key(step), self.keys, 3)

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
        part = _part(place.static, operands, results)
        out, lse = part if out is None else _merged(out, lse, *part)
    if "sinks" in others:
        total = jnp.logaddexp(lse, _sink_scores(place, others, lse))
        safe = jnp.where(jnp.isneginf(total), 0, total)
        out, lse = out * jnp.exp(lse - safe)[..., None], total
    undefined = lse == _lowest(lse)  # all scores of the row are -inf
    out, lse = jnp.where(undefined[..., None], jnp.nan, out), jnp.where(undefined, jnp.nan, lse)
    return out.astype(query.dtype), lse


def _sink_scores(place: _Place, others: Operands, lse: Array) -> Array:
    """Of every row; padding has no sink."""
    scores = jnp.broadcast_to(others["sinks"].astype(lse.dtype)[:, None], lse.shape)
    if "query_lens" not in others:
        return scores
    rows = place.device * place.queries + jnp.arange(place.queries)
    return jnp.where(rows < others["query_lens"][:, None, None], scores, -jnp.inf)


def _lowest(lse: Array) -> Any:
    return jnp.finfo(lse.dtype).min


def _part(static: Static, operands: Operands, results: dict[str, Any]) -> tuple[Array, Array]:
    """out and lse of a part that others are merged with. A row whose scores are all -inf (from infinite inputs) has
    the lowest lse, not NaN: keys of other parts may have finite scores, beside which these weigh 0."""
    found = _call("headway_attention", static, operands, results)
    if found["lse"].size == 0:
        return found["out"], found["lse"]

    def beside_sink(out: Array, lse: Array) -> tuple[Array, Array]:
        """Beside the finite score of a sink such rows are finite; NaN and +inf still give NaN."""
        sinks = jnp.zeros(operands["query"].shape[1], operands["query"].dtype)
        again = _call("headway_attention", static, {**operands, "sinks": sinks}, results)
        only = jnp.isnan(lse) & ~jnp.isnan(again["lse"])
        return jnp.where(only[..., None], again["out"], out), jnp.where(only, _lowest(lse), lse)

    unsure: Any = jnp.isnan(found["lse"]).any()
    merged: Any = lax.cond(unsure, beside_sink, lambda out, lse: (out, lse), found["out"], found["lse"])
    return merged


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
    d_bias = jnp.zeros_like(_wide(others["bias"])) if "bias" in others else None
    names = ("query", "key", "value") if d_bias is None else ("query", "key", "value", "bias")
    blocks = (key, value)
    sums = (jnp.zeros_like(_wide(key)), jnp.zeros_like(_wide(value)))
    for step in range(steps):
        arrived = blocks
        if step + 1 < steps:
            blocks = place.shift(blocks, 1)
        operands = {**rows, "key": _wide(arrived[0]), "value": _wide(arrived[1]), **place.part(step, others)}
        if d_bias is not None:
            operands["bias"] = _wide(operands["bias"])
        found = _call("headway_attention_backward", place.static, operands, {n: _like(operands[n]) for n in names})
        d_query = d_query + found["query"]
        if d_bias is not None:
            more = place.columns(d_bias, step) + found["bias"]
            whole = d_bias.shape[3] == 1
            d_bias = more if whole else lax.dynamic_update_slice_in_dim(d_bias, more, place.first_key(step), 3)
        sums = (sums[0] + found["key"], sums[1] + found["value"])
        if step + 1 < steps:
            sums = place.shift(sums, 1)
    if steps > 1:
        sums = place.shift(sums, place.devices - steps + 1)
    gradients = (d_query.astype(query.dtype), sums[0].astype(key.dtype), sums[1].astype(value.dtype))
    of_others = {name: _no_gradient(x) for name, x in others.items()}
    if d_bias is not None:
        of_others["bias"] = _shared(d_bias, others["bias"])
    if "sinks" in others:
        share = jnp.where(jnp.isneginf(lse), 0, jnp.exp(_sink_scores(place, others, lse) - lse))
        change = (rows["grad_out"] * rows["out"]).sum(-1)
        of_others["sinks"] = _shared(-jnp.where(share == 0, 0, share * change).sum((0, 2)), others["sinks"])
    return (*gradients, of_others)


def _shared(gradient: Array, like: Array) -> Array:
    """The sum over the devices that hold the same array."""
    axes = _varying_axes({"": gradient}) - _varying_axes({"": like})
    return (lax.psum(gradient, tuple(sorted(axes))) if axes else gradient).astype(like.dtype)


def _no_gradient(x: Array) -> Any:
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0)


_ring.defvjp(_ring_forward, _ring_backward)
