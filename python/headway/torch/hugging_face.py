"""Headway behind Hugging Face's attn_implementation."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from headway.torch._core import Options
from headway.torch._dispatch import attend
from headway.torch.functional import attention_varlen, draw_seed

_collector: Any = None


def register_with_transformers(name: str = "headway") -> None:
    """Makes attn_implementation="headway" known to Hugging Face transformers.

    Then pass it to from_pretrained or from_config, or call model.set_attn_implementation("headway"). Padding, causal
    and sliding-window masks, grouped heads, sinks, soft caps, position biases and dropout all go through Headway.
    model(..., output_attentions=True) gives the weights of each layer, in training before dropout. generate works with
    every cache of transformers.

    Continuous batching (model.generate_batch) accepts implementations of its own names only: under
    register_with_transformers("paged|eager") Headway takes the place of that one.

    >>> import torch, headway.torch
    >>> headway.torch.register_with_transformers()
    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    >>> model = BertModel._from_config(config, attn_implementation="headway")
    >>> model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
    torch.Size([1, 3, 32])
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            "register_with_transformers needs transformers 5 or later: pip install transformers"
        ) from error
    global _collector
    with suppress(ImportError, AttributeError):  # what models collect of their layers, by name, in transformers 5
        from transformers.utils.output_capturing import _active_collector as _collector
    AttentionInterface.register(name, attention_forward)
    if name.startswith("paged|"):
        return  # continuous batching makes the masks of these itself
    AttentionInterface.register(f"paged|{name}", attention_forward)  # read by transformers before 5.22
    # The same masks as for torch's attention: bool (B, 1, Sq, Sk), True = attend, None where causal or nothing says it.
    AttentionMaskInterface.register(name, sdpa_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls: query (B, H, Sq, D), key and value (B, Hkv, Sk, D) -> (out (B, Sq, H, D), weights).

    The weights (B, H, Sq, Sk), before dropout, are None unless the model's caller asked for output_attentions.
    """
    if cache is not None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=others)
        if others.get("k_cache") is not None:
            raise NotImplementedError(
                "headway: a block table of continuous batching is not read: set max_blocks_per_request=0"
            )
        if attention_mask is None:
            return _packed(query, key, value, scaling, softcap, s_aux, others), None
        s_aux = getattr(module, "sinks", None) if s_aux is None else s_aux
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    options = Options(
        sinks=s_aux,
        # A single query is the newest one, and sees every key.
        causal="top_left" if attention_mask is None and query.shape[2] > 1 and causal else "none",
        scale=scaling,
        softcap=softcap,
        dropout=float(dropout),
        seed=draw_seed() if dropout > 0 else None,
        bias=position_bias,
    )
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        options = options._replace(mask=attention_mask)
    elif attention_mask is not None:
        options = options._replace(bias=attention_mask if position_bias is None else attention_mask + position_bias)
    out, _, weights = attend(query, key, value, options, return_weights=_wants_weights(module, others))
    return out.transpose(1, 2).contiguous(), weights


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    others: dict[str, Any],
) -> Tensor:
    """Continuous batching without a mask: the sequences one after the other, (1, H, total, D) -> (1, total, H, D)."""
    bounds_q, bounds_k = others["cu_seq_lens_q"], others["cu_seq_lens_k"]
    width = others.get("sliding_window")
    rows_q, rows_k = int(bounds_q[-1]), int(bounds_k[-1])  # what lies behind them is padding
    out = attention_varlen(
        query[0].transpose(0, 1)[:rows_q],
        key[0].transpose(0, 1)[:rows_k],
        value[0].transpose(0, 1)[:rows_k],
        bounds_q,
        bounds_k,
        causal="bottom_right",
        window=None if width is None else (width - 1, None),
        scale=scaling,
        softcap=softcap,
        sinks=sinks,
    )
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, query.shape[2] - rows_q))[None]


def _wants_weights(module: nn.Module, others: dict[str, Any]) -> bool:
    """Whether output_attentions was asked for: of the call, of the configuration, or of a model around this one."""
    asked = others.get("output_attentions")
    if asked is None:
        asked = getattr(getattr(module, "config", None), "output_attentions", None)
    if asked:
        return True
    if _collector is None or (torch.compiler.is_compiling() and not _collector.compiling):
        return False  # a compiler cannot follow a context variable that nobody set for it
    collected = _collector.get()
    return collected is not None and any(name.endswith("attentions") for name in collected)
