"""Forward-mode derivatives: the tangents of attention's results, from those of its inputs.

With P the weights and ds, dv, .. tangents:  ds = scale * (dq k^T + q dk^T), times softcap's slope, + dbias
    dlse = sum_j P ds + sink's share * dsink,  dP = P (ds - dlse),  dout = dP v + P dv
Plain torch, differentiable itself. Like second derivatives it stores the Sq x Sk matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from headway.torch._core import Options, lse_type
from headway.torch._weights import hide_unseen, per_head, sink_share, softmax_scale

# Tangents of inner levels of torch.func.jvp: torch runs a function's own jvp with all levels off.
all_levels: Any = forward_ad._set_fwd_grad_enabled


def on() -> bool:
    """Whether tangents may be present: inside forward_ad.dual_level or a torch.func transform that uses it."""
    return forward_ad._current_level >= 0


def primal(x: Any) -> Any:
    """A tensor without its tangent of this level; anything else as it is."""
    return forward_ad.unpack_dual(x).primal if isinstance(x, Tensor) else x  # type: ignore[no-untyped-call]


def tangents(
    d_inputs: tuple[Any, ...], query: Tensor, key: Tensor, value: Tensor, options: Options, lse: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The tangents of out, lse and weights; d_inputs are those of query, key, value, bias and sinks, or None."""
    wide, narrow = lse_type(query.dtype), query.dtype
    weights = weights.to(wide)
    d_query, d_key, d_value, d_bias, d_sinks = d_inputs
    query = query.to(wide)
    key, value = (hide_unseen(x.to(wide), weights) for x in (key, value))
    scale = softmax_scale(query, options)

    d_scores = torch.zeros_like(weights)
    if d_query is not None:
        d_scores = d_scores + scale * (d_query.to(wide) @ key.transpose(-2, -1))
    if d_key is not None:
        d_scores = d_scores + scale * (query @ hide_unseen(d_key.to(wide), weights).transpose(-2, -1))
    if options.softcap is not None:
        scores = scale * (query @ key.transpose(-2, -1))
        d_scores = d_scores * (1 - torch.tanh(scores / options.softcap) ** 2)
    if d_bias is not None:
        d_scores = d_scores + d_bias.to(wide)
    d_scores = d_scores.masked_fill(weights == 0, 0.0)

    d_lse = (weights * d_scores).sum(dim=-1)
    share = sink_share(lse, options.sinks)
    if d_sinks is not None and share is not None:
        # As in backward, a row without a key has no derivative, though its lse is the sink.
        d_lse = d_lse + (share * per_head(d_sinks, lse)).masked_fill(~weights.any(dim=-1), 0.0)
    d_weights = weights * (d_scores - d_lse.unsqueeze(-1))
    d_out = d_weights @ value
    if d_value is not None:
        d_out = d_out + weights @ hide_unseen(d_value.to(wide), weights)
    return d_out.to(narrow), d_lse, d_weights.to(narrow)
