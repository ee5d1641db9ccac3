"""./dev bench gpu: Headway beside PyTorch's attention kernels on this machine's GPU, in one run.

Every row times its contenders one after another in short bursts, between CUDA events, and takes medians; ours runs
first and last. A card that is capped in power slows down under a long load, so only figures of one run compare. The
table goes to the terminal; the numbers and a plot are written to benchmarks/results/. `--rows TEXT` runs only the rows
that contain TEXT, such as "hd64 causal s512", and writes nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import random_draws
import torch
from gpu_analysis import analysis_rows
from gpu_layer import layer_rows
from gpu_spans import span_rows
from report import put_between
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
TOKENS, WIDTH = 16384, 2048  # batch x sequence, heads x head dim
DTYPES = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 3}  # the values of headway::DType
Call = Callable[[], object]


class GpuCall(ctypes.Structure):
    """As in benchmarks/native/gpu.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "lse")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "query_len", "key_len", "head_dim")),
        ("dtype", ctypes.c_int),
        ("causal", ctypes.c_int),
        ("window_left", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("softcap", "dropout")),
        *((name, ctypes.c_void_p) for name in ("slopes", "mask", "bias", "stream")),
        *((name, ctypes.c_void_p) for name in ("grad_out", "dq", "dk", "dv")),
        ("spans", ctypes.c_void_p),
        ("span_count", ctypes.c_int64),
    ]


@dataclasses.dataclass
class Wanted:
    """Which rows a run is asked for: those whose group and name contain a text."""

    text: str

    def __call__(self, group: str, name: str) -> bool:
        return self.text in f"{group} {name}"


class Headway:
    def __init__(self, library: Path) -> None:
        self._native = ctypes.CDLL(str(library))
        self._native.headway_gpu_attention.restype = ctypes.c_char_p
        self._native.headway_gpu_kernel.restype = ctypes.c_char_p
        self._native.headway_gpu_analyze.restype = ctypes.c_char_p

    def call(self, q: Any, k: Any, v: Any, *, causal: bool = False, window: int = -1, **options: Any) -> Call:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
        tensors = {name: options[name].data_ptr() for name in ("slopes", "mask", "bias", "spans") if name in options}
        described = GpuCall(
            *(x.data_ptr() for x in (q, k, v, out, lse)),
            *(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3]),
            DTYPES[q.dtype],
            causal,
            window,
            *(options.get(name, 0.0) for name in ("softcap", "dropout")),
            stream=torch.cuda.current_stream().cuda_stream,
            span_count=options["spans"].shape[1] if "spans" in options else 0,
            **tensors,
        )
        kept = (q, k, v, out, lse, options)

        def run() -> Any:
            error = self._native.headway_gpu_attention(ctypes.byref(described))
            if error:
                raise RuntimeError(error.decode())
            return kept[3]

        run.kernel, run.tile = self._kernel(described)  # type: ignore[attr-defined]
        run.described = described  # type: ignore[attr-defined]
        return run

    def analyze(self, q: Any, k: Any, top: int, **options: Any) -> Call:
        described = self.call(q, k, k, **options).described  # type: ignore[attr-defined]
        kept = (q, k, options)

        def run() -> Any:
            error = self._native.headway_gpu_analyze(ctypes.byref(described), ctypes.c_int64(top))
            if error:
                raise RuntimeError(error.decode())
            return kept

        run.kernel = "analysis"  # type: ignore[attr-defined]
        return run

    def backward(self, q: Any, k: Any, v: Any, grad_out: Any, **options: Any) -> Call:
        """The gradients, after one forward call whose out and lse they use."""
        forward = self.call(q, k, v, **options)
        forward()
        described = forward.described  # type: ignore[attr-defined]
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        described.grad_out = grad_out.data_ptr()
        described.dq, described.dk, described.dv = (x.data_ptr() for x in gradients)
        kept = (forward, grad_out, gradients)

        def run() -> Any:
            kept[0]()
            return kept[2]

        run.kernel, run.tile = self._kernel(described)  # type: ignore[attr-defined]
        return run

    def _kernel(self, described: GpuCall) -> tuple[str, tuple[int, int]]:
        """The name of a call's kernel, and the queries and keys of its tiles."""
        queries, keys = ctypes.c_int64(1), ctypes.c_int64(1)
        name = self._native.headway_gpu_kernel(ctypes.byref(described), ctypes.byref(queries), ctypes.byref(keys))
        return name.decode(), (queries.value, keys.value)


