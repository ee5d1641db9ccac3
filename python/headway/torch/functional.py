"""headway.attention and headway.attention_varlen for torch tensors, with gradients."""

from __future__ import annotations

from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from headway import _headway
from headway._arguments import flag, shown, whole_number
from headway._headway import Mask
from headway._suggest import hint
from headway.torch._core import Options
from headway.torch._dispatch import Results, attend
from headway.torch._structured import with_mask

Causal = bool | Literal["top_left", "bottom_right"]
Window = tuple[int | None, int | None]

_MOST = 2**63 - 1


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | Mask | None = None,
    bias: Tensor | None = None,
    causal: Causal = False,
    window: Window | None = None,
    valid_lens: Any | None = None,
    query_lens: Any | None = None,
    spans: Any | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any | None = None,
    sinks: Any | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    engine: str | None = None,
    batch_invariant: bool = False,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    span_rows: int = 1,
    **unknown: NoReturn,
) -> Any:
    """headway.attention under autograd: the same options, and gradients for query, key, value, bias and sinks.

    query (B, H, Sq, D), key (B, Hkv, Sk, D), value (B, Hkv, Sk, Dv) -> (B, H, Sq, Dv); without heads or batch too.
    mask is True where a query may attend, or a structured mask of headway.masks. Returns out, or a tuple
    (out[, weights][, lse]), each with a gradient. With layout="bshd" tensors with four axes, out among them, are
    (B, S, H, D).

    dropout draws its seed from torch's generator where none is given: torch.manual_seed repeats a run. It acts whenever
    it is above 0: pass dropout=p if self.training else 0.0. out= is for calls that record no gradients.

    >>> import torch, headway.torch
    >>> query = torch.randn(2, 8, 10, 64, requires_grad=True)
    >>> key, value = torch.randn(2, 2, 10, 64), torch.randn(2, 2, 10, 64)
    >>> sinks = torch.zeros(8, requires_grad=True)
    >>> out = headway.torch.attention(query, key, value, causal=True, window=(4, 0), sinks=sinks)
    >>> out.sum().backward()
    >>> out.shape, query.grad.shape, sinks.grad.shape
    (torch.Size([2, 8, 10, 64]), torch.Size([2, 8, 10, 64]), torch.Size([8]))
    """
    if unknown:
        refuse_keywords("attention", attention, unknown)
    require_tensors("attention", ("query", query), ("key", key), ("value", value))
    options = _options(
        "attention", mask, bias, causal, window, valid_lens, query_lens, spans, span_rows, scale, softcap, alibi_slopes,
        sinks, dropout, seed, engine, batch_invariant, query.device,
    )  # fmt: skip
    if not _has_heads_third("attention", layout):
        if isinstance(mask, Mask):
            options = with_mask("attention", mask, query, key, options)
        return _attend(query, key, value, options, return_weights, return_lse, out)
    # (B, S, H, D) seen as (B, H, S, D): out lies in memory as the query does.
    place = None if out is None else _heads_second(out)
    query, key, value = _heads_second(query), _heads_second(key), _heads_second(value)
    if isinstance(mask, Mask):
        options = with_mask("attention", mask, query, key, options)
    results = _attend(query, key, value, options, return_weights, return_lse, place)
    if not return_weights and not return_lse:
        return _heads_second(results) if out is None else out
    return (_heads_second(results[0]) if out is None else out, *results[1:])


