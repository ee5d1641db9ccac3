"""The machine-code part of the benchmark: this machine's peaks, the C++ layer, and matrix products."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

_LIBRARY = Path(__file__).resolve().parent.parent / "build/bench/benchmarks/libheadway_benchmark.so"
_native = ctypes.CDLL(str(_LIBRARY))

_pointer, _long, _double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
for _name in ("headway_peak_f32", "headway_peak_f32_avx2", "headway_peak_bf16", "headway_rate_f32"):
    getattr(_native, _name).restype = _double
    getattr(_native, _name).argtypes = [ctypes.c_int, _double]
_native.headway_read.argtypes = [_pointer, _long, ctypes.c_int]
for _name in ("headway_product", "openblas_product", "onednn_product"):
    getattr(_native, _name).argtypes = [_pointer, _pointer, _pointer, _long, _long, _long]
_native.headway_layer_make.restype = _pointer
_native.headway_layer_make.argtypes = [_long, _long]
_native.headway_layer_free.argtypes = [_pointer]
_native.headway_layer_infer.argtypes = [_pointer, _pointer, _long, _long, _pointer]


def peak(kind: str, threads: int, seconds: float = 0.02) -> float:
    """Floating-point operations a second: kind is f32, avx2 or bf16. 0 where the machine lacks the instruction."""
    name = {"f32": "headway_peak_f32", "avx2": "headway_peak_f32_avx2", "bf16": "headway_peak_bf16"}[kind]
    return float(getattr(_native, name)(threads, seconds))


def rate(threads: int, seconds: float) -> float:
    """What the threads reach of the f32 peak right now, on average: less where something else runs."""
    return float(_native.headway_rate_f32(threads, seconds))


def read(address: int, size: int, threads: int) -> None:
    """Reads that many bytes, each thread its part, and does nothing with them."""
    _native.headway_read(address, size, threads)


def set_threads(threads: int) -> None:
    """For the library inside this one; the Python package has its own."""
    _native.headway_native_threads(threads)


def product(which: str, x: Any, weight: Any, y: Any) -> bool:
    """y = x W by headway, openblas or onednn. False where that library was not found when this one was built."""
    rows, inputs = x.shape
    function = getattr(_native, which + "_product")
    return bool(function(x.ctypes.data, weight.ctypes.data, y.ctypes.data, rows, inputs, weight.shape[1]))


class Layer:
    """headway::MultiHeadAttention with biases, on float32."""

    def __init__(self, model_dim: int, heads: int) -> None:
        self._layer = _native.headway_layer_make(model_dim, heads)

    def __del__(self) -> None:
        _native.headway_layer_free(self._layer)

    def infer(self, x: Any, weights: Any = None) -> None:
        """Self-attention on x (B, S, model_dim); weights (B, H, S, S) are written where they are given."""
        _native.headway_layer_infer(
            self._layer, x.ctypes.data, x.shape[0], x.shape[1], weights.ctypes.data if weights is not None else None
        )
