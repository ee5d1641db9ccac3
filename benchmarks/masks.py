"""Structured masks on this machine's CPU: operations per second over allowed pairs, forward and backward, in one run.

    PYTHONPATH=build/python-package python3 benchmarks/masks.py     (./dev bench cpu builds what it needs)

Masks of 32768 tokens beside Headway's own causal mask, window and documents as a batch; 2 % of the blocks of 65536
tokens beside no mask; a fifth of the pairs of 8192 tokens beside torch with a bool mask; and the time to build each
mask for 131072 tokens beside one head's attention.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from turns import Row, run, settings

import headway
from headway import masks

KINDS = {"f32": torch.float32, "bf16": torch.bfloat16}
LENGTH, DOCUMENT, WINDOW, FIRST, PREFIX = 32768, 2048, 1024, 4, 8192
BLOCK, SPARSE_LENGTH = 128, 65536


def tensors(batch: int, heads: int, length: int, dim: int, kind: str) -> list[torch.Tensor]:
    return [torch.randn(batch, heads, length, dim).to(KINDS[kind]) for _ in range(4)]


def row(name: str, data: list[torch.Tensor], pairs: float, backward: bool, options: dict[str, Any], **more: Any) -> Row:
    """Pairs are those of a head, in the whole batch."""
    q, k, v, grad = data
    work = 4.0 * q.shape[1] * q.shape[3] * pairs * (2.5 if backward else 1)
    if not backward:
        out = torch.empty_like(q)
        return Row(name, work, lambda n: headway.attention(q, k, v, out=out, **options), **more)
    out, lse = headway.attention(q, k, v, return_lse=True, **options)
    return Row(name, work, lambda n: headway.attention_backward(grad, q, k, v, out, lse, **options), **more)


def long_rows(kind: str, dim: int, backward: bool) -> list[Row]:
    data = tensors(1, 1, LENGTH, dim, kind)
    batch = [x.view(LENGTH // DOCUMENT, 1, DOCUMENT, dim) for x in data]
    causal = LENGTH * (LENGTH + 1) / 2
    documents = masks.documents(np.arange(LENGTH) // DOCUMENT) & masks.causal()
    window, first = masks.window(WINDOW, 0), masks.first(FIRST) & masks.causal()
    prefix = masks.prefix(PREFIX)

    def made(
        name: str, pairs: float, options: dict[str, Any], *, of: str = "", least: float = 0, short: bool = False
    ) -> Row:
        return row(name, batch if short else data, pairs, backward, options, of=of, least=least)

    def pairs(mask: Any) -> float:
        return float(mask.pairs(LENGTH, LENGTH))

    alone = f"causal, a batch of {LENGTH // DOCUMENT} of {DOCUMENT}"
    return [
        made("causal", causal, {"causal": True}),
        made("causal as spans", causal, {"mask": masks.causal()}, of="causal"),
        made(f"prefix {PREFIX}", pairs(prefix), {"mask": prefix}, of="causal", least=0.9),
        made(alone, pairs(documents), {"causal": True}, short=True),
        made(f"documents of {DOCUMENT} and causal", pairs(documents), {"mask": documents}, of=alone, least=0.95),
        made("window option", pairs(window), {"window": (WINDOW, 0)}),
        made("window and first", pairs(window | first), {"mask": window | first}, of="window option", least=0.95),
    ]


def sparse_rows(kind: str, dim: int, backward: bool) -> list[Row]:
    count = SPARSE_LENGTH // BLOCK
    keep = np.random.default_rng(0).random((count, count)) < 0.02
    mask = masks.blocks(keep, BLOCK)
    sparse, plain = tensors(1, 1, SPARSE_LENGTH, dim, kind), tensors(1, 1, 8192, dim, kind)
    return [
        row("no mask, 8192 tokens", plain, 8192.0**2, backward, {}),
        row(
            f"2 % of blocks of {BLOCK}",
            sparse,
            float(mask.pairs(SPARSE_LENGTH, SPARSE_LENGTH)),
            backward,
            {"mask": mask},
            of="no mask, 8192 tokens",
            least=0.7,
        ),
    ]


def torch_rows(kind: str, dim: int) -> list[Row]:
    length, heads = 8192, 4
    ids = np.repeat(np.arange(5), -(-length // 5))[:length]
    mask = masks.documents(ids)  # a fifth of the pairs
    pairs = float(mask.pairs(length, length))
    q, k, v, grad = tensors(1, heads, length, dim, kind)
    bools = torch.from_numpy(mask.to_bool(length, length)[0, 0])

    def sdpa(n: int) -> object:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bools)

    theirs = Row("torch, bool mask", 4.0 * heads * dim * pairs, torch.inference_mode()(sdpa))
    ours = row("documents", [q, k, v, grad], pairs, False, {"mask": mask}, of=theirs.name, least=3)
    return [ours, theirs]


def build_rows(kind: str, dim: int) -> list[Row]:
    """Calls per second: spans are made that many times in the time of the attention. 8 heads; a prefix, whose attention
    takes seconds, with one."""
    length = 131072
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 64, length))
    keep = rng.random((length // BLOCK, length // BLOCK)) < 0.02
    kinds = {
        "prefix": lambda: masks.prefix(PREFIX),
        "documents and causal": lambda: masks.documents(ids) & masks.causal(),
        "window and first": lambda: masks.window(WINDOW, 0) | (masks.first(FIRST) & masks.causal()),
        "blocks": lambda: masks.blocks(keep, BLOCK),
    }
    rows = []
    for name, made in kinds.items():
        q, k, v, out = tensors(1, 1 if name == "prefix" else 8, length, dim, kind)
        mask = made()

        def attend(n: int, q: Any = q, k: Any = k, v: Any = v, mask: Any = mask, out: Any = out) -> object:
            return headway.attention(q, k, v, mask=mask, out=out)

        rows.append(Row(f"attention, {name}", 1e9, attend))
        built = Row(
            f"spans, {name}", 1e9, lambda n, made=made: made().spans(length, length), of=rows[-1].name, least=100
        )
        rows.append(built)
    return rows


def main() -> None:
    chosen = settings(__doc__ or "", rounds=3)
    groups: list[tuple[str, str, Any]] = []
    for kind, dim in (("f32", 64), ("bf16", 128)):
        for backward in (False, True):
            which = "backward" if backward else "forward"
            groups.append(
                (
                    f"masks, {kind}, D {dim}, {LENGTH} tokens, {which}",
                    "GFLOP/s",
                    partial(long_rows, kind, dim, backward),
                )
            )
            groups.append(
                (
                    f"blocks, {kind}, D {dim}, {SPARSE_LENGTH} tokens, {which}",
                    "GFLOP/s",
                    partial(sparse_rows, kind, dim, backward),
                )
            )
        groups.append(
            (f"torch, {kind}, D {dim}, 8192 tokens, a fifth of the pairs", "GFLOP/s", partial(torch_rows, kind, dim))
        )
    groups.append(("building masks, f32, D 64, 131072 tokens", "calls/s", partial(build_rows, "f32", 64)))
    run(groups, chosen)


if __name__ == "__main__":
    main()
