"""Serving on this machine's CPU: one query of each sequence over its cache, beside peers, in one run.

    PYTHONPATH=build/python-package python3 benchmarks/serving.py     (./dev bench cpu builds what it needs)

Groups: contiguous caches, pages and 8-bit pages; a batch of sequences of 100 to 8000 tokens; values inside keys (MLA).
Who shares a group takes turns, round after round; the median of the rounds is shown, with the rate at which keys and
values are read, the share of a loop that only reads them ("reading"), and the tokens a second beside the first row.
Headway's own pages are in random order. torch has a padded cache with a mask; ONNX Runtime's GroupQueryAttention a
shared buffer, which it also adds the new token to.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import native
import numpy as np
import torch
import torch.nn.functional as F

import headway

Call = Callable[[], object]
KINDS = {"f32": torch.float32, "bf16": torch.bfloat16, "i8": torch.int8, "fp8": torch.float8_e4m3fn}
PAGE_SIZES = (16, 64, 256)


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

    def bytes(self, size: int) -> float:
        return float(self.keys * self.kv_heads * (self.dim if self.inside else 2 * self.dim) * size)


@dataclass
class Row:
    name: str
    bytes: float
    call: Call


def random(sizes: tuple[int, ...], kind: str) -> torch.Tensor:
    numbers = torch.randn(sizes)
    if kind == "i8":
        return (numbers * 40).clamp(-127, 127).round().to(torch.int8)
    return (numbers * 40 if kind == "fp8" else numbers).to(KINDS[kind])


def pages_row(shape: Shape, kind: str, stored: str, size: int, head_major: bool) -> Row:
    count = -(-shape.keys // size)
    sizes = (count, shape.kv_heads, size, shape.dim) if head_major else (count, size, shape.kv_heads, shape.dim)

    def made() -> torch.Tensor:
        x = random(sizes, stored)
        return x.transpose(1, 2) if head_major else x

    query = random((1, shape.heads, 1, shape.dim), kind)
    keys = made()
    values = keys[..., : shape.value_dim] if shape.inside else made()
    table = torch.randperm(count, dtype=torch.int32)[None]
    lengths = torch.tensor([shape.keys], dtype=torch.int32)
    options: dict[str, Any] = {}
    if stored in ("i8", "fp8"):
        scales = torch.rand(count, size, shape.kv_heads) * 0.02 + 0.01
        options = {"key_scales": scales, "value_scales": scales}
    out = torch.empty(1, shape.heads, 1, shape.value_dim, dtype=KINDS[kind])
    name = f"{'head-major ' if head_major else ''}pages of {size}, {stored}" + (
        f", {kind} query" if stored != kind else ""
    )
    return Row(
        name,
        shape.bytes(keys.element_size()),
        lambda: headway.attention_paged(query, keys, values, table, lengths, out=out, **options),
    )


def contiguous_rows(shape: Shape, kind: str, threads: int, peers: bool) -> Iterator[Row]:
    """The loop that only reads, one tensor in both layouts, torch and ONNX Runtime."""
    query = random((1, shape.heads, 1, shape.dim), kind)
    for layout in ("B H S D", "B S H D"):
        ours = layout == "B H S D"
        sizes = (1, shape.kv_heads, shape.keys) if ours else (1, shape.keys, shape.kv_heads)
        keys = random((*sizes, shape.dim), kind)
        whole = [keys] if shape.inside else [keys, random((*sizes, shape.dim), kind)]
        used = whole[-1][..., : shape.value_dim]
        k, v = (keys, used) if ours else (keys.transpose(1, 2), used.transpose(1, 2))
        out = torch.empty(1, shape.heads, 1, shape.value_dim, dtype=KINDS[kind])
        bytes_ = shape.bytes(keys.element_size())

        def attend(k: Any = k, v: Any = v, out: Any = out) -> object:
            return headway.attention(query, k, v, out=out)

        yield Row(f"one tensor [{layout}], {kind}", bytes_, attend)
        if not ours:
            continue
        places = [(x.data_ptr(), x.numel() * x.element_size()) for x in whole]

        def read(places: Any = places) -> None:
            for address, size in places:
                native.read(address, size, threads)

        yield Row("reading", bytes_, read)
        if peers:
            sdpa = partial(F.scaled_dot_product_attention, query, k, v, enable_gqa=shape.heads != shape.kv_heads)
            yield Row(f"torch, {kind}", bytes_, torch.inference_mode()(sdpa))


def onnxruntime_rows(shape: Shape, threads: int) -> Iterator[Row]:
    from onnx_peer import decode_session

    for bits in (32, 8):
        call = decode_session(shape.heads, shape.kv_heads, shape.keys, shape.dim, bits=bits, threads=threads)
        if call is None:
            print(f"  ONNX Runtime has no cache of {bits} bits here")
            continue
        yield Row(f"ONNX Runtime GroupQueryAttention, {'f32' if bits == 32 else 'i8'}", shape.bytes(bits // 8), call)


def decode_rows(shape: Shape, kind: str, threads: int) -> Iterator[Row]:
    yield from contiguous_rows(shape, kind, threads, peers=True)
    for head_major in (False, True):
        for size in PAGE_SIZES:
            yield pages_row(shape, kind, kind, size, head_major)
    for stored in ("i8", "fp8"):
        for size in (16, 64):
            yield pages_row(shape, kind, stored, size, False)
    yield pages_row(shape, kind, "i8", 64, True)
    if kind == "f32":
        yield from onnxruntime_rows(shape, threads)


def mixed_rows(kind: str) -> Iterator[Row]:
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
    pages = [random((sum(each), size, kv_heads, dim), kind) for _ in range(2)]
    out = torch.empty_like(query)
    useful = 2.0 * float(lengths.sum()) * kv_heads * dim * query.element_size()
    yield Row(
        f"pages of {size}, {kind}", useful, lambda: headway.attention_paged(query, *pages, table, lengths, out=out)
    )
    sdpa = torch.inference_mode()(
        lambda: F.scaled_dot_product_attention(query, *padded, attn_mask=mask, enable_gqa=True)
    )
    yield Row(f"torch, padded, {kind}", useful, sdpa)


def mla_rows(shape: Shape, kind: str, threads: int) -> Iterator[Row]:
    yield from contiguous_rows(shape, kind, threads, peers=False)
    yield pages_row(shape, kind, kind, 64, False)


def groups(threads: int) -> Iterator[tuple[str, Callable[[], Iterator[Row]], float]]:
    """Each with what its rows are, and its operations where those may bind, else 0."""
    for kind in ("bf16", "f32"):
        for kv_heads in (8, 32):
            shape = Shape(32, kv_heads)
            yield (
                f"decode, {kind}, 32 heads over {kv_heads}, 8192 keys, D 128",
                lambda s=shape, k=kind: decode_rows(s, k, threads),
                0,
            )
    for kind in ("bf16", "f32"):
        yield f"mixed batch, {kind}, 32 sequences of 100 to 8000 tokens", lambda k=kind: mixed_rows(k), 0
    for kind in ("bf16", "f32"):
        for heads in (16, 128):
            shape = Shape(heads, 1, 8192, 576, 512)
            flops = 2.0 * heads * shape.keys * (576 + 512)
            yield f"MLA, {kind}, {heads} heads, 8192 keys", lambda s=shape, k=kind: mla_rows(s, k, threads), flops


def measure(rows: list[Row], rounds: int) -> list[float]:
    for row in rows:
        row.call()
    times: list[list[float]] = [[] for _ in rows]
    for _ in range(rounds):
        for row, found in zip(rows, times):
            begin = time.perf_counter()
            for _ in range(3):
                row.call()
            found.append((time.perf_counter() - begin) / 3)
    return [statistics.median(found) for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only groups whose name contains this")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    headway.set_threads(arguments.threads)
    torch.manual_seed(0)
    peaks = {kind: native.peak(kind, arguments.threads, 0.2) for kind in ("f32", "bf16")}
    print(f"{arguments.threads} threads, torch {torch.__version__}; peaks: ", end="")
    print(", ".join(f"{kind} {peak / 1e9:.0f} GFLOP/s" for kind, peak in peaks.items()))
    for name, made, flops in groups(arguments.threads):
        if arguments.only not in name:
            continue
        print(f"\n{name}", flush=True)
        rows = list(made())
        times = measure(rows, arguments.rounds)
        reading = next((row.bytes / t for row, t in zip(rows, times) if row.name == "reading"), 0.0)
        for row, t in zip(rows, times):
            line = f"  {row.name:46}{t * 1e6:10.0f} us{row.bytes / t / 1e9:8.1f} GB/s"
            line += f"{row.bytes / t / reading * 100:7.0f} %" if reading else " " * 9
            line += f"{times[0] / t:8.2f}x"
            if flops and row.name != "reading":
                line += f"{flops / t / 1e9:8.0f} GFLOP/s"
            print(line, flush=True)
        del rows


if __name__ == "__main__":
    main()
