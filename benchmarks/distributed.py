"""Times attention over ranks of one thread each beside one process with as many threads, counts bytes, and asks the
simulator.

    python benchmarks/distributed.py    # 2 ranks, ring, 16,384 tokens: the table of docs/distributed.md
    python benchmarks/distributed.py --ranks 1 2 4 --schemes ring all_gather heads --length 8192

Ranks are processes of this machine under gloo: with more ranks than cores they share cores. Runs of the one process and
of the ranks alternate, so that a disturbance meets both; each time is the fastest of several. The simulator gets the
FLOP/s that the one process reached with one thread, and the bandwidth measured between two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist

import headway
import headway.distributed as shards
import headway.torch
import headway.torch.distributed as context_parallel

WIDTH = 64
KINDS = ("causal", "documents")


def documents(length: int, seed: int = 0) -> list[int]:
    """Bounds of packed documents of random length: most are short, some are long."""
    random, bounds = np.random.default_rng(seed), [0]
    while bounds[-1] < length:
        bounds.append(min(length, bounds[-1] + int(16 * np.exp(random.uniform(0, 5.5)))))
    return bounds


def calls(length: int, ranks: int, kind: str):
    """The sharding, and attention's options."""
    if kind == "documents":
        bounds = documents(length)
        packed = {"causal": True, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        return shards.balanced(length, ranks=ranks, **packed), packed
    return shards.zigzag(length, ranks=ranks), {"causal": True}


def inputs(length: int, heads: int, kind: str) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shape = (length, heads, WIDTH) if kind == "documents" else (1, heads, length, WIDTH)
    return [torch.randn(shape, generator=random) for _ in range(3)]


def set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    headway.set_threads(threads)


def alone(tensors: list[torch.Tensor], options: dict, backward: bool):
    """One process with all rows: a function to time."""
    options = dict(options)
    bounds = [torch.tensor(options.pop(name)) for name in ("cu_seqlens_q", "cu_seqlens_k") if name in options]
    function = headway.torch.attention_varlen if bounds else headway.torch.attention
    tensors = [x.clone().requires_grad_(backward) for x in tensors]

    def run() -> None:
        out = function(*tensors, *bounds, **options)
        if backward:
            out.backward(out.detach())

    return run


def split(tensors: list[torch.Tensor], sharding, options: dict, backward: bool, scheme: str, rank: int):
    """This rank's part of the call."""
    axis = 0 if "cu_seqlens_q" in options else 2
    mine = [shards.take(x, sharding.queries[rank], axis).requires_grad_(backward) for x in tensors]

    def run() -> None:
        out = context_parallel.attention(*mine, sharding=sharding, scheme=scheme, **options)
        if backward:
            out.backward(out.detach())

    return run


def gathered(tensors: list[torch.Tensor], backward: bool, rank: int, ranks: int):
    """What is done without a schedule: contiguous shards, all keys gathered everywhere, causal."""
    length = tensors[0].shape[2]
    rows = shards.contiguous(length, ranks=ranks).queries
    query, key, value = (shards.take(x, rows[rank]) for x in tensors)
    seen = rows[rank][0][1]

    def run() -> None:
        whole = []
        for x in (key, value):
            parts = [torch.empty_like(x) for _ in range(ranks)]
            dist.all_gather(parts, x.contiguous())
            whole.append(torch.cat(parts, dim=2)[:, :, :seen].requires_grad_(backward))
        out = headway.torch.attention(query.requires_grad_(backward), *whole, causal="bottom_right")
        if backward:
            out.backward(out.detach())
            for x in whole:
                full = torch.zeros_like(tensors[1])
                full[:, :, :seen] = x.grad
                dist.all_reduce(full)

    return run


def seconds(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def on_all(run) -> float:
    """The slowest rank's time."""
    dist.barrier()
    found = torch.tensor(seconds(run))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def bandwidth(rank: int) -> float:
    """Bytes per second from rank 0 to rank 1, as gloo carries them."""
    x = torch.zeros(1 << 24, dtype=torch.uint8)
    carry = {0: lambda: dist.send(x, 1), 1: lambda: dist.recv(x, 0)}.get(rank, lambda: None)
    rate = torch.tensor(x.numel() / min(seconds(carry) for _ in range(6)))
    dist.broadcast(rate, 0)
    return rate.item()


def measured(kind: str, backward: bool, rank: int, ranks: int, given: argparse.Namespace) -> dict[str, float]:
    """The fastest times: "one" thread, "threads", each scheme, and "gathered"."""
    tensors = inputs(given.length, given.heads, kind)
    sharding, options = calls(given.length, ranks, kind)
    single = alone(tensors, options, backward)
    parts = {scheme: split(tensors, sharding, options, backward, scheme, rank) for scheme in given.schemes}
    if kind == "causal" and given.gathered:
        parts["gathered"] = gathered(tensors, backward, rank, ranks)
    threads = min(ranks, os.cpu_count() or 1)
    found: dict[str, list[float]] = {}
    for turn in range(given.repeats + 1):
        for name, count in (("threads", threads), ("one", 1)):
            if name == "one" and turn > 1:
                continue  # for the simulator, which needs no more than its speed
            set_threads(count)
            took = seconds(single) if rank == 0 else 0.0
            dist.barrier()
            found.setdefault(name, []).append(took)
        set_threads(1)
        for name, run in parts.items():
            found.setdefault(name, []).append(on_all(run))
    return {name: min(times[1:]) for name, times in found.items()}


def fork_ranks(ranks: int, work) -> dict:
    """What rank 0 returns."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
                dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
                found = work(rank)
                if rank == 0:
                    pathlib.Path(folder, "found.json").write_text(json.dumps(found))
                dist.barrier()
                os._exit(0)
            children.append(child)
        if any(os.waitpid(child, 0)[1] for child in children):
            raise SystemExit(f"a rank of {ranks} failed")
        return json.loads(pathlib.Path(folder, "found.json").read_text())


def planned(kind: str, backward: bool, ranks: int, single: float, rate: float, given: argparse.Namespace):
    """The simulator's time of the ring on ranks that are each as fast as the one thread; imbalance; bytes over the
    least that the sharding needs, forward."""
    sharding, options = calls(given.length, ranks, kind)
    one, _ = calls(given.length, 1, kind)
    sizes = {"heads": given.heads, "head_dim": WIDTH, "text": False, "scheme": "ring", **options}
    passes = (False, True) if backward else (False,)
    unit = shards.Cluster(flops=1.0, bandwidth=1e30, node_bandwidth=1e30, latency=0.0, node_latency=0.0, call=0.0)
    flops = sum(shards.explain(one, backward=b, cluster=unit, **sizes).seconds for b in passes) / single
    cluster = shards.Cluster(ranks_per_node=ranks, flops=flops, bandwidth=rate, node_bandwidth=rate)
    time_of = sum(shards.explain(sharding, backward=b, cluster=cluster, **sizes).seconds for b in passes)
    plan = shards.explain(sharding, cluster=cluster, **sizes)
    return time_of, plan.imbalance, plan.bytes, least_bytes(sharding, kind, given)


def least_bytes(sharding, kind: str, given: argparse.Namespace) -> float:
    """Each K/V row once to every other rank with a query that sees it, counted row by row."""
    rows = np.arange(given.length)
    first = np.zeros(given.length, dtype=int)  # of the keys that a query sees, up to itself
    if kind == "documents":
        bounds = np.array(documents(given.length))
        first = bounds[np.searchsorted(bounds, rows, side="right") - 1]
    total = 0
    for mine in sharding.queries:
        held = np.zeros(given.length + 1, dtype=int)
        needed = np.zeros(given.length + 1, dtype=int)
        for begin, end in mine:
            held[begin:end] = 1
            np.add.at(needed, first[begin:end], 1)
            np.add.at(needed, rows[begin:end] + 1, -1)
        total += int(np.sum((np.cumsum(needed)[:-1] > 0) & (held[:-1] == 0)))
    return total * given.heads * 2 * WIDTH * 4.0


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--schemes", nargs="+", default=["ring"])
    parser.add_argument("--gathered", action="store_true", help="time a plain all-gather too")
    given = parser.parse_args()

    def work(rank: int, ranks: int) -> dict:
        found: dict = {"bandwidth": bandwidth(rank) if ranks > 1 else 5e9}
        for kind in KINDS:
            for backward in (False, True):
                found[f"{kind} {backward}"] = measured(kind, backward, rank, ranks, given)
        return found

    times = {ranks: fork_ranks(ranks, lambda rank, ranks=ranks: work(rank, ranks)) for ranks in given.ranks}
    others = [*given.schemes, *(["gathered"] if given.gathered else [])]
    print(
        f"{given.length} tokens, {given.heads} heads of {WIDTH}, f32, {os.cpu_count()} cores; "
        f"seconds, the fastest of {given.repeats}"
    )
    names = " | ".join({"gathered": "plain all-gather"}.get(name, name) for name in others)
    print(f"| what | ranks | one process, as many threads | {names} | one / {others[0]} | imbalance | bytes / least | "
          "simulated ring | simulated / measured |")  # fmt: skip
    print("|---" * (8 + len(others)) + "|")
    for kind in KINDS:
        for backward in (False, True):
            for ranks, found in times.items():
                took = found[f"{kind} {backward}"]
                guess, imbalance, sent, least = planned(kind, backward, ranks, took["one"], found["bandwidth"], given)
                columns = " | ".join(f"{took[name]:.3f}" if name in took else "" for name in others)
                title = f"{kind}, {'forward and backward' if backward else 'forward'}"
                ratio = took["threads"] / took[others[0]]
                print(
                    f"| {title} | {ranks} | {took['threads']:.3f} | {columns} | {ratio:.2f} "
                    f"| {100 * imbalance:.1f} % | {sent / least if least else 1:.3f} | {guess:.3f} "
                    f"| {guess / took['ring'] if 'ring' in took else 0:.2f} |"
                )


if __name__ == "__main__":
    main()
