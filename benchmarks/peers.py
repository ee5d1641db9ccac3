"""One attention call, as Headway and as each peer does it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any

import native
import numpy as np
import torch
import torch.nn.functional as F
from sampling import Call

import headway

_TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Attention:
    """A call, forward or backward, with at most one option beside causal."""

    batch: int = 1
    heads: int = 8
    kv_heads: int = 0  # 0: as many as heads
    queries: int = 2048
    keys: int = 0  # 0: as many as queries
    width: int = 64
    dtype: str = "f32"
    causal: bool = False
    backward: bool = False
    option: str = ""  # mask, bias, alibi, softcap, dropout or weights

    def filled(self) -> Attention:
        return replace(self, kv_heads=self.kv_heads or self.heads, keys=self.keys or self.queries)

    @property
    def flops(self) -> float:
        """Two products of a multiply and an add; half of them when causal; the backward has five products."""
        call = self.filled()
        pairs = call.batch * call.heads * call.queries * call.keys * (0.5 if call.causal else 1.0)
        return 4.0 * pairs * call.width * (2.5 if call.backward else 1.0)

    @property
    def key_value_bytes(self) -> float:
        call = self.filled()
        size = {"f32": 4, "bf16": 2, "f16": 2}[call.dtype]
        return 2.0 * call.batch * call.kv_heads * call.keys * call.width * size


class Inputs:
    """Random inputs of a call, the same for all who run it."""

    def __init__(self, call: Attention) -> None:
        call = call.filled()
        torch.manual_seed(0)
        kind = _TORCH[call.dtype]
        self.call = call
        self.q = torch.randn(call.batch, call.heads, call.queries, call.width).to(kind)
        self.k = torch.randn(call.batch, call.kv_heads, call.keys, call.width).to(kind)
        self.v = torch.randn(call.batch, call.kv_heads, call.keys, call.width).to(kind)
        self.grad = torch.randn(call.batch, call.heads, call.queries, call.width).to(kind)
        if call.option == "mask":
            self.mask = torch.rand(1, 1, call.queries, call.keys) < 0.8
        if call.option == "bias":
            self.bias = torch.randn(1, 1, call.queries, call.keys).to(kind)
        self.slopes = torch.tensor([2.0 ** (-8.0 * (h + 1) / call.heads) for h in range(call.heads)])

    def alibi_matrix(self) -> torch.Tensor:
        i, j = torch.arange(self.call.queries)[:, None], torch.arange(self.call.keys)[None, :]
        return -self.slopes[:, None, None] * (i - j).abs()


def headway_call(inputs: Inputs) -> Call:
    """Torch tensors in, through DLPack: NumPy has no bf16 of its own."""
    call, q, k, v = inputs.call, inputs.q, inputs.k, inputs.v
    options: dict[str, Any] = {"causal": call.causal}
    if call.option == "mask":
        options["mask"] = inputs.mask
    elif call.option == "bias":
        options["bias"] = inputs.bias
    elif call.option == "alibi":
        options["alibi_slopes"] = inputs.slopes
    elif call.option == "softcap":
        options["softcap"] = 20.0
    elif call.option == "dropout":
        options.update(dropout=0.1, seed=1)
    if call.backward:
        out, lse = headway.attention(q, k, v, return_lse=True, **options)
        return lambda: headway.attention_backward(inputs.grad, q, k, v, out, lse, **options)
    if call.option == "weights":
        return lambda: headway.attention(q, k, v, return_weights=True, **options)
    out = torch.empty_like(q)
    return lambda: headway.attention(q, k, v, out=out, **options)


def _eager(q: Any, k: Any, v: Any, call: Attention) -> Any:
    """What a PyTorch user writes where scaled_dot_product_attention lacks the option."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(call.width)
    if call.option == "softcap":
        scores = 20.0 * torch.tanh(scores / 20.0)
    weights = scores.softmax(-1)
    return weights @ v, weights


def torch_call(inputs: Inputs) -> Call:
    call, q, k, v = inputs.call, inputs.q, inputs.k, inputs.v
    if call.option in ("softcap", "weights"):
        return torch.inference_mode()(lambda: _eager(q, k, v, call))
    options: dict[str, Any] = {"is_causal": call.causal, "enable_gqa": call.heads != call.kv_heads}
    if call.option == "mask":
        options["attn_mask"] = inputs.mask
    elif call.option == "bias":
        options["attn_mask"] = inputs.bias
    elif call.option == "alibi":
        options["attn_mask"] = inputs.alibi_matrix()
    elif call.option == "dropout":
        options["dropout_p"] = 0.1
    if call.backward:
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
        out = F.scaled_dot_product_attention(*leaves, **options)
        return lambda: torch.autograd.grad(out, leaves, inputs.grad, retain_graph=True)
    return torch.inference_mode()(lambda: F.scaled_dot_product_attention(q, k, v, **options))


def onnxruntime_call(inputs: Inputs, threads: int) -> Call | None:
    call = inputs.call
    if call.backward or call.dtype != "f32" or call.option or call.heads != call.kv_heads:
        return None
    from onnx_peer import session

    return session(inputs.q, inputs.k, inputs.v, causal=call.causal, threads=threads)


def jax_call(inputs: Inputs) -> Call | None:
    """jax.nn.dot_product_attention under jit, on [B, S, heads, width]. It stores the whole matrix."""
    call = inputs.call
    if call.option or call.dtype == "f16":
        return None
    if call.queries * call.keys * call.heads * call.batch > 2**28:
        return None  # seconds a call and gigabytes: too slow to wait for
    import jax
    import jax.numpy as jnp

    kind = {"f32": jnp.float32, "bf16": jnp.bfloat16}[call.dtype]

    def moved(x: torch.Tensor) -> Any:
        return jnp.asarray(np.ascontiguousarray(x.float().transpose(1, 2).numpy()), dtype=kind)

    q, k, v, grad = (moved(x) for x in (inputs.q, inputs.k, inputs.v, inputs.grad))

    def attention(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=call.causal)

    if call.backward:
        _, pull = jax.vjp(jax.jit(attention), q, k, v)
        backward = jax.jit(lambda pull, grad: pull(grad))
        return lambda: jax.block_until_ready(backward(pull, grad))
    forward = jax.jit(attention)
    return lambda: forward(q, k, v).block_until_ready()


def reading_call(inputs: Inputs, threads: int) -> Call:
    """Reads keys and values where they lie, as fast as memory gives them."""
    places = [(x.data_ptr(), x.numel() * x.element_size()) for x in (inputs.k, inputs.v)]

    def read() -> None:
        for address, size in places:
            native.read(address, size, threads)

    return read


def contenders(call: Attention, threads: int, *, reading: bool = False) -> dict[str, Call]:
    """Headway and every peer that can do this call, and what only reads the keys and values."""
    inputs = Inputs(call)
    made = {
        "reading": reading_call(inputs, threads) if reading else None,
        "headway": headway_call(inputs),
        "torch": torch_call(inputs),
        "onnxruntime": onnxruntime_call(inputs, threads),
        "jax": jax_call(inputs) if not os.environ.get("HEADWAY_ISA") else None,
    }
    return {who: run for who, run in made.items() if run is not None}
