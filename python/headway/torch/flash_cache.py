"""FlashAttention's flash_attn_with_kvcache, computed by Headway over the cache where it lies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway import _headway
from headway._arguments import flag
from headway.torch.flash import _softcap, _window
from headway.torch.functional import require_tensors

_NAME = "flash_attn_with_kvcache"


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """flash_attn.flash_attn_with_kvcache, computed by Headway: adds k and v to the cache in place, then attends.

    q                 (B, Sq, H, D): the last tokens of their sequences
    k_cache, v_cache  (B, length, Hkv, D); with block_table pages (pages, page_size, Hkv, D) of any size
    k, v              (B, new, Hkv, D), written behind the cache_seqlens keys that are there
    cache_seqlens     the keys of each sequence before that: a number or (B,); None: the whole length
    rotary_cos, rotary_sin   (positions, D' / 2): k is rotated at its positions and q at its own; without causal or a
                      window all rows of q at cache_seqlens
    cache_batch_idx   (B,): which rows of the cache belong to the sequences
    cache_leftpad     (B,): the first key of each sequence
    block_table       (B, most pages)
    returns           out (B, Sq, H, D); with return_softmax_lse (out, lse (B, H, Sq))

    The other arguments are those of flash_attn_func. num_splits changes nothing: Headway chooses, and the bits stay.
    There are no gradients. A query without a key gives 0.

    >>> import torch
    >>> from headway.torch import flash_attn_with_kvcache
    >>> k_cache, v_cache = torch.zeros(2, 16, 1, 8), torch.zeros(2, 16, 1, 8)
    >>> q, k, v = torch.randn(3, 2, 1, 1, 8)
    >>> lengths = torch.tensor([4, 0], dtype=torch.int32)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True).shape
    torch.Size([2, 1, 1, 8])
    >>> torch.equal(k_cache[0, 4], k[0, 0])
    True
    """
    require_tensors(_NAME, ("q", q), ("k_cache", k_cache), ("v_cache", v_cache))
    if q.dim() != 4 or k_cache.dim() != 4 or v_cache.dim() != 4:
        raise ValueError(
            f"{_NAME}: expected 4 axes, found q {_shape(q)}, k_cache {_shape(k_cache)}, v_cache {_shape(v_cache)}"
        )
    try:  # before anything is written
        causal = flag("attention_paged", "causal", causal)
        options: dict[str, Any] = {"causal": "bottom_right" if causal else False, "window": _window(window_size)}
        options |= {"scale": softmax_scale, "softcap": _softcap(softcap), "layout": "bshd"}
    except (TypeError, ValueError) as error:
        raise _in_their_words(error) from None
    for name, given in (("k", k), ("v", v), ("alibi_slopes", alibi_slopes), ("block_table", block_table)):
        if given is not None:
            require_tensors(_NAME, (name, given))
    stays = q.is_cuda and k is None and cache_leftpad is None  # nobody here has to read the table or the lengths
    table = _table(q, k_cache, cache_batch_idx, block_table, stays)
    before = _lengths(q, k_cache, table, cache_seqlens, stays)
    new = 0 if k is None else k.shape[1]
    after, places = before + new, None
    if k is not None or v is not None:
        k = _rotated_keys(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, before, rotary_interleaved)
        places = _places(k_cache, k, table, before)
        if rotary_cos is not None:
            local = causal or tuple(window_size) != (-1, -1)
            steps = _steps(q.shape[1]) if local else torch.zeros(q.shape[1], dtype=torch.int64, device="cpu")
            q = _rotated("q", q, rotary_cos, rotary_sin, before[:, None] + steps, rotary_interleaved)
    elif rotary_cos is not None or rotary_sin is not None:
        raise ValueError(f"{_NAME}: rotary_cos and rotary_sin need k and v, found none")
    try:
        if k is not None and v is not None and places is not None:
            # Without queries: what attention refuses is refused before anything is written.
            _attend(q[:, :0], k_cache, v_cache, table, before, alibi_slopes, False, options)
            k_cache[places], v_cache[places] = k, v
        if cache_leftpad is not None:
            options["spans"] = _spans_from(cache_leftpad, after, q.shape[1])
        return _attend(q, k_cache, v_cache, table, after, alibi_slopes, return_softmax_lse, options)
    except Exception as error:
        raise _in_their_words(error) from None


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    slopes: Tensor | None,
    return_lse: bool,
    options: dict[str, Any],
) -> Any:
    if slopes is None or slopes.dim() == 1:
        return _headway.attention_paged(
            q, k_cache, v_cache, table, lengths, alibi_slopes=slopes, return_lse=return_lse, **options
        )
    found = []  # slopes of (B, H): one call for each item of the batch
    for b in range(len(q)):
        one = slice(b, b + 1)
        spans = {"spans": options["spans"][one]} if "spans" in options else {}
        arguments = (q[one], k_cache, v_cache, table[one], lengths[one], slopes[b], return_lse, options | spans)
        found.append(_attend(*arguments))
    if return_lse:
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])
    return torch.cat(found)


def _table(
    q: Tensor, k_cache: Tensor, cache_batch_idx: Tensor | None, block_table: Tensor | None, stays: bool
) -> Tensor:
    """(B, pages): a cache without pages has one for each row of its batch."""
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError(f"{_NAME}: expected block_table or cache_batch_idx, found both")
        return block_table if stays else block_table.cpu()
    if cache_batch_idx is not None:
        return (cache_batch_idx if stays else cache_batch_idx.cpu()).reshape(-1, 1)
    if len(k_cache) != len(q):
        raise ValueError(f"{_NAME}: k_cache has batch {len(k_cache)}, q has {len(q)}: expected cache_batch_idx")
    return torch.arange(len(q), dtype=torch.int32, device="cpu")[:, None]


def _lengths(q: Tensor, k_cache: Tensor, table: Tensor, cache_seqlens: int | Tensor | None, stays: bool) -> Tensor:
    most = table.shape[1] * k_cache.shape[1]
    if cache_seqlens is None:
        cache_seqlens = most
    if isinstance(cache_seqlens, int):
        return torch.full((len(q),), cache_seqlens, dtype=torch.int64, device="cpu")
    return cache_seqlens if stays else cache_seqlens.to("cpu", torch.int64)


def _rotated_keys(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    before: Tensor,
    interleaved: bool,
) -> Tensor:
    """The new keys, rotated, after checks of everything that will be written."""
    if k is None or v is None:
        raise ValueError(f"{_NAME}: expected both k and v, found one of them")
    for name, rows, cache in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = (len(q), k.shape[1], *cache.shape[2:])
        if tuple(rows.shape) != wanted:
            raise ValueError(f"{_NAME}: {name} has shape {_shape(rows)}, expected {wanted}")
        if rows.dtype != cache.dtype:
            raise TypeError(f"{_NAME}: {name} has type {rows.dtype}, {name}_cache has {cache.dtype}")
        if rows.device != cache.device:
            raise ValueError(f"{_NAME}: {name} is on {rows.device}, {name}_cache is on {cache.device}")
    if (cos is None) != (sin is None):
        raise ValueError(f"{_NAME}: expected both rotary_cos and rotary_sin, found one of them")
    if cos is None or sin is None:
        return k
    return _rotated("k", k, cos, sin, before[:, None] + _steps(k.shape[1]), interleaved)


def _rotated(name: str, x: Tensor, cos: Tensor, sin: Tensor | None, positions: Tensor, interleaved: bool) -> Tensor:
    """x (B, S, H, D) with cosines and sines of tables (positions, D' / 2), in float32."""
    assert sin is not None
    if cos.shape != sin.shape or cos.dim() != 2 or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"{_NAME}: rotary_cos and rotary_sin have shapes {_shape(cos)} and {_shape(sin)}, "
            f"expected (positions, at most {x.shape[-1] // 2}), and both alike"
        )
    if positions.numel() and (int(positions.min()) < 0 or int(positions.max()) >= len(cos)):
        last = int(positions.max())
        raise ValueError(f"{_NAME}: {name} is at position {last}, rotary_cos has {len(cos)} positions")
    c, s = (table.float()[positions.to(table.device)][:, :, None] for table in (cos, sin))  # (B, S, 1, D' / 2)
    dims = 2 * cos.shape[1]
    rotated = x.float()
    pairs = rotated[..., :dims].unflatten(-1, (-1, 2) if interleaved else (2, -1))  # type: ignore[no-untyped-call]
    axis = -1 if interleaved else -2
    first, second = pairs.unbind(axis)
    turned = torch.stack((first * c - second * s, second * c + first * s), dim=axis).flatten(-2)
    return torch.cat((turned, rotated[..., dims:]), dim=-1).to(x.dtype)


