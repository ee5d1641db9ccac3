"""One draw, run by Headway through its public Python API and by every peer that supports the case.

A contender is a function without arguments that does the whole call, and the context in which it is timed: torch
chooses its kernel in the context, not in the timed calls.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from draws import Draw
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import headway
import headway.torch

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
TOLERANCE = {"f32": 1e-3, "bf16": 3e-2, "f16": 5e-3}  # of a result's norm; a wrong mask is off by tenths
GPU_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
MATH_PAIRS = 2**29  # the math backend stores all scores, several times


@dataclass
class Contender:
    forward: Callable[[], Tensor]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


class Inputs:
    """A draw's tensors, the same numbers for the same text. Leaves of autograd where the kind is trained."""

    def __init__(self, draw: Draw, device: torch.device) -> None:
        self.draw, self.device = draw, device
        self.generator = torch.Generator(device).manual_seed(zlib.crc32(str(draw).encode()))
        self.query = self._tensor(draw.heads, draw.queries)
        self.key = self._tensor(draw.kv_heads, draw.keys)
        self.value = self._tensor(draw.kv_heads, draw.keys)
        self.grad_out = self._tensor(draw.heads, draw.queries)
        self.mask = self._mask()
        if draw.trained:
            for x in self.leaves:
                x.requires_grad_()

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def _tensor(self, heads: int, length: int) -> Tensor:
        """(B, H, S, D), in memory as the draw's layout says."""
        draw = self.draw
        sizes = (heads, length) if draw.layout == "bhsd" else (length, heads)
        numbers = self._normal(draw.batch, *sizes, draw.width)
        return numbers if draw.layout == "bhsd" else numbers.transpose(1, 2)

    def _normal(self, *sizes: int) -> Tensor:
        dtype = DTYPES[self.draw.dtype]
        return torch.randn(sizes, generator=self.generator, device=self.device, dtype=torch.float32).to(dtype)

    def _uniform(self, *sizes: int) -> Tensor:
        return torch.rand(sizes, generator=self.generator, device=self.device)

    def _mask(self) -> Tensor | None:
        """What attn_mask is; a model that has a mask and the causal rule joins them once, for all its layers."""
        draw, device = self.draw, self.device
        i, j = torch.arange(draw.queries, device=device)[:, None], torch.arange(draw.keys, device=device)
        allowed = j <= draw.keys - draw.queries + i
        if draw.mask == "bias":
            bias = self._normal(1, draw.heads, draw.queries, draw.keys)
            return bias.masked_fill(~allowed, float("-inf")) if draw.causal else bias
        if draw.mask == "documents":
            documents = (i // 512 == j // 512)[None, None]
            return documents & allowed if draw.causal else documents
        if draw.mask == "padding":
            # From a quarter of the keys to all of them; the last query sees the last key that is there.
            lengths = draw.keys - (self._uniform(draw.batch, 1, 1, 1) * 0.75 * draw.keys).long()
            lengths = lengths.clamp(min=draw.queries if draw.causal else 1)
            return j <= lengths - draw.queries + i if draw.causal else j < lengths
        return None

    def options(self) -> dict[str, Any]:
        """Keywords of torch's function, but for the causal rule where queries and keys differ in number."""
        draw = self.draw
        given: dict[str, Any] = {}
        if self.mask is not None:
            given["attn_mask"] = self.mask
        if draw.causal == "causal" and self.mask is None:
            given["is_causal"] = True
        if draw.heads != draw.kv_heads:
            given["enable_gqa"] = True
        if draw.dropout:
            given["dropout_p"] = draw.dropout
        return given

    @property
    def bottom_right(self) -> bool:
        """Whether the causal rule is one that torch's function has no option for; a padded cache's mask holds it."""
        return self.draw.causal == "bottom_right" and self.mask is None


def ours(inputs: Inputs) -> Contender:
    query, key, value = inputs.leaves
    if inputs.bottom_right:
        return Contender(lambda: headway.torch.attention(query, key, value, causal="bottom_right"))
    call, options = headway.torch.scaled_dot_product_attention, inputs.options()
    return Contender(lambda: call(query, key, value, **options))


def plan(inputs: Inputs, *, backward: bool) -> Any:
    """What explain() says of our call."""
    draw = inputs.draw
    options: dict[str, Any] = {}
    if inputs.mask is not None:
        options["bias" if draw.mask == "bias" else "mask"] = inputs.mask
    elif draw.causal:
        options["causal"] = "bottom_right"
    if draw.dropout:
        options.update(dropout=draw.dropout, seed=1)
    query, key, value = (x.detach() for x in inputs.leaves)
    return headway.explain(query, key, value, return_lse=draw.trained, backward=backward, **options)


def peers(inputs: Inputs, threads: int) -> dict[str, Contender]:
    """Everyone who may take the case; who refuses it is found when it is run."""
    return gpu_peers(inputs) if inputs.device.type == "cuda" else cpu_peers(inputs, threads)


def gpu_peers(inputs: Inputs) -> dict[str, Contender]:
    """Torch's function, held to one backend after another."""
    draw, options = inputs.draw, inputs.options()
    backends = dict(GPU_BACKENDS)
    if draw.batch * draw.heads * draw.queries * draw.keys > MATH_PAIRS:
        del backends["math"]
    if inputs.bottom_right:
        options["attn_mask"] = _bottom_right_mask(draw, inputs.device)
    call = partial(F.scaled_dot_product_attention, *inputs.leaves, **options)
    found = {who: Contender(call, partial(sdpa_kernel, backend)) for who, backend in backends.items()}
    if inputs.bottom_right:
        # Two backends have the rule itself; without one torch makes the mask anew in every call.
        options["attn_mask"] = causal_lower_right(draw.queries, draw.keys)
        ruled = partial(F.scaled_dot_product_attention, *inputs.leaves, **options)
        found["flash"] = Contender(ruled, partial(sdpa_kernel, backends["flash"]))
        found["efficient, causal_lower_right"] = Contender(ruled, partial(sdpa_kernel, backends["efficient"]))
    return found


def _bottom_right_mask(draw: Draw, device: torch.device) -> Tensor:
    return torch.ones(draw.queries, draw.keys, dtype=torch.bool, device=device).tril(draw.keys - draw.queries)


def cpu_peers(inputs: Inputs, threads: int) -> dict[str, Contender]:
    draw, options = inputs.draw, inputs.options()
    if inputs.bottom_right:
        options["attn_mask"] = _bottom_right_mask(draw, inputs.device)
    found = {"torch": Contender(partial(F.scaled_dot_product_attention, *inputs.leaves, **options))}
    onnx = onnxruntime(inputs, threads)
    return found | ({"onnxruntime": onnx} if onnx else {})


def onnxruntime(inputs: Inputs, threads: int) -> Contender | None:
    """ONNX Runtime's operator, where it is installed and takes the case."""
    draw = inputs.draw
    try:
        from onnx_peer import session
    except ImportError:
        return None
    if draw.dtype != "f32" or draw.mask or draw.dropout or draw.kv_heads != draw.heads or inputs.bottom_right:
        return None
    run = session(*(x.detach() for x in inputs.leaves), causal=bool(draw.causal), threads=threads)

    def forward() -> Tensor:
        out = torch.from_numpy(run()[0])  # (B, Sq, H * D)
        return out.unflatten(-1, (draw.heads, draw.width)).transpose(1, 2)

    return Contender(forward)


def gradients(contender: Contender, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]] | None:
    """The backward of a contender's call, after one forward; None where it records none."""
    with contender.context():
        out = contender.forward()
    if not out.requires_grad:
        return None
    return lambda: torch.autograd.grad(out, inputs.leaves, inputs.grad_out, retain_graph=True)


def distances(draw: Draw, device: torch.device, who: str, threads: int) -> dict[str, float]:
    """How far our results and a peer's are apart, as a share of the peer's norm; dropout is left out."""
    inputs = Inputs(replace(draw, dropout=0.0), device)
    theirs = peers(inputs, threads)[who]
    found = {}
    with theirs.context():
        expected = theirs.forward()
    found["out"] = _distance(ours(inputs).forward(), expected)
    backward = gradients(theirs, inputs)
    own = gradients(ours(inputs), inputs) if backward else None
    if backward and own:
        for name, actual, gradient in zip(("dq", "dk", "dv"), own(), backward()):
            found[name] = _distance(actual, gradient)
    return found


def _distance(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().float(), expected.detach().float()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
