"""From a torch BlockMask to spans."""

from __future__ import annotations

from typing import Any

import numpy as np

from headway import _headway

_PAIRS_AT_ONCE = 1 << 22  # of mask_mod


def mask_of(block_mask: Any) -> _headway.Mask:
    """Its full blocks, and what mask_mod allows in the partial ones, as spans of each query."""
    for name in ("kv_num_blocks", "kv_indices", "mask_mod", "BLOCK_SIZE", "seq_lengths"):
        if not hasattr(block_mask, name):
            raise TypeError(f"masks.from_block_mask: found a {type(block_mask).__name__}, expected a torch BlockMask")
    queries, keys = (int(length) for length in block_mask.seq_lengths)
    rows: list[np.ndarray[Any, Any]] = []  # (row, begin, end), where a row counts over batch items, heads and queries
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    sizes = tuple(int(size) for size in block_mask.BLOCK_SIZE)
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    rows += _full_spans(full, sizes, heads, queries, keys)
    rows += _partial_spans(partial, block_mask, sizes, heads, queries, keys)
    return _headway.mask_spans(_array(rows, batch * heads * queries).reshape(batch, heads, queries, -1, 2), 1)


def _listed(counts: Any, indices: Any) -> np.ndarray[Any, Any]:
    """The listed blocks as rows (batch item, head, query block, key block)."""
    if counts is None:
        return np.zeros((0, 4), np.int64)
    counts, indices = counts.cpu().numpy(), indices.cpu().numpy()
    used = np.arange(indices.shape[-1]) < counts[..., None]
    return np.concatenate([np.argwhere(used)[:, :3], indices[used][:, None]], axis=1)


def _rows_of(block: np.ndarray[Any, Any], size: int, heads: int, queries: int) -> np.ndarray[Any, Any]:
    """(blocks, size) numbers of the rows of each block, -1 behind the last query."""
    query = block[:, 2:3] * size + np.arange(size)
    return np.where(query < queries, (block[:, :1] * heads + block[:, 1:2]) * queries + query, -1)


def _full_spans(
    blocks: np.ndarray[Any, Any], sizes: tuple[int, ...], heads: int, queries: int, keys: int
) -> list[np.ndarray[Any, Any]]:
    rows = _rows_of(blocks, sizes[0], heads, queries)
    begin = np.broadcast_to(blocks[:, 3:] * sizes[1], rows.shape)
    spans = np.stack([rows, begin, np.minimum(begin + sizes[1], keys)], -1)
    return [spans[rows >= 0]]


def _partial_spans(
    blocks: np.ndarray[Any, Any], block_mask: Any, sizes: tuple[int, ...], heads: int, queries: int, keys: int
) -> list[np.ndarray[Any, Any]]:
    import torch

    found = []
    at_once = max(_PAIRS_AT_ONCE // (sizes[0] * sizes[1]), 1)
    device = block_mask.kv_indices.device
    for start in range(0, len(blocks), at_once):
        some = blocks[start : start + at_once]
        batch_item, head, row_block, key_block = (torch.as_tensor(column, device=device) for column in some.T)
        query = (row_block[:, None] * sizes[0] + torch.arange(sizes[0], device=device))[:, :, None]
        key = (key_block[:, None] * sizes[1] + torch.arange(sizes[1], device=device))[:, None, :]
        pairs = [x.expand(len(some), *sizes).reshape(-1) for x in (batch_item[:, None, None], head[:, None, None])]
        pairs += [x.expand(len(some), *sizes).reshape(-1) for x in (query, key)]
        inside = (pairs[2] < queries) & (pairs[3] < keys)
        # What lies outside is no position that mask_mod may look up.
        pairs[2], pairs[3] = pairs[2].clamp(max=queries - 1), pairs[3].clamp(max=keys - 1)
        allowed = torch.vmap(block_mask.mask_mod)(*pairs) & inside
        found.append(_runs(allowed.reshape(len(some), *sizes).cpu().numpy(), some, sizes, heads, queries))
    return found


def _runs(
    allowed: np.ndarray[Any, Any], blocks: np.ndarray[Any, Any], sizes: tuple[int, ...], heads: int, queries: int
) -> np.ndarray[Any, Any]:
    """The runs of True (blocks, query size, key size) as (row, begin, end)."""
    steps = np.diff(np.pad(allowed, ((0, 0), (0, 0), (1, 1))).astype(np.int8), axis=-1)
    block, row, begin = np.nonzero(steps == 1)
    end = np.nonzero(steps == -1)[2]
    numbers = _rows_of(blocks, sizes[0], heads, queries)[block, row]
    base = blocks[block, 3] * sizes[1]
    return np.stack([numbers, base + begin, base + end], -1)


def _array(rows: list[np.ndarray[Any, Any]], count: int) -> np.ndarray[Any, Any]:
    """(count, R, 2) spans from (row, begin, end) in any order; those that touch become one."""
    spans = np.concatenate([np.zeros((0, 3), np.int64), *rows])
    spans = spans[np.lexsort((spans[:, 1], spans[:, 0]))]
    touches = (spans[1:, 0] == spans[:-1, 0]) & (spans[1:, 1] == spans[:-1, 2])
    starts, ends = np.r_[True, ~touches][: len(spans)], np.r_[~touches, True][: len(spans)]
    row, begin, end = spans[starts, 0], spans[starts, 1], spans[ends, 2]
    place = np.arange(len(row)) - np.searchsorted(row, row)
    array = np.zeros((count, int(place.max(initial=0)) + 1, 2), np.int32)
    array[row, place, 0], array[row, place, 1] = begin, end
    return array
