"""The drop-in for torch.nn.MultiheadAttention."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway._arguments import whole_number
from headway.torch._core import Options
from headway.torch._dispatch import attend, autocast_active, is_watched
from headway.torch._mean_weights import attend_for_mean
from headway.torch._nested import Packed
from headway.torch._parts import split
from headway.torch._weights import hide_unseen
from headway.torch.functional import attention_varlen, draw_seed, refuse_keywords, require_number, require_tensors

_NAME = "MultiheadAttention"


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention, computed by Headway: the same arguments, parameters, initialisation and state_dict.

    query (L, N, embed_dim), key (S, N, kdim), value (S, N, vdim) -> (L, N, embed_dim) and weights (N, L, S) or None;
    batch_first puts N in front, and all work without N. In attn_mask (L, S) or (N * num_heads, L, S) and in
    key_padding_mask (N, S) True means ignore; floating ones are added. No (L, S) matrix is stored but with
    need_weights=True, which is torch's default.

    One difference: a query that the masks leave no key for gives what out_proj makes of 0, never NaN.

    >>> import torch
    >>> from headway.torch import MultiheadAttention
    >>> layer = MultiheadAttention(embed_dim=32, num_heads=4, batch_first=True)
    >>> x = torch.randn(2, 10, 32)
    >>> padding = torch.arange(10) >= torch.tensor([[10], [7]])
    >>> out, weights = layer(x, x, x, key_padding_mask=padding)
    >>> out.shape, weights.shape
    (torch.Size([2, 10, 32]), torch.Size([2, 10, 10]))
    >>> original = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    >>> original.load_state_dict(layer.state_dict())
    <All keys matched successfully>
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            refuse_keywords(_NAME, MultiheadAttention.__init__, unknown)
        whole_number(_NAME, "embed_dim", embed_dim)
        whole_number(_NAME, "num_heads", num_heads)
        for name, width in (("kdim", kdim), ("vdim", vdim)):
            if width is not None and whole_number(_NAME, name, width) < 0:
                raise ValueError(f"{_NAME}: {name} is {width}, expected 0 or more")
        require_number(_NAME, "dropout", dropout)
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads != 0:
            raise ValueError(f"{_NAME}: embed_dim is {embed_dim}, expected a multiple of the {num_heads} heads")
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"{_NAME}: dropout is {dropout}, expected 0 to 1")
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )

    def extra_repr(self) -> str:
        """What print() says before out_proj."""
        parts = [f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"]
        parts += [f"dropout={self.dropout}"] if self.dropout else []
        parts += [f"kdim={self.kdim}, vdim={self.vdim}"] if self.in_proj_weight is None else []
        parts += ["bias=False"] if self.in_proj_bias is None else []
        parts += ["add_bias_kv=True"] if self.bias_k is not None else []
        parts += ["add_zero_attn=True"] if self.add_zero_attn else []
        parts += ["batch_first=True"] if self.batch_first else []
        return ", ".join(parts)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        **unknown: NoReturn,
    ) -> tuple[Tensor, Tensor | None]:
        """Query (L, N, embed_dim), key (S, N, kdim), value (S, N, vdim) -> (out (L, N, embed_dim), weights or None).

        N comes first with batch_first, and is absent for single sequences. The weights are (N, L, S), or
        (N, num_heads, L, S) with average_attn_weights=False, after dropout. is_causal says that attn_mask is the causal
        mask, so that it need not be read.
        """
        if unknown:
            refuse_keywords(f"{_NAME}.forward", MultiheadAttention.forward, unknown)
        if isinstance(query, Tensor) and query.is_nested:
            masks_given = key_padding_mask is not None or attn_mask is not None
            return self._forward_nested(query, key, value, need_weights, masks_given), None
        self._check(query, key, value, key_padding_mask, attn_mask, is_causal)
        batched = query.dim() == 3
        length_axis = 1 if self.batch_first or not batched else 0

        q, k, v = self._project(query, key, value)
        if not batched:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        q, k, v = (self._split(x, length_axis) for x in (q, k, v))  # each [N, num_heads, length, head_dim]
        masks = _Masks(attn_mask, key_padding_mask, is_causal and key_padding_mask is None and not need_weights)
        k, v = self._with_extra_keys(k, v, masks)

        dropout = self.dropout if self.training else 0.0
        mean = need_weights and average_attn_weights
        weights: Tensor | None
        if mean and dropout == 0.0:
            joined, weights = attend_for_mean(q, k, v, masks.options(q))
        else:
            joined, weights = _attend(q, k, v, masks.options(q), dropout, need_weights)
            weights = weights.mean(dim=1) if weights is not None and mean else weights
        joined = joined.transpose(1, 2) if length_axis == 1 else joined.permute(2, 0, 1, 3)
        out = F.linear(joined.flatten(-2), self.out_proj.weight, self.out_proj.bias)
        if not batched:
            out, weights = out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out, weights

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, masks_given: bool
    ) -> Tensor:
        """Nested (N, length, width) tensors, each item inside itself: nothing is padded."""
        if not self.batch_first or need_weights or masks_given or self.bias_k is not None or self.add_zero_attn:
            raise NotImplementedError(
                f"{_NAME}: query is nested, expected batch_first=True, need_weights=False, no masks (lengths are the "
                "tensor's own), and neither add_bias_kv nor add_zero_attn"
            )
        once = {id(x): Packed(_NAME, name, x) for name, x in (("value", value), ("key", key), ("query", query))}
        packed = [once[id(x)] for x in (query, key, value)]
        q, k, v = (
            x.view(len(x), self.num_heads, self.head_dim) for x in self._project(*(part.rows for part in packed))
        )
        dropout = self.dropout if self.training else 0.0
        joined: Tensor = attention_varlen(q, k, v, packed[0].begins, packed[1].begins, dropout=dropout)
        return packed[0].like(F.linear(joined.flatten(-2), self.out_proj.weight, self.out_proj.bias))

    # ---- Projections ----

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each (.., its width) -> (.., embed_dim), in one product where they are one tensor."""
        width, bias = self.embed_dim, self.in_proj_bias
        if self.in_proj_weight is None:
            biases = (None, None, None) if bias is None else bias.chunk(3)
            return (
                F.linear(query, self.q_proj_weight, biases[0]),
                F.linear(key, self.k_proj_weight, biases[1]),
                F.linear(value, self.v_proj_weight, biases[2]),
            )
        weight = self.in_proj_weight
        if query is key and key is value:
            q, k, v = split(F.linear(query, weight, bias), 3, is_watched())
            return q, k, v
        own, rest = weight[:width], weight[width:]
        own_bias, rest_bias = (None, None) if bias is None else (bias[:width], bias[width:])
        q = F.linear(query, own, own_bias)
        if key is value:
            k, v = split(F.linear(key, rest, rest_bias), 2, is_watched())
            return q, k, v
        weights = rest.chunk(2)
        biases = (None, None) if rest_bias is None else rest_bias.chunk(2)
        return q, F.linear(key, weights[0], biases[0]), F.linear(value, weights[1], biases[1])

    def _split(self, x: Tensor, length_axis: int) -> Tensor:
        """(N, length, embed_dim) or (length, N, embed_dim) -> (N, num_heads, length, head_dim), as a view."""
        x = x.view(*x.shape[:-1], self.num_heads, self.head_dim)
        return x.transpose(1, 2) if length_axis == 1 else x.permute(1, 2, 0, 3)

    def _with_extra_keys(self, key: Tensor, value: Tensor, masks: _Masks) -> tuple[Tensor, Tensor]:
        """bias_k and bias_v, then a key and value of zeros, at the end of [N, num_heads, S, head_dim]."""
        more: list[tuple[Tensor, Tensor]] = []
        if self.bias_k is not None and self.bias_v is not None:
            more.append((self._split(self.bias_k, 1), self._split(self.bias_v, 1)))
        if self.add_zero_attn:
            more.append((key.new_zeros(()), value.new_zeros(())))
        if not more:
            return key, value
        masks.add_keys(len(more))
        one = (*key.shape[:2], 1, key.shape[3])
        return (
            torch.cat([key, *(k.expand(one) for k, _ in more)], dim=2),
            torch.cat([value, *(v.expand(one) for _, v in more)], dim=2),
        )

    # ---- Checks ----

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> None:
        require_tensors(_NAME, ("query", query), ("key", key), ("value", value))
        if key.is_nested or value.is_nested:
            raise NotImplementedError(f"{_NAME}: key or value is nested, and query is not: expected all three alike")
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            raise ValueError(
                f"{_NAME}: query, key and value have shapes {tuple(query.shape)}, {tuple(key.shape)} and "
                f"{tuple(value.shape)}, expected (length, batch, width) or (length, width), and all three alike"
            )
        widths, dtype = (self.embed_dim, self.kdim, self.vdim), self.out_proj.weight.dtype
        for name, x, width in zip(("query", "key", "value"), (query, key, value), widths):
            if x.shape[-1] != width:
                raise ValueError(f"{_NAME}: {name} has width {x.shape[-1]}, expected {width}")
            if x.dtype != dtype and not autocast_active():
                raise TypeError(f"{_NAME}: {name} has type {x.dtype}, the parameters have {dtype}")
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(f"{_NAME}: value has shape {tuple(value.shape)}, key has {tuple(key.shape)}")
        batched = query.dim() == 3
        batch_axis, length_axis = (0, 1) if self.batch_first else (1, 0)
        batch = query.shape[batch_axis] if batched else 1
        if batched and key.shape[batch_axis] != batch:
            raise ValueError(f"{_NAME}: key has batch {key.shape[batch_axis]}, query has {batch}")
        queries, keys = (query.shape[length_axis], key.shape[length_axis]) if batched else (len(query), len(key))
        _check_mask("key_padding_mask", key_padding_mask, [(batch, keys) if batched else (keys,)])
        _check_mask("attn_mask", attn_mask, [(queries, keys), (batch * self.num_heads, queries, keys)])
        if is_causal and attn_mask is None:
            raise RuntimeError(f"{_NAME}: is_causal says that attn_mask is the causal mask, and attn_mask is None")


