"""Attention over a split sequence on GPUs: its results beside those of one process, and which transfers are hidden.

    python benchmarks/gpu_ring.py                                      # on one GPU, about a minute
    torchrun --standalone --nproc-per-node 2 benchmarks/gpu_ring.py    # a GPU for each rank: NCCL

On one GPU there are two ways. Loop-back: one process runs what rank 0 of several would run; the blocks of K and V that
other ranks would send are copied on a stream of their own, from pinned host memory, while the parts of the step before
are computed. And two processes that share the GPU: over NCCL where it lets them (NCCL_MULTI_RANK_GPU_ENABLE, from 2.30
on; before, it refuses: "Duplicate GPU detected"), and over gloo, which carries the rows through host memory.

Processes compare forward and backward with one process's, repeat a call 20 times for its bits, and time the ring, the
ring without its messages and the ring without its parts: what all three tell is the share of the transfers that is
hidden. torch's profiler tells it too: the time of copies during which the same process's kernels ran.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import headway.distributed as shards
import headway.torch
import headway.torch.distributed as context_parallel
from headway import _headway
from headway.torch import _messages, _on_device

WIDTH = 128
# Options, type, scheme and tolerance of calls that are compared with one process's.
CALLS: list[tuple[dict[str, Any], torch.dtype, str, float]] = [
    ({"causal": True}, torch.bfloat16, "ring", 3e-2),
    ({"causal": True}, torch.float32, "ring", 1e-4),
    ({"causal": True, "window": (300, None), "softcap": 5.0}, torch.float16, "ring", 4e-3),
    ({"valid_lens": [701, 0], "scale": 0.2}, torch.bfloat16, "all_gather", 3e-2),
    ({"window": (100, 50), "alibi_slopes": [0.01, 0.02, 0.03, 0.04]}, torch.float32, "all_gather", 1e-4),
    ({"causal": "bottom_right"}, torch.bfloat16, "automatic", 3e-2),
]
Parts = list[tuple[int, tuple[int, int], tuple[int, int]]]


# ---- Time ----


def milliseconds(run: Callable[[], Any], repeats: int, together: bool = False) -> float:
    """The fastest of several runs; of all ranks, each time the slowest one's."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        if together:
            meet()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    if not together:
        return 1e3 * min(times[1:])
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, times[1:])
    return 1e3 * min(max(one) for one in zip(*of_ranks, strict=True))


