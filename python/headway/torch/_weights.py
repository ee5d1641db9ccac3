"""Gradients that come in through the returned weights: plain torch, since the weights are a matrix anyway."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headway.torch._core import Options


def gradients_through_weights(
    grad_weights: Tensor, query: Tensor, key: Tensor, lse: Tensor, weights: Tensor, options: Options
) -> dict[int, Tensor]:
    """What sum(grad_weights * weights) adds to the gradients of query (0), key (1), bias (3) and sinks (4).

    grad_weights and weights (B, H, Sq, Sk), the others as in attention; all without heads or batch too.
    """
    kept = (weights * grad_weights).sum(dim=-1, keepdim=True)  # [.., Sq, 1]
    grad_biased = weights * (grad_weights - kept)
    scale = softmax_scale(query, options)
    group = query.shape[-3] // key.shape[-3] if query.dim() == 4 and key.shape[-3] > 0 else 1
    # What is not finite has made NaN of the rows that attend to it, and times the zeros of the others it would of them.
    query, keys = _finite(query), _finite(key if group == 1 else key.repeat_interleave(group, dim=-3))
    grad_scores = grad_biased
    if options.softcap is not None:
        scores = scale * (query @ keys.transpose(-2, -1))
        grad_scores = grad_biased * (1 - torch.tanh(scores / options.softcap) ** 2)
    grad_query = scale * (grad_scores @ keys)
    grad_key = scale * (grad_scores.transpose(-2, -1) @ query)
    if group != 1:
        grad_key = grad_key.reshape(*key.shape[:2], group, *key.shape[2:]).sum(dim=2)
    found = {0: grad_query, 1: grad_key}
    if options.bias is not None:
        found[3] = grad_biased.sum_to_size(options.bias.shape).to(options.bias.dtype)
    if options.sinks is not None:
        found[4] = _sinks_gradient(kept.squeeze(-1), lse, options.sinks)
    return found


def _sinks_gradient(kept: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The sink's share of each row, times -kept: sinks (H,), kept and lse (B, H, Sq), or without heads or batch."""
    grad = -sink_share(lse, sinks) * kept
    return (grad.sum(dim=(0, 2)) if lse.dim() == 3 else grad.sum().reshape(1)).to(sinks.dtype)


def sink_share(lse: Tensor, sinks: Tensor) -> Tensor:
    """How much of each row goes to its sink: lse (B, H, Sq), or without heads or batch; 0 for padding."""
    return torch.exp(per_head(sinks, lse) - lse.masked_fill(lse == -math.inf, math.inf))


def per_head(numbers: Tensor, lse: Tensor) -> Tensor:
    """A number for each head (H,), so that it broadcasts to lse (B, H, Sq), or without heads or batch."""
    return numbers.to(lse.dtype).unsqueeze(-1) if lse.dim() == 3 else numbers.to(lse.dtype)


def hide_unseen(x: Tensor, weights: Tensor) -> Tensor:
    """Keys or values (.., Hkv, Sk, width), a copy for every query head, 0 where weights (.., H, Sq, Sk) are all 0.

    What is stored in a key that nobody attends to must not show, and 0 times NaN would.
    """
    group = weights.shape[-3] // x.shape[-3] if x.dim() == 4 and x.shape[-3] > 0 else 1
    x = x if group == 1 else x.repeat_interleave(group, dim=-3)
    return x.masked_fill(~weights.any(dim=-2).unsqueeze(-1), 0.0)


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0)


def softmax_scale(query: Tensor, options: Options) -> float:
    """The scale that attention uses."""
    if options.scale is not None:
        return options.scale
    return 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] > 0 else 1.0
