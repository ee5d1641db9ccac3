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
    keys = key if group == 1 else key.repeat_interleave(group, dim=-3)
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
    heads = sinks.to(lse.dtype).unsqueeze(-1) if lse.dim() == 3 else sinks.to(lse.dtype)
    padding = lse == -math.inf
    share = torch.exp(heads - lse.masked_fill(padding, math.inf))
    grad = -share * kept
    return (grad.sum(dim=(0, 2)) if lse.dim() == 3 else grad.sum().reshape(1)).to(sinks.dtype)


def softmax_scale(query: Tensor, options: Options) -> float:
    """The scale that attention uses."""
    if options.scale is not None:
        return options.scale
    return 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] > 0 else 1.0
