"""headway.rope under autograd, and torch.ops.headway.rope: what torch.compile, vmap and torch.func see of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from headway import _headway
from headway._rope import settings_of
from headway.torch._dispatch import is_watched
from headway.torch._ops import as_function, register_loop
from headway.torch.functional import require_number, require_tensors


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


# ---- The operator, which takes texts and no dicts ----

_KINDS: dict[str, Callable[[str], Any]] = {
    "float": float,
    "int": int,
    "str": str,
    "bool": "True".__eq__,
    "NoneType": lambda _: None,
}


def _spelled(settings: dict[str, Any]) -> str:
    """The settings as one text, in words that a compiler can follow."""
    return " ".join([f"{name}={type(value).__name__}:{value}" for name, value in settings.items()])


def _read(text: str) -> dict[str, Any]:
    """What _spelled wrote."""
    entries = [entry.replace("=", ":", 1).split(":") for entry in text.split(" ")]
    return {name: _KINDS[kind](value) for name, kind, value in entries}


@torch.library.custom_op(
    "headway::rope", mutates_args=(), schema="(Tensor x, Tensor positions, str settings, bool back) -> Tensor"
)
def _rotate(x: Tensor, positions: Tensor, settings: str, back: bool) -> Tensor:
    """The settings are those of settings_of, as _spelled writes them."""
    return _headway.rotate(x.detach(), positions, _read(settings), back, None)


@_rotate.register_fake
def _(x: Tensor, positions: Tensor, settings: str, back: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, positions, ctx.settings, ctx.back = inputs
    ctx.save_for_backward(positions)
    ctx.save_for_forward(positions)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (positions,) = ctx.saved_tensors
    return _run(grad, positions, ctx.settings, not ctx.back), None, None, None


def _tangent(ctx: Any, d_x: Tensor, *_: Any) -> Tensor:
    (positions,) = ctx.saved_tensors
    rotated: Tensor = _run(d_x, positions, ctx.settings, ctx.back)
    return rotated


_rotate.register_autograd(_gradient, setup_context=_save)
register_loop(_rotate)
_run = as_function(_rotate, _save, _gradient, _tangent)


# ---- The function ----


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
    require_number("rope", "base", base)
    settings = settings_of("rope", x.shape[-1] if x.dim() else 0, base, dims, interleaved, scaling)
    if is_watched():
        if not isinstance(positions, Tensor):
            positions = torch.as_tensor(positions, device="cpu")
        rotated: Tensor = _run(x, positions, _spelled(settings), False)
        return rotated
    return _rotation(x, positions, settings, False)
