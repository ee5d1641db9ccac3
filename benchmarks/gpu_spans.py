"""Rows of ./dev bench gpu for structured masks: rates for each allowed pair, beside FlexAttention where it compiles.

Headway takes spans in device memory and builds its lists of tiles inside every call; what FlexAttention needs to build
its block mask is printed, not timed with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

HEADS, DIM, LENGTH = 16, 128, 32768
DOCUMENT, WINDOW, FIRST, PREFIX = 2048, 1024, 4, 8192
Row = dict[str, Any]


def span_cases() -> dict[str, tuple[Any, Callable[..., Any]]]:
    """Spans [S, R, 2] of each mask, and the same as a function of a pair."""
    i = torch.arange(LENGTH, device="cuda", dtype=torch.int32)
    zero = torch.zeros_like(i)

    def of(*spans: tuple[Any, Any]) -> Any:
        return torch.stack([torch.stack(span, -1) for span in spans], 1).contiguous()

    window = (i - WINDOW).clamp(min=0)
    return {
        "causal": (of((zero, i + 1)), lambda b, h, q, k: k <= q),
        f"documents of {DOCUMENT}, causal": (
            of((i // DOCUMENT * DOCUMENT, i + 1)),
            lambda b, h, q, k: (q // DOCUMENT == k // DOCUMENT) & (k <= q),
        ),
        f"window {WINDOW}, first {FIRST}": (
            of((zero, torch.minimum(zero + FIRST, window)), (window, i + 1)),
            lambda b, h, q, k: (k <= q) & ((k < FIRST) | (q - k <= WINDOW)),
        ),
        f"prefix {PREFIX}": (
            of((zero, (i + 1).clamp(min=PREFIX))),
            lambda b, h, q, k: (k <= q) | (k < PREFIX),
        ),
    }


def flex_calls(allowed: Callable[..., Any], q: Any, k: Any, v: Any, grad_out: Any) -> tuple[Any, Any]:
    """FlexAttention's forward and backward, compiled; None where it is not there."""
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        began = time.perf_counter()
        mask = create_block_mask(allowed, None, None, LENGTH, LENGTH, device="cuda", _compile=True)
        torch.cuda.synchronize()
        print(f"    FlexAttention's mask took {time.perf_counter() - began:.1f} s to build", flush=True)
        attend = torch.compile(flex_attention)
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, block_mask=mask)
        backward = lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)  # noqa: E731
        backward()
    except (ImportError, RuntimeError) as reason:
        print(f"    no FlexAttention: {reason}", flush=True)
        return None, None
    return lambda: attend(q, k, v, block_mask=mask), backward


def span_rows(headway: Any, wanted: Any, measure: Callable[..., Row], work_of: Callable[..., float]) -> list[Row]:
    group, rows = f"masks, bf16 {HEADS} heads of {DIM}, s{LENGTH}", []
    if not any(wanted(group, name) for name in span_cases()):
        return rows
    q, k, v, grad_out = (
        torch.randn(1, HEADS, LENGTH, DIM, device="cuda", dtype=torch.float32).to(torch.bfloat16) for _ in range(4)
    )
    for name, (spans, allowed) in span_cases().items():
        if not wanted(group, name):
            continue
        pairs = float((spans[..., 1] - spans[..., 0]).sum())
        theirs, their_backward = flex_calls(allowed, q, k, v, grad_out)
        peers = {"flex": theirs} if theirs else {}
        rows.append(measure(group, name, headway.call(q, k, v, spans=spans), peers, work_of(q, pairs)))
        if name == "causal":
            ours = headway.call(q, k, v, causal=True)
            rows.append(measure(group, f"{name} option", ours, {}, work_of(q, pairs)))
        peers = {"flex": their_backward} if their_backward else {}
        work = work_of(q, pairs) * 2.5  # ten products' operations instead of four
        ours = headway.backward(q, k, v, grad_out, spans=spans)
        rows.append(measure(group, f"{name}, backward", ours, peers, work))
        if name == "causal":
            ours = headway.backward(q, k, v, grad_out, causal=True)
            rows.append(measure(group, f"{name} option, backward", ours, {}, work))
    return rows
