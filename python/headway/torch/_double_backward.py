"""Second derivatives: attention once more in plain torch, differentiated twice.

Unlike everything else here it stores the Sq x Sk matrices; it runs only where a second derivative is asked for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headway import _headway
from headway.torch._core import SCHEMA, Options
from headway.torch._weights import hide_unseen, softmax_scale


def double_backward(
    grads: tuple[Tensor | None, ...],
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
) -> tuple[Tensor | None, ...]:
    """The gradients of grad_out, grad_lse, query, key, value, bias and sinks.

    grads are those of attention_backward's five results, None where nothing depends on one.
    """
    if options.packed:
        raise NotImplementedError("attention_varlen: there is no second derivative of packed sequences")
    if options.dropout != 0.0:
        raise NotImplementedError(
            f"attention: there is no second derivative with dropout, found dropout={options.dropout}"
        )
    recorded = torch.is_grad_enabled()  # for a third derivative

    def source(x: Tensor | None) -> Tensor | None:
        # Each one apart from the others, which it may have been computed from.
        if x is None:
            return None
        return x.view_as(x) if recorded and x.requires_grad else x.detach().requires_grad_()

    with torch.enable_grad():
        weights = [source(grad_out), source(grad_lse)]
        sources = [source(x) for x in (query, key, value, options.bias, options.sinks)]
        results = _attention(options._replace(bias=sources[3], sinks=sources[4]), *sources[:3])
        pairs = [(result, weight) for result, weight in zip(results, weights) if weight is not None]
        firsts = _grad(pairs, sources, create_graph=True)
        pairs = [(first, grad) for first, grad in zip(firsts, grads) if first is not None and grad is not None]
        return _grad(pairs, [*weights, *sources], create_graph=recorded)


def _grad(
    pairs: list[tuple[Tensor, Tensor]], inputs: list[Tensor | None], create_graph: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of sum(result * weight) over the pairs, None for inputs that are None or not in it."""
    pairs = [(result, weight) for result, weight in pairs if result.requires_grad]
    given = [x for x in inputs if x is not None]
    if not pairs:
        return (None,) * len(inputs)
    outputs, weights = zip(*pairs)
    found = iter(torch.autograd.grad(outputs, given, weights, create_graph=create_graph, allow_unused=True))
    return tuple(None if x is None else next(found) for x in inputs)


@torch.library.custom_op(
    "headway::biased_scores", mutates_args=(), schema=f"(Tensor query, Tensor key, {SCHEMA}) -> Tensor"
)
def biased_scores(query: Tensor, key: Tensor, *options: Any) -> Tensor:
    """The scores (B, H, Sq, Sk) before the softmax, -inf where a key is forbidden."""
    return _headway.attention_scores(query, key, stage="biased", **Options(*options).keywords())


@biased_scores.register_fake
def _(query: Tensor, key: Tensor, *options: Any) -> Tensor:
    return query.new_empty(*query.shape[:-1], key.shape[-2])


def _attention(options: Options, query: Any, key: Any, value: Any) -> tuple[Tensor, Tensor]:
    """Out and lse, recorded by autograd."""
    with torch.no_grad():
        biased = biased_scores(query, key, *options._replace(sinks=None))
        allowed = biased != -math.inf
        if options.query_lens is not None:
            rows = torch.arange(query.shape[-2], device=query.device)
            real = rows < options.query_lens.to(query.device).reshape(-1, *[1] * (query.dim() - 2))
            allowed = allowed & (real if query.dim() > 2 else real.reshape(-1)).unsqueeze(-1)
    empty = ~allowed.any(dim=-1, keepdim=True)
    key, value = hide_unseen(key, allowed), hide_unseen(value, allowed)
    scores = softmax_scale(query, options) * (query.masked_fill(empty, 0.0) @ key.transpose(-2, -1))
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.bias is not None:
        scores = scores + torch.where(options.bias > -math.inf, options.bias, 0.0).to(scores.dtype)
    if options.alibi_slopes is not None:
        scores = scores + (biased.masked_fill(~allowed, 0.0) - scores.masked_fill(~allowed, 0.0)).detach()
    scores = scores.masked_fill(~allowed, -math.inf)
    # Rows without a key take part with a score of 0, and are forbidden afterwards, so that nothing is NaN.
    scores = scores.masked_fill(empty, 0.0)
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype).reshape(-1, *[1] * (2 if query.dim() == 4 else query.dim() - 1))
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1))[..., : key.shape[-2]].masked_fill(empty, 0.0)
    return weights @ value, lse.masked_fill(empty.squeeze(-1), 0.0)
