"""headway.attention for JAX arrays."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from headway import _headway
from headway._arguments import as_numpy
from headway._headway import Mask
from headway._suggest import suggests_keywords
from headway.jax._call import Array, Layout, Operands, Static, run


@suggests_keywords
def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    valid_lens: Any = None,
    query_lens: Any = None,
    spans: Any = None,
    span_rows: int = 1,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: Any = None,
    return_weights: bool = False,
    return_lse: bool = False,
    engine: str | None = None,
    layout: str = "bhsd",
) -> Any:
    """Attention of JAX arrays: headway.attention inside jit, with gradients.

    Shapes and options are headway.attention's: query (B, H, Sq, D), key (B, Hkv, Sk, D), value (B, Hkv, Sk, Dv) give
    (B, H, Sq, Dv); (B, S, D) is one head, (S, D) one head of one batch item; layout="bshd" takes and gives
    (B, S, H, D). float32, bfloat16, float16, and float64 where JAX has it enabled.

    Arrays may be traced: query, key, value, mask, bias, valid_lens, query_lens, spans, alibi_slopes, sinks, and seed.
    The other options are part of the compiled program, and so are structured masks (headway.masks). Lengths and spans
    that are out of range are an error when the program runs; lengths on a GPU are clamped instead.

    On a GPU the call is queued on XLA's stream, among the program's other kernels. With dropout the host waits for the
    seed, which lies in the GPU's memory.

    seed is an integer from 0 to 2**64 - 1, a scalar of an integer type, or a key of jax.random.

    Gradients flow to query, key, value, bias and sinks, from the result, the weights and lse. A query that no key is
    left for gives 0, and so do its gradients. Gradients of gradients are computed in plain JAX, which stores the
    (Sq, Sk) matrix; forward-mode differentiation is an error. Under jit, weights that nothing uses are not computed.

    >>> import jax, jax.numpy as jnp, numpy as np, headway.jax
    >>> query = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> value = jnp.array([[1.0], [2.0], [4.0]])
    >>> np.asarray(headway.jax.attention(query, query, value, causal=True)).round(3)
    array([[1.   ],
           [1.67 ],
           [2.759]], dtype=float32)
    >>> drop = jax.jit(lambda key: headway.jax.attention(query, query, value, dropout=0.5, seed=key))
    >>> drop(jax.random.key(0)).shape
    (3, 1)
    """
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f"attention: layout is {layout!r}, expected 'bhsd' or 'bshd'")
    static, operands = _prepare(
        "attention",
        "BSHD" if layout == "bshd" and jnp.ndim(query) == 4 else "BHSD",
        {"query": query, "key": key, "value": value},
        mask=mask,
        bias=bias,
        causal=causal,
        window=window,
        valid_lens=valid_lens,
        query_lens=query_lens,
        spans=spans,
        span_rows=span_rows,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout=dropout,
        seed=seed,
        engine=engine,
    )
    rank = operands["query"].ndim
    out, weights, lse = run(static, bool(return_weights), _with_four_axes(operands, rank))
    without = {4: (), 3: (1,), 2: (0, 1)}[rank]
    results = [out]
    if weights is not None:
        results.append(weights)
    if return_lse:
        results.append(lse)
    squeezed: tuple[Any, ...] = tuple(jnp.squeeze(result, without) if without else result for result in results)
    return squeezed if len(results) > 1 else squeezed[0]


# ---- From arguments to a call ----


def attend_positions_first(
    operation: str, query: Any, key: Any, value: Any, *, return_weights: bool = False, **options: Any
) -> tuple[Array, Any]:
    """For the drop-ins: query (B, Sq, H, D), key (B, Sk, Hkv, D), value (B, Sk, Hkv, Dv), attention's options.

    Gives out (B, Sq, H, Dv), and the weights (B, H, Sq, Sk) or else lse (B, H, Sq). Errors begin with the operation.
    """
    static, operands = _prepare(operation, "BSHD", {"query": query, "key": key, "value": value}, **options)
    out, weights, lse = run(static, return_weights, operands)
    return out, weights if return_weights else lse


def check_matrix(operation: str, name: str, shape: tuple[int, ...], full: tuple[int, ...]) -> None:
    """ValueError, with the shape that the caller gave, unless it broadcasts to the whole (batch..., H, Sq, Sk)."""
    fits = len(shape) <= len(full) and all(own in (1, size) for own, size in zip(shape[::-1], full[::-1]))
    if not fits:
        batch, (queries, keys) = full[:-3], full[-2:]
        hint = ""
        if shape == (*batch, keys):
            hint = f"; if it says which keys each batch item has, make it {(*batch, 1, 1, keys)}"
        elif shape == (*batch, queries, keys):
            hint = f"; if it is one matrix for each batch item, make it {(*batch, 1, queries, keys)}"
        raise ValueError(f"{operation}: {name} has shape {shape}, which does not broadcast to {full}{hint}")


def as_arrays(operation: str, inputs: dict[str, Any]) -> Operands:
    """The inputs as JAX's arrays; TypeError for the first that is none and cannot become one."""
    return {name: _as_array(operation, name, x) for name, x in inputs.items()}


