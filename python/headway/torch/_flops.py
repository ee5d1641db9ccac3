"""What torch.utils.flop_counter.FlopCounterMode counts for the operators.

As for torch's own fused attention: every pair of a query and a key, also those that a mask forbids. headway.explain
counts what is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway.torch._core import Options


def _lengths(bounds: Tensor, total: int) -> list[int]:
    """Of packed sequences. Fake tensors have no numbers: one sequence of everything, the most that they can be."""
    if type(bounds) not in (torch.Tensor, torch.nn.Parameter) or bounds.is_meta:
        return [total]
    lengths: list[int] = bounds.diff().tolist()
    return lengths


def _pairs(query: Tensor, key: Tensor, options: Options) -> int:
    """Pairs of a query and a key, of all heads."""
    if options.cu_seqlens_q is None or options.cu_seqlens_k is None:
        return query.shape[:-1].numel() * key.shape[-2]
    lengths = zip(_lengths(options.cu_seqlens_q, query.shape[0]), _lengths(options.cu_seqlens_k, key.shape[0]))
    return query.shape[1] * sum(queries * keys for queries, keys in lengths)


def forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any, out_val: Any = None) -> int:
    """Q K^T and P V."""
    return 2 * _pairs(query, key, Options(*rest[:-1])) * (query.shape[-1] + value.shape[-1])


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
    out_val: Any = None,
) -> int:
    """Q K^T again, dQ and dK; dP and dV."""
    return 2 * _pairs(query, key, Options(*rest[2:])) * (3 * query.shape[-1] + 2 * value.shape[-1])
