"""Calls of the compiled part with torch tensors: what the operators and the eager paths share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway import _headway
from headway.torch._parts import empty_like_parts

# The type of out decides the type of lse.
_LSE_TYPE = {torch.float64: torch.float64}


# Options, as the operators' schemas spell them.
SCHEMA = (
    "Tensor? bias, Tensor? sinks, Tensor? mask, Tensor? alibi_slopes, Tensor? valid_lens, Tensor? query_lens, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, str causal, SymInt? window_left, SymInt? window_right, "
    "float? scale, float? softcap, float dropout, str? engine, bool batch_invariant"
)
TENSORS = 9  # how many of Options' fields are tensors: its first ones


class Options(NamedTuple):
    """Attention's options as the operators take them: flat, in the schema's order, the tensors first."""

    bias: Tensor | None = None
    sinks: Tensor | None = None
    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    valid_lens: Tensor | None = None
    query_lens: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seed: Tensor | None = None
    causal: str = "none"  # "none", "square", "top_left", "bottom_right"
    window_left: int | None = None
    window_right: int | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    engine: str | None = None
    batch_invariant: bool = False

    @property
    def packed(self) -> bool:
        """Whether this is a call over packed sequences."""
        return self.cu_seqlens_q is not None

    def keywords(self) -> dict[str, Any]:
        """The options that are given, under the names that headway.attention has for them."""
        given: dict[str, Any] = {}
        for name in ("bias", "sinks", "mask", "alibi_slopes", "valid_lens", "query_lens", "scale", "softcap", "engine"):
            value = getattr(self, name)
            if value is not None:
                given[name] = value.resolve_neg() if isinstance(value, Tensor) else value
        if self.causal != "none":
            given["causal"] = self.causal == "square" or self.causal
        if self.window_left is not None or self.window_right is not None:
            given["window"] = (self.window_left, self.window_right)
        if self.dropout != 0.0:
            given["dropout"] = self.dropout
        if self.batch_invariant:
            given["batch_invariant"] = True
        if self.seed is not None:
            given["seed"] = int(self.seed.item()) % 2**64
        return given


NO_OPTIONS = Options()


def lse_type(dtype: torch.dtype) -> torch.dtype:
    """The type of lse for inputs of this type."""
    return _LSE_TYPE.get(dtype, torch.float32)


def lse_shape(query: Tensor, packed: bool) -> tuple[int, ...]:
    """(B, H, Sq), or (H, total) for packed sequences."""
    return (query.shape[1], query.shape[0]) if packed else tuple(query.shape[:-1])


def empty_in_order(like: Tensor, width: int) -> Tensor | None:
    """An empty (B, H, S, width) whose axes lie in memory as those of like (B, H, S, D); None where that is as usual.

    A query that is a (B, Sq, H, D) projection seen as (B, H, Sq, D) gets an out whose heads are joined without a copy,
    and a gradient that goes back into the projection without one.
    """
    if like.dim() != 4:
        return None
    stride = like.stride()
    if stride[0] >= stride[1] >= stride[2]:
        return None
    sizes = (*like.shape[:-1], width)
    # Axes of one element lie anywhere; expanded ones have no place of their own. Both keep theirs.
    axes = [axis for axis in range(3) if sizes[axis] > 1 and stride[axis] > 0]
    by_stride = iter(sorted(axes, key=lambda axis: -stride[axis]))
    order = [next(by_stride) if axis in axes else axis for axis in range(3)]
    if order == [0, 1, 2]:
        return None
    steps, step = [0, 0, 0, 1], width
    for axis in reversed(order):
        steps[axis] = step
        step = step * max(sizes[axis], 1)
    return like.new_empty_strided(sizes, steps)  # not a permuted tensor: forward mode takes no views


def out_like(query: Tensor, value: Tensor) -> Tensor | None:
    """An empty out (B, H, Sq, Dv) whose axes lie in memory as the query's do; None where that is the usual order."""
    return empty_in_order(query, value.shape[-1]) if value.dim() == 4 else None


def forward(
    query: Tensor, key: Tensor, value: Tensor, options: Options, return_weights: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Out, lse, and the weights if asked for."""
    # A tensor may be stored negated, which DLPack does not tell.
    query, key, value = query.resolve_neg(), key.resolve_neg(), value.resolve_neg()
    keywords = options.keywords()
    if options.packed:
        out, lse = _headway.attention_varlen(
            query, key, value, options.cu_seqlens_q, options.cu_seqlens_k, return_lse=True, **keywords
        )
        return out, lse, None
    place = out_like(query, value)
    if return_weights:
        out, weights, lse = _headway.attention(
            query, key, value, return_weights=True, return_lse=True, out=place, **keywords
        )
        return out, lse, weights
    out, lse = _headway.attention(query, key, value, return_lse=True, out=place, **keywords)
    return out, lse, None


def _gradient_places(query: Tensor, key: Tensor, value: Tensor, may_share: bool) -> list[Tensor | None]:
    """Where to write the gradients: as their tensors lie, so that what split them joins them again without a copy."""
    if may_share:
        all_three = empty_like_parts((query, key, value))
        if all_three is not None:
            return [*all_three]
        two = empty_like_parts((key, value))
        if two is not None:
            return [empty_in_order(query, query.shape[-1]), *two]
    return [empty_in_order(x, x.shape[-1]) for x in (query, key, value)]


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    may_share: bool = False,
    bias_gradient: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of query, key, value, bias and sinks; None for those that are not given or not wanted.

    may_share lets gradients lie side by side in one buffer, as query, key and value do where one product made them.
    """
    width = value.shape[-1]
    grad_out, query, key, value = (x.resolve_neg() for x in (grad_out, query, key, value))
    if grad_lse is not None:
        # Backward subtracts rowsum(grad_out * out) from the gradient of every score of a row, and the gradient of lse
        # is added there: one more column, grad_lse times -1, over values of 0.
        if options.packed:
            grad_lse = grad_lse.transpose(0, 1)
        grad_out = torch.cat([grad_out, grad_lse.unsqueeze(-1).to(grad_out.dtype)], dim=-1)
        out = torch.cat([out, out.new_full((*out.shape[:-1], 1), -1.0)], dim=-1)
        value = torch.cat([value, value.new_zeros(*value.shape[:-1], 1)], dim=-1)
    keywords = {**options.keywords(), "bias_gradient": bias_gradient}
    if options.packed:
        grads = _headway.attention_varlen_backward(
            grad_out, query, key, value, out, lse, options.cu_seqlens_q, options.cu_seqlens_k, **keywords
        )
    else:
        contiguous = query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
        if grad_lse is None and not contiguous:
            keywords["gradients"] = _gradient_places(query, key, value, may_share)
        grads = _headway.attention_backward(grad_out, query, key, value, out, lse, **keywords)
    grad_value = grads.value if grad_lse is None else grads.value[..., :width].contiguous()
    return grads.query, grads.key, grad_value, grads.bias, grads.sinks
