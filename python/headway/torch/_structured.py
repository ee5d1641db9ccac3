"""Structured masks as tensors for the operators, made once for each mask and sizes."""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from headway import _headway
from headway._headway import Mask
from headway.torch._core import Options

# By mask: the sizes that it was last used with, and its tensors, so that the layers of a model share them.
_last: WeakKeyDictionary[Mask, tuple[Any, tuple[Tensor | None, int, Tensor | None]]] = WeakKeyDictionary()


def _with_mask(operation: str, mask: Mask, query: Tensor, key: Tensor, options: Options) -> Options:
    """The options with the mask's spans and bools, for query and key (B, H, S, D) or without heads or batch."""
    if options.spans is not None:
        raise ValueError(
            f"{operation}: found spans and a structured mask, expected one: masks.spans(array) & mask joins them"
        )
    if options.packed:
        bounds = (options.cu_seqlens_q.tolist(), options.cu_seqlens_k.tolist())  # type: ignore[union-attr]
        _check_axes(operation, mask, len(bounds[0]) - 1, query.shape[1])
        spans, rows, bools = _tensors(mask, bounds, query.device, _headway.mask_packed_parts)
        return options._replace(spans=spans, mask=bools)
    if query.dim() not in (2, 3, 4) or key.dim() != query.dim():
        return options  # the call says what is wrong
    batch, heads = ((1, 1), (query.shape[0], 1), (query.shape[0], query.shape[1]))[query.dim() - 2]
    _check_axes(operation, mask, batch, heads)
    sizes = (int(query.shape[-2]), int(key.shape[-2]))
    try:
        spans, rows, bools = _tensors(mask, sizes, query.device, _headway.mask_parts)
    except ValueError as error:
        raise ValueError(str(error).replace("Mask.parts", operation)) from None
    lost: tuple[Any, ...] = ((0, 0), (slice(None), 0), ())[query.dim() - 2]  # axes that the query does not have
    return options._replace(
        spans=None if spans is None else spans[lost],
        mask=None if bools is None else bools[lost],
        span_rows=rows,
    )


def _check_axes(operation: str, mask: Mask, batch: int, heads: int) -> None:
    for name, found, expected in (("batch items", mask.batch, batch), ("heads", mask.heads, heads)):
        if found not in (1, expected):
            raise ValueError(f"{operation}: mask has {found} {name}, expected {expected} or 1")


def _tensors(mask: Mask, sizes: Any, device: torch.device, make: Any) -> tuple[Tensor | None, int, Tensor | None]:
    """Spans; queries of an entry; bools. On the device, so that no call checks spans and sends them again."""
    known = _last.get(mask)
    if known is not None and known[0] == (sizes, device):
        return known[1]
    spans, rows, bools = make(mask, *sizes)
    tensors = (
        None if spans is None else torch.from_numpy(spans).to(device),
        rows,
        None if bools is None else torch.from_numpy(bools).to(device),
    )
    _last[mask] = ((sizes, device), tensors)
    return tensors


_disabled: Any = None


def with_mask(operation: str, mask: Mask, query: Tensor, key: Tensor, options: Options) -> Options:
    """The options with the mask in them, outside of compiled graphs: what a mask becomes depends on its numbers."""
    global _disabled
    if "torch._dynamo" not in sys.modules:  # nothing compiles yet
        return _with_mask(operation, mask, query, key, options)
    if _disabled is None:
        disable: Any = torch.compiler.disable
        _disabled = disable(_with_mask)
    found: Options = _disabled(operation, mask, query, key, options)
    return found


# What torch.compiler.disable would set; but it imports the compiler, which takes longer than all of torch.
with_mask._torchdynamo_disable = True  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
