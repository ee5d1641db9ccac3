"""Calls of the compiled part with torch tensors, for the operators and the eager paths."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway import _headway
from headway.torch._parts import empty_like_parts

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]

# The type of out decides the type of lse.
_LSE_TYPE = {torch.float64: torch.float64}


# Options, as the operators' schemas spell them.
SCHEMA = (
    "Tensor? bias, Tensor? sinks, Tensor? mask, Tensor? alibi_slopes, Tensor? valid_lens, Tensor? query_lens, "
    "Tensor? spans, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, str causal, SymInt? window_left, "
    "SymInt? window_right, float? scale, float? softcap, float dropout, str? engine, bool batch_invariant, "
    "SymInt span_rows"
)
TENSORS = 10  # how many of Options' fields are tensors: its first ones


class Options(NamedTuple):
    """Attention's options as the operators take them: flat, in the schema's order, the tensors first.

    The compiled part reads them in this order too (python/src/torch_calls.cpp).
    """

    bias: Tensor | None = None
    sinks: Tensor | None = None
    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    valid_lens: Tensor | None = None
    query_lens: Tensor | None = None
    spans: Tensor | None = None
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
    span_rows: int = 1

    @property
    def packed(self) -> bool:
        """Whether this is a call over packed sequences."""
        return self.cu_seqlens_q is not None

    def keywords(self) -> dict[str, Any]:
        """The options that are given, under the names that headway.attention has for them."""
        given: dict[str, Any] = {}
        for name in (
            "bias", "sinks", "mask", "alibi_slopes", "valid_lens", "query_lens", "spans", "scale", "softcap", "engine"
        ):  # fmt: skip
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
        if self.span_rows != 1:
            given["span_rows"] = self.span_rows
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
    """An empty (B, H, S, width) whose axes have the memory order of like (B, H, S, D); None if that is the usual order.

    A query that is a (B, Sq, H, D) projection seen as (B, H, Sq, D) gets an out whose heads are joined without a copy,
    and a gradient that goes back into the projection without one.
    """
    if like.dim() != 4:
        return None
    first, second, third, _ = like.stride()
    if first >= second >= third:
        return None
    batch, heads, length, _ = sizes = like.shape
    if third > second > 0 and heads > 1 and length > 1 and (batch == 1 or first >= third):  # (B, S, H, D)
        steps = [length * heads * width, width, heads * width, 1]
    else:
        # Axes of one element lie anywhere; expanded ones have no place of their own. Both keep theirs.
        stride = (first, second, third)
        axes = [axis for axis in range(3) if sizes[axis] > 1 and stride[axis] > 0]
        by_stride = iter(sorted(axes, key=lambda axis: -stride[axis]))
        order = [next(by_stride) if axis in axes else axis for axis in range(3)]
        if order == [0, 1, 2]:
            return None
        steps, step = [0, 0, 0, 1], width
        for axis in reversed(order):
            steps[axis] = step
            step = step * max(sizes[axis], 1)
    # Not a permuted tensor: forward mode takes no views.
    return like.new_empty_strided((batch, heads, length, width), steps)


def out_like(query: Tensor, value: Tensor) -> Tensor | None:
    """An empty out (B, H, Sq, Dv) whose axes have the memory order of the query's; None if that is the usual order."""
    return empty_in_order(query, value.shape[-1]) if value.dim() == 4 else None


def forward(
    query: Tensor, key: Tensor, value: Tensor, options: Options, return_weights: bool, return_lse: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Out, and lse and the weights if requested. Autograd records nothing here."""
    place = None
    if not query.is_contiguous() and options.cu_seqlens_q is None:
        place = out_like(query, value)
    found: tuple[Tensor, Tensor | None, Tensor | None] = _headway.torch_attention(
        query, key, value, options, return_weights, return_lse, place
    )
    return found


def gradient_places(query: Tensor, key: Tensor, value: Tensor, may_share: bool) -> list[Tensor | None]:
    """Outputs for the gradients, in the memory layout of their tensors, so that a split is undone without a copy."""
    step = key.shape[1] * key.shape[-1] * key.element_size() if may_share and key.dim() == 4 else 0
    if step > 0 and value.data_ptr() - key.data_ptr() == step:  # not the rule, and quick to see
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
) -> Gradients:
    """The gradients of query, key, value, bias and sinks; None for those that are not given or not wanted.

    may_share lets gradients lie side by side in one buffer, as query, key and value do where one product made them.
    """
    if grad_lse is not None:
        return _backward_of_lse(grad_out, grad_lse, query, key, value, out, lse, options, bias_gradient)
    places = None
    if not ((query.is_contiguous() and key.is_contiguous() and value.is_contiguous()) or options.packed):
        places = gradient_places(query, key, value, may_share)
    found: Gradients = _headway.torch_attention_backward(
        grad_out, query, key, value, out, lse, options, places, bias_gradient
    )
    return found


def _backward_of_lse(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    bias_gradient: bool,
) -> Gradients:
    # Backward subtracts rowsum(grad_out * out) from the gradient of every score of a row, and the gradient of lse
    # is added there: one more column, grad_lse times -1, over values of 0.
    if options.packed:
        grad_lse = grad_lse.transpose(0, 1)
    grad_out = torch.cat([grad_out, grad_lse.unsqueeze(-1).to(grad_out.dtype)], dim=-1)
    out = torch.cat([out, out.new_full((*out.shape[:-1], 1), -1.0)], dim=-1)
    wider = torch.cat([value, value.new_zeros(*value.shape[:-1], 1)], dim=-1)
    d_query, d_key, d_wider, d_bias, d_sinks = _headway.torch_attention_backward(
        grad_out, query, key, wider, out, lse, options, None, bias_gradient
    )
    return d_query, d_key, d_wider[..., :-1].contiguous(), d_bias, d_sinks
