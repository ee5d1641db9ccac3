"""scaled_dot_product_attention of plain tensors in eager mode: in the compiled part, its autograd node included.

torch_sdpa takes torch's arguments by position and answers None for every call that is not plain, for which _dispatch.py
then decides; python/src/torch_eager.cpp says which calls those are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from headway import _headway
from headway.torch import _core, _dispatch, _ops
from headway.torch._core import Options
from headway.torch.functional import draw_seed

torch_sdpa = _headway.torch_sdpa
_gradients = _headway.torch_sdpa_backward


class _Sdpa(torch.autograd.Function):
    """A node whose inputs are query, key, value, a bias or None, and (out, lse, mask, numbers) in a tuple.

    It saves query, key, value, out, lse, mask and bias; ctx.options is (is_causal, scale, dropout_p, seed) or None.
    """

    forward = staticmethod(_headway.torch_sdpa_node)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's is of *grad_outputs
        ctx: Any, grad_out: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_out is not None and not _dispatch.is_compiling():
            found: tuple[Tensor | None, ...] | None = _gradients(ctx, grad_out)
            if found is not None:
                return found
        query, key, value, out, lse, mask, bias = ctx.saved_tensors
        causal, scale, dropout, seed = ctx.options or (False, None, 0.0, None)
        options = Options(
            bias=bias,
            mask=mask,
            causal="top_left" if causal else "none",
            scale=scale,
            dropout=dropout,
            seed=None if seed is None else torch.tensor(seed, device="cpu"),
        )
        eager = _dispatch.is_eager(grad_out)
        saved: tuple[Any, ...] = (query, key, value, out, lse, None)
        return _ops.input_gradients((grad_out, None, None), saved, options, ctx.needs_input_grad, eager)


_headway.torch_prepare(
    {
        "Tensor": Tensor,
        "Parameter": torch.nn.Parameter,
        "is_neg": Tensor.is_neg,
        "is_grad_enabled": _dispatch.is_grad_enabled,
        "transforms_active": _dispatch.transforms_active,
        "modes_active": _dispatch.modes_active,
        "tracing_state": _dispatch.tracing_state,
        "autocast_active": _dispatch.autocast_active,
        "has_storage": _dispatch.has_storage,
        "forward_mode": vars(forward_ad),
        "recorders": _dispatch.recorders,
        "draw_seed": draw_seed,
        "empty_like": torch.empty_like,
        "gradient_places": _core.gradient_places,
    },
    # Without Function.apply's Python, which is for torch.func: nothing of it comes here.
    super(torch.autograd.Function, _Sdpa).apply,  # pyright: ignore[reportAttributeAccessIssue]
)
