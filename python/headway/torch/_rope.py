"""headway.rope under autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from headway import _headway
from headway._rope import settings_of
from headway.torch.functional import require_tensors


class _Rotation(torch.autograd.Function):
    """Its gradient is the rotation back, of which the gradient is the rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Any, settings: dict[str, Any], back: bool) -> Tensor:
        ctx.arguments = positions, settings, not back
        return _headway.rotate(x.detach(), positions, settings, back, None)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _rotation(grads[0], *ctx.arguments), None, None, None


_rotation: Callable[..., Tensor] = _Rotation.apply


def rope(
    x: Tensor,
    positions: Any,
    *,
    base: float = 10000.0,
    dims: int | None = None,
    interleaved: bool = False,
    scaling: Mapping[str, Any] | None = None,
) -> Tensor:
    """headway.rope under autograd: x (..., S, D), positions (S,) or (B, S), and a gradient for x.

    >>> import torch, headway.torch
    >>> x = torch.randn(2, 4, 10, 64, requires_grad=True)
    >>> headway.torch.rope(x, torch.arange(10), scaling={"rope_type": "linear", "factor": 2.0}).sum().backward()
    >>> x.grad.shape
    torch.Size([2, 4, 10, 64])
    """
    require_tensors("rope", ("x", x))
    settings = settings_of("rope", x.shape[-1] if x.dim() else 0, base, dims, interleaved, scaling)
    return _rotation(x, positions, settings, False)
