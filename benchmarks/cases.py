"""The cases of ./dev bench cpu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import native
import numpy as np
import torch
from peers import Attention, Inputs, contenders, headway_call
from sampling import Call, Case

import headway


def attention_case(group: str, name: str, call: Attention, threads: int, peak: str = "") -> Case:
    if not peak:
        peak = "bf16" if call.dtype == "bf16" else "f32"
    return Case(group, name, call.flops, peak, partial(contenders, call, threads))


def main_cases(threads: int, lengths: tuple[int, ...] = (128, 512, 2048, 8192)) -> Iterator[Case]:
    """B1 H8, every length and width, causal and not, f32 and bf16, forward and backward."""
    for dtype in ("f32", "bf16"):
        for backward in (False, True):
            group = f"{dtype} {'backward' if backward else 'forward'}, B1 H8"
            for width in (64, 128):
                for causal in (False, True):
                    for length in lengths:
                        name = f"S{length} D{width}{' causal' if causal else ''}"
                        call = Attention(queries=length, width=width, dtype=dtype, causal=causal, backward=backward)
                        yield attention_case(group, name, call, threads)


def odd_cases(threads: int) -> Iterator[Case]:
    group = "other sizes and types, forward, B1 H8"
    yield attention_case(group, "S2048 D32", Attention(width=32), threads)
    yield attention_case(group, "S2048 D80", Attention(width=80), threads)
    yield attention_case(group, "S1000 D64", Attention(queries=1000), threads)
    yield attention_case(group, "f16 S2048 D64", Attention(dtype="f16"), threads)
    yield attention_case(group, "f16 S2048 D128", Attention(dtype="f16", width=128), threads)


def option_cases(threads: int) -> Iterator[Case]:
    group = "f32 forward S2048 D64 with an option, B1 H8"
    for option in ("mask", "bias", "alibi", "softcap", "dropout", "weights"):
        yield attention_case(group, option, Attention(option=option), threads)


def small_cases(threads: int) -> Iterator[Case]:
    group = "many small problems, f32"
    for batch, heads, length, width in ((32, 8, 128, 64), (32, 8, 64, 64), (32, 8, 32, 64), (256, 12, 16, 32)):
        for backward in (False, True):
            call = Attention(batch=batch, heads=heads, queries=length, width=width, backward=backward)
            name = f"B{batch} H{heads} S{length} D{width} {'backward' if backward else 'forward'}"
            yield attention_case(group, name, call, threads)


def decode_cases(threads: int) -> Iterator[Case]:
    group = "decode: one query, 8192 keys, D128"
    for dtype in ("f32", "bf16"):
        for kv_heads in (32, 8):
            call = Attention(heads=32, kv_heads=kv_heads, queries=1, keys=8192, width=128, dtype=dtype)
            name = f"{dtype} 32 heads" + (f", {kv_heads} of keys" if kv_heads != 32 else "")
            yield Case(group, name, call.key_value_bytes, "read", partial(contenders, call, threads, reading=True))


def window_cases(threads: int) -> Iterator[Case]:
    """No peer: with a mask of 32768 x 32768 they would do 64 times the work."""
    length, window = 32768, 512
    pairs = sum(min(i + 1, window) for i in range(length))

    def made() -> dict[str, Call]:
        inputs = Inputs(Attention(queries=length))
        out = torch.empty_like(inputs.q)
        windowed = (window - 1, 0)
        return {"headway": lambda: headway.attention(inputs.q, inputs.k, inputs.v, window=windowed, out=out)}

    yield Case("f32 forward with a window, B1 H8", "S32768 D64 window 512", 4.0 * 8 * pairs * 64, "f32", made)


def layer_contenders(width: int, heads: int, batch: int, length: int, weights: bool) -> dict[str, Call]:
    """The C++ layer, and nn.MultiheadAttention in inference mode, batch first."""
    x = np.random.default_rng(0).standard_normal((batch, length, width), dtype=np.float32)
    tensor = torch.from_numpy(x)
    stored = np.empty((batch, heads, length, length), np.float32) if weights else None
    ours = native.Layer(width, heads)
    theirs = torch.nn.MultiheadAttention(width, heads, batch_first=True).eval()

    @torch.inference_mode()
    def run_theirs() -> object:
        return theirs(tensor, tensor, tensor, need_weights=weights, average_attn_weights=False)

    return {"headway": lambda: ours.infer(x, stored), "torch": run_theirs}


def layer_cases(threads: int) -> Iterator[Case]:
    """Four projections around attention."""
    for width, heads, batch, length in ((512, 8, 4, 512), (1024, 16, 1, 2048)):
        flops = 8.0 * batch * length * width * width + 4.0 * batch * length * length * width
        for weights in (False, True):
            name = f"d{width} h{heads} B{batch} S{length}{' with weights' if weights else ''}"
            made = partial(layer_contenders, width, heads, batch, length, weights)
            yield Case("the layer, f32", name, flops, "f32", made)


def product_contenders(width: int) -> dict[str, Call]:
    random = np.random.default_rng(0)
    x = random.standard_normal((2048, width), dtype=np.float32)
    weight = random.standard_normal((width, width), dtype=np.float32)
    y = np.empty_like(x)
    a, b, c = torch.from_numpy(x), torch.from_numpy(weight), torch.from_numpy(y)
    here = [who for who in ("headway", "openblas", "onednn") if native.product(who, x, weight, y)]
    calls: dict[str, Call] = {who: partial(native.product, who, x, weight, y) for who in here}
    calls["torch"] = torch.inference_mode()(lambda: torch.mm(a, b, out=c))
    return calls


def product_cases(threads: int) -> Iterator[Case]:
    for width in (512, 1024):
        name, flops = f"M2048 K{width} N{width}", 2.0 * 2048 * width * width
        yield Case("projections, f32", name, flops, "f32", partial(product_contenders, width))


def all_cases(threads: int) -> Iterator[Case]:
    yield from product_cases(threads)
    yield from main_cases(threads)
    yield from odd_cases(threads)
    yield from option_cases(threads)
    yield from small_cases(threads)
    yield from decode_cases(threads)
    yield from window_cases(threads)
    yield from layer_cases(threads)


def avx2_cases(threads: int) -> Iterator[Case]:
    """With HEADWAY_ISA=avx2, and PyTorch held to AVX2 too."""
    group = "AVX2 kernels, f32 forward, B1 H8"
    for width in (64, 128):
        for causal in (False, True):
            call = Attention(width=width, causal=causal)
            yield attention_case(group, f"S2048 D{width}{' causal' if causal else ''}", call, threads, peak="avx2")


def headway_alone(call: Attention) -> dict[str, Call]:
    return {"headway": headway_call(Inputs(call))}


def growth_cases(threads: int) -> Iterator[Case]:
    """One head, S from 128 to 65536: the time for each pair must stay the same."""
    for length in (128, 512, 2048, 8192, 32768, 65536):
        call = Attention(heads=1, queries=length)
        if length < 2048:  # as much work as one head of 2048 has, or the machine is asleep
            call = replace(call, heads=2048 // length)

        yield Case("growth, f32 forward, D64", f"S{length}", call.flops, "f32", partial(headway_alone, call))


SUITES = {"all": all_cases, "avx2": avx2_cases, "growth": growth_cases}
