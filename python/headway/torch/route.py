"""activate() and deactivate(): Headway behind torch's own functions.

Torch lets a library take the place of its flash attention kernels. What torch would give to them then runs on Headway,
unchanged: torch.nn.functional.scaled_dot_product_attention wherever torch picks its flash backend (on the CPU and on
CUDA), torch.nn.attention.varlen.varlen_attn, and what builds on them. Autograd and the compiler see torch's operators.

The functions below are those operators, with torch's arguments and the memory order that torch's own give.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from headway import _headway
from headway.torch._core import Options
from headway.torch.functional import draw_seed

_NAME = "Headway"
_NEEDS = "needs a torch with torch.nn.attention.register_flash_attention_impl"


def activate() -> None:
    """Lets torch's flash attention run on Headway, until deactivate(). Safe to call twice.

    One difference to torch's kernels: a query that a mask leaves no key for gives 0, never NaN.

    >>> import torch, headway.torch
    >>> x = torch.randn(1, 8, 128, 64)
    >>> expected = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> headway.torch.activate()
    >>> out = torch.nn.functional.scaled_dot_product_attention(x, x, x)  # by Headway
    >>> headway.torch.deactivate()
    >>> torch.allclose(out, expected, atol=1e-5)
    True
    """
    attention: Any = torch.nn.attention
    if not hasattr(attention, "register_flash_attention_impl"):
        raise NotImplementedError(f"activate: {_NEEDS}, this is {torch.__version__}")
    attention.register_flash_attention_impl(_NAME, register_fn=_Registration)
    attention.activate_flash_attention_impl(_NAME)


def deactivate() -> None:
    """Gives torch its own kernels back; does nothing where another implementation or none is active.

    >>> import headway.torch
    >>> headway.torch.activate()
    >>> headway.torch.deactivate()
    """
    attention: Any = torch.nn.attention
    if hasattr(attention, "current_flash_attention_impl") and attention.current_flash_attention_impl() == _NAME:
        attention.restore_flash_attention_impl()


class _Registration:
    """The kernels in torch's dispatcher, while torch keeps this object."""

    def __init__(self) -> None:
        self._libraries: list[Any] = [torch.library.Library("aten", "IMPL") for _ in _KERNELS]  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels that are overridden, which is what is wanted
            for library, (device, kernels) in zip(self._libraries, _KERNELS.items()):
                for name, kernel in kernels.items():
                    if hasattr(torch.ops.aten, name):  # not every torch has each of them
                        library.impl(name, kernel, device)

    def remove(self) -> None:
        for library in self._libraries:
            library._destroy()


# ---- torch.nn.functional.scaled_dot_product_attention on the CPU ----


def _cpu_options(dropout_p: float, is_causal: bool, attn_mask: Tensor | None, scale: float | None) -> Options:
    if dropout_p != 0.0:
        raise NotImplementedError("headway: torch's flash attention has no dropout on the CPU")
    is_mask = attn_mask is not None and attn_mask.dtype == torch.bool
    return Options(
        bias=None if is_mask else attn_mask,
        mask=attn_mask if is_mask else None,
        causal="top_left" if is_causal else "none",
        scale=scale,
    )


def _cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    options = _cpu_options(dropout_p, is_causal, attn_mask, scale)
    out, lse, _ = _headway.torch_attention(query, key, value, options, False, True, torch.empty_like(query))
    # As torch's own kernel stores it: (B, Sq, H).
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    options = _cpu_options(dropout_p, is_causal, attn_mask, scale)
    places = [torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype) for x in (query, key, value)]
    return _gradients(grad_out, query, key, value, out, logsumexp, options, places)


def _gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    places: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    found = _headway.torch_attention_backward(grad_out, query, key, value, out, lse, options, places, False)
    return found[0], found[1], found[2]


# ---- The same on CUDA ----


def _flash_options(is_causal: bool, scale: float | None, dropout_p: float, seed: Tensor | None) -> Options:
    """Torch's flash kernels align the causal rule to the last key; a seed is the first of two numbers."""
    return Options(
        causal="bottom_right" if is_causal else "none",
        scale=scale,
        dropout=dropout_p,
        seed=seed[0] if seed is not None and dropout_p > 0.0 else None,
    )


