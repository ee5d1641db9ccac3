"""FlashAttention's functions, with its arguments and its rules, computed by Headway on any device and type."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway import _headway
from headway._arguments import flag, shown
from headway._suggest import suggests_keywords
from headway.functions import renamed
from headway.torch.functional import Window, attention, attention_varlen, require_number


@suggests_keywords
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn.flash_attn_func, computed by Headway, with gradients for q, k and v.

    q             (B, Sq, H, D)
    k, v          (B, Sk, Hkv, D); Hkv divides H
    causal        the last query sees the last key: bottom right, where Sq and Sk differ
    window_size   (left, right) around that diagonal; -1 is unlimited
    softcap       0 is none
    alibi_slopes  (H,) or (B, H)
    returns       out (B, Sq, H, D); with return_attn_probs (out, lse (B, H, Sq), None): no matrix is stored

    Results are the same bits in every run, so deterministic changes nothing. A query without a key gives 0.

    >>> import torch
    >>> from headway.torch import flash_attn_func
    >>> q = torch.randn(2, 5, 8, 64, requires_grad=True)
    >>> k, v = torch.randn(2, 9, 2, 64), torch.randn(2, 9, 2, 64)
    >>> out = flash_attn_func(q, k, v, causal=True, window_size=(4, -1))
    >>> out.sum().backward()
    >>> out.shape, q.grad.shape
    (torch.Size([2, 5, 8, 64]), torch.Size([2, 5, 8, 64]))
    """
    slopes = alibi_slopes
    if isinstance(slopes, Tensor) and isinstance(q, Tensor) and slopes.dim() == 2 and len(slopes) == len(q):
        if len(q) != 1:
            given: dict[str, Any] = {"dropout_p": dropout_p, "softmax_scale": softmax_scale, "causal": causal}
            given |= {"window_size": window_size, "softcap": softcap, "return_attn_probs": return_attn_probs}
            return _item_by_item(q, k, v, slopes, given)
        slopes = slopes[0]
    try:
        options = _options(dropout_p, softmax_scale, causal, window_size, softcap, slopes)
        results = attention(q, k, v, layout="bshd", return_lse=return_attn_probs, **options)
    except Exception as error:
        raise _in_their_words(error, "flash_attn_func") from None
    return (*results, None) if return_attn_probs else results


@suggests_keywords
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """flash_attn.flash_attn_varlen_func, computed by Headway: packed sequences that never see each other.

    q             (total_q, H, D)
    k, v          (total_k, Hkv, D)
    cu_seqlens_q  (B + 1,) integers: sequence b is the rows from cu_seqlens_q[b] to cu_seqlens_q[b + 1]; so for k and v
    alibi_slopes  (H,)
    block_table   (B, most pages): k and v are then pages (pages, page_size, Hkv, D), cu_seqlens_k counts their keys,
                  and there are no gradients
    returns       out (total_q, H, D); with return_attn_probs (out, lse (H, total_q), None)

    The other arguments are those of flash_attn_func. max_seqlen_q and max_seqlen_k are not needed and not read.

    >>> import torch
    >>> from headway.torch import flash_attn_varlen_func
    >>> rows, starts = torch.randn(7, 2, 8), torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> flash_attn_varlen_func(rows, rows, rows, starts, starts, 4, 4, causal=True).shape
    torch.Size([7, 2, 8])
    """
    try:
        options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
        if block_table is not None:
            results = _over_pages(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, return_attn_probs, options)
        else:
            results = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=return_attn_probs, **options)
    except Exception as error:
        raise _in_their_words(error, "flash_attn_varlen_func") from None
    return (*results, None) if return_attn_probs else results


def _over_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_table: Tensor,
    return_lse: bool,
    options: dict[str, Any],
) -> Any:
    if options.pop("dropout") != 0:
        raise NotImplementedError("flash_attn_varlen_func: keys in pages take no dropout_p")
    lengths = torch.as_tensor(cu_seqlens_k).diff()
    return _headway.attention_paged(
        q, k, v, block_table, lengths, cu_seqlens_q=cu_seqlens_q, return_lse=return_lse, **options
    )


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> dict[str, Any]:
    return {
        "causal": "bottom_right" if flag("attention", "causal", causal) else False,
        "window": _window(window_size),
        "scale": softmax_scale,
        "softcap": _softcap(softcap),
        "alibi_slopes": alibi_slopes,
        "dropout": dropout_p,
    }


def _softcap(softcap: float) -> float | None:
    require_number("attention", "softcap", softcap)
    return None if softcap == 0.0 else softcap


def _window(window_size: tuple[int, int]) -> Window | None:
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise ValueError(f"attention: window is {shown(window_size)}, expected a pair (left, right), -1 for unlimited")
    left, right = window_size
    if left == -1 and right == -1:
        return None
    return None if left == -1 else left, None if right == -1 else right


def _item_by_item(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, options: dict[str, Any]) -> Any:
    """Slopes of (B, H): one call for each item of the batch."""
    found = [
        flash_attn_func(q[b : b + 1], k[b : b + 1], v[b : b + 1], alibi_slopes=slopes[b], **options)
        for b in range(q.shape[0])
    ]
    if not options["return_attn_probs"]:
        return torch.cat(found)
    return torch.cat([out for out, _, _ in found]), torch.cat([lse for _, lse, _ in found]), None


def _in_their_words(error: Exception, function: str) -> Exception:
    names = {"query": "q", "key": "k", "value": "v", "dropout": "dropout_p", "scale": "softmax_scale"}
    text = str(error)
    for inner in ("attention_varlen: ", "attention_paged: "):
        if text.startswith(inner):
            error = type(error)(text.replace(inner, "attention: ", 1))
    return renamed(error, function, **names, window="window_size")
