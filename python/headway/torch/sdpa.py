"""The drop-in for torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from headway import _headway
from headway.functions import renamed
from headway.torch._core import Options
from headway.torch._dispatch import (
    attend,
    autocast_active,
    is_compiling,
    modes_active,
    recorders,
    tracing_state,
    transforms_active,
)
from headway.torch._forward_mode import on as forward_mode_on
from headway.torch._nested import nested_attention
from headway.torch.functional import Causal, draw_seed, refuse_keywords, require_number, require_tensors

is_grad_enabled = torch.is_grad_enabled

_NAME = "scaled_dot_product_attention"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **unknown: NoReturn,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, computed by Headway.

    query      (..., H, Sq, D)
    key        (..., H, Sk, D)     leading axes broadcast; with enable_gqa the heads of key and value divide query's
    value      (..., H, Sk, Dv)
    attn_mask  broadcasts to (..., H, Sq, Sk): bool (True = attend), or floating, added to the scores, with a gradient
    returns    (..., H, Sq, Dv)

    is_causal lets query i see the keys j <= i, also where Sq and Sk differ, and of these what attn_mask allows: torch
    itself refuses the two together in some of its kernels. dropout_p acts whenever it is above 0, as in torch; its seed
    comes from torch's generator.

    One difference: a query that the mask leaves no key for gives 0, never NaN, and gradients of 0.

    >>> import torch
    >>> from headway.torch import scaled_dot_product_attention
    >>> x = torch.randn(2, 8, 128, 64)
    >>> out = scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True), atol=1e-5)
    True
    """
    # The shortest way for plain calls, which a small attention would spend most of its time on.
    if (
        attn_mask is None
        and dropout_p == 0.0
        and not is_compiling()
        and type(query) is type(key) is type(value) is Tensor
        and not (query.requires_grad and is_grad_enabled())
        and not (transforms_active() or modes_active() or autocast_active() or tracing_state() or recorders or unknown)
        and not forward_mode_on()
        and not enable_gqa
    ):
        try:
            if not is_causal and scale is None:
                plain = _headway.plain_attention(query, key, value)
            else:
                causal: Causal = "top_left" if is_causal else False
                plain = _headway.plain_attention(query, key, value, causal=causal, scale=scale)
            if plain is not None:
                return plain  # type: ignore[no-any-return]
        except (ValueError, TypeError, NotImplementedError):
            pass  # key or value requires grad, a tensor stored negated, or an error that the way below names better
    if unknown:
        refuse_keywords(_NAME, scaled_dot_product_attention, unknown)
    if isinstance(query, Tensor) and query.is_nested:
        return _nested(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    _check(query, key, value, attn_mask, dropout_p, scale)
    call = _call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    try:
        out = attend(call.query, call.key, call.value, call.options)[0]
    except Exception as error:
        raise renamed(error, _NAME, mask="attn_mask", bias="attn_mask") from None
    sizes = (*call.leading, *out.shape[-2:])
    return out if out.shape == sizes else out.reshape(sizes)


def _nested(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """(B, H, j, D) tensors with a length for each item: nothing is padded, and items do not see each other."""
    if attn_mask is not None:
        raise NotImplementedError(f"{_NAME}: attn_mask is given with nested tensors, expected None")
    jagged = query.layout == key.layout == torch.jagged and query.dim() == key.dim() == 4
    hint = _grouped_hint(query, key) if jagged and not enable_gqa else ""
    if hint:
        raise ValueError(f"{_NAME}: query has {query.shape[1]} heads, key has {key.shape[1]}{hint}")
    try:
        return nested_attention(_NAME, query, key, value, dropout_p, is_causal, scale)
    except Exception as error:
        raise renamed(error, _NAME) if not str(error).startswith(_NAME) else error from None


def seen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Options]:
    """A call of torch's function as Headway would make it: query, key and options."""
    call = _call(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
    return call.query, call.key, call.options


class _Call(NamedTuple):
    query: Tensor  # (B, H, Sq, D), or fewer axes
    key: Tensor
    value: Tensor
    options: Options
    leading: tuple[int, ...]  # the axes of the result before (Sq, Dv)


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> _Call:
    options = Options(
        causal="top_left" if is_causal else "none",
        scale=None if scale is None else float(scale),
        dropout=float(dropout_p),
        seed=draw_seed() if dropout_p > 0 else None,
    )
    if query.dim() <= 4 and not enable_gqa and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return _Call(query, key, value, _with_mask(options, attn_mask), tuple(query.shape[:-2]))
    return _broadcast(query, key, value, attn_mask, enable_gqa, options)


def _check(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, scale: float | None
) -> None:
    require_tensors(_NAME, ("query", query), ("key", key), ("value", value))
    if attn_mask is not None:
        require_tensors(_NAME, ("attn_mask", attn_mask))
    require_number(_NAME, "dropout_p", dropout_p)
    if scale is not None:
        require_number(_NAME, "scale", scale)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested:
            raise NotImplementedError(f"{_NAME}: {name} is nested, and query is not: expected all three alike")
        if x.dim() < 2:
            raise ValueError(f"{_NAME}: {name} has shape {tuple(x.shape)}, expected (..., length, width)")
        if x.dtype != query.dtype:
            raise TypeError(f"{_NAME}: {name} has type {x.dtype}, query has {query.dtype}")
        if x.device != query.device:
            raise ValueError(f"{_NAME}: {name} is on {x.device}, query is on {query.device}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"{_NAME}: dropout_p is {dropout_p}, expected 0 to 1")
    if attn_mask is not None and attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"{_NAME}: attn_mask has type {attn_mask.dtype}, expected bool (True = attend) or floating")


def _broadcast(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool, options: Options
) -> _Call:
    """Attention of what has grouped heads, other leading axes than (B, H), or leading axes that differ."""
    if enable_gqa:
        key, value = _same_heads(query, key, value)
    heads = _leading(query, key, value, enable_gqa)
    batch = heads[:-1]
    rank = 2 + len(heads) if not enable_gqa else max(4, 2 + len(heads))
    query, key, value = (
        _spread(x, batch, x.shape[-3:-2] if enable_gqa else heads[-1:], rank) for x in (query, key, value)
    )
    return _Call(query, key, value, _with_mask(options, _one_batch_axis(attn_mask, batch)), (*batch, *heads[-1:]))


def _with_mask(options: Options, attn_mask: Tensor | None) -> Options:
    if attn_mask is None:
        return options
    return options._replace(mask=attn_mask) if attn_mask.dtype == torch.bool else options._replace(bias=attn_mask)


def _leading(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """The axes before (length, width), broadcast; with enable_gqa the heads are the query's."""
    shapes = [tuple(x.shape[:-2]) for x in (query, key, value)]
    if enable_gqa:
        shapes = [shapes[0], *((*shape[:-1], 1) for shape in shapes[1:])]
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        found = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("query", query), ("key", key), ("value", value)))
        hint = "" if enable_gqa else _grouped_hint(query, key)
        raise ValueError(f"{_NAME}: the leading axes do not broadcast: {found}{hint}") from None


def _grouped_hint(query: Tensor, key: Tensor) -> str:
    """Where the heads look like those of grouped attention, what that needs."""
    heads, shared = (int(x.shape[-3]) if x.dim() > 2 else 1 for x in (query, key))
    grouped = 0 < shared < heads and heads % shared == 0
    return f"; heads that share keys and values, {heads} for {shared}, need enable_gqa=True" if grouped else ""


def _same_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value with as many heads as each other; torch lets each divide the query's on its own."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 3:
            raise ValueError(f"{_NAME}: {name} has shape {tuple(x.shape)}, expected heads: (..., H, length, width)")
        if x.shape[-3] == 0 or query.shape[-3] % x.shape[-3] != 0:
            raise ValueError(
                f"{_NAME}: query has {query.shape[-3]} heads, expected a multiple of {name}'s {x.shape[-3]}"
            )
    if key.shape[-3] != value.shape[-3]:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
    return key, value


def _spread(x: Tensor, batch: tuple[int, ...], heads: tuple[int, ...], rank: int) -> Tensor:
    """x as (B, H, length, width), or with as few axes as rank says; broadcast axes stay views where they can."""
    shape = (*batch, *heads, *x.shape[-2:])
    x = x if x.shape == shape else x.expand(shape)
    if len(shape) > 4:
        return x.flatten(0, len(batch) - 1)
    return x.unsqueeze(0) if len(shape) < rank else x


def _one_batch_axis(attn_mask: Tensor | None, batch: tuple[int, ...]) -> Tensor | None:
    """The mask with the axes that belong to batch as one, as the inputs have them."""
    extra = 0 if attn_mask is None else attn_mask.dim() - 3
    if attn_mask is None or len(batch) < 2 or extra <= 0:
        return attn_mask
    if extra > len(batch):
        raise ValueError(
            f"{_NAME}: attn_mask has shape {tuple(attn_mask.shape)}, expected at most {len(batch) + 3} axes"
        )
    if all(size == 1 for size in attn_mask.shape[:extra]):
        return attn_mask.reshape(attn_mask.shape[extra:])
    return attn_mask.expand(*batch, *attn_mask.shape[extra:]).flatten(0, len(batch) - 1)