def _heads_second(x: Tensor) -> Tensor:
    return x.transpose(1, 2) if x.dim() == 4 else x


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    mask: Tensor | Mask | None = None,
    bias: Tensor | None = None,
    causal: Causal = False,
    window: Window | None = None,
    valid_lens: Any | None = None,
    query_lens: Any | None = None,
    spans: Any | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any | None = None,
    sinks: Any | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    engine: str | None = None,
    batch_invariant: bool = False,
    layout: Literal["bhsd"] = "bhsd",
    span_rows: int = 1,
    **unknown: NoReturn,
) -> Any:
    """headway.attention_varlen under autograd: attention over packed sequences that never see each other.

    query (total_q, H, D), key (total_k, Hkv, D), value (total_k, Hkv, Dv) -> (total_q, H, Dv). Sequence b is the rows
    from cu_seqlens_q[b] to cu_seqlens_q[b + 1], and of key and value those from cu_seqlens_k[b] to cu_seqlens_k[b + 1].
    Options as for attention, positions counted inside a sequence; lse is (H, total_q).

    >>> import torch, headway.torch
    >>> rows = torch.randn(7, 2, 8, requires_grad=True)
    >>> starts = torch.tensor([0, 3, 7])
    >>> out = headway.torch.attention_varlen(rows, rows, rows, starts, starts, causal=True)
    >>> out.sum().backward()
    >>> out.shape, rows.grad.shape
    (torch.Size([7, 2, 8]), torch.Size([7, 2, 8]))
    """
    if unknown:
        refuse_keywords("attention_varlen", attention_varlen, unknown)
    require_tensors("attention_varlen", ("query", query), ("key", key), ("value", value))
    options = _options(
        "attention_varlen", mask, bias, causal, window, valid_lens, query_lens, spans, span_rows, scale, softcap,
        alibi_slopes, sinks, dropout, seed, engine, batch_invariant, query.device,
    )  # fmt: skip
    if _has_heads_third("attention_varlen", layout):
        raise ValueError("attention_varlen: layout is 'bshd', expected none: packed sequences are (total, H, D)")
    options = options._replace(
        cu_seqlens_q=_integers("attention_varlen", "cu_seqlens_q", cu_seqlens_q),
        cu_seqlens_k=_integers("attention_varlen", "cu_seqlens_k", cu_seqlens_k),
    )
    if isinstance(mask, Mask):
        options = with_mask("attention_varlen", mask, query, key, options)
    return _results(attend(query, key, value, options, False, return_lse), False, return_lse)


def refuse_keywords(function: str, signature: Any, unknown: dict[str, Any]) -> None:
    """TypeError for the first unknown keyword, with the one that was probably meant."""
    import inspect

    known = [name for name in inspect.signature(signature).parameters if name not in ("self", "unknown")]
    name = next(iter(unknown))
    raise TypeError(f"{function}() got an unexpected keyword argument '{name}'{hint(name, known)}")


def require_tensors(operation: str, *inputs: tuple[str, Any]) -> None:
    """TypeError for the first that is no tensor."""
    for name, x in inputs:
        if not isinstance(x, Tensor):
            remedy = "; headway.masks.from_block_mask makes a mask of it" if type(x).__name__ == "BlockMask" else ""
            raise TypeError(f"{operation}: {name} is a {type(x).__name__}, expected a torch.Tensor{remedy}")


def require_number(operation: str, name: str, value: Any) -> None:
    """TypeError for what cannot be compared with one; ValueError for one that is learnt, which would learn nothing."""
    if isinstance(value, int | float):
        return
    if not hasattr(value, "__float__") or getattr(value, "ndim", 0) != 0:
        raise TypeError(f"{operation}: {name} is {shown(value)}, expected a number")
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        remedy = "multiply query by it and pass scale=1" if name == "scale" else "pass a number"
        raise ValueError(f"{operation}: {name} requires grad, and has no gradient: {remedy}")


def _plain_number(operation: str, name: str, value: Any) -> Any:
    """A tensor as Python's number, which the operators take; anything else is left to the call's own checks."""
    if not isinstance(value, Tensor):
        return value
    require_number(operation, name, value)
    return float(value)


def draw_seed() -> Tensor:
    """A seed for dropout from torch's generator."""
    return torch.randint(-(2**63), 2**63 - 1, (), device="cpu")


def _options(
    operation: str,
    mask: Tensor | Mask | None,
    bias: Tensor | None,
    causal: Causal,
    window: Window | None,
    valid_lens: Any,
    query_lens: Any,
    spans: Any,
    span_rows: int,
    scale: float | None,
    softcap: float | None,
    alibi_slopes: Any,
    sinks: Any,
    dropout: float,
    seed: int | Tensor | None,
    engine: str | None,
    batch_invariant: bool,
    device: torch.device,
) -> Options:
    left, right = _sides(operation, window)
    require_number(operation, "dropout", dropout)
    if isinstance(mask, Mask):
        mask = None  # with_mask puts it in, when the sizes are known
    elif mask is not None:
        require_tensors(operation, ("mask", mask))
    if bias is not None:
        require_tensors(operation, ("bias", bias))
    return Options(
        bias=bias,
        sinks=_floats(operation, "sinks", sinks, device),
        mask=mask,
        alibi_slopes=_floats(operation, "alibi_slopes", alibi_slopes, device),
        valid_lens=_integers(operation, "valid_lens", valid_lens),
        query_lens=_integers(operation, "query_lens", query_lens),
        spans=_integers(operation, "spans", spans),
        seed=_seed(operation, dropout, seed),
        causal=_alignment(operation, causal),
        window_left=left,
        window_right=right,
        scale=_plain_number(operation, "scale", scale),
        softcap=_plain_number(operation, "softcap", softcap),
        dropout=_plain_number(operation, "dropout", dropout),
        engine=engine,
        batch_invariant=flag(operation, "batch_invariant", batch_invariant),
        span_rows=whole_number(operation, "span_rows", span_rows),
    )