def peer(backend: SDPBackend, q: Any, k: Any, v: Any, **options: Any) -> Call:
    def run() -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return run


def peer_backward(backend: SDPBackend, q: Any, k: Any, v: Any, grad_out: Any, **options: Any) -> Call:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, **options)
    return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)


FAST = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
EXACT = {"math": SDPBackend.MATH, "efficient": SDPBackend.EFFICIENT_ATTENTION}


def peers_of(backends: dict[str, Any], make: Callable[..., Call], *inputs: Any, **options: Any) -> dict[str, Call]:
    """PyTorch's kernels, without those that refuse the case."""
    calls = {}
    for who, backend in backends.items():
        try:
            call = make(backend, *inputs, **options)
            call()
            torch.cuda.synchronize()
        except RuntimeError:
            continue
        calls[who] = call
    return calls


def milliseconds(call: Call, repeats: int = 12) -> float:
    """The median of a short burst after a pause and three warm-up calls."""
    call()
    torch.cuda.synchronize()
    time.sleep(0.06)
    for _ in range(3):
        call()
    pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def inputs(batch: int, heads: int, kv_heads: int, length: int, dim: int, dtype: Any) -> tuple[Any, Any, Any]:
    def normal(h: int) -> Any:
        return torch.randn(batch, h, length, dim, device="cuda", dtype=torch.float32).to(dtype)

    return normal(heads), normal(kv_heads), normal(kv_heads)


def pairs_of(length: int, *, causal: bool = False, window: int = -1) -> float:
    """(query, key) pairs of one head."""
    if not causal and window < 0:
        return float(length) * length
    wide = min(window + 1, length) if window >= 0 else length
    return wide * (wide + 1) / 2 + float(length - wide) * wide