def _as_array(operation: str, name: str, x: Any) -> Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        found = f"has type {x.dtype}" if isinstance(x, np.ndarray) else f"is a {type(x).__name__}"
        raise TypeError(f"{operation}: {name} {found}, expected an array") from None


_DEFAULTS: dict[str, Any] = {
    "causal": False,
    "window": None,
    "scale": None,
    "softcap": None,
    "dropout": 0.0,
    "engine": None,
    "span_rows": 1,
}
_ARRAYS = ("mask", "bias", "alibi_slopes", "sinks", "valid_lens", "query_lens", "spans")
_INTEGERS = ("valid_lens", "query_lens", "spans")


def _prepare(operation: str, layout: Layout, inputs: dict[str, Any], **given: Any) -> tuple[Static, Operands]:
    """Checks everything that is known now, with the errors of headway.attention."""
    operands = as_arrays(operation, inputs)
    if isinstance(given.get("mask"), Mask):
        given |= _parts_of(operation, layout, given["mask"], operands, given.get("spans"))
    for name in _ARRAYS:
        array = given.pop(name, None)
        if array is not None:
            operands[name] = (
                _integers(operation, name, array) if name in _INTEGERS else _as_array(operation, name, array)
            )
    seed = given.pop("seed", None)
    if isinstance(seed, np.ndarray) and seed.ndim == 0 and seed.dtype.kind in "iu":
        seed = int(seed)  # JAX would keep 32 bits of it
    options = _DEFAULTS | given
    for name, option in options.items():
        if isinstance(option, Tracer):
            raise TypeError(
                f"{operation}: {name} is traced, expected a value that is known when the program is compiled"
                + ("; to learn it, multiply the query by it and pass scale=1" if name == "scale" else "")
            )
    described = tuple((name, array.shape, np.dtype(array.dtype)) for name, array in operands.items())
    checked = 0 if seed is not None and not isinstance(seed, int | np.integer) else seed
    _check((operation, layout, described, checked, tuple(options.items())))
    if options["dropout"] > 0:
        operands["seed"] = _seed_words(operation, seed)
    return _static(layout, **options), operands


def _parts_of(operation: str, layout: Layout, mask: Mask, operands: Operands, spans: Any) -> dict[str, Any]:
    """A structured mask as the arrays that it becomes for these sizes, without the axes that the query lacks."""
    if spans is not None:
        raise ValueError(
            f"{operation}: found spans and a structured mask, expected one: masks.spans(array) & mask joins them"
        )
    query, key = operands["query"], operands["key"]
    rank = query.ndim
    if rank not in (2, 3, 4) or key.ndim != rank:
        return {"mask": None}  # the call says what is wrong
    at, by = (1, 2) if rank == 4 and layout == "BSHD" else (rank - 2, 1)
    own = {"batch items": query.shape[0] if rank > 2 else 1, "heads": query.shape[by] if rank == 4 else 1}
    for (name, expected), found in zip(own.items(), (mask.batch, mask.heads)):
        if found not in (1, expected):
            raise ValueError(f"{operation}: mask has {found} {name}, expected {expected} or 1")
    try:
        array, rows, bools = _headway.mask_parts(mask, query.shape[at], key.shape[at])
    except ValueError as error:
        raise ValueError(str(error).replace("Mask.parts", operation)) from None
    lost: tuple[Any, ...] = ((0, 0), (slice(None), 0), ())[rank - 2]
    return {
        "mask": None if bools is None else bools[lost],
        "spans": None if array is None else array[lost],
        "span_rows": rows,
    }


def _check(call: tuple[Any, ...]) -> None:
    try:
        hash(call)
    except TypeError:  # an array or a list among the options: legal, or an error with its own text
        _check_call(call)
    else:
        _check_once(call)


def _check_call(call: tuple[Any, ...]) -> None:
    """Has the library itself look at shapes, types and options; arrays of one element stand in for the real ones."""
    operation, layout, described, seed, options = call
    options = dict(options)
    if options["engine"] == "cuda" and jax.default_backend() == "gpu":
        options["engine"] = None  # it reads no host memory; whether it takes the call is seen when it runs
    arrays: dict[str, Any] = {name: np.broadcast_to(np.zeros((), dtype), shape) for name, shape, dtype in described}
    if layout == "BSHD":
        arrays |= {name: arrays[name].swapaxes(1, 2) for name in ("query", "key", "value")}
    try:
        _headway.explain(**arrays, seed=seed, **options)
    except (ValueError, TypeError, NotImplementedError) as error:
        text = str(error)
        raise type(error)(operation + text[text.find(":") :] if text.startswith("explain") else text) from None


