"""Attention and the mean of its weights over the heads; on a GPU without the matrices of single heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway import _headway
from headway.torch._core import TENSORS, Options
from headway.torch._dispatch import attend, autocast, autocast_active, is_plain
from headway.torch._weights import gradients_through_weights, sink_share


def attend_for_mean(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Out (N, H, L, D) and the mean of the weights (N, L, S), of a call without dropout."""
    if autocast_active():
        query, key, value, options = autocast(query, key, value, options)
    if query.device.type != "cuda" or not is_plain(query, key, value, options):
        out, _, weights = attend(query, key, value, options, True)
        assert weights is not None
        return out, weights.mean(dim=1)
    out, lse, _ = attend(query, key, value, options, return_lse=True)
    assert lse is not None
    mean: Tensor = _MeanWeights.apply(query, key, options.bias, options.sinks, lse.detach(), options)  # type: ignore[no-untyped-call]
    return out, mean


class _MeanWeights(torch.autograd.Function):
    """The mean, and its gradients, which need the matrices of single heads."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, bias: Tensor | None, sinks: Tensor | None, lse: Tensor, options: Options
    ) -> Tensor:
        ctx.options = options[TENSORS:]
        ctx.save_for_backward(query, key, *options[:TENSORS])
        return _headway.mean_weights(query.resolve_neg(), key.resolve_neg(), lse, **options.keywords())

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's is of *grad_outputs
        ctx: Any, grad_mean: Tensor
    ) -> tuple[Tensor | None, ...]:
        query, key, *tensors = ctx.saved_tensors
        options = Options(*tensors, *ctx.options)
        _, lse, weights = attend(query, key, key[..., :0], options, True, True)
        assert lse is not None and weights is not None
        grad_weights = (grad_mean / query.shape[1]).unsqueeze(1).expand_as(weights)
        share = sink_share(lse, options.sinks)
        found = gradients_through_weights(grad_weights, None, query, key, share, weights, options)
        return found[0], found[1], found.get(3), found.get(4), None, None