def visited_pairs(length: int, window: int, tile: tuple[int, int]) -> float:
    """The pairs of one head that lie in tiles with a pair of a causal window."""
    queries, keys = tile
    visited = 0.0
    for first in range(0, length, queries):
        last = min(first + queries, length)
        visited += (last - first) * (-(-last // keys) - max(0, first - window) // keys) * keys
    return visited


FORWARD, BACKWARD = 4.0, 10.0  # operations for each pair and feature


def measure(
    group: str, name: str, ours: Call, peers: dict[str, Call], work: float, unit: str = "TFLOP/s"
) -> dict[str, Any]:
    """Rates of work: floating-point operations or bytes."""
    first = milliseconds(ours)
    times = {who: milliseconds(call) for who, call in peers.items()}
    times = {"headway": statistics.mean((first, milliseconds(ours))), **times}
    rates = {who: work / time_ms / 1e9 for who, time_ms in times.items()}
    others = [rate for who, rate in rates.items() if who != "headway"]
    ratio = rates["headway"] / max(others) if others else None
    text = ", ".join(f"{who} {rate:.3g}" for who, rate in rates.items())
    print(f"  {group:28} {name:18} {text} {unit}{f'  {ratio:.3f}x' if ratio else ''}", flush=True)
    kernel = ours.kernel  # type: ignore[attr-defined]
    about = {"group": group, "name": name, "kernel": kernel, "milliseconds": times}
    return {**about, "rates": rates, "unit": unit, "ratio": ratio}


def work_of(q: Any, pairs: float, each: float = FORWARD) -> float:
    return each * float(q.shape[0] * q.shape[1] * q.shape[3]) * pairs


def forward_rows(headway: Headway, wanted: Wanted) -> list[dict[str, Any]]:
    rows = []
    for dim in (128, 64, 256):
        for causal in (False, True):
            for length in (512, 2048, 4096, 16384):
                group = f"bf16 hd{dim}{' causal' if causal else ''}"
                if not wanted(group, f"s{length}"):
                    continue
                heads, batch = WIDTH // dim, TOKENS // length
                q, k, v = inputs(batch, heads, heads, length, dim, torch.bfloat16)
                peers = peers_of(FAST, peer, q, k, v, is_causal=causal)
                work = work_of(q, pairs_of(length, causal=causal))
                rows.append(measure(group, f"s{length}", headway.call(q, k, v, causal=causal), peers, work))
    if wanted("f32 hd64", "s4096"):
        q, k, v = inputs(4, 16, 16, 4096, 64, torch.float32)
        exact, work = peers_of(EXACT, peer, q, k, v), work_of(q, pairs_of(4096))
        rows.append(measure("f32 hd64", "s4096", headway.call(q, k, v), exact, work))
    return rows


def graphed(call: Call) -> Call:
    """A replay of the call, captured on the current stream: what the host does to queue a call is not timed."""
    graph = torch.cuda.CUDAGraph()
    call()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        kept = call()

    def replay() -> Any:
        graph.replay()
        return kept

    replay.kernel = getattr(call, "kernel", "")  # type: ignore[attr-defined]
    return replay


def decode_rows(headway: Headway, wanted: Wanted) -> list[dict[str, Any]]:
    """One query against many keys: what counts is how fast keys and values are read. All from CUDA graphs."""
    rows = []
    with torch.cuda.stream(torch.cuda.Stream()):  # a graph is not captured on the default stream
        for batch, length in ((1, 8192), (1, 131072), (16, 8192), (64, 8192)):
            group, name = "decode 32/8 hd128, graphs", f"b{batch} n{length}"
            if not wanted(group, name):
                continue
            q, k, v = inputs(batch, 32, 8, length, 128, torch.bfloat16)
            q = q[:, :, :1].contiguous()
            peers = {who: graphed(call) for who, call in peers_of(FAST, peer, q, k, v, enable_gqa=True).items()}
            read = 2.0 * k.numel() * k.element_size()
            ours = graphed(headway.call(q, k, v))
            rows.append(measure(group, name, ours, peers, read, "TB/s"))
    return rows


def backward_row(
    headway: Headway, group: str, tensors: tuple[Any, Any, Any], backends: dict[str, Any], causal: bool
) -> dict[str, Any]:
    q, k, v = tensors
    length, grad_out = q.shape[2], torch.randn_like(q)
    peers = peers_of(backends, peer_backward, q, k, v, grad_out, is_causal=causal)
    work = work_of(q, pairs_of(length, causal=causal), BACKWARD)
    return measure(group, f"s{length}", headway.backward(q, k, v, grad_out, causal=causal), peers, work)


def backward_rows(headway: Headway, wanted: Wanted) -> list[dict[str, Any]]:
    rows = []
    for dim in (128, 64, 256):
        for causal in (False, True):
            for length in (2048, 4096, 16384):
                group = f"bf16 hd{dim}{' causal' if causal else ''} backward"
                if wanted(group, f"s{length}"):
                    heads, batch = WIDTH // dim, TOKENS // length
                    tensors = inputs(batch, heads, heads, length, dim, torch.bfloat16)
                    rows.append(backward_row(headway, group, tensors, FAST, causal))
    for dim in (64, 128):
        for causal in (False, True):
            group, length, heads = f"f32 hd{dim}{' causal' if causal else ''} backward", 4096, 1024 // dim
            if wanted(group, f"s{length}"):
                tensors = inputs(4, heads, heads, length, dim, torch.float32)
                rows.append(backward_row(headway, group, tensors, EXACT, causal))
    return rows


OPTIONS_LENGTH = 4096


def option_inputs(dim: int) -> tuple[Any, Any, Any, Any]:
    """Query, key and value, and numbers for a mask or bias."""
    heads, length = WIDTH // dim, OPTIONS_LENGTH
    tensors = inputs(TOKENS // length, heads, heads, length, dim, torch.bfloat16)
    return (*tensors, torch.randn(length, length, device="cuda"))


def option_cases(heads: int, matrix: Any) -> dict[str, dict[str, Any]]:
    return {
        "plain": {},
        "softcap": {"softcap": 50.0},
        "alibi": {"slopes": torch.rand(heads, device="cuda")},
        "mask": {"mask": matrix > -1.0},
        "bias": {"bias": matrix.to(torch.bfloat16)},
        "dropout": {"dropout": 0.1},
    }


def backward_option_rows(headway: Headway, wanted: Wanted) -> list[dict[str, Any]]:
    rows = []
    for dim in (128, 64):
        q, k, v, matrix = option_inputs(dim)
        heads, grad_out = q.shape[1], torch.randn_like(q)
        group, work = f"backward options, hd{dim} s{OPTIONS_LENGTH}", work_of(q, pairs_of(OPTIONS_LENGTH), BACKWARD)
        for name, options in option_cases(heads, matrix).items():
            if wanted(group, name):
                rows.append(measure(group, name, headway.backward(q, k, v, grad_out, **options), {}, work))
        if wanted(group, "gqa 4:1"):
            few = [x[:, : heads // 4].contiguous() for x in (k, v)]
            rows.append(measure(group, "gqa 4:1", headway.backward(q, *few, grad_out), {}, work))
    return rows


def option_rows(headway: Headway, wanted: Wanted) -> list[dict[str, Any]]:
    """Options on the fast path: their own rate, against the same kernel's without them."""
    rows = []
    for dim in (128, 64, 256):
        q, k, v, matrix = option_inputs(dim)
        heads = q.shape[1]
        group, work = f"options, hd{dim} s{OPTIONS_LENGTH}", work_of(q, pairs_of(OPTIONS_LENGTH))
        for name, options in option_cases(heads, matrix).items():
            if wanted(group, name):
                rows.append(measure(group, name, headway.call(q, k, v, **options), {}, work))
        if wanted(group, "gqa 4:1"):
            few = [x[:, : heads // 4].contiguous() for x in (k, v)]
            rows.append(measure(group, "gqa 4:1", headway.call(q, *few), {}, work))
        group = f"options, hd{dim} s{TOKENS}"
        if wanted(group, "window 1024"):
            q, k, v = inputs(1, heads, heads, TOKENS, dim, torch.bfloat16)
            rows.append(measure(group, "plain", headway.call(q, k, v), {}, work_of(q, pairs_of(TOKENS))))
            ours = headway.call(q, k, v, causal=True, window=1024)
            rows.append(measure(group, "window 1024", ours, {}, work_of(q, pairs_of(TOKENS, window=1024))))
            tile = ours.tile  # type: ignore[attr-defined]
            work = work_of(q, visited_pairs(TOKENS, 1024, tile))
            rows.append(measure(group, f"window 1024, whole tiles of {tile[0]} x {tile[1]}", ours, {}, work))
    return rows


def shared_option_rows(headway: Headway, wanted: Wanted) -> list[dict[str, Any]]:
    """Options that PyTorch's kernels have too."""
    rows, backends = [], FAST | {"efficient": SDPBackend.EFFICIENT_ATTENTION}
    for dim in (128, 64):
        q, k, v, matrix = option_inputs(dim)
        grad_out, mask, bias = torch.randn_like(q), matrix > -1.0, matrix.to(torch.bfloat16)
        group, pairs = f"options of both, hd{dim} s{OPTIONS_LENGTH}", pairs_of(OPTIONS_LENGTH)
        cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "mask": ({"mask": mask}, {"attn_mask": mask}),
            "bias": ({"bias": bias}, {"attn_mask": bias}),
            "dropout": ({"dropout": 0.1}, {"dropout_p": 0.1}),
            "mask, dropout": ({"mask": mask, "dropout": 0.1}, {"attn_mask": mask, "dropout_p": 0.1}),
        }
        for name, (own, theirs) in cases.items():
            if wanted(group, name):
                peers = peers_of(backends, peer, q, k, v, **theirs)
                rows.append(measure(group, name, headway.call(q, k, v, **own), peers, work_of(q, pairs)))
                peers = peers_of(backends, peer_backward, q, k, v, grad_out, **theirs)
                ours, work = headway.backward(q, k, v, grad_out, **own), work_of(q, pairs, BACKWARD)
                rows.append(measure(group, f"{name}, backward", ours, peers, work))
    return rows


def machine() -> dict[str, str]:
    query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", "0"]
    values = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    found = dict(zip(query.split(","), values, strict=True))
    return found | {"torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version())}


def plot(results: list[dict[str, Any]], about: dict[str, str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = [g for g in dict.fromkeys(r["group"] for r in results) if g.startswith("bf16")]
    figure, axes = pyplot.subplots(len(groups) // 3, 3, figsize=(13, 3.5 * len(groups) // 3), sharey=True)
    for axis, group in zip(axes.flat, groups, strict=True):
        rows = [r for r in results if r["group"] == group]
        for who in ("headway", "cudnn", "flash"):
            known = [r for r in rows if who in r["rates"]]
            axis.plot([r["name"] for r in known], [r["rates"][who] for r in known], marker="o", label=who)
        axis.set_title(group)
        axis.grid(alpha=0.3)
    axes.flat[0].legend()
    figure.supylabel("TFLOP/s")
    figure.suptitle(f"Attention, {about['name']}, {datetime.date.today()}, torch {about['torch']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


NAMES = {
    "cudnn": "cuDNN",
    "flash": "flash",
    "math": "math",
    "efficient": "efficient",
    "torch": "PyTorch",
    "flex": "FlexAttention",
    "forward": "forward",
}


def tables(results: list[dict[str, Any]], about: dict[str, str]) -> str:
    """The part of docs/benchmarks.md that shows a run."""
    said = f"{about['name']}, driver {about['driver_version']}, PyTorch {about['torch']} with cuDNN {about['cudnn']}"
    text = f"{datetime.date.today()}, {said}.\n\n"
    for group in dict.fromkeys(r["group"] for r in results):
        rows = [r for r in results if r["group"] == group]
        plain = next((r["rates"]["headway"] for r in rows if r["name"] == "plain"), None)
        text += f"### {group}\n\n| | Headway |{' of plain |' if plain else ' PyTorch | to the best |'}\n"
        text += f"|---|---|{'---|' if plain else '---|---|'}\n"
        for r in rows:
            text += f"| {r['name']} | {r['rates']['headway']:.3g} {r['unit']} |"
            others = [f"{NAMES[who]} {rate:.3g}" for who, rate in r["rates"].items() if who != "headway"]
            if plain:
                text += f" {r['rates']['headway'] / plain:.0%} |\n"
            else:
                ratio = f"{r['ratio']:.2f}x" if r["ratio"] else ""
                text += f" {', '.join(others)} | {ratio} |\n"
        text += "\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, default=ROOT / "build/bench/benchmarks/libheadway_benchmark_gpu.so")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rows", metavar="TEXT", default="", help="only rows that contain it; nothing is written")
    random_draws.add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.random or arguments.case:
        random_draws.main("gpu", arguments, threads=1)
        return
    about = machine()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    headway = Headway(arguments.library)
    wanted = Wanted(arguments.rows)
    results = forward_rows(headway, wanted) + option_rows(headway, wanted) + decode_rows(headway, wanted)
    results += backward_rows(headway, wanted) + backward_option_rows(headway, wanted)
    results += shared_option_rows(headway, wanted) + span_rows(headway, wanted, measure, work_of)
    results += analysis_rows(headway, wanted, measure)
    if wanted("layer", ""):
        results += layer_rows(milliseconds, arguments.library)
    if arguments.rows:
        return
    arguments.results.mkdir(parents=True, exist_ok=True)
    stem = f"gpu-{datetime.date.today()}-{about['name'].replace(' ', '-').lower()}"
    record = {"date": str(datetime.date.today()), "machine": about, "results": results}
    (arguments.results / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {arguments.results / stem}.json")
    try:
        plot(results, about, arguments.results / f"{stem}.png")
    except ImportError as missing:
        print(f"no plot: {missing}")
    if arguments.results == RESULTS:
        put_between(ROOT / "docs/benchmarks.md", "gpu", tables(results, about))


if __name__ == "__main__":
    main()
