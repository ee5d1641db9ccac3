"""Forward-mode derivatives: the tangents of attention's results, from those of its inputs.

With P the weights and ds, dv, .. tangents:  ds = scale * (dq k^T + q dk^T), times softcap's slope, + dbias
    dlse = sum_j P ds + sink's share * dsink,  dP = P (ds - dlse),  dout = dP v + P dv
Plain torch, recorded for reverse mode too. Like second derivatives it stores the Sq x Sk matrix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from headway.torch._core import Options, lse_type
from headway.torch._weights import hide_unseen, per_head, sink_share, softmax_scale

_make_dual: Any = forward_ad.make_dual
_unpack_dual: Any = forward_ad.unpack_dual


class Dual(NamedTuple):
    """The five inputs that have derivatives: query, key, value, bias and sinks, and their tangents; or None."""

    primals: list[Any]
    tangents: list[Any]


def on() -> bool:
    """Whether tangents may be on their way: inside forward_ad.dual_level or a torch.func transform that uses it."""
    return forward_ad._current_level >= 0


def unpack(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Dual | None:
    """The inputs apart from their tangents; None where none has one."""
    if not on():
        return None
    slopes = options.alibi_slopes
    if slopes is not None and _unpack_dual(slopes).tangent is not None:
        raise ValueError("attention: alibi_slopes has a tangent, and no derivative: pass what is learnt as bias")
    inputs = (query, key, value, options.bias, options.sinks)
    pairs = [(None, None) if x is None else _unpack_dual(x) for x in inputs]
    if all(tangent is None for _, tangent in pairs):
        return None
    if options.packed:
        raise NotImplementedError("attention_varlen: there is no forward-mode derivative of packed sequences")
    if options.dropout != 0.0:
        raise NotImplementedError(
            f"attention: there is no forward-mode derivative with dropout, found dropout={options.dropout}"
        )
    return Dual([primal for primal, _ in pairs], [tangent for _, tangent in pairs])


def with_tangents(inputs: Dual, results: tuple[Any, ...], options: Options) -> tuple[Any, ...]:
    """(out, lse, weights) of these inputs, each with its tangent."""
    out, lse, weights = results
    tangents = _tangents(inputs, out, lse, weights, options)
    return tuple(_make_dual(x, dx.to(x.dtype)) for x, dx in zip(results, tangents))


def _tangents(inputs: Dual, out: Tensor, lse: Tensor, weights: Tensor, options: Options) -> tuple[Tensor, ...]:
    wide = lse_type(out.dtype)
    weights = weights.to(wide)
    d_query, d_key, d_value, d_bias, d_sinks = inputs.tangents
    query = inputs.primals[0].to(wide)
    key, value = (hide_unseen(x.to(wide), weights) for x in inputs.primals[1:3])
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
    if d_sinks is not None:
        d_lse = d_lse + sink_share(lse, inputs.primals[4]) * per_head(d_sinks, lse)
    d_weights = weights * (d_scores - d_lse.unsqueeze(-1))
    d_out = d_weights @ value
    if d_value is not None:
        d_out = d_out + weights @ hide_unseen(d_value.to(wide), weights)
    return d_out, d_lse, d_weights
