"""Rows of ./dev bench gpu for analyze(): pairs of a query and a key each second, beside Headway's own forward.

A call's time includes its results' way to host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

HEADS, LENGTH = 8, 32768
Row = dict[str, Any]


def analysis_rows(headway: Any, wanted: Any, measure: Callable[..., Row]) -> list[Row]:
    group, rows = f"analysis, bf16 {HEADS} heads, s{LENGTH}", []
    for dim in (64, 128):
        for causal in (False, True):
            for top in (8, 0):
                name = f"hd{dim}{' causal' if causal else ''}{'' if top else ', no lists'}"
                if not wanted(group, name):
                    continue
                q, k, v = (
                    torch.randn(1, HEADS, LENGTH, dim, device="cuda", dtype=torch.float32).to(torch.bfloat16)
                    for _ in range(3)
                )
                pairs = HEADS * LENGTH * (LENGTH + 1) / 2 if causal else HEADS * float(LENGTH) ** 2
                forward = headway.call(q, k, v, causal=causal)
                analyze = headway.analyze(q, k, top, causal=causal)
                row = measure(group, name, analyze, {"forward": forward}, pairs, "T pairs/s")
                times = row["milliseconds"]
                print(f"    {times['headway']:.2f} ms, {times['headway'] / times['forward']:.2f} forwards", flush=True)
                rows.append(row)
    return rows
