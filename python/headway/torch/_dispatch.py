"""Chooses the path of a call: directly into the compiled part, through an autograd node, or through the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from headway.torch import _core, _ops
from headway.torch._core import NO_OPTIONS, TENSORS, Options

Results = tuple[Tensor, Tensor | None, Tensor | None]

# Subclasses (fake tensors, distributed ones, ...) give torch's functions a meaning of their own: the operators heed it.
_PLAIN = (torch.Tensor, torch.nn.Parameter)

is_compiling = torch.compiler.is_compiling
is_grad_enabled = torch.is_grad_enabled
transforms_active = torch._C._are_functorch_transforms_active
modes_active = torch._C._len_torch_dispatch_stack
tracing_state = torch._C._get_tracing_state
autocast_active = torch._C._is_any_autocast_enabled
has_storage = torch._C._has_storage


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
        only_out: bool,
    ) -> Any:
        out, lse, weights = _core.forward(query, key, value, options, return_weights)
        ctx.set_materialize_grads(False)
        tensors = options[:TENSORS]
        for x in tensors:
            if x is not None:
                # Tensors go where torch sees when one is changed in place before backward.
                ctx.options = options[TENSORS:]
                ctx.save_for_backward(query, key, value, out, lse, weights, *tensors)
                break
        else:
            ctx.options = options
            ctx.save_for_backward(query, key, value, out, lse, weights)
        return out if only_out else (out, lse, weights)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's is of *grad_outputs
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None, grad_weights: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        needed = ctx.needs_input_grad
        options = ctx.options if len(saved) == 6 else Options(*saved[6:], *ctx.options)
        # Recorded where a second derivative is asked for.
        if grad_out is not None and grad_lse is None and grad_weights is None:
            if _is_plain_gradient(grad_out) and not is_grad_enabled() and not is_watched():
                query, key, value, out, lse = saved[:5]
                found = _core.backward(grad_out, None, query, key, value, out, lse, options, True, needed[3])
                return (*found, None, None, None)
        grads = (grad_out, grad_lse, grad_weights)
        eager = is_eager(*grads)
        return _ops.input_gradients(grads, saved[:6], options, needed, eager)


def is_eager(*grads: Tensor | None) -> bool:
    """Whether the compiled part may compute the gradients: nothing records or intercepts the call."""
    return not is_grad_enabled() and not is_watched() and all(x is None or _is_plain_gradient(x) for x in grads)


def _is_plain_gradient(grad: Tensor) -> bool:
    """Whether it has memory to read; a batch of gradients (autograd.grad's is_grads_batched) has the same type."""
    return type(grad) in _PLAIN and has_storage(grad)


# Without Function.apply's Python, which is for torch.func: nothing of it comes here.
_record: Any = super(torch.autograd.Function, _Attention).apply  # pyright: ignore[reportAttributeAccessIssue]


def is_watched() -> bool:
    """Whether something other than eager torch runs the call: a compiler, a tracer, torch.func, a dispatch mode."""
    return (
        is_compiling()
        or transforms_active()
        or modes_active() != 0
        or tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def is_plain(query: Tensor, key: Tensor, value: Tensor, options: Options) -> bool:
    """Whether eager torch runs a call of plain tensors."""
    if type(query) not in _PLAIN or type(key) not in _PLAIN or type(value) not in _PLAIN or query.is_meta:
        return False
    if options is not NO_OPTIONS:
        for x in options[:TENSORS]:
            if x is not None and type(x) not in _PLAIN:
                return False
    return not is_watched()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    return_weights: bool = False,
    return_lse: bool = False,
) -> Results:
    """(out, lse, weights) of attention under autograd, autocast and everything that may intercept a call.

    What is not asked for may be None.
    """
    if autocast_active():
        query, key, value, options = autocast(query, key, value, options)
    if recorders:
        for take in recorders:
            take(query, key, options)
    alibi = options.alibi_slopes
    if alibi is not None and alibi.requires_grad and is_grad_enabled():
        raise ValueError("attention: alibi_slopes requires grad, and has no gradient: pass learnt slopes as a bias")
    if not is_plain(query, key, value, options):
        if type(query).__name__ == "DTensor":  # without importing what torch imports lazily
            return _attend_dtensors(query, key, value, options, return_weights)
        results: Results = _ops.run_attention(query, key, value, *options, return_weights)
        return results
    if is_grad_enabled():
        bias, sinks = options.bias, options.sinks
        if (
            query.requires_grad
            or key.requires_grad
            or value.requires_grad
            or (bias is not None and bias.requires_grad)
            or (sinks is not None and sinks.requires_grad)
        ):
            only_out = not (return_weights or return_lse)
            found = _record(query, key, value, bias, sinks, options, return_weights, only_out)
            return (found, None, None) if only_out else found
    return _core.forward(query, key, value, options, return_weights, return_lse)


def _attend_dtensors(query: Tensor, key: Tensor, value: Tensor, options: Options, return_weights: bool) -> Results:
    """DTensors, in place: a sharded batch or head axis needs no other rank, a sharded sequence runs the schedule."""
    from headway.torch import distributed

    if return_weights:
        raise NotImplementedError("attention: weights of DTensors are not returned: pass full_tensor()")
    out, lse = distributed.attention(query, key, value, return_lse=True, **options.keywords())
    return out, lse, None


def autocast(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor, Options]:
    """With autocast on: the tensors that torch's own attention casts, in the type to which it casts them."""
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return query, key, value, options
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    if options.bias is not None:
        options = options._replace(bias=cast(options.bias))
    return cast(query), cast(key), cast(value), options
