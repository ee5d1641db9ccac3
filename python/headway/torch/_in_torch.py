"""Attention's weights and gradients in plain torch, for derivatives that the compiled part does not compute.

Derivatives of gradients, in either mode, are torch's own of this code, so that they nest as deep as torch.func does.
Unlike everything else here it stores (Sq, Sk) matrices, about ten for each head; it runs only where a second or a
forward-mode derivative is asked for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headway import _headway
from headway.torch._core import SCHEMA, Options
from headway.torch._weights import gradients_through_weights, hide_unseen, per_head, softmax_scale, sum_groups


def covers(options: Options) -> bool:
    """Whether calls with these options are written here."""
    return not options.packed and options.dropout == 0.0


def refuse(what: str, options: Options) -> None:
    """NotImplementedError for calls whose derivatives are not written here."""
    if covers(options):
        return
    if options.packed:
        raise NotImplementedError(f"attention_varlen: there is no {what} derivative of packed sequences")
    raise NotImplementedError(f"attention: there is no {what} derivative with dropout, found dropout={options.dropout}")


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

    grads are those of the five results of gradients, None where nothing depends on one.
    """
    refuse("second", options)
    inputs = (grad_out, grad_lse, query, key, value, options.bias, options.sinks)
    given = [index for index, x in enumerate(inputs) if x is not None]
    wanted = [index for index, grad in enumerate(grads) if grad is not None and inputs[index + 2] is not None]
    if not wanted:
        return (None,) * len(inputs)

    def wanted_gradients(*sources: Tensor) -> tuple[Any, ...]:
        each: list[Any] = [None] * len(inputs)
        for index, x in zip(given, sources):
            each[index] = x
        grad_out, grad_lse, query, key, value, bias, sinks = each
        found = gradients(grad_out, grad_lse, query, key, value, options._replace(bias=bias, sinks=sinks))
        return tuple(found[index] for index in wanted)

    derivative = torch.func.vjp(wanted_gradients, *(inputs[index] for index in given))[1]
    seconds = iter(derivative(tuple(grads[index] for index in wanted)))
    return tuple(None if x is None else next(seconds) for x in inputs)


def gradients(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor | None, ...]:
    """attention_backward in plain torch: the gradients of query, key, value, bias and sinks, None where not given."""
    allowed, terms = _allowed(query, key, options)
    empty = ~allowed.any(dim=-1)
    weights, share = _weights(query, key, allowed, terms, options)
    # Rows without a key contribute nothing, whatever they hold.
    grad_out = grad_out.masked_fill(empty.unsqueeze(-1), 0.0)
    if grad_lse is not None:
        grad_lse = grad_lse.masked_fill(empty, 0.0)
    grad_weights = grad_out @ hide_unseen(value, allowed).transpose(-2, -1)
    found = gradients_through_weights(grad_weights, grad_lse, query, key, share, weights, options)
    grad_value = sum_groups(weights.transpose(-2, -1) @ grad_out, value)
    return found[0], found[1], grad_value, found.get(3), found.get(4)


def _allowed(query: Tensor, key: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """The allowed pairs (.., Sq, Sk), and the terms that are added to their scores besides the bias."""
    terms = fixed_terms(_without_width(query), _without_width(key), *options._replace(bias=None, sinks=None))
    allowed = terms != -math.inf
    if options.bias is not None:
        allowed = allowed & (options.bias != -math.inf)
    if options.query_lens is not None:
        allowed = allowed & ~_padding(query, options.query_lens).unsqueeze(-1)
    return allowed, terms


def _weights(query: Any, key: Any, allowed: Tensor, terms: Tensor, options: Options) -> tuple[Tensor, Tensor | None]:
    """The weights (.., Sq, Sk), and the sink's share of each row where there is one.

    Rows without a key get weights that are finite, no more: what they are multiplied with is 0.
    """
    empty = ~allowed.any(dim=-1, keepdim=True)
    query = softmax_scale(query, options) * query.masked_fill(empty, 0.0)
    scores = query @ hide_unseen(key, allowed).transpose(-2, -1)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.bias is not None:
        scores = scores + _zero_where_forbidden(options.bias).to(scores.dtype)
    if options.alibi_slopes is not None:
        scores = scores + _zero_where_forbidden(terms)
    if options.sinks is None:
        return torch.softmax(scores.masked_fill(~(allowed | empty), -math.inf), dim=-1), None
    sinks = per_head(options.sinks, scores[..., 0]).unsqueeze(-1).expand(*scores.shape[:-1], 1)
    scores = torch.cat([scores.masked_fill(~allowed, -math.inf), sinks.masked_fill(empty, 0.0)], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    return weights[..., :-1], weights[..., -1]


def _zero_where_forbidden(terms: Tensor) -> Tensor:
    return terms.masked_fill(terms == -math.inf, 0.0)


def _without_width(x: Tensor) -> Tensor:
    """x (.., S, D) reduced to its shape: terms that depend on positions only have no derivative."""
    return torch.empty(*x.shape[:-1], 0, dtype=x.dtype, device=x.device)


def _padding(query: Tensor, query_lens: Tensor) -> Tensor:
    """Which rows of query (.., Sq, D) are padding: (B, 1, Sq), (B, Sq) or (Sq,)."""
    rows = torch.arange(query.shape[-2], device=query.device)
    return rows >= query_lens.to(query.device).reshape([-1, 1, 1][: query.dim() - 1])


@torch.library.custom_op(
    "headway::fixed_terms", mutates_args=(), schema=f"(Tensor query, Tensor key, {SCHEMA}) -> Tensor"
)
def fixed_terms(query: Tensor, key: Tensor, *options: Any) -> Tensor:
    """The terms added to the scores (B, H, Sq, Sk) of queries and keys of width 0: ALiBi, and -inf where forbidden."""
    return _headway.attention_scores(query, key, stage="biased", **Options(*options).keywords())


@fixed_terms.register_fake
def _(query: Tensor, key: Tensor, *options: Any) -> Tensor:
    return query.new_empty(*query.shape[:-1], key.shape[-2])
