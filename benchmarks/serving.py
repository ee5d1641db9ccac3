"""Serving on this machine's CPU: one query of each sequence over its cache, beside peers, in one run.

    PYTHONPATH=build/python-package python3 benchmarks/serving.py     (./dev bench cpu builds what it needs)

Groups: contiguous caches, pages and 8-bit pages; a batch of sequences of 100 to 8000 tokens; values inside keys (MLA).
Keys and values come from memory: a round goes through as many of a model's layers as do not fit into the caches, the
same memory in every row. "reading" is a loop that only reads it. Headway's pages are in random order. torch has a
padded cache with a mask; ONNX Runtime's GroupQueryAttention has one layer, in a buffer that it also adds the new token
to.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import native
import numpy as np
import torch
import torch.nn.functional as F
from turns import Row, run, settings

import headway

KINDS = {"f32": torch.float32, "bf16": torch.bfloat16, "i8": torch.int8, "fp8": torch.float8_e4m3fn}
PAGE_SIZES = (16, 64, 256)
OUT_OF_CACHE = 200e6  # bytes


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    keys: int = 8192
    dim: int = 128
    value_dim: int = 128

    @property
    def inside(self) -> bool:
        """Values are the first columns of the keys' memory."""
        return self.value_dim != self.dim

    @property
    def elements(self) -> int:
        """Of one layer's keys and values."""
        return self.keys * self.kv_heads * self.dim * (1 if self.inside else 2)

    def bytes(self, stored: str) -> float:
        return float(self.elements * KINDS[stored].itemsize)

    def layers(self, stored: str) -> int:
        return max(1, -(-int(OUT_OF_CACHE) // int(self.bytes(stored))))


def random(sizes: tuple[int, ...], kind: str) -> torch.Tensor:
    if kind == "i8":
        return torch.randint(-127, 128, sizes, dtype=torch.int8)
    return (torch.randn(sizes) * (40 if kind == "fp8" else 1)).to(KINDS[kind])


@cache
def memory(elements: int, stored: str) -> torch.Tensor:
    return random((elements,), stored)


def layer(shape: Shape, stored: str, n: int, sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of layer n in these sizes: the same memory in every layout."""
    both = memory(shape.elements * shape.layers(stored), stored)[n * shape.elements :][: shape.elements]
    if shape.inside:
        keys = both.view(sizes)
        return keys, keys[..., : shape.value_dim]
    half = shape.elements // 2
    return both[:half].view(sizes), both[half:].view(sizes)


def pages_row(shape: Shape, kind: str, stored: str, size: int, head_major: bool, of: str, least: float) -> Row:
    count = shape.keys // size
    sizes = (count, shape.kv_heads, size, shape.dim) if head_major else (count, size, shape.kv_heads, shape.dim)
    query = random((1, shape.heads, 1, shape.dim), kind)
    table = torch.randperm(count, dtype=torch.int32)[None]
    lengths = torch.tensor([shape.keys], dtype=torch.int32)
    options: dict[str, Any] = {}
    if stored in ("i8", "fp8"):
        scales = torch.rand(count, size, shape.kv_heads) * 0.02 + 0.01
        options = {"key_scales": scales, "value_scales": scales}
    out = torch.empty(1, shape.heads, 1, shape.value_dim, dtype=KINDS[kind])
    layers = [layer(shape, stored, n, sizes) for n in range(shape.layers(stored))]
    if head_major:
        layers = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in layers]

    def call(n: int) -> object:
        return headway.attention_paged(query, *layers[n], table, lengths, out=out, **options)

    name = f"{'head-major ' if head_major else ''}pages of {size}, {stored}"
    name += f", {kind} query" if stored != kind else ""
    return Row(name, shape.bytes(stored), call, len(layers), of, least)


def contiguous_rows(shape: Shape, kind: str, threads: int, peers: bool) -> list[Row]:
    """The loop that only reads, one tensor in both layouts, and torch."""
    query = random((1, shape.heads, 1, shape.dim), kind)
    bytes_, count = shape.bytes(kind), shape.layers(kind)
    rows = []

    def read(n: int) -> None:
        for x in layer(shape, kind, n, (-1,) if not shape.inside else (-1, shape.dim)):
            if not shape.inside or x.shape[-1] == shape.dim:
                native.read(x.data_ptr(), x.numel() * x.element_size(), threads)

    rows.append(Row("reading", bytes_, read, count))
    flops = 2.0 * shape.heads * shape.keys * (shape.dim + shape.value_dim) if shape.inside else 0
    for layout in ("B H S D", "B S H D"):
        ours = layout == "B H S D"
        sizes = (1, shape.kv_heads, shape.keys) if ours else (1, shape.keys, shape.kv_heads)
        layers = [layer(shape, kind, n, (*sizes, shape.dim)) for n in range(count)]
        if not ours:
            layers = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in layers]
        out = torch.empty(1, shape.heads, 1, shape.value_dim, dtype=KINDS[kind])

        def attend(n: int, layers: Any = layers, out: Any = out) -> object:
            return headway.attention(query, *layers[n], out=out)

        rows.append(Row(f"one tensor [{layout}], {kind}", bytes_, attend, count, "reading", 0.9, flops))
        if ours and peers:

            def sdpa(n: int, layers: Any = layers) -> object:
                return F.scaled_dot_product_attention(query, *layers[n], enable_gqa=shape.heads != shape.kv_heads)

            rows.append(Row(f"torch, {kind}", bytes_, torch.inference_mode()(sdpa), 1, "reading"))
    return rows


def onnxruntime_rows(shape: Shape, threads: int) -> list[Row]:
    from onnx_peer import decode_session

    rows = []
    for bits, stored in ((32, "f32"), (8, "i8")):
        call = decode_session(shape.heads, shape.kv_heads, shape.keys, shape.dim, bits=bits, threads=threads)
        if call is None:
            print(f"  ONNX Runtime has no cache of {bits} bits here")
            continue
        name = f"ONNX Runtime GroupQueryAttention, {stored}"
        rows.append(Row(name, shape.bytes(stored), lambda n, call=call: call(), shape.layers(stored), "reading"))
    return rows


def decode_rows(shape: Shape, kind: str, threads: int) -> list[Row]:
    rows = contiguous_rows(shape, kind, threads, peers=True)
    for head_major, layout in ((False, "B S H D"), (True, "B H S D")):
        of = f"one tensor [{layout}], {kind}"
        rows += [pages_row(shape, kind, kind, size, head_major, of, 0.95) for size in PAGE_SIZES]
    # Bytes a second: 1.7x the tokens of bf16 are 0.85 of its bytes.
    least = 0.85 if kind == "bf16" else 0
    for stored in ("i8", "fp8"):
        for size in (16, 64):
            rows.append(pages_row(shape, kind, stored, size, False, f"pages of {size}, {kind}", least))
    rows.append(pages_row(shape, kind, "i8", 64, True, f"head-major pages of 64, {kind}", least))
    if kind == "f32":
        rows += onnxruntime_rows(shape, threads)
    return rows


def mixed_rows(kind: str) -> list[Row]:
    """32 sequences of 100 to 8000 tokens, 32 heads over 8 of keys, D 128: pages of 16, and torch's padded cache."""
    count, heads, kv_heads, dim, longest, size = 32, 32, 8, 128, 8000, 16
    lengths = np.linspace(100, longest, count).round().astype(np.int32)
    np.random.default_rng(0).shuffle(lengths)
    query = random((count, heads, 1, dim), kind)
    padded = [random((count, kv_heads, longest, dim), kind) for _ in range(2)]
    mask = torch.arange(longest)[None, None, None] < torch.from_numpy(lengths)[:, None, None, None]
    each = [-(-int(length) // size) for length in lengths]
    order = np.random.default_rng(1).permutation(sum(each)).astype(np.int32)
    table = np.zeros((count, max(each)), np.int32)
    for b, n in enumerate(each):
        table[b, :n] = order[sum(each[:b]) : sum(each[:b]) + n]
    pages = [padded[n].view(-1)[: sum(each) * size * kv_heads * dim].view(-1, size, kv_heads, dim) for n in range(2)]
    out = torch.empty_like(query)
    useful = 2.0 * float(lengths.sum()) * kv_heads * dim * query.element_size()

    def attend(n: int) -> object:
        return headway.attention_paged(query, *pages, table, lengths, out=out)

    def sdpa(n: int) -> object:
        return F.scaled_dot_product_attention(query, *padded, attn_mask=mask, enable_gqa=True)

    name = f"torch, padded, {kind}"
    return [
        Row(f"pages of {size}, {kind}", useful, attend, of=name, least=2),
        Row(name, useful, torch.inference_mode()(sdpa)),
    ]


def mla_rows(shape: Shape, kind: str, threads: int) -> list[Row]:
    rows = contiguous_rows(shape, kind, threads, peers=False)
    return [*rows, pages_row(shape, kind, kind, 64, False, f"one tensor [B S H D], {kind}", 0.95)]


def main() -> None:
    chosen = settings(__doc__ or "", rounds=7)
    groups: list[tuple[str, str, Any]] = []
    for kind in ("bf16", "f32"):
        for kv_heads in (8, 32):
            name = f"decode, {kind}, 32 heads over {kv_heads}, 8192 keys, D 128"
            groups.append((name, "GB/s", partial(decode_rows, Shape(32, kv_heads), kind, chosen.threads)))
    for kind in ("bf16", "f32"):
        groups.append((f"mixed batch, {kind}, 32 sequences of 100 to 8000 tokens", "GB/s", partial(mixed_rows, kind)))
    for kind in ("bf16", "f32"):
        for heads in (16, 128):
            made = partial(mla_rows, Shape(heads, 1, 8192, 576, 512), kind, chosen.threads)
            groups.append((f"MLA, {kind}, {heads} heads, 8192 keys", "GB/s", made))
    run(groups, chosen)


if __name__ == "__main__":
    main()
