"""The whole layer on the GPU: headway.torch.MultiheadAttention beside torch.nn.MultiheadAttention, for gpu.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

WIDTH, HEADS, BATCH, LENGTH = 1024, 16, 8, 2048
Call = Callable[[], object]


def layer_rows(milliseconds: Callable[[Call], float]) -> list[dict[str, Any]]:
    """Forward without and with weights, and forward with backward, in bf16."""
    try:
        from headway.torch import MultiheadAttention
    except ImportError as missing:
        print(f"  no rows for the layer: {missing} (python3 needs nanobind to build it)")
        return []
    theirs = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, device="cuda", dtype=torch.bfloat16)
    ours = MultiheadAttention(WIDTH, HEADS, batch_first=True, device="cuda", dtype=torch.bfloat16)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    projections, products = 8.0 * BATCH * LENGTH * WIDTH**2, 4.0 * BATCH * LENGTH**2 * WIDTH
    rows = []
    for name, weights, backward in (
        ("forward", False, False),
        ("forward, weights", True, False),
        ("forward, backward", False, True),
    ):
        calls = {who: _call(layer, x, weights, backward) for who, layer in (("headway", ours), ("torch", theirs))}
        first = milliseconds(calls["headway"])
        times = {"torch": milliseconds(calls["torch"])}
        times = {"headway": statistics.mean((first, milliseconds(calls["headway"]))), **times}
        flops = (3.0 * projections + 3.5 * products) if backward else projections + products
        group, ratio = f"layer d{WIDTH} h{HEADS} b{BATCH}", times["torch"] / times["headway"]
        rates = {who: flops / time_ms / 1e9 for who, time_ms in times.items()}
        rows.append(
            {"group": group, "name": name, "milliseconds": times, "rates": rates, "unit": "TFLOP/s", "ratio": ratio}
        )
        text = ", ".join(f"{who} {time_ms:.3f}" for who, time_ms in times.items())
        print(f"  {group:22} {name:18} {text} ms  {ratio:.3f}x", flush=True)
    return rows


def _call(layer: torch.nn.Module, x: Any, weights: bool, backward: bool) -> Call:
    """Inference as torch is fastest at it, or a step of training: the gradients of the input and of every parameter."""

    def infer() -> object:
        with torch.inference_mode():
            return layer.eval()(x, x, x, need_weights=weights)

    source = x.detach().clone().requires_grad_()

    def train() -> object:
        out = layer.train()(source, source, source, need_weights=weights)[0]
        return torch.autograd.grad(out, [source, *layer.parameters()], x)

    return train if backward else infer
