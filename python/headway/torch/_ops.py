"""torch.ops.headway.attention and torch.ops.headway.attention_backward: what torch.compile, torch.export, vmap and
torch.func see, with the shapes of their results, their gradients and their gradients' gradients.

Eager calls that nothing watches go round them (see _dispatch.py): an operator written in Python costs more than a small
attention takes.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from headway.torch import _core, _flops, _forward_mode, _in_torch
from headway.torch._core import SCHEMA, TENSORS, Options
from headway.torch._weights import gradients_through_weights, sink_share

Results = tuple[Tensor, ...]

_transforms_active = torch._C._are_functorch_transforms_active
_is_compiling = torch.compiler.is_compiling


# ---- Forward ----


@torch.library.custom_op(
    "headway::attention",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {SCHEMA}, bool return_weights) -> (Tensor, Tensor, Tensor)",
)
def attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Results:
    """(out, lse, weights); the weights are empty unless return_weights."""
    out, lse, weights = _core.forward(query, key, value, Options(*rest[:-1]), rest[-1])
    assert lse is not None
    return out, lse, query.new_empty(0) if weights is None else weights


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Results:
    options, return_weights = Options(*rest[:-1]), rest[-1]
    packed = options.packed
    if not query.dim() == key.dim() == value.dim() or query.dim() not in ((3,) if packed else (2, 3, 4)):
        raise ValueError(f"attention: query, key and value have {query.dim()}, {key.dim()} and {value.dim()} axes")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"attention: key has type {key.dtype}, value has {value.dtype}, query has {query.dtype}")
    out = None if packed else _core.out_like(query, value)
    if out is None:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
    lse = query.new_empty(_core.lse_shape(query, packed), dtype=_core.lse_type(query.dtype))
    weights = query.new_empty(*query.shape[:-1], key.shape[-2]) if return_weights else query.new_empty(0)
    return out, lse, weights


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    """Keeps what the gradients need: query, key, value, out, lse, and the weights where they were asked for."""
    query, key, value, *rest, return_weights = inputs
    out, lse, weights = output
    ctx.set_materialize_grads(False)
    ctx.plain_options, ctx.return_weights = rest[TENSORS:], return_weights
    ctx.save_for_backward(query, key, value, out, lse, weights if return_weights else None, *rest[:TENSORS])
    ctx.save_for_forward(query, key, value, *rest[:TENSORS])


def _gradients(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, grad_weights: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of all inputs of the operator, from those of its three results."""
    query, key, value, out, lse, weights, *tensors = ctx.saved_tensors
    options = Options(*tensors, *ctx.plain_options)
    return input_gradients(
        (grad_out, grad_lse, grad_weights), (query, key, value, out, lse, weights), options, ctx.needs_input_grad
    )


