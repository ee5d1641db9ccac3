"""Which way a call takes: straight into the compiled part, through an autograd node, or through the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headway.torch import _core, _forward_mode, _ops
from headway.torch._core import TENSORS, Options

Results = tuple[Tensor, Tensor, Tensor | None]

_NO_TENSORS = (None,) * TENSORS
# Subclasses (fake tensors, distributed ones, ...) give torch's functions a meaning of their own: the operators heed it.
_PLAIN = (torch.Tensor, torch.nn.Parameter)

is_compiling = torch.compiler.is_compiling
transforms_active = torch._C._are_functorch_transforms_active
modes_active = torch._C._len_torch_dispatch_stack
tracing_state = torch._C._get_tracing_state
autocast_active = torch._C._is_any_autocast_enabled


# Called with query, key and options of every call while headway.torch.record is on.
recorders: list[Callable[[Tensor, Tensor, Options], None]] = []


class _Attention(torch.autograd.Function):
    """The operator's gradients without the operator: a node of eager autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        options: Options,
        return_weights: bool,
    ) -> Results:
        out, lse, weights = _core.forward(query.detach(), key.detach(), value.detach(), options, return_weights)
        ctx.set_materialize_grads(False)
        # Tensors go where torch sees when one is changed in place before backward.
        tensors = options[:TENSORS] if options[:TENSORS] != _NO_TENSORS else ()
        ctx.options = options[TENSORS:]
        ctx.save_for_backward(query, key, value, out, lse, weights, *tensors)
        return out, lse, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        options = Options(*(saved[6:] or _NO_TENSORS), *ctx.options)
        # Recorded where a second derivative is asked for.
        eager = not torch.is_grad_enabled() and not is_watched() and all(x is None or type(x) in _PLAIN for x in grads)
        return _ops.input_gradients(grads, saved[:6], options, ctx.needs_input_grad, eager)


def is_watched() -> bool:
    """Whether something else than eager torch runs the call: a compiler, a tracer, torch.func, a dispatch mode."""
    if is_compiling() or transforms_active() or modes_active() != 0 or tracing_state() is not None:
        return True
    return _forward_mode.on()


def is_plain(query: Tensor, key: Tensor, value: Tensor, options: Options) -> bool:
    """Whether eager torch runs a call of tensors that are no more than that."""
    if type(query) not in _PLAIN or type(key) not in _PLAIN or type(value) not in _PLAIN or query.is_meta:
        return False
    return not is_watched() and all(x is None or type(x) in _PLAIN for x in options[:TENSORS])


def attend(query: Tensor, key: Tensor, value: Tensor, options: Options, return_weights: bool = False) -> Results:
    """(out, lse, weights if asked for) of attention under autograd, autocast and everything that may watch a call."""
    if autocast_active():
        query, key, value, options = autocast(query, key, value, options)
    for take in recorders:
        take(query, key, options)
    alibi = options.alibi_slopes
    if alibi is not None and alibi.requires_grad and torch.is_grad_enabled():
        raise ValueError("attention: alibi_slopes requires grad, and has no gradient: pass what is learnt as bias")
    if not is_plain(query, key, value, options):
        results: Results = _ops.run_attention(query, key, value, *options, return_weights)
        return results
    bias, sinks = options.bias, options.sinks
    if torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    ):
        return _Attention.apply(query, key, value, bias, sinks, options, return_weights)  # type: ignore[no-any-return, no-untyped-call]
    return _core.forward(query, key, value, options, return_weights)


def autocast(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor, Options]:
    """Where autocast is on: what torch's own attention casts, in the type that it is cast to."""
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return query, key, value, options
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    if options.bias is not None:
        options = options._replace(bias=cast(options.bias))
    return cast(query), cast(key), cast(value), options
