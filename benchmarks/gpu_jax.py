"""headway.jax on a GPU beside jax.nn.dot_product_attention(implementation="cudnn"): compiled calls, in one process.

    python3 benchmarks/gpu_jax.py [--rows TEXT]

Forward, and the gradients of query, key and value with their forward. Bursts alternate, medians are compared; a figure
is cuDNN's time over ours.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import headway.jax

TOKENS, WIDTH = 16384, 2048  # batch x sequence, heads x head dim
ROUNDS, BURST_SECONDS = 7, 0.01
Call = Callable[[], Any]


def inputs(length: int, dim: int, group: int) -> tuple[Any, ...]:
    """Query, key, value and the gradient of out, (batch, length, heads, dim)."""
    heads, batch = WIDTH // dim, TOKENS // length
    keys = jax.random.split(jax.random.key(0), 4)
    counts = (heads, heads // group, heads // group, heads)
    return tuple(jax.random.normal(key, (batch, length, count, dim), jnp.bfloat16) for key, count in zip(keys, counts))


def gradients(attend: Any, query: Any, key: Any, value: Any, grad_out: Any) -> Any:
    return jax.vjp(attend, query, key, value)[1](grad_out)


def seconds(call: Call, repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        found = call()
    jax.block_until_ready(found)
    return (time.perf_counter() - begin) / repeats


def times(calls: dict[str, Call]) -> dict[str, float]:
    samples: dict[str, list[float]] = {who: [] for who in calls}
    for call in calls.values():
        seconds(call, 2)
    repeats = {who: max(3, int(BURST_SECONDS / seconds(call, 3))) for who, call in calls.items()}
    for turn in range(ROUNDS):
        for who in calls if turn % 2 == 0 else reversed(calls):
            samples[who].append(seconds(calls[who], repeats[who]))
    return {who: statistics.median(some) for who, some in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", metavar="TEXT", default="", help="only rows that contain it")
    wanted = parser.parse_args().rows
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, bf16; ms a call")
    for dim in (128, 64):
        for length in (512, 2048, 8192):
            for causal, group in ((False, 1), (True, 1), (True, 4)):
                name = f"hd{dim} s{length}{' causal' if causal else ''}{' grouped' if group > 1 else ''}"
                if wanted in name:
                    row(name, inputs(length, dim, group), causal)


def row(name: str, given: tuple[Any, ...], causal: bool) -> None:
    query, key, value, grad_out = given
    ours = partial(headway.jax.dot_product_attention, is_causal=causal)
    theirs = partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")
    forward, backward = {}, {}
    for who, attend in (("headway", ours), ("cudnn", theirs)):
        forward[who] = partial(jax.jit(attend), query, key, value)
        backward[who] = partial(jax.jit(partial(gradients, attend)), query, key, value, grad_out)
    for what, calls in (("forward", forward), ("forward and gradient", backward)):
        found = times(calls)
        said = ", ".join(f"{who} {t * 1e3:.3f}" for who, t in found.items())
        print(f"  {name:26} {what:22} {said}  {found['cudnn'] / found['headway']:.2f}x", flush=True)


if __name__ == "__main__":
    main()