def _places(k_cache: Tensor, k: Tensor, table: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The page and the slot of each new key (B, new), all different."""
    size, new = k_cache.shape[1], k.shape[1]
    most = table.shape[1] * size
    if before.shape != (len(k),):
        raise ValueError(f"{_NAME}: cache_seqlens has shape {_shape(before)}, expected ({len(k)},)")
    for b, length in enumerate(before.tolist()):
        if not 0 <= length <= most - new:
            raise ValueError(
                f"{_NAME}: cache_seqlens[{b}] is {length}, expected 0 to {most - new}: {most} keys, {new} of them new"
            )
    positions = before[:, None] + _steps(new)
    pages, slots = table.long().gather(1, positions // max(size, 1)), positions % max(size, 1)
    if pages.numel() > 0 and (int(pages.min()) < 0 or int(pages.max()) >= len(k_cache)):
        raise ValueError(f"{_NAME}: expected pages from 0 to {len(k_cache) - 1}, found {pages.tolist()}")
    if len(set((pages * size + slots).flatten().tolist())) != pages.numel():
        raise ValueError(f"{_NAME}: two sequences would write to the same place of the cache")
    return pages, slots


def _spans_from(leftpad: Tensor, lengths: Tensor, queries: int) -> Tensor:
    """Every row sees the keys from leftpad on: (B, 1, Sq, 1, 2)."""
    begin = leftpad.to("cpu", torch.int64).clamp(min=0).minimum(lengths)
    return torch.stack((begin, lengths), dim=-1)[:, None, None, None].expand(-1, 1, queries, 1, 2).contiguous()


def _steps(count: int) -> Tensor:
    return torch.arange(count, device="cpu")


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _in_their_words(error: Exception) -> Exception:
    text = str(error)
    if text.startswith("attention: "):
        text = text.replace("attention: ", "attention_paged: ", 1)
    if not text.startswith("attention_paged: "):
        return error
    names = {
        "query": "q",
        "key_pages": "k_cache",
        "value_pages": "v_cache",
        "lengths": "cache_seqlens",
        "window": "window_size",
    }
    words = text.removeprefix("attention_paged: ")
    for ours, theirs in names.items():
        words = words.replace(ours, theirs)
    return type(error)(f"{_NAME}: {words}")
