"""Shows on a GPU that a ring hides its transfers behind the computation.

    python benchmarks/gpu_ring.py                                      # one GPU: the schedule of one rank, loop-back
    torchrun --standalone --nproc-per-node 2 benchmarks/gpu_ring.py    # a GPU for each rank: NCCL

Loop-back: one process runs what rank 0 of several would run. The blocks of K and V that other ranks would send are
copied on a stream of their own, from pinned host memory, while the parts of the step before are computed. It times
the parts alone, the copies alone, one after the other, and both at once. With NCCL each rank times the ring beside its
parts alone. NCCL takes no two ranks on one GPU ("Duplicate GPU detected"), which is why there is a loop-back.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import headway.distributed as shards
import headway.torch.distributed as context_parallel
from headway import _headway

WIDTH = 128
Parts = list[tuple[int, tuple[int, int], tuple[int, int]]]


def milliseconds(run: Callable[[], None], repeats: int) -> float:
    """The fastest of several runs, by the device's clock."""
    run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


def draw(given: argparse.Namespace, rows: int) -> torch.Tensor:
    return torch.randn(1, given.heads, rows, WIDTH, device="cuda", dtype=torch.bfloat16)


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
    query, key = draw(given, given.length // given.ranks), draw(given, given.length)
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
    print(f"{torch.cuda.get_device_name()}; rank 0 of {given.ranks}, {given.length} tokens, {given.heads} heads of "
          f"{WIDTH}, bf16, causal zigzag; {moved / 1e6:.0f} MB arrive")  # fmt: skip
    print(f"parts alone {alone:.2f} ms, copies alone {copies:.2f} ms, one after the other {serial:.2f} ms, "
          f"at once {both:.2f} ms: {100 * hidden:.0f} % of the copies hidden")  # fmt: skip


def with_nccl(given: argparse.Namespace) -> None:
    """The ring over NCCL, and rank 0's parts alone."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharding = shards.zigzag(given.length, ranks=ranks)
    mine: list[Any] = [draw(given, given.length // ranks) for _ in range(3)]
    sizes = (1, given.heads, given.heads, given.length, given.length, WIDTH, WIDTH, 2)
    steps, _, parts = _headway.distributed_schedule(sizes, sharding, rank, scheme="ring", causal=True)
    key = draw(given, given.length)
    alone = milliseconds(
        lambda: [compute(parts, step, mine[0], key, sharding.queries[rank]) for step in range(steps)], given.repeats
    )
    options: dict[str, Any] = {"causal": True, "sharding": sharding}
    ring = milliseconds(lambda: context_parallel.attention(*mine, scheme="ring", **options), given.repeats)
    gather = milliseconds(lambda: context_parallel.attention(*mine, scheme="all_gather", **options), given.repeats)
    print(f"rank {rank} of {ranks} on {torch.cuda.get_device_name()}: parts alone {alone:.2f} ms, ring {ring:.2f} ms, "
          f"all_gather {gather:.2f} ms")  # fmt: skip
    dist.destroy_process_group()


def main() -> None:
    """Loop-back, or NCCL under torchrun."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="of the loop-back")
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_ring.py needs a CUDA device")
    with_nccl(given) if "LOCAL_RANK" in os.environ else loop_back(given)


if __name__ == "__main__":
    main()