def input_gradients(
    grads: tuple[Tensor | None, ...],
    saved: tuple[Tensor, ...],
    options: Options,
    needed: tuple[bool, ...],
    eager: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value, bias and sinks where needed, and None up to the length of needed.

    grads are those of out, lse and the weights; saved is query, key, value, out, lse and the weights or None.
    """
    grad_out, grad_lse, grad_weights = grads
    query, key, value, out, lse, weights = saved
    found: list[Tensor | None] = [None] * 5
    if grad_out is not None or grad_lse is not None:
        if grad_out is None:
            grad_out = out.new_zeros(()).expand_as(out)
        if eager:
            found = list(_core.backward(grad_out, grad_lse, query, key, value, out, lse, options, True, needed[3]))
        elif _forward_mode.on() and _in_torch.covers(options):
            found = list(_in_torch.gradients(grad_out, grad_lse, query, key, value, options))
        else:
            results = _run_backward(grad_out, grad_lse, *saved[:5], *options)
            found = [*results[:3], None if options.bias is None else results[3]]
            found.append(None if options.sinks is None else results[4])
    if grad_weights is not None and weights is not None:
        share = sink_share(lse, options.sinks)
        more = gradients_through_weights(grad_weights, None, query, key, share, weights, options)
        for index, gradient in more.items():
            one = found[index]
            found[index] = gradient if one is None else one + gradient
    wanted = [gradient if need else None for gradient, need in zip(found, needed)]
    return (*wanted, *[None] * (len(needed) - 5))


# ---- Backward ----


@torch.library.custom_op(
    "headway::attention_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    f"{SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def attention_backward(grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, *rest: Any) -> Results:
    """The gradients of query, key, value, bias and sinks; empty for those that are not given."""
    key, value, out, lse, *options = rest
    found = _core.backward(grad_out, grad_lse, query, key, value, out, lse, Options(*options))
    return tuple(query.new_empty(0) if gradient is None else gradient for gradient in found)


@attention_backward.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: Any,
) -> Results:
    given = Options(*options)
    found: list[Tensor] = []
    for x in (query, key, value):
        place = None if given.packed or grad_lse is not None else _core.empty_in_order(x, x.shape[-1])
        found.append(torch.empty_like(x, memory_format=torch.contiguous_format) if place is None else place)
    for option in given[:2]:
        found.append(
            query.new_empty(0) if option is None else torch.empty_like(option, memory_format=torch.contiguous_format)
        )
    return tuple(found)


def _save_for_double_backward(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    ctx.set_materialize_grads(False)
    first = 7 + TENSORS
    ctx.plain_options = inputs[first:]
    ctx.save_for_backward(*inputs[:first])
    ctx.save_for_forward(*inputs[7:first])


def _double_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_out, grad_lse, query, key, value, _, _, *tensors = ctx.saved_tensors
    options = Options(*tensors, *ctx.plain_options)
    found = _in_torch.double_backward(grads, grad_out, grad_lse, query, key, value, options)
    # out and lse were computed from the inputs: what depends on them is in the inputs' gradients already.
    rest = [None] * (len(ctx.needs_input_grad) - 9)
    return (*found[:5], None, None, *found[5:], *rest)


attention.register_autograd(_gradients, setup_context=_save)
attention_backward.register_autograd(_double_backward, setup_context=_save_for_double_backward)


# ---- torch.utils.flop_counter ----


register_flop_formula(torch.ops.headway.attention, get_raw=True)(_flops.forward)
register_flop_formula(torch.ops.headway.attention_backward, get_raw=True)(_flops.backward)


# ---- vmap and torch.func ----


def _one_by_one(operator: Any) -> Any:
    """A vmap rule: each item separately, the results stacked. An item of zeros has the shapes of no items."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        count = info.batch_size

        def of(item: int, arg: Any, axis: int) -> Any:
            return arg.select(axis, item) if count > 0 else arg.new_zeros(arg.movedim(axis, 0).shape[1:])

        items = [
            operator(*(arg if axis is None else of(item, arg, axis) for arg, axis in zip(args, in_dims)))
            for item in range(max(count, 1))
        ]
        if isinstance(items[0], Tensor):
            return torch.stack(items)[:count], 0
        results = tuple(torch.stack(parts)[:count] for parts in zip(*items))
        return results, (0,) * len(results)

    return rule


def register_loop(operator: Any) -> None:
    """Has vmap run an operator for each item."""
    operator.register_vmap(_one_by_one(operator))


def as_function(operator: Any, save: Any, gradients: Any, tangents: Any = None) -> Any:
    """The operator for torch.func and forward mode, which do not use its autograd formula."""
    parts = {
        "forward": staticmethod(lambda *inputs: operator(*inputs)),
        "setup_context": staticmethod(save),
        "backward": staticmethod(gradients),
        "vmap": staticmethod(_one_by_one(lambda *inputs: run(*inputs))),
    }
    if tangents is not None:
        parts["jvp"] = staticmethod(tangents)
    function: Any = type(f"{operator._name.replace('::', '_')}_function", (torch.autograd.Function,), parts)

    def run(*inputs: Any) -> Results:
        watched = _transforms_active() or (_forward_mode.on() and not _is_compiling())
        results: Results = function.apply(*inputs) if watched else operator(*inputs)
        return results

    return run


def _tangents(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
    """The tangents of the operator's three results, from those of its inputs."""
    d_query, d_key, d_value, d_bias, d_sinks, *_ = given
    with _forward_mode.all_levels(True):
        query, key, value, *tensors = (_forward_mode.primal(x) for x in ctx.saved_tensors)
        options = Options(*tensors, *ctx.plain_options)
        _in_torch.refuse("forward-mode", options)
        if given[3 + Options._fields.index("alibi_slopes")] is not None:
            raise ValueError("attention: alibi_slopes has a tangent, and no derivative: pass learnt slopes as a bias")
        _, lse, weights = run_attention(query, key, value[..., :0], *options, True)
        d_inputs = (d_query, d_key, d_value, d_bias, d_sinks)
        d_out, d_lse, d_weights = _forward_mode.tangents(d_inputs, query, key, value, options, lse, weights)
        return d_out, d_lse, d_weights if ctx.return_weights else weights.new_zeros(0)


def _backward_tangents(ctx: Any, *given: Any) -> NoReturn:
    """The tangents of gradients: there are none of those that the plain code does not have, and only they come here."""
    _in_torch.refuse("forward-mode", Options(*ctx.saved_tensors, *ctx.plain_options))
    raise AssertionError


for _operator in (attention, attention_backward, _in_torch.fixed_terms):
    register_loop(_operator)

run_attention = as_function(attention, _save, _gradients, _tangents)
_run_backward = as_function(attention_backward, _save_for_double_backward, _double_backward, _backward_tangents)
