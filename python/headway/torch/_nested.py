"""Nested tensors: sequences of different lengths in one tensor, which packed attention takes without padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway.torch.functional import attention_varlen

_FROM_JAGGED = torch.nested.nested_tensor_from_jagged


class Packed:
    """A nested tensor whose second axis is the ragged one, (B, j, ...): its rows (total, ...) and where items begin."""

    def __init__(self, operation: str, name: str, x: Any) -> None:
        found = None
        if not x.is_nested:
            found = "no nested tensor, and the others are"
        elif x.layout != torch.jagged:
            found = f"nested with the layout {x.layout}"
        elif x._ragged_idx != 1 or x.lengths() is not None:
            found = "nested with its lengths elsewhere, or with gaps"
        if found is not None:
            raise NotImplementedError(
                f"{operation}: {name} is {found}, expected layout=torch.jagged, as (B, length, ...)"
            )
        self.rows: Tensor = x.values()
        self.begins: Tensor = x.offsets()

    def like(self, rows: Tensor) -> Tensor:
        """Other rows, nested as these are."""
        nested: Tensor = _FROM_JAGGED(rows, self.begins)
        return nested


def nested_attention(
    operation: str, query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool, scale: float | None
) -> Tensor:
    """Attention of nested (B, H, j, D) tensors, each item inside itself; (B, j, D) has one head."""
    headed = query.dim() == 4
    packed = [
        Packed(operation, name, x.transpose(1, 2) if headed else x)
        for name, x in (("query", query), ("key", key), ("value", value))
    ]
    q, k, v = (part.rows if headed else part.rows.unsqueeze(1) for part in packed)
    out: Tensor = attention_varlen(
        q, k, v, packed[0].begins, packed[1].begins,
        causal="top_left" if is_causal else False, scale=scale, dropout=dropout,
    )  # fmt: skip
    return packed[0].like(out).transpose(1, 2) if headed else packed[0].like(out.squeeze(1))