def _seed_of(query: Tensor, dropout_p: float) -> Tensor:
    """What torch keeps for backward: with dropout, a seed in host memory, which backward reads without waiting."""
    if dropout_p > 0.0:
        return draw_seed().expand(2).clone()
    return torch.empty(2, dtype=torch.uint64, device=query.device)


def _refuse_debug_mask(return_debug_mask: bool) -> None:
    if return_debug_mask:
        raise NotImplementedError("headway: return_debug_mask is true: no matrix of weights is stored")


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _refuse_debug_mask(return_debug_mask)
    seed = _seed_of(query, dropout_p)
    options = _flash_options(is_causal, scale, dropout_p, seed)
    out, lse, _ = _headway.torch_attention(query, key, value, options, False, True, torch.empty_like(query))
    return out, lse, None, None, query.shape[2], key.shape[2], seed, seed.new_empty(()), query.new_empty(0)


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    options = _flash_options(is_causal, scale, dropout_p, philox_seed)
    places = [torch.empty_like(x) for x in (query, key, value)]
    return _gradients(grad_out, query, key, value, out, logsumexp, options, places)


# ---- Packed sequences, and (B, S, H, D) ----


def _with_window(
    options: Options, left: int | None, right: int | None, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None
) -> Options:
    """Negative sides are unlimited."""
    return options._replace(
        cu_seqlens_q=cum_seq_q,
        cu_seqlens_k=cum_seq_k,
        window_left=None if left is None or left < 0 else left,
        window_right=None if right is None or right < 0 else right,
    )


def _heads_second(x: Tensor) -> Tensor:
    return x.transpose(1, 2) if x.dim() == 4 else x


def _write_forward(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, options: Options, block_table: Tensor | None
) -> Tensor:
    """Writes out and gives lse; tensors are (total, H, D) or (B, S, H, D)."""
    if block_table is not None:
        raise NotImplementedError("headway: block_table is given: paged keys are not read here")
    query, key, value, out = (_heads_second(x) for x in (query, key, value, out))
    lse: Tensor = _headway.torch_attention(query, key, value, options, False, True, out)[1]
    return lse


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Any, ...]:
    _refuse_debug_mask(return_debug_mask)
    seed, out = _seed_of(query, dropout_p), torch.empty_like(query)
    options = _flash_options(is_causal, scale, dropout_p, seed)
    options = options._replace(valid_lens=seqused_k, alibi_slopes=alibi_slopes)
    options = _with_window(options, window_size_left, window_size_right, cum_seq_q, cum_seq_k)
    lse = _write_forward(out, query, key, value, options, block_table)
    return out, lse, seed, seed.new_empty(()), query.new_empty(0)


def _flash_forward_inplace(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    _refuse_debug_mask(return_debug_mask)
    options = _flash_options(is_causal, scale, 0.0, None)
    options = options._replace(valid_lens=seqused_k, alibi_slopes=alibi_slopes)
    options = _with_window(options, window_size_left, window_size_right, cum_seq_q, cum_seq_k)
    return _write_forward(out, query, key, value, options, block_table)


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    options = _flash_options(is_causal, scale, dropout_p, rng_state)
    options = _with_window(options, window_size_left, window_size_right, cum_seq_q, cum_seq_k)
    grads = tuple(torch.empty_like(x) for x in (query, key, value))
    grad_out, query, key, value, out = (_heads_second(x) for x in (grad_out, query, key, value, out))
    _gradients(grad_out, query, key, value, out, logsumexp, options, [_heads_second(x) for x in grads])
    return grads  # type: ignore[return-value]


_KERNELS: dict[str, dict[str, Any]] = {
    "CPU": {
        "_scaled_dot_product_flash_attention_for_cpu": _cpu_forward,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_backward,
    },
    "CUDA": {
        "_scaled_dot_product_flash_attention": _sdpa_forward,
        "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
        "_flash_attention_forward": _flash_forward,
        "_flash_attention_forward_no_dropout_inplace": _flash_forward_inplace,
        "_flash_attention_backward": _flash_backward,
    },
}
