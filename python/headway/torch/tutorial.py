"""The multi-head attention module that tutorials build; headway.torch.MultiheadAttention is torch's."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor, nn

from headway.functions import check_heads
from headway.torch._core import NO_OPTIONS
from headway.torch._dispatch import attend
from headway.torch.functional import require_tensors


class MultiHeadAttention(nn.Module):
    """Multi-head attention with four nn.Linear(d_model, d_model): W_q, W_k, W_v, W_o.

    forward(Q, K, V): Q (B, seq_q, d_model), K and V (B, seq_k, d_model) -> (B, seq_q, d_model)

    It trains, moves between devices and types and has a state_dict, as modules do; no (seq_q, seq_k) matrix is stored.

    >>> import torch
    >>> from headway.torch.tutorial import MultiHeadAttention
    >>> mha = MultiHeadAttention(d_model=32, num_heads=4)
    >>> Q, K = torch.randn(1, 3, 32), torch.randn(1, 7, 32)
    >>> mha(Q, K, K).shape
    torch.Size([1, 3, 32])
    """

    def __init__(self, d_model: int, num_heads: int, **unknown: NoReturn) -> None:
        super().__init__()
        if unknown:
            raise TypeError(
                f"MultiHeadAttention() got an unexpected keyword argument '{next(iter(unknown))}'; the drop-in for "
                "torch.nn.MultiheadAttention is headway.torch.MultiheadAttention, with a small h"
            )
        check_heads("MultiHeadAttention", "d_model is", d_model, num_heads)
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def extra_repr(self) -> str:
        """What print() says before the four projections."""
        return f"d_model={self.num_heads * self.d_k}, num_heads={self.num_heads}"

    def forward(self, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        """Q (B, seq_q, d_model), K and V (B, seq_k, d_model) -> (B, seq_q, d_model)."""
        d_model = self.num_heads * self.d_k
        require_tensors("MultiHeadAttention", ("Q", Q), ("K", K), ("V", V))
        for name, x in (("Q", Q), ("K", K), ("V", V)):
            if x.dim() != 3 or x.shape[-1] != d_model:
                raise ValueError(
                    f"MultiHeadAttention: {name} has shape {tuple(x.shape)}, expected (batch, length, {d_model})"
                )
        query, key, value = self._split(self.W_q(Q)), self._split(self.W_k(K)), self._split(self.W_v(V))
        heads = attend(query, key, value, NO_OPTIONS)[0]
        joined: Tensor = self.W_o(heads.transpose(1, 2).flatten(2))
        return joined

    def _split(self, x: Tensor) -> Tensor:
        """(B, S, d_model) -> (B, num_heads, S, d_k), as a view."""
        return x.view(*x.shape[:-1], self.num_heads, self.d_k).transpose(1, 2)
