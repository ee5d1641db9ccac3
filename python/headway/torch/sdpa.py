"""The drop-in for torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeGuard, cast

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from headway._headway import Mask
from headway.functions import renamed
from headway.torch._core import NO_OPTIONS, Options
from headway.torch._dispatch import attend, is_compiling
from headway.torch._eager import torch_sdpa
from headway.torch._nested import nested_attention
from headway.torch.functional import draw_seed, refuse_keywords, require_number, require_tensors

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

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
    attn_mask  broadcasts to (..., H, Sq, Sk): bool (True = attend), or floating, added to the scores, with a gradient;
               or a CausalBias of torch.nn.attention.bias
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
    if unknown:
        refuse_keywords(_NAME, scaled_dot_product_attention, unknown)
    if not is_compiling():
        found = torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if found is not None:
            return cast("Tensor", found)
    if not isinstance(query, Tensor) and has_torch_function((query, key, value, attn_mask)):  # a proxy of torch.fx
        return cast(
            "Tensor",
            handle_torch_function(
                scaled_dot_product_attention,
                (query, key, value, attn_mask),
                query,
                key,
                value,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            ),
        )
    if isinstance(query, Tensor) and query.is_nested:
        return _nested(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    leading = None
    try:
        if _is_causal_bias(attn_mask):
            _check(query, key, value, attn_mask, dropout_p)
        options = _options(attn_mask, dropout_p, is_causal, scale)
        if _is_direct(query.shape, key.shape, value.shape, enable_gqa):
            out = attend(query, key, value, options)[0]
        else:
            call = _broadcast(query, key, value, enable_gqa, options)
            leading = call.leading
            out = attend(call.query, call.key, call.value, call.options)[0]
    except Exception as error:
        _check(query, key, value, attn_mask, dropout_p)  # names what is wrong in torch's words
        raise renamed(error, _NAME, mask="attn_mask", bias="attn_mask") from None
    return out if leading is None else out.reshape(*leading, *out.shape[-2:])


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
    options = _options(attn_mask, 0.0, is_causal, scale)
    if _is_direct(query.shape, key.shape, value.shape, enable_gqa):
        return query, key, options
    call = _broadcast(query, key, value, enable_gqa, options)
    return call.query, call.key, call.options


class _Call(NamedTuple):
    query: Tensor  # (B, H, Sq, D), or fewer axes
    key: Tensor
    value: Tensor
    options: Options
    leading: tuple[int, ...]  # the axes of the result before (Sq, Dv)


_CAUSAL = Options(causal="top_left")


def _is_causal_bias(mask: object) -> TypeGuard[CausalBias]:
    """By its name: importing the type imports the compiler, which takes longer than all of torch."""
    return type(mask).__name__ == "CausalBias"


def _options(attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None) -> Options:
    if attn_mask is None and dropout_p == 0.0 and scale is None:
        return _CAUSAL if is_causal else NO_OPTIONS
    mask = bias = None
    causal = "top_left" if is_causal else "none"
    if _is_causal_bias(attn_mask):
        if is_causal:
            raise ValueError(f"{_NAME}: attn_mask is a CausalBias, expected is_causal=False beside it")
        causal = "top_left" if attn_mask.variant.name == "UPPER_LEFT" else "bottom_right"
    elif attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            mask = attn_mask
        else:
            bias = attn_mask
    if scale is not None:
        require_number(_NAME, "scale", scale)
    return Options(
        bias=bias,
        mask=mask,
        causal=causal,
        scale=None if scale is None else float(scale),
        dropout=float(dropout_p),
        seed=draw_seed() if dropout_p > 0 else None,
    )


def _is_direct(query: torch.Size, key: torch.Size, value: torch.Size, enable_gqa: bool) -> bool:
    """Whether attention takes the tensors as they are: (B, H, length, width) or fewer axes, nothing to broadcast."""
    rank = len(query)
    if query == key == value:
        return rank == 4 or (2 <= rank <= 3 and not enable_gqa)
    if rank != len(key) or rank != len(value):
        return False
    if rank == 4:
        if not query[0] == key[0] == value[0] or key[1] != value[1]:
            return False
        return query[1] == key[1] or (enable_gqa and key[1] > 0 and query[1] % key[1] == 0)
    return 2 <= rank <= 3 and not enable_gqa and query[:-2] == key[:-2] == value[:-2]


def _check(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float) -> None:
    require_tensors(_NAME, ("query", query), ("key", key), ("value", value))
    if isinstance(attn_mask, Mask):
        raise TypeError(
            f"{_NAME}: attn_mask is a Mask, expected a torch.Tensor; headway.torch.attention takes it as mask="
        )
    if attn_mask is not None:
        require_tensors(_NAME, ("attn_mask", attn_mask))
    require_number(_NAME, "dropout_p", dropout_p)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested:
            raise NotImplementedError(f"{_NAME}: {name} is nested, and query is not: expected all three alike")
    _check_axes(query, key, value)
    if _is_causal_bias(attn_mask):
        sizes = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
        if sizes != (query.shape[-2], key.shape[-2]):
            raise ValueError(
                f"{_NAME}: attn_mask is a CausalBias of {sizes[0]} queries and {sizes[1]} keys, "
                f"found {query.shape[-2]} and {key.shape[-2]}"
            )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise TypeError(f"{_NAME}: {name} has type {x.dtype}, query has {query.dtype}")
        if x.device != query.device:
            raise ValueError(f"{_NAME}: {name} is on {x.device}, query is on {query.device}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"{_NAME}: dropout_p is {dropout_p}, expected 0 to 1")
    if attn_mask is not None and attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"{_NAME}: attn_mask has type {attn_mask.dtype}, expected bool (True = attend) or floating")


def _check_axes(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 2:
            raise ValueError(f"{_NAME}: {name} has shape {tuple(x.shape)}, expected (..., length, width)")


def _broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, options: Options) -> _Call:
    """Attention of what has other leading axes than (B, H), or leading axes that differ."""
    _check_axes(query, key, value)
    if enable_gqa:
        key, value = _same_heads(query, key, value)
    heads = _leading(query, key, value, enable_gqa)
    batch = heads[:-1]
    rank = 2 + len(heads) if not enable_gqa else max(4, 2 + len(heads))
    query, key, value = (
        _spread(x, batch, x.shape[-3:-2] if enable_gqa else heads[-1:], rank) for x in (query, key, value)
    )
    if len(batch) > 1:
        options = options._replace(mask=_one_batch_axis(options.mask, batch), bias=_one_batch_axis(options.bias, batch))
    return _Call(query, key, value, options, (*batch, *heads[-1:]))


def _leading(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """The axes before (length, width), broadcast; with enable_gqa the heads are the query's."""
    shapes = [tuple(x.shape[:-2]) for x in (query, key, value)]
    if enable_gqa:
        shapes = [shapes[0], *((*shape[:-1], 1) for shape in shapes[1:])]
    rank = max(len(shape) for shape in shapes)
    sizes = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if size != 1 and sizes[axis] not in (1, size):
                found = ", ".join(
                    f"{name} {tuple(x.shape)}" for name, x in (("query", query), ("key", key), ("value", value))
                )
                hint = "" if enable_gqa else _grouped_hint(query, key)
                raise ValueError(f"{_NAME}: the leading axes do not broadcast: {found}{hint}")
            if size != 1:
                sizes[axis] = size
    return tuple(sizes)


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
    if attn_mask is None or extra <= 0:
        return attn_mask
    if extra > len(batch):
        raise ValueError(
            f"{_NAME}: attn_mask has shape {tuple(attn_mask.shape)}, expected at most {len(batch) + 3} axes"
        )
    if all(size == 1 for size in attn_mask.shape[:extra]):
        return attn_mask.reshape(attn_mask.shape[extra:])
    return attn_mask.expand(*batch, *attn_mask.shape[extra:]).flatten(0, len(batch) - 1)
