"""The compiled calls and their derivatives. Arrays here have four axes, in one of two orders:

BHSD   query (B, H, Sq, D), key (B, Hkv, Sk, D), value (B, Hkv, Sk, Dv), out (B, H, Sq, Dv)
BSHD   query (B, Sq, H, D), key (B, Sk, Hkv, D), value (B, Sk, Hkv, Dv), out (B, Sq, H, Dv)
both   lse (B, H, Sq), weights (B, H, Sq, Sk)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from headway import _headway
from headway.jax import _plain, _sharded

Array: TypeAlias = jax.Array
Operands: TypeAlias = dict[str, Array]  # query, key, value, and those of mask, bias, ... that are given
ShapeDtype: Any = jax.ShapeDtypeStruct  # it has no annotations
Layout: TypeAlias = Literal["BHSD", "BSHD"]

for _platform, _handlers in _headway.xla_handlers.items():
    for _name, _handler in _handlers.items():
        jax.ffi.register_ffi_target(_name, _handler, platform=_platform)


@dataclass(frozen=True)
class Static:
    """What a compiled call knows in advance."""

    layout: Layout
    causal: str | None = None  # "square", "top_left" or "bottom_right"
    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    engine: str | None = None
    span_rows: int = 1

    def attributes(self) -> dict[str, Any]:
        """As the handler reads them; what is not given is absent."""
        given = {
            "layout": self.layout,
            "causal": self.causal,
            "window_left": _int64(self.window[0]),
            "window_right": _int64(self.window[1]),
            "scale": _float64(self.scale),
            "softcap": _float64(self.softcap),
            "dropout": _float64(self.dropout),
            "engine": self.engine,
            "span_rows": _int64(self.span_rows),
        }
        return {name: value for name, value in given.items() if value is not None}

    def without_dropout(self) -> Static:
        """The same for a pass over the weights themselves."""
        return replace(self, dropout=0.0)

    def heads_first(self, array: Array) -> Array:
        """From this order to (B, H, S, D), or back: it is one exchange of axes."""
        return array if self.layout == "BHSD" else jnp.swapaxes(array, 1, 2)


def _int64(value: int | None) -> Any:
    return None if value is None else np.int64(min(value, np.iinfo(np.int64).max))


def _float64(value: float | None) -> Any:
    return None if value is None else np.float64(value)


def _call(target: str, static: Static, operands: Operands, results: dict[str, Any]) -> Operands:
    """The results by name, computed where sharded operands lie."""
    plain = _plain_call(target, static, tuple(operands), tuple(results))
    axes = _varying_axes(operands)
    if _sharded.applies(operands, bool(axes)):
        return dict(zip(results, _sharded.call(plain, static, operands, results)))
    return dict(zip(results, _varying(plain(*operands.values(), shapes=tuple(results.values())), axes)))


@functools.lru_cache(maxsize=1024)
def _plain_call(target: str, static: Static, operands: tuple[str, ...], results: tuple[str, ...]) -> Any:
    """Each mapped axis of a vmap comes in front of every operand, and the handler knows what to do with it."""

    def run(*arrays: Array, shapes: tuple[Any, ...]) -> Any:
        function = jax.ffi.ffi_call(target, shapes, vmap_method="expand_dims")
        return function(*arrays, operands=" ".join(operands), results=" ".join(results), **static.attributes())

    return run


def _varying_axes(operands: Operands) -> set[str]:
    """The axes of a jax.shard_map around the call along which some operand differs."""
    axes: set[str] = set()
    for operand in operands.values():
        found = jax.typeof(operand)
        axes |= getattr(getattr(found, "manual_axis_type", None), "varying", getattr(found, "vma", frozenset()))
    return axes


def _varying(results: Any, axes: set[str]) -> Any:
    """Inside jax.shard_map, results differ between devices where an operand does; JAX would take them for equal."""
    if not axes:
        return results
    lax: Any = jax.lax
    if hasattr(lax, "pcast"):
        return [lax.pcast(result, tuple(sorted(axes)), to="varying") for result in results]
    return [lax.pvary(result, tuple(sorted(axes))) for result in results]  # its name before


def _like(array: Array) -> Any:
    return ShapeDtype(array.shape, array.dtype)


def _lse_like(static: Static, query: Array) -> Any:
    dtype = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    batch, first, second, _ = query.shape
    return ShapeDtype((batch, first, second) if static.layout == "BHSD" else (batch, second, first), dtype)


# ---- Gradients ----


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """Those of bias and sinks whose gradient is asked for."""

    names: tuple[str, ...]


def _split(operands: dict[str, Any]) -> tuple[Operands, _Wanted]:
    """The arrays of a forward pass that will be differentiated, and what of them varies."""
    if "alibi_slopes" in operands and operands["alibi_slopes"].perturbed:
        raise ValueError(
            "attention: alibi_slopes is differentiated, and has no gradient: pass learnt slopes as a bias, or "
            "jax.lax.stop_gradient(alibi_slopes)"
        )
    wanted = _Wanted(tuple(name for name in ("bias", "sinks") if name in operands and operands[name].perturbed))
    return {name: operand.value for name, operand in operands.items()}, wanted


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gradients(static: Static, wanted: _Wanted, operands: Operands) -> Operands:
    """The operands are those of the forward pass, and grad_out, out, lse."""
    results = {name: _like(operands[name]) for name in ("query", "key", "value", *wanted.names)}
    return _call("headway_attention_backward", static, operands, results)


@_gradients.defjvp
def _gradients_tangent(static: Static, wanted: _Wanted, primals: Any, tangents: Any) -> tuple[Operands, Operands]:
    """The gradient's own derivative, in plain JAX. out and lse follow from the rest, and so do their tangents."""
    (operands,), (changes,) = primals, tangents
    keep = _kept(static, operands) if static.dropout > 0 else None
    constant = {name: x for name, x in operands.items() if not jnp.issubdtype(x.dtype, jnp.floating)}
    varying = {name: x for name, x in operands.items() if name not in (*constant, "out", "lse")}

    def plain(varying: Operands) -> Operands:
        inputs = {name: varying[name] for name in ("query", "key", "value", *wanted.names)}
        others = constant | varying
        _, pull = jax.vjp(lambda x: _plain.attention(static, others | x, keep), inputs)
        (gradients,) = pull(varying["grad_out"])
        return {name: gradients[name] for name in inputs}

    _, tangent = jax.jvp(plain, (varying,), ({name: changes[name] for name in varying},))
    return _gradients(static, wanted, operands), tangent


