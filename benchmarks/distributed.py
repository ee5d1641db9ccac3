"""Times attention over 1, 2 and 4 ranks of one thread each beside one process, counts bytes, and asks the simulator.

    python benchmarks/distributed.py --length 8192 --repeats 3

Ranks are processes of this machine under gloo: with more ranks than cores they share cores. The one process beside them
has as many threads as there are ranks. The simulator gets the FLOP/s that one rank reached, and the bandwidth measured
between two.
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

HEADS, WIDTH = 8, 64


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


def inputs(length: int, kind: str) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shape = (length, HEADS, WIDTH) if kind == "documents" else (1, HEADS, length, WIDTH)
    return [torch.randn(shape, generator=random) for _ in range(3)]


def seconds(run, repeats: int) -> float:
    """The fastest of several runs."""
    run()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def alone(length: int, kind: str, backward: bool, threads: int, repeats: int) -> float:
    torch.set_num_threads(threads)
    headway.set_threads(threads)
    tensors = [x.requires_grad_(backward) for x in inputs(length, kind)]
    _, options = calls(length, 1, kind)
    options = dict(options)
    bounds = [options.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k") if name in options]
    function = headway.torch.attention_varlen if bounds else headway.torch.attention

    def run():
        out = function(*tensors, *(torch.tensor(x) for x in bounds), **options)
        if backward:
            out.backward(out.detach())

    return seconds(run, repeats)


def on_rank(length: int, kind: str, backward: bool, scheme: str, rank: int, ranks: int, repeats: int) -> float:
    """The slowest rank's time."""
    torch.set_num_threads(1)
    headway.set_threads(1)
    sharding, options = calls(length, ranks, kind)
    axis = 0 if kind == "documents" else 2
    tensors = [shards.take(x, sharding.queries[rank], axis).requires_grad_(backward) for x in inputs(length, kind)]

    def run():
        dist.barrier()
        out = context_parallel.attention(*tensors, sharding=sharding, scheme=scheme, **options)
        if backward:
            out.backward(out.detach())
        dist.barrier()

    found = torch.tensor(seconds(run, repeats))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def gathered(length: int, backward: bool, rank: int, ranks: int, repeats: int) -> float:
    """What is done without a schedule: contiguous shards, all keys gathered everywhere."""
    rows = shards.contiguous(length, ranks=ranks).queries
    query, key, value = (shards.take(x, rows[rank]) for x in inputs(length, "causal"))
    mask_end = rows[rank][0][1]

    def run():
        dist.barrier()
        whole = []
        for x in (key, value):
            parts = [torch.empty_like(shards.take(x, [(0, x.shape[2])])) for _ in range(ranks)]
            dist.all_gather(parts, x.contiguous())
            whole.append(torch.cat(parts, dim=2)[:, :, :mask_end].requires_grad_(backward))
        out = headway.torch.attention(query.requires_grad_(backward), *whole, causal="bottom_right")
        if backward:
            out.backward(out.detach())
            for x in whole:
                full = torch.zeros(1, HEADS, length, WIDTH)
                full[:, :, :mask_end] = x.grad
                dist.all_reduce(full)
        dist.barrier()

    found = torch.tensor(seconds(run, repeats))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def bandwidth(rank: int) -> float:
    """Bytes per second from rank 0 to rank 1, as gloo carries them."""
    x = torch.zeros(1 << 24, dtype=torch.uint8)
    found = seconds(lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0), 5) if rank < 2 else 1.0
    rate = torch.tensor(x.numel() / found)
    dist.broadcast(rate, 0)
    return rate.item()


def fork_ranks(ranks: int, work) -> dict:
    """What rank 0 returns."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
                found = work(rank, ranks)
                if rank == 0:
                    pathlib.Path(folder, "found.json").write_text(json.dumps(found))
                dist.barrier()
                os._exit(0)
            children.append(child)
        if any(os.waitpid(child, 0)[1] for child in children):
            raise SystemExit(f"a rank of {ranks} failed")
        return json.loads(pathlib.Path(folder, "found.json").read_text())


def measure(length: int, ranks: int, repeats: int):
    def work(rank: int, _: int) -> dict:
        found = {"bandwidth": bandwidth(rank) if ranks > 1 else 5e9}
        for kind in ("causal", "documents"):
            for backward in (False, True):
                for scheme in ("ring", "all_gather", "heads"):
                    found[f"{kind} {backward} {scheme}"] = on_rank(length, kind, backward, scheme, rank, ranks, repeats)
        for backward in (False, True):
            found[f"gathered {backward}"] = gathered(length, backward, rank, ranks, repeats)
        return found

    return fork_ranks(ranks, work)


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    arguments = parser.parse_args()
    length = arguments.length
    measured = {ranks: measure(length, ranks, arguments.repeats) for ranks in arguments.ranks}  # before threads start
    cores = os.cpu_count() or 1
    print(
        f"{length} tokens, {HEADS} heads of {WIDTH}, f32; {cores} cores; "
        f"times in seconds, the fastest of {arguments.repeats}"
    )
    print(
        "| what | ranks | one process, as many threads | ring | all_gather | heads | plain all-gather | one / ring "
        "| simulated ring |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for kind in ("causal", "documents"):
        for backward in (False, True):
            single = alone(length, kind, backward, 1, arguments.repeats)
            for ranks, found in measured.items():
                threads = alone(length, kind, backward, min(ranks, cores), arguments.repeats)
                times = [found[f"{kind} {backward} {scheme}"] for scheme in ("ring", "all_gather", "heads")]
                plain = f"{found[f'gathered {backward}']:.3f}" if kind == "causal" else ""
                guess = simulated(length, kind, backward, ranks, single, found["bandwidth"])
                name = f"{kind}, {'forward and backward' if backward else 'forward'}"
                print(
                    f"| {name} | {ranks} | {threads:.3f} | {times[0]:.3f} | {times[1]:.3f} | {times[2]:.3f} | {plain} "
                    f"| {threads / times[0]:.2f} | {guess:.3f} |"
                )


def simulated(length: int, kind: str, backward: bool, ranks: int, single: float, rate: float) -> float:
    """The ring's time on ranks that are each as fast as the one that was measured."""
    sharding, options = calls(length, ranks, kind)
    one, _ = calls(length, 1, kind)
    sizes = {"heads": HEADS, "head_dim": WIDTH, "text": False, "scheme": "ring", **options}
    passes = (False, True) if backward else (False,)
    unit = shards.Cluster(flops=1.0, bandwidth=1e30, node_bandwidth=1e30, latency=0.0, node_latency=0.0, call=0.0)
    flops = sum(shards.explain(one, backward=b, cluster=unit, **sizes).seconds for b in passes) / single
    cluster = shards.Cluster(ranks_per_node=ranks, flops=flops, bandwidth=rate, node_bandwidth=rate)
    return sum(shards.explain(sharding, backward=b, cluster=cluster, **sizes).seconds for b in passes)


if __name__ == "__main__":
    main()