def _check_mask(name: str, mask: Tensor | None, shapes: list[tuple[int, ...]]) -> None:
    if mask is None:
        return
    require_tensors(_NAME, (name, mask))
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{_NAME}: {name} has type {mask.dtype}, expected bool (True = ignore) or floating")
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{_NAME}: {name} has shape {tuple(mask.shape)}, expected {' or '.join(map(str, shapes))}")


class _Masks:
    """torch's two masks as Headway's mask and bias, without building a larger matrix than either."""

    def __init__(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, causal: bool) -> None:
        self.causal = causal
        self.attn = None if causal else attn_mask  # (L, S) or (N * num_heads, L, S)
        self.padding = key_padding_mask  # (N, S)

    def add_keys(self, count: int) -> None:
        """More keys at the end, which nothing forbids."""
        self.attn = None if self.attn is None else F.pad(self.attn, (0, count))
        self.padding = None if self.padding is None else F.pad(self.padding, (0, count))

    def options(self, query: Tensor) -> Options:
        """The masks as options for query (N, num_heads, L, head_dim)."""
        batch, heads = query.shape[:2]
        mask: Tensor | None = None
        bias: Tensor | None = None
        attn, padding = self.attn, self.padding
        if attn is not None:
            attn = attn.reshape(batch, heads, *attn.shape[1:]) if attn.dim() == 3 else attn
            mask, bias = (~attn, None) if attn.dtype == torch.bool else (None, attn)
        if padding is not None:
            padding = padding[:, None, None, :]
            if padding.dtype == torch.bool:
                if mask is None:
                    mask = ~padding
                else:  # a second mask, at its own size
                    bias = torch.zeros_like(padding, dtype=query.dtype).masked_fill(padding, -math.inf)
            elif bias is None:
                bias = padding
            elif mask is None and _only_forbids(padding):
                mask = padding == 0
            else:
                bias = bias + padding
        return Options(mask=mask, bias=bias, causal="top_left" if self.causal else "none")


def _only_forbids(padding: Tensor) -> bool:
    """Whether a floating mask (N, 1, 1, S) holds only 0 and -inf, as torch's encoder makes them from bool ones."""
    # Elsewhere reading it would synchronize, or is not allowed.
    if padding.requires_grad or padding.device.type != "cpu" or is_watched():
        return False
    return bool(((padding == 0) | (padding == -math.inf)).all())


def _attend(
    query: Tensor, key: Tensor, value: Tensor, options: Options, dropout: float, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Out (N, num_heads, L, head_dim), and the weights (N, num_heads, L, S) after dropout where they are wanted."""
    if dropout == 0.0:
        out, _, weights = attend(query, key, value, options, need_weights)
        return out, weights if need_weights else None
    if not need_weights:
        return attend(query, key, value, options._replace(dropout=dropout, seed=draw_seed()))[0], None
    # Dropped by torch itself: a run with the same seed drops what nn.MultiheadAttention drops.
    weights = attend(query, key, value[..., :0], options, return_weights=True)[2]
    assert weights is not None
    kept = F.dropout(weights, dropout)
    return kept @ hide_unseen(value, weights), kept
