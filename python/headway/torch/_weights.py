"""Gradients that come in through the returned weights: plain torch, since the weights are a matrix anyway."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headway.torch._core import Options


def gradients_through_weights(
    grad_weights: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    share: Tensor | None,
    weights: Tensor,
    options: Options,
) -> dict[int, Tensor]:
    """The contribution of sum(grad_weights * weights) + sum(grad_lse * lse) to some gradients.

    Those are of query (0), key (1), bias (3) and sinks (4). grad_weights and weights (B, H, Sq, Sk), the sinks' share
    of each row (B, H, Sq), the others as in attention; all without heads or batch too.
    """
    kept = (weights * grad_weights).sum(dim=-1, keepdim=True)  # [.., Sq, 1]
    if grad_lse is not None:
        kept = kept - grad_lse.unsqueeze(-1).to(kept.dtype)
    grad_biased = weights * (grad_weights - kept)
    scale = softmax_scale(query, options)
    # Values that are not finite have made the rows that attend to them NaN; multiplied by the other rows' zero weights
    # they would make those NaN too.
    query, keys = _finite(query), _finite(_repeat_groups(key, query.shape[-3:-2]))
    grad_scores = grad_biased
    if options.softcap is not None:
        scores = scale * (query @ keys.transpose(-2, -1))
        grad_scores = grad_biased * (1 - torch.tanh(scores / options.softcap) ** 2)
    grad_query = scale * (grad_scores @ keys)
    found = {0: grad_query, 1: sum_groups(scale * (grad_scores.transpose(-2, -1) @ query), key)}
    if options.bias is not None:
        found[3] = grad_biased.sum_to_size(options.bias.shape).to(options.bias.dtype)
    if options.sinks is not None and share is not None:
        grad = -share * kept.squeeze(-1)
        grad = grad.sum(dim=(0, 2)) if grad.dim() == 3 else grad.sum().reshape(1)
        found[4] = grad.to(options.sinks.dtype)
    return found


def sink_share(lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """The share of each row that its sink takes: lse (B, H, Sq), or without heads or batch; 0 for padding."""
    if sinks is None:
        return None
    return torch.exp(per_head(sinks, lse) - lse.masked_fill(lse == -math.inf, math.inf))


def per_head(numbers: Tensor, lse: Tensor) -> Tensor:
    """A number for each head (H,), so that it broadcasts to lse (B, H, Sq), or without heads or batch."""
    return numbers.to(lse.dtype).unsqueeze(-1) if lse.dim() == 3 else numbers.to(lse.dtype)


def hide_unseen(x: Tensor, weights: Tensor) -> Tensor:
    """Keys or values (.., Hkv, Sk, width), a copy for every query head, 0 where weights (.., H, Sq, Sk) are all 0.

    What is stored in a key that nobody attends to must not show, and 0 times NaN would.
    """
    x = _repeat_groups(x, weights.shape[-3:-2])
    return x.masked_fill(~weights.any(dim=-2).unsqueeze(-1), 0.0)


def _repeat_groups(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Keys or values (B, Hkv, Sk, width) with a copy for every query head; without heads as they are."""
    if x.dim() != 4 or x.shape[-3] == 0 or x.shape[-3] == heads[0]:
        return x
    return x.repeat_interleave(heads[0] // x.shape[-3], dim=-3)


def sum_groups(gradient: Tensor, x: Tensor) -> Tensor:
    """A gradient with a copy for every query head, for keys or values x (B, Hkv, Sk, width) themselves."""
    if gradient.shape == x.shape:
        return gradient
    return gradient.reshape(*x.shape[:2], gradient.shape[1] // x.shape[1], *x.shape[2:]).sum(dim=2)


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0)


def softmax_scale(query: Tensor, options: Options) -> float:
    """The scale that attention uses."""
    if options.scale is not None:
        return options.scale
    return 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] > 0 else 1.0
