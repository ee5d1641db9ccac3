"""Query, key and value out of one projection, and their gradients back into it, without a copy.

A product with the joined weights gives (.., parts * width); its parts are read where they lie. Backward writes their
gradients into one buffer of the same layout (empty_like_parts), which split then recognises and hands on as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

has_storage = torch._C._has_storage


def split(joined: Tensor, parts: int, watched: bool) -> tuple[Tensor, ...]:
    """(outer, inner, parts * width) -> parts of (outer, inner, width), as views.

    watched says that a compiler or a transform runs the call, which then sees torch's own operators.
    """
    if watched or not (joined.requires_grad and torch.is_grad_enabled()):
        return joined.chunk(parts, dim=-1)
    return _Split.apply(joined, parts)  # type: ignore[no-any-return, no-untyped-call]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: Tensor, parts: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.parts = joined.shape, parts
        return joined.chunk(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        given = [x for x in grads if x is not None]
        if not given:
            return None, None
        if not torch.is_grad_enabled() and len(given) == ctx.parts and _side_by_side(given):
            first, row = given[0], ctx.shape[-1]
            steps = [row]
            for size in ctx.shape[-2:0:-1]:
                steps.insert(0, steps[0] * size)
            if first.stride() == (*steps, 1):
                return first.as_strided(ctx.shape, (*steps, 1), first.storage_offset()), None
        width = ctx.shape[-1] // ctx.parts
        parts = [given[0].new_zeros(*ctx.shape[:-1], width) if x is None else x for x in grads]
        return torch.cat(parts, dim=-1), None


def empty_like_parts(parts: Sequence[Tensor]) -> list[Tensor] | None:
    """Empty tensors like parts (B, H, S, D) of one projection, side by side in one buffer; None if they are not that.

    The projection is (B, S, parts * H * D) or (S, B, parts * H * D), and the parts views of it.
    """
    first = parts[0]
    if first.dim() != 4 or first.numel() == 0 or not _side_by_side(parts):
        return None
    batch, heads, length, dim = first.shape
    row = len(parts) * heads * dim
    sizes = (len(parts), heads, dim)
    if first.stride() == (length * row, dim, row, 1):
        whole = first.new_empty(batch, length, *sizes)
        return [x.transpose(1, 2) for x in whole.unbind(2)]
    if first.stride() == (row, dim, batch * row, 1):
        whole = first.new_empty(length, batch, *sizes)
        return [x.permute(1, 2, 0, 3) for x in whole.unbind(2)]
    return None


def _side_by_side(parts: Sequence[Tensor]) -> bool:
    """Whether the rows of equal parts follow each other in one storage: all but the last axes have one step."""
    if not all(map(has_storage, parts)):  # a batch of gradients: see _dispatch.py
        return False
    first = parts[0]
    heads_and_width = first.shape[1] * first.shape[3] if first.dim() == 4 else first.shape[-1]
    begin, step = first.data_ptr(), heads_and_width * first.element_size()
    # Comparing addresses first rejects tensors that were never one.
    if any(x.data_ptr() != begin + i * step for i, x in enumerate(parts)):
        return False
    shape, stride, dtype, storage = first.shape, first.stride(), first.dtype, first.untyped_storage().data_ptr()
    return all(
        x.shape == shape and x.stride() == stride and x.dtype == dtype and x.untyped_storage().data_ptr() == storage
        for x in parts
    )