def _has_heads_third(operation: str, layout: str) -> bool:
    if isinstance(layout, str) and layout in ("bhsd", "bshd"):
        return layout == "bshd"
    error = ValueError if isinstance(layout, str) else TypeError
    raise error(f"{operation}: layout is {shown(layout)}, expected 'bhsd' or 'bshd'")


def _alignment(operation: str, causal: Causal) -> str:
    if isinstance(causal, bool | np.bool_):
        return "square" if causal else "none"
    if isinstance(causal, str) and causal in ("top_left", "bottom_right"):
        return causal
    error = ValueError if isinstance(causal, str) else TypeError
    raise error(f"{operation}: causal is {shown(causal)}, expected False, True, 'top_left' or 'bottom_right'")


def _sides(operation: str, window: Window | None) -> Window:
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        error = ValueError if isinstance(window, (tuple, list)) else TypeError
        raise error(f"{operation}: window is {shown(window)}, expected a pair (left, right) of integers or None")
    left, right = window
    return _count(left), _count(right)


def _count(side: Any) -> Any:
    """A side of a window, at most what an operator's integers hold: from there on it is unlimited for any sequence."""
    return _MOST if isinstance(side, (int, np.integer)) and side > _MOST else side


def _seed(operation: str, dropout: float, seed: int | Tensor | None) -> Tensor | None:
    if seed is None:
        return draw_seed() if dropout > 0 else None
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.is_floating_point() or seed.is_complex():
            raise TypeError(
                f"{operation}: seed is a tensor {tuple(seed.shape)} and type {seed.dtype}, expected an integer"
            )
        return seed
    seed = whole_number(operation, "seed", seed, bits=64)
    if not 0 <= seed < 2**64:
        raise ValueError(f"{operation}: seed is {seed}, expected 0 to 2^64 - 1")
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed, device="cpu")  # its 64 bits


def _integers(operation: str, name: str, numbers: Any) -> Tensor | None:
    """Lengths and bounds: lists become tensors; what is none is left to the call's own checks."""
    if numbers is None or isinstance(numbers, Tensor):
        return numbers
    # In host memory, whatever torch's default device is, unless they lie on a GPU already.
    device = None if hasattr(numbers, "__cuda_array_interface__") else "cpu"
    tensor = _as_tensor(operation, name, numbers, "integers", device=device)
    return tensor.long() if tensor.numel() == 0 else tensor


def _floats(operation: str, name: str, numbers: Any, device: torch.device) -> Tensor | None:
    if numbers is None or isinstance(numbers, Tensor):
        return numbers
    return _as_tensor(operation, name, numbers, "numbers", dtype=torch.float64, device=device)


def _as_tensor(operation: str, name: str, numbers: Any, expected: str, **settings: Any) -> Tensor:
    try:
        return torch.as_tensor(numbers, **settings)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{operation}: {name} is {shown(numbers)}, expected {expected}") from None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    return_weights: bool,
    return_lse: bool,
    out: Tensor | None,
) -> Any:
    if out is not None:
        require_tensors("attention", ("out", out))
        return _write_to(out, query, key, value, options, return_weights, return_lse)
    return _results(attend(query, key, value, options, return_weights, return_lse), return_weights, return_lse)


def _write_to(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, options: Options, return_weights: bool, return_lse: bool
) -> Any:
    recorded = [x for x in (query, key, value, options.bias, options.sinks, out) if x is not None and x.requires_grad]
    if torch.is_grad_enabled() and recorded:
        raise ValueError("attention: out= records no gradients: omit it, or call it under torch.no_grad()")
    return _headway.attention(
        query, key, value, return_weights=return_weights, return_lse=return_lse, out=out, **options.keywords()
    )


def _results(results: Results, return_weights: bool, return_lse: bool) -> Any:
    out, lse, weights = results
    if not return_weights and not return_lse:
        return out
    return (out, *([weights] if return_weights else []), *([lse] if return_lse else []))
