"""The whole layer on the GPU beside torch.nn.MultiheadAttention, for gpu.py: headway.torch's and the one in C++."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WIDTH, HEADS, BATCH, LENGTH = 1024, 16, 8, 2048
BF16 = 2  # of headway::DType
Call = Callable[[], object]


def layer_rows(milliseconds: Callable[[Call], float], library: Path) -> list[dict[str, Any]]:
    """Forward without and with weights, and forward with backward, in bf16."""
    theirs = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    rows = []
    try:
        from headway.torch import MultiheadAttention
    except ImportError as missing:
        print(f"  no rows for headway.torch's layer: {missing} (python3 needs nanobind to build it)")
    else:
        ours = MultiheadAttention(WIDTH, HEADS, batch_first=True, device="cuda", dtype=torch.bfloat16)
        ours.load_state_dict(theirs.state_dict())
        for name, weights, backward in (
            ("forward", False, False),
            ("forward, weights", True, False),
            ("forward, backward", False, True),
        ):
            calls = [_call(layer, x, weights, backward) for layer in (ours, theirs)]
            rows.append(_row(milliseconds, name, *calls, backward))
    native = NativeLayer(library, theirs)
    for name, backward in (("C++: forward", False), ("C++: forward, backward", True)):
        rows.append(_row(milliseconds, name, native.call(x, backward), _call(theirs, x, False, backward), backward))
    return rows


def _row(milliseconds: Callable[[Call], float], name: str, ours: Call, theirs: Call, backward: bool) -> dict[str, Any]:
    projections, products = 8.0 * BATCH * LENGTH * WIDTH**2, 4.0 * BATCH * LENGTH**2 * WIDTH
    first = milliseconds(ours)
    times = {"torch": milliseconds(theirs)}
    times = {"headway": statistics.mean((first, milliseconds(ours))), **times}
    flops = (3.0 * projections + 3.5 * products) if backward else projections + products
    group, ratio = f"layer d{WIDTH} h{HEADS} b{BATCH}", times["torch"] / times["headway"]
    rates = {who: flops / time_ms / 1e9 for who, time_ms in times.items()}
    text = ", ".join(f"{who} {time_ms:.3f}" for who, time_ms in times.items())
    print(f"  {group:22} {name:18} {text} ms  {ratio:.3f}x", flush=True)
    return {"group": group, "name": name, "milliseconds": times, "rates": rates, "unit": "TFLOP/s", "ratio": ratio}


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


class _Parameters(ctypes.Structure):
    """As in benchmarks/native/gpu_layer.cpp, and so the next."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("in_weight", "in_bias", "out_weight", "out_bias")),
        *((name, ctypes.c_int64) for name in ("width", "heads")),
        ("dtype", ctypes.c_int),
        ("stream", ctypes.c_void_p),
    ]


class _LayerCall(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "grad_out", "y")),
        *((name, ctypes.c_int64) for name in ("batch", "length")),
        ("stream", ctypes.c_void_p),
    ]


class NativeLayer:
    """The C++ layer with the parameters of torch's; it checks its first result."""

    def __init__(self, library: Path, theirs: torch.nn.MultiheadAttention) -> None:
        self._native = ctypes.CDLL(str(library))
        for function in (self._native.headway_gpu_layer_make, self._native.headway_gpu_layer):
            function.restype = ctypes.c_char_p
        self._stream = torch.cuda.current_stream().cuda_stream
        tensors = (theirs.in_proj_weight, theirs.in_proj_bias, theirs.out_proj.weight, theirs.out_proj.bias)
        described = _Parameters(*(x.data_ptr() for x in tensors), WIDTH, HEADS, BF16, self._stream)
        self._check(self._native.headway_gpu_layer_make(ctypes.byref(described)))
        x = torch.randn(2, 100, WIDTH, device="cuda", dtype=torch.bfloat16)
        y = torch.empty_like(x)
        self._run(_LayerCall(x.data_ptr(), None, y.data_ptr(), 2, 100, self._stream))
        with torch.inference_mode():
            torch.testing.assert_close(y, theirs(x, x, x, need_weights=False)[0], rtol=2e-2, atol=2e-2)

    def call(self, x: Any, backward: bool) -> Call:
        """Inference, or the gradients of the input and of every parameter."""
        described = _LayerCall(x.data_ptr(), x.data_ptr() if backward else None, None, *x.shape[:2], self._stream)
        return lambda: self._run(described)

    def _run(self, described: _LayerCall) -> None:
        self._check(self._native.headway_gpu_layer(ctypes.byref(described)))

    @staticmethod
    def _check(error: bytes | None) -> None:
        if error:
            raise RuntimeError(error.decode())