def _kept(static: Static, operands: Operands) -> Array:
    """What dropout multiplies the weights by (B, H, Sq, Sk): the library's answer for equal scores and a unit value."""
    query, key = (static.heads_first(operands[name]) for name in ("query", "key"))
    keys = key.shape[2]
    value = jnp.broadcast_to(jnp.eye(keys, dtype=jnp.float32), (*key.shape[:3], keys))
    zeros = {"query": jnp.zeros(query.shape, jnp.float32), "key": jnp.zeros(key.shape, jnp.float32)}
    drop = Static("BHSD", dropout=static.dropout)
    found: Any = attend(drop, {**zeros, "value": value, "seed": operands["seed"]})
    kept: Array = keys * found[0]
    return kept


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _lse_part(static: Static, wanted: _Wanted, operands: Operands) -> Operands:
    """_gradients for an out that is not attention's."""
    return _gradients(static, wanted, operands)


@_lse_part.defjvp
def _no_tangent(static: Static, wanted: _Wanted, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError("attention: the second derivative of lse is not implemented")


def _cotangents(operands: Operands, parts: list[Operands]) -> dict[str, Any]:
    """The sum of the parts for each operand; None where nothing flows."""
    result: dict[str, Any] = dict.fromkeys(operands)
    for part in parts:
        for name, gradient in part.items():
            result[name] = gradient if result[name] is None else result[name] + gradient
    return result


# ---- Attention ----


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(static: Static, operands: Operands) -> tuple[Array, Array]:
    """out and lse."""
    query, value = operands["query"], operands["value"]
    out = ShapeDtype((*query.shape[:-1], value.shape[-1]), query.dtype)
    results = _call("headway_attention", static, operands, {"out": out, "lse": _lse_like(static, query)})
    return results["out"], results["lse"]


def _attend_forward(static: Static, operands: dict[str, Any]) -> tuple[tuple[Array, Array], Any]:
    arrays, wanted = _split(operands)
    found: Any = attend(static, arrays)
    out, lse = found
    return (out, lse), (arrays, wanted, out, lse)


def _attend_backward(static: Static, residuals: Any, cotangents: Any) -> tuple[dict[str, Any]]:
    operands, wanted, out, lse = residuals
    grad_out, grad_lse = cotangents
    parts = []
    if not isinstance(grad_out, SymbolicZero):
        parts.append(_gradients(static, wanted, {**operands, "grad_out": grad_out, "out": out, "lse": lse}))
    if not isinstance(grad_lse, SymbolicZero):
        parts.append(_lse_gradients(static, wanted, operands, lse, grad_lse))
    return (_cotangents(operands, parts),)


def _lse_gradients(static: Static, wanted: _Wanted, operands: Operands, lse: Array, grad_lse: Array) -> Operands:
    """Through lse: its derivative by a score is the weight, p.

    The backward pass gives p (<grad_out, value> - <grad_out, out>) to a score. With a value of 1 and an out of 0 that
    is p grad_lse.
    """
    value = operands["value"]
    ones = jnp.ones((*value.shape[:-1], 1), value.dtype)
    grad_out = static.heads_first(grad_lse[..., None].astype(value.dtype))
    others = {name: operand for name, operand in operands.items() if name not in ("value", "sinks", "seed")}
    others |= {"value": ones, "grad_out": grad_out, "out": jnp.zeros_like(grad_out), "lse": lse}
    names = tuple(name for name in wanted.names if name != "sinks")
    result = _lse_part(static.without_dropout(), _Wanted(names), others)
    del result["value"]
    if "sinks" in wanted.names:
        sinks = operands["sinks"]
        share = jnp.where(jnp.isneginf(lse), 0, jnp.exp(sinks.astype(lse.dtype)[:, None] - lse))
        result["sinks"] = (share * grad_lse).sum((0, 2)).astype(sinks.dtype)
    return result


attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


# ---- Weights ----
# A separate call: a compiled program that does not use the weights drops it.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_weights(static: Static, operands: Operands, lse: Array) -> Array:
    """The weights, before dropout. lse is the one that attend gives, and is only used for gradients."""
    query, key = operands["query"], operands["key"]
    batch, heads, length = lse.shape
    keys = key.shape[2 if static.layout == "BHSD" else 1]
    weights = ShapeDtype((batch, heads, length, keys), query.dtype)
    return _call("headway_attention_weights", static, operands, {"weights": weights})["weights"]


def _weights_forward(static: Static, operands: dict[str, Any], lse: Any) -> tuple[Array, Any]:
    arrays, wanted = _split(operands)
    weights: Any = attention_weights(static, arrays, lse.value)
    return weights, (arrays, wanted, lse.value, weights)


def _weights_backward(static: Static, residuals: Any, grad: Any) -> tuple[dict[str, Any], None]:
    """The weights are what attention gives for the unit matrix as its value."""
    operands, wanted, lse, weights = residuals
    if isinstance(grad, SymbolicZero):
        return _cotangents(operands, []), None
    key, keys = operands["key"], weights.shape[-1]
    unit = jnp.eye(keys, dtype=key.dtype)
    value = jnp.broadcast_to(unit if static.layout == "BHSD" else unit[:, None], (*key.shape[:-1], keys))
    rows = {"grad_out": static.heads_first(grad), "out": static.heads_first(weights), "lse": lse}
    result = _gradients(static, wanted, {**operands, "value": value, **rows})
    del result["value"]
    return _cotangents(operands, [result]), None


attention_weights.defvjp(_weights_forward, _weights_backward, symbolic_zeros=True)


# ---- Both, compiled ----


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(static: Static, with_weights: bool, operands: Operands) -> tuple[Array, Array | None, Array]:
    """out, weights where they are asked for, and lse."""
    found: Any = attend(static, operands)
    out, lse = found
    if not with_weights:
        return out, None, lse
    scored = {name: operand for name, operand in operands.items() if name not in ("value", "seed")}
    return out, attention_weights(static.without_dropout(), scored, jax.lax.stop_gradient(lse)), lse