_check_once = functools.lru_cache(maxsize=4096)(_check_call)


def _static(layout: Layout, **options: Any) -> Static:
    causal = options["causal"]
    left, right = options["window"] or (None, None)
    return Static(
        layout,
        causal=causal if isinstance(causal, str) else "square" if causal else None,
        window=(None if left is None else int(left), None if right is None else int(right)),
        scale=None if options["scale"] is None else float(options["scale"]),
        softcap=None if options["softcap"] is None else float(options["softcap"]),
        dropout=float(options["dropout"]),
        engine=options["engine"],
        span_rows=int(options["span_rows"]),
    )


def _integers(operation: str, name: str, lens: Any) -> Array:
    whole = lens if isinstance(lens, jax.Array) else _kept_whole(operation, name, lens)
    array = _as_array(operation, name, whole)
    if array.dtype in (jnp.int8, jnp.int16, jnp.uint8, jnp.uint16):
        return array.astype(jnp.int32)
    if array.dtype in (jnp.uint32, jnp.uint64):  # what is past the type is past every length too
        return jnp.minimum(array, np.iinfo(np.int32).max).astype(jnp.int32)
    return array.astype(jnp.int32) if array.size == 0 else array  # an empty list is one of floats


def _kept_whole(operation: str, name: str, numbers: Any) -> Any:
    """An array of NumPy's or Python's numbers, of which JAX would keep 32 bits: ValueError for what they cannot say."""
    array = as_numpy(operation, name, numbers)
    holds = np.iinfo(jax.dtypes.canonicalize_dtype(np.int64))
    integers = array.dtype.kind in "iu" or (array.dtype.kind == "O" and all(isinstance(x, int) for x in array.flat))
    past = (array > holds.max) | (array < holds.min) if integers else np.zeros((), bool)
    if np.any(past):
        first = tuple(np.argwhere(past)[0])
        place = f"[{', '.join(map(str, first))}]" if first else ""
        raise ValueError(f"{operation}: {name}{place} is {array[first]}, expected a number below 2^{holds.bits - 1}")
    return array


def _seed_words(operation: str, seed: Any) -> Array:
    """The seed's low and high word."""
    if isinstance(seed, int | np.integer):
        return jnp.asarray(np.array([int(seed) & 0xFFFFFFFF, int(seed) >> 32], np.uint32))
    array = jnp.asarray(seed) if hasattr(seed, "dtype") else np.asarray(seed)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) and array.ndim == 0:
        return jax.random.bits(array, (2,), jnp.uint32)
    if array.dtype == jnp.uint32 and array.shape == (2,):  # a key as jax.random.PRNGKey makes it
        return jax.random.bits(array, (2,), jnp.uint32)
    if jnp.issubdtype(array.dtype, jnp.integer) and array.ndim == 0:
        high = array >> 32 if array.dtype.itemsize == 8 else jnp.zeros_like(array)
        return jnp.stack([array.astype(jnp.uint32), high.astype(jnp.uint32)])
    raise TypeError(
        f"{operation}: seed has type {array.dtype} and shape {array.shape}, expected an integer or a jax.random key"
    )


def _with_four_axes(operands: Operands, rank: int) -> Operands:
    """Operands of (B, S, D) and (S, D) with the axes that they lack."""
    if rank == 4:
        result = dict(operands)
    else:
        result = {name: _add_axes(name, array, rank) for name, array in operands.items()}
    for name, axes in (("mask", 4), ("bias", 4), ("spans", 5)):
        if name in result:
            result[name] = _to_rank(result[name], axes)
    return result


def _add_axes(name: str, array: Array, rank: int) -> Array:
    if name in ("query", "key", "value"):
        return array[:, None] if rank == 3 else array[None, None]
    if (name in ("mask", "bias") and rank == array.ndim == 3) or (name == "spans" and rank == 3 and array.ndim == 4):
        return array[:, None]
    if name in ("alibi_slopes", "sinks"):
        return array.reshape(1)
    if name == "valid_lens" and rank == 2:
        return array.reshape(1) if array.size == 1 else array.reshape(1, -1)
    return array.reshape(1) if name == "query_lens" and rank == 2 else array


def _to_rank(array: Array, rank: int) -> Array:
    return array if array.ndim == rank else array.reshape((1,) * (rank - array.ndim) + array.shape)
