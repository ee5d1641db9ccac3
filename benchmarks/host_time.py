"""The host's time for a call: the time of Python, torch and the library before and after a kernel runs.

    PYTHONPATH=build/python-package python3 benchmarks/host_time.py

Problems are so small that the device does next to nothing. A sample is a burst of calls that nobody waits for, so on a
GPU it is the time to queue a call; on the CPU it is the call. The least of many samples is shown, in microseconds:
Headway, torch's own function, and under autograd a Function that does nothing, which is what torch's autograd takes by
itself. A burst queues fewer kernels than a stream holds, or the host would wait for the device.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import headway.torch

Call = Callable[[], object]
BATCH, HEADS, QUERIES, KEYS, WIDTH = 1, 4, 8, 8, 64
BURST = 20  # calls


class Nothing(torch.autograd.Function):
    """A node of autograd with attention's inputs and gradients, and no work."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return torch.empty_like(query)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return ctx.saved_tensors


def tensors(device: torch.device, kv_heads: int, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def one(heads: int, length: int) -> Tensor:
        sizes = (heads, length) if layout == "bhsd" else (length, heads)
        x = torch.randn(BATCH, *sizes, WIDTH, device=device).to(dtype)
        return x if layout == "bhsd" else x.transpose(1, 2)

    return one(HEADS, QUERIES), one(kv_heads, KEYS), one(kv_heads, KEYS)


def cases(device: torch.device) -> dict[str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]]:
    """Inputs and torch's keywords."""
    plain = tensors(device, HEADS, "bhsd")
    bias = torch.randn(1, HEADS, QUERIES, KEYS, device=device).to(plain[0].dtype)
    padding = torch.arange(KEYS, device=device)[None, None, None] < KEYS - 2
    return {
        "plain": (plain, {}),
        "causal": (plain, {"is_causal": True}),
        "scale": (plain, {"scale": 0.25}),
        "grouped heads": (tensors(device, 2, "bhsd"), {"enable_gqa": True}),
        "(B, S, H, D)": (tensors(device, HEADS, "bshd"), {}),
        "bool mask": (plain, {"attn_mask": padding}),
        "bias": (plain, {"attn_mask": bias}),
        "dropout": (plain, {"dropout_p": 0.1}),
    }


def microseconds(calls: dict[str, Call], device: torch.device, rounds: int) -> dict[str, float]:
    """The least time of each call, in bursts that alternate."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            wait()
            begin = time.perf_counter()
            for _ in range(BURST):
                call()
            least[name] = min(least[name], (time.perf_counter() - begin) / BURST * 1e6)
            wait()
    return least


def passes(inputs: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]) -> dict[str, dict[str, Call]]:
    """The three passes that are timed, each as everyone does it."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    ours, theirs = headway.torch.scaled_dot_product_attention, F.scaled_dot_product_attention
    grad = torch.randn_like(inputs[0])

    def backward(out: Tensor) -> Call:
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return {
        "forward": {
            "headway": lambda: ours(*inputs, **options),
            "torch": lambda: theirs(*inputs, **options),
        },
        "forward, recorded": {
            "headway": lambda: ours(*leaves, **options),
            "torch": lambda: theirs(*leaves, **options),
            "nothing": lambda: Nothing.apply(*leaves),
        },
        "backward": {
            "headway": backward(ours(*leaves, **options)),
            "torch": backward(theirs(*leaves, **options)),
            "nothing": backward(Nothing.apply(*leaves)),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--case", help="one of the cases alone")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
        headway.set_threads(1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, 1 thread"
    print(f"{name}, torch {torch.__version__}: microseconds a call, the least of {arguments.rounds} bursts")
    print(f"{'':20}{'forward':>18}{'forward, recorded':>27}{'backward':>27}")
    print(f"{'':20}{'headway':>9}{'torch':>9}" + f"{'headway':>9}{'torch':>9}{'nothing':>9}" * 2)
    found = {}
    for case, (inputs, options) in cases(device).items():
        if arguments.case not in (None, case):
            continue
        found[case] = {
            which: microseconds(calls, device, arguments.rounds) for which, calls in passes(inputs, options).items()
        }
        figures = [figure for times in found[case].values() for figure in times.values()]
        print(f"{case:20}" + "".join(f"{figure:9.1f}" for figure in figures), flush=True)
    if arguments.save:
        arguments.save.write_text(json.dumps({"machine": name, "torch": torch.__version__, "microseconds": found}))


if __name__ == "__main__":
    main()