def meet() -> None:
    """A barrier of the hosts."""
    x = torch.zeros(1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(x)
    torch.cuda.synchronize()


def overlap(run: Callable[[], Any]) -> str:
    """Milliseconds of this process's copies, and during which of them its kernels ran, by torch's profiler."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            run()
            torch.cuda.synchronize()
        events = [e for e in found.events() or () if e.device_type == DeviceType.CUDA]
    except (RuntimeError, AssertionError) as error:
        return f"torch's profiler: {str(error).splitlines()[0]}"
    moves = [e.time_range for e in events if "memcpy" in e.name.lower() or "nccl" in e.name.lower()]
    kernels = sorted(
        (e.time_range.start, e.time_range.end)
        for e in events
        if not any(word in e.name.lower() for word in ("memcpy", "memset", "nccl"))
    )
    moves = [one for one in moves if one.end - one.start > 20]  # microseconds: rows, not numbers
    if not moves or not kernels:
        return "torch's profiler saw no copies or no kernels"
    covered = 0.0
    for one in moves:
        at = one.start
        for start, end in kernels:
            if end > at and start < one.end:
                covered += min(end, one.end) - max(start, at)
                at = min(end, one.end)
    total = sum(one.end - one.start for one in moves)
    return f"torch's profiler: transfers {total / 1e3:.2f} ms, {100 * covered / total:.0f} % of it while kernels ran"


def draw(heads: int, rows: int) -> torch.Tensor:
    return torch.randn(1, heads, rows, WIDTH, device="cuda", dtype=torch.bfloat16)


# ---- Loop-back ----


def compute(parts: Parts, step: int, query: torch.Tensor, key: torch.Tensor, queries: list[tuple[int, int]]) -> None:
    """The parts of a step; which rows they have matters for their number alone."""
    for when, rows, keys in parts:
        if when == step:
            at = sum(end - begin for begin, end in queries[: queries.index(rows)])
            block = key[:, :, : keys[1] - keys[0]]
            _headway.distributed_part(
                query[:, :, at : at + rows[1] - rows[0]], block, block, rows[0] - keys[0], causal="top_left"
            )


def loop_back(given: argparse.Namespace) -> None:
    """What rank 0 of given.ranks does."""
    sharding = shards.zigzag(given.length, ranks=given.ranks)
    sizes = (1, given.heads, given.heads, given.length, given.length, WIDTH, WIDTH, 2)
    steps, transfers, parts = _headway.distributed_schedule(sizes, sharding, 0, scheme="ring", causal=True)
    queries = sharding.queries[0]
    query, key = draw(given.heads, given.length // given.ranks), draw(given.heads, given.length)
    rows_of = [sum(e - b for when, _, to, b, e, _ in transfers if to == 0 and when == step) for step in range(steps)]
    # K and V of a step, as its sender would hold them.
    remote = [torch.empty(2, given.heads, max(n, 1), WIDTH, dtype=torch.bfloat16).pin_memory() for n in rows_of]
    local = [torch.empty_like(x, device="cuda") for x in remote]
    link = torch.cuda.Stream()

    def copy(step: int) -> None:
        if step < steps and rows_of[step]:
            local[step].copy_(remote[step], non_blocking=True)

    def overlapped() -> None:
        for step in range(steps):
            link.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(link):
                copy(step + 1)
            compute(parts, step, query, key, queries)
            torch.cuda.current_stream().wait_stream(link)

    def one_after_the_other() -> None:
        for step in range(steps):
            copy(step + 1)
            compute(parts, step, query, key, queries)

    alone = milliseconds(lambda: [compute(parts, step, query, key, queries) for step in range(steps)], given.repeats)
    copies = milliseconds(lambda: [copy(step) for step in range(1, steps)], given.repeats)
    serial, both = milliseconds(one_after_the_other, given.repeats), milliseconds(overlapped, given.repeats)
    hidden = (alone + copies - both) / copies
    moved = sum(x.numel() * x.element_size() for x, n in zip(remote, rows_of, strict=True) if n)
    print(f"loop-back: rank 0 of {given.ranks}, {given.length} tokens, {given.heads} heads of {WIDTH}, bf16, causal "
          f"zigzag; {moved / 1e6:.0f} MB arrive")  # fmt: skip
    print(f"  parts alone {alone:.2f} ms, copies alone {copies:.2f} ms, one after the other {serial:.2f} ms, "
          f"at once {both:.2f} ms: {100 * hidden:.0f} % of the copies hidden")  # fmt: skip
    print(f"  {overlap(overlapped)}", flush=True)


# ---- Processes ----


def check_results(rank: int, ranks: int) -> None:
    """Forward and backward beside one process's, which every rank computes for itself."""
    worst: dict[torch.dtype, float] = {}
    for options, dtype, scheme, tolerance in CALLS:
        torch.manual_seed(0)
        keys = 1537 if options.get("causal") == "bottom_right" else 1003
        shapes = ((2, 4, 1003, 64), (2, 2, keys, 64), (2, 2, keys, 64), (2, 4, 1003, 64))
        query, key, value, grad_out = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
        of_tensors = {
            name: torch.tensor(x, device="cuda") if name in ("valid_lens", "alibi_slopes") else x
            for name, x in options.items()
        }
        whole = [x.clone().requires_grad_() for x in (query, key, value)]
        out = headway.torch.attention(*whole, **of_tensors)
        out.backward(grad_out)
        sharding = shards.zigzag(1003, keys, ranks=ranks)
        mine = [
            shards.take(x, sharding[side][rank]).requires_grad_() for x, side in zip((query, key, value), (0, 1, 1))
        ]
        found = context_parallel.attention(*mine, sharding=sharding, scheme=scheme, **of_tensors)
        found.backward(shards.take(grad_out, sharding.queries[rank]))
        results = [(found, out, 0), *((x.grad, y.grad, s) for x, y, s in zip(mine, whole, (0, 1, 1), strict=True))]
        for one, exact, side in results:
            exact = shards.take(exact, sharding[side][rank])
            off = (one - exact).abs().max().item() / max(exact.abs().max().item(), 1.0)
            worst[dtype] = max(worst.get(dtype, 0.0), off)
            assert off <= tolerance, f"{options}, {dtype}, {scheme}: off by {off}"
    if rank == 0:
        texts = ", ".join(f"{str(dtype).removeprefix('torch.')} {off:.1e}" for dtype, off in worst.items())
        print(f"  {len(CALLS)} calls, forward and backward, are one process's; furthest off: {texts}")


def check_bits(rank: int, ranks: int) -> None:
    """20 repeats."""
    sharding = shards.zigzag(4096, ranks=ranks)
    torch.manual_seed(rank)
    tensors = [draw(4, 4096 // ranks) for _ in range(4)]
    seen = set()
    for _ in range(20):
        mine = [x.clone().requires_grad_() for x in tensors[:3]]
        out = context_parallel.attention(*mine, causal=True, sharding=sharding, scheme="ring")
        out.backward(tensors[3])
        results = [out, *(x.grad for x in mine)]
        seen.add(b"".join(x.detach().view(torch.uint8).cpu().numpy().tobytes() for x in results))
    assert len(seen) == 1, f"{len(seen)} different results in 20 repeats"
    if rank == 0:
        print("  20 repeats, forward and backward: the same bits", flush=True)


@contextlib.contextmanager
def without_messages() -> Any:
    """Rows that would arrive are 0."""

    def begin(self: Any, sends: Any, receives: Any) -> None:
        for memory, _ in receives:
            memory.zero_()

    def nothing(self: Any) -> None:
        pass

    with contextlib.ExitStack() as stack:
        for one in (_messages.Direct, _messages.Staged):
            for name, replacement in (("begin", begin), ("flush", nothing), ("end", nothing)):
                stack.enter_context(mock.patch.object(one, name, replacement))
        yield


@contextlib.contextmanager
def without_parts(like: torch.Tensor) -> Any:
    """Parts that compute nothing."""
    results: dict[int, Any] = {}

    def part(query: torch.Tensor, *_: Any, **__: Any) -> Any:
        rows = query.shape[2]
        if rows not in results:
            results[rows] = torch.zeros_like(query), torch.zeros(query.shape[:3], device=query.device)
        return results[rows]

    names = ("distributed_schedule",)
    stub = mock.Mock(**{name: getattr(_headway, name) for name in names}, distributed_part=part)
    with mock.patch.object(_on_device, "_headway", stub):
        yield


def time_processes(given: argparse.Namespace, rank: int, ranks: int) -> None:
    """The ring as it is, without messages, and without parts."""
    length = 2 * given.length
    sharding = shards.zigzag(length, ranks=ranks)
    rows = length // ranks
    query, key, value = draw(given.heads, rows), draw(1, rows), draw(1, rows)

    def call(scheme: str = "ring") -> None:
        context_parallel.attention(query, key, value, scheme=scheme, causal=True, sharding=sharding)

    ring = milliseconds(call, given.repeats, True)
    with without_messages():
        parts = milliseconds(call, given.repeats, True)
    with without_parts(query):
        transfers = milliseconds(call, given.repeats, True)
    gather = milliseconds(lambda: call("all_gather"), given.repeats, True)
    profiled = overlap(call)
    meet()
    if rank == 0:
        moved = 2 * key.numel() * key.element_size()
        print(f"  {length} tokens, {given.heads} heads of {WIDTH}, one kv head, bf16, causal zigzag; a rank receives "
              f"{moved / 1e6:.0f} MB")  # fmt: skip
        hidden = (parts + transfers - ring) / transfers
        print(f"  ring {ring:.2f} ms, without its messages {parts:.2f} ms, without its parts {transfers:.2f} ms: "
              f"{100 * hidden:.0f} % of the transfers hidden; all_gather {gather:.2f} ms")  # fmt: skip
        print(f"  {profiled}", flush=True)


def as_rank(given: argparse.Namespace) -> None:
    """One of the processes."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    where = {"init_method": f"file://{given.store}", "rank": rank, "world_size": ranks} if given.store else {}
    dist.init_process_group(given.backend, **where)
    meet()
    if rank == 0:
        version = ".".join(map(str, torch.cuda.nccl.version())) if given.backend == "nccl" else ""
        print(f"{ranks} processes over {given.backend} {version}".rstrip() + ":")
    failed = 0
    for check in (check_results, check_bits, *([] if given.only_check else [lambda *at: time_processes(given, *at)])):
        try:
            check(rank, ranks)
        except Exception:
            traceback.print_exc()
            failed = 1
    dist.destroy_process_group()
    sys.exit(failed)


def sharing_one_gpu(given: argparse.Namespace, backend: str) -> bool:
    """Two processes of this file on the first GPU. Says what happened."""
    with tempfile.TemporaryDirectory() as folder:
        common = {**os.environ, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        common.setdefault("GLOO_SOCKET_IFNAME", "lo")
        command = [sys.executable, __file__, *sys.argv[1:], "--backend", backend, "--store", f"{folder}/store"]
        ranks = [
            subprocess.Popen(command, env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True)
            for rank in range(2)
        ]  # fmt: skip
        said = []
        for one in ranks:
            try:
                said.append(one.communicate(timeout=given.limit)[0])
            except subprocess.TimeoutExpired:
                one.kill()
                said.append(one.communicate()[0] + f"\nended after {given.limit} s")
    if all(one.returncode == 0 for one in ranks):
        print(said[0], end="", flush=True)
        return True
    lines = [line for text in said for line in text.splitlines()]
    reasons = [line for line in lines if "Duplicate GPU" in line or "same GPU" in line]
    if backend == "nccl" and reasons:
        print(
            f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} refuses two ranks on one GPU: {reasons[0].strip()}"
        )
        return False
    print(f"two processes over {backend} failed:", *said, sep="\n", flush=True)
    return False


def main() -> None:
    """One GPU: loop-back and two processes that share it. Under torchrun: one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="of the loop-back")
    parser.add_argument("--length", type=int, default=65536, help="of the loop-back; the processes have twice as many")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=int, default=45, help="seconds for the processes that share a GPU")
    parser.add_argument("--only-check", action="store_true", help="two processes over gloo, and no times")
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"), help="of a rank")
    parser.add_argument("--store", help="where ranks that share a GPU find each other")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_ring.py needs a CUDA device")
    if "LOCAL_RANK" in os.environ:
        as_rank(given)
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}", flush=True)
    if given.only_check:
        sys.exit(not sharing_one_gpu(given, "gloo"))
    try:
        loop_back(given)
    except Exception:
        traceback.print_exc()
    done = [sharing_one_gpu(given, backend) for backend in ("nccl", "gloo")]
    sys.exit(not any(done))


if __name__ == "__main__":
    main()
