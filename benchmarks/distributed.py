"""Times attention over ranks of one thread each beside one process with as many threads, counts bytes, and asks the
simulator.

    python benchmarks/distributed.py    # 2 ranks, ring, 16,384 tokens
    python benchmarks/distributed.py --ranks 1 2 4 --schemes ring all_gather heads --length 8192 --peers
    python benchmarks/distributed.py --json benchmarks/results/distributed.json --kinds causal --passes forward
    python benchmarks/distributed.py --table benchmarks/results/distributed.json    # the tables of docs/distributed.md

Ranks are processes of this machine under gloo: with more ranks than cores they share cores. Runs of the one process and
of the ranks alternate, so that a disturbance meets both; each time is the fastest of several. The simulator gets the
FLOP/s that the one process reached with one thread, the bandwidth measured between two ranks, and the CPU time that
ranks spend on a byte which they send or receive, measured beforehand with another call (few queries, many keys); where
ranks outnumber cores, both as much slower. --json keeps what was measured in a file, call by call: a later run replaces
its own rows.

--peers adds what is done without a schedule (all keys gathered everywhere, then one call of this library's or torch's
attention) and torch's own context parallel, which has no kernel for the CPU as of torch 2.13: the table says so.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import pathlib
import platform
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import headway
import headway.distributed as shards
import headway.torch
import headway.torch.distributed as context_parallel

WIDTH = 64
KINDS = ("causal", "documents")
PASSES = {"forward": False, "both": True}
TITLES = {
    "threads": "one process, as many threads",
    "gathered": "plain all-gather",
    "torch": "plain all-gather, torch's",
}


def documents(length: int, seed: int = 0) -> list[int]:
    """Bounds of packed documents of random length: most are short, some are long."""
    random, bounds = np.random.default_rng(seed), [0]
    while bounds[-1] < length:
        bounds.append(min(length, bounds[-1] + int(16 * np.exp(random.uniform(0, 5.5)))))
    return bounds


def calls(given: argparse.Namespace, ranks: int, kind: str):
    """The sharding, and attention's options."""
    length = given.length
    if kind == "documents":
        bounds = documents(length, given.seed)
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


def causal_of_torch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """torch's attention of the last queries to all keys; its is_causal aligns the first ones."""
    queries, keys = query.shape[2], key.shape[2]
    if queries == keys:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def gathered(tensors: list[torch.Tensor], backward: bool, rank: int, ranks: int, attention):
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
        out = attention(query.requires_grad_(backward), *whole)
        if backward:
            out.backward(out.detach())
            for x in whole:
                full = torch.zeros_like(tensors[1])
                full[:, :, :seen] = x.grad
                dist.all_reduce(full)

    return run


def why_no_context_parallel(ranks: int) -> str:
    """What torch's own context parallel says on CPU tensors; empty where it runs, and would be timed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as of_torch

    tensors = [torch.randn(1, 2, 16 * ranks, WIDTH) for _ in range(3)]
    try:
        with of_torch(init_device_mesh("cpu", (ranks,)), buffers=tensors, buffer_seq_dims=[2, 2, 2]):
            F.scaled_dot_product_attention(*tensors, is_causal=True)
    except (NotImplementedError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def seconds(run, clock=time.perf_counter) -> float:
    start = clock()
    run()
    return clock() - start


def on_all(run, clock) -> float:
    """The slowest rank's time, or the CPU time of all ranks."""
    dist.barrier()
    found = torch.tensor(seconds(run, clock))
    dist.all_reduce(found, dist.ReduceOp.MAX if clock is time.perf_counter else dist.ReduceOp.SUM)
    return found.item()


def bandwidth(rank: int) -> float:
    """Bytes per second from rank 0 to rank 1 as gloo carries them."""
    x = torch.zeros(1 << 24, dtype=torch.uint8)
    carry = {0: lambda: dist.send(x, 1), 1: lambda: dist.recv(x, 0)}.get(rank, lambda: None)
    fastest = torch.tensor(min(seconds(carry) for _ in range(6)))
    dist.broadcast(fastest, 0)
    return x.numel() / fastest.item()


def handling(rank: int, ranks: int, given: argparse.Namespace) -> dict[str, float]:
    """CPU seconds of ranks for a byte that they send or receive, by pass: few queries over many keys, so that most of
    the time is spent on them."""
    queries = 64 * ranks
    tensors = inputs(given.length, given.heads, "causal")
    tensors[0] = tensors[0][:, :, :queries]
    sharding = shards.contiguous(queries, given.length, ranks=ranks)
    sizes = {"heads": given.heads, "head_dim": WIDTH, "text": False, "scheme": "ring"}
    set_threads(1)
    found, before = {}, (0.0, 0.0)
    for name, backward in PASSES.items():
        one = alone(tensors, {}, backward)
        parts = split(tensors, sharding, {}, backward, "ring", rank)
        spent = []
        for _ in range(8):
            own = seconds(one, time.process_time) if rank == 0 else 0.0
            of_all = on_all(parts, time.process_time)
            spent.append(of_all - own)
        more = torch.tensor(statistics.median(spent[2:]))
        dist.broadcast(more, 0)
        moved = shards.explain(sharding, backward=backward, **sizes).bytes
        found[name] = max(more.item() - before[0], 0.0) / (2 * moved)
        before = (more.item(), moved)
    return found


def measured(kind: str, backward: bool, rank: int, ranks: int, given: argparse.Namespace) -> dict[str, list[float]]:
    """The fastest time and the median of "one" thread, "threads", each scheme, and all-gathers (ours, torch's)."""
    tensors = inputs(given.length, given.heads, kind)
    sharding, options = calls(given, ranks, kind)
    single = alone(tensors, options, backward)
    parts = {scheme: split(tensors, sharding, options, backward, scheme, rank) for scheme in given.schemes}
    if kind == "causal" and given.peers:
        ours = functools.partial(headway.torch.attention, causal="bottom_right")
        parts["gathered"] = gathered(tensors, backward, rank, ranks, ours)
        parts["torch"] = gathered(tensors, backward, rank, ranks, causal_of_torch)
    threads = min(ranks, os.cpu_count() or 1)
    clock = time.process_time if given.cpu_time else time.perf_counter
    found: dict[str, list[float]] = {}
    for turn in range(given.repeats + 1):
        for name, count in (("threads", threads), ("one", 1)):
            if name == "one" and turn > 1:
                continue  # for the simulator, which needs no more than its speed
            set_threads(count)
            took = seconds(single, clock) if rank == 0 else 0.0
            dist.barrier()
            found.setdefault(name, []).append(took)
        set_threads(1)
        for name, run in parts.items():
            found.setdefault(name, []).append(on_all(run, clock))
    return {name: [min(times[1:]), statistics.median(times[1:])] for name, times in found.items()}


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


def planned(
    kind: str, backward: bool, ranks: int, scheme: str, one: float, link: dict[str, Any], given: argparse.Namespace
):
    """The simulator's time of a scheme on ranks that are each as fast as one thread, or its share of the cores;
    imbalance; bytes, and the least that the sharding needs, forward."""
    sharding, options = calls(given, ranks, kind)
    whole, _ = calls(given, 1, kind)
    sizes = {"heads": given.heads, "head_dim": WIDTH, "text": False, **options}
    passes = ("forward", "both") if backward else ("forward",)
    unit = shards.Cluster(flops=1.0, bandwidth=1e30, node_bandwidth=1e30, latency=0.0, node_latency=0.0, call=0.0)
    flops = (
        sum(shards.explain(whole, backward=PASSES[b], cluster=unit, scheme="ring", **sizes).seconds for b in passes)
        / one
    )
    share = min(1.0, (os.cpu_count() or 1) / ranks)  # of a core for each rank
    rate, time_of = link["bandwidth"], 0.0
    for name in passes:
        cluster = shards.Cluster(
            ranks_per_node=ranks, flops=share * flops, bandwidth=rate, node_bandwidth=ranks * rate,
            handling=link["handling"][name] / share,
        )  # fmt: skip
        plan = shards.explain(sharding, backward=PASSES[name], cluster=cluster, scheme=scheme, **sizes)
        time_of += plan.seconds
    plan = shards.explain(sharding, cluster=cluster, scheme="ring", **sizes)
    return time_of, plan.imbalance, plan.bytes, least_bytes(sharding, kind, given)


def least_bytes(sharding, kind: str, given: argparse.Namespace) -> float:
    """Each K/V row once to every other rank with a query that sees it, counted row by row."""
    rows = np.arange(given.length)
    first = np.zeros(given.length, dtype=int)  # of the keys that a query sees, up to itself
    if kind == "documents":
        bounds = np.array(documents(given.length, given.seed))
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


def run_all(given: argparse.Namespace) -> list[dict]:
    """A row for each kind, pass and number of ranks."""

    def work(rank: int, ranks: int) -> dict:
        found: dict = {"link": {"bandwidth": 5e9, "handling": dict.fromkeys(PASSES, 0.0)}}
        if ranks > 1:
            found["link"] = {"bandwidth": bandwidth(rank), "handling": handling(rank, ranks, given)}
        if given.peers:
            found["torch's context parallel"] = why_no_context_parallel(ranks)
        for kind in given.kinds:
            for name in given.passes:
                found[f"{kind} {name}"] = measured(kind, PASSES[name], rank, ranks, given)
        return found

    rows = []
    for ranks in given.ranks:
        found = fork_ranks(ranks, lambda rank, ranks=ranks: work(rank, ranks))
        for kind in given.kinds:
            for name in given.passes:
                times, medians = ({who: t[n] for who, t in found[f"{kind} {name}"].items()} for n in (0, 1))
                plans = {
                    scheme: planned(kind, PASSES[name], ranks, scheme, times["one"], found["link"], given)
                    for scheme in given.schemes
                }
                first = plans[given.schemes[0]]
                rows.append({
                    "kind": kind, "pass": name, "ranks": ranks, "length": given.length, "heads": given.heads,
                    "repeats": given.repeats, "clock": "cpu" if given.cpu_time else "wall",
                    "seed": given.seed, "seconds": times, "medians": medians,
                    "imbalance": first[1], "bytes": first[2], "least_bytes": first[3],
                    **found["link"],
                    "simulated": {scheme: plan[0] for scheme, plan in plans.items()},
                    **({"torch_context_parallel": found["torch's context parallel"]} if given.peers else {}),
                })  # fmt: skip
    return rows


def keep(rows: list[dict], path: pathlib.Path) -> None:
    """Adds rows to the file; those of the same call are replaced."""
    key = lambda row: [row[name] for name in ("clock", "length", "heads", "kind", "seed", "pass", "ranks")]  # noqa: E731
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    new = [key(row) for row in rows]
    kept = sorted([*(row for row in before if key(row) not in new), *rows], key=key)
    about = {"date": datetime.date.today().isoformat(), "cpu": cpu_name(), "cores": os.cpu_count(),
             "torch": torch.__version__, "headway": headway.__version__}  # fmt: skip
    path.write_text(json.dumps({"about": about, "rows": kept}, indent=1) + "\n")


def cpu_name() -> str:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def print_table(rows: list[dict]) -> None:
    """Seconds of the fastest runs, and the ratios that matter, that of the medians in brackets."""
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"] if name not in ("one", "threads")))
    columns = " | ".join(TITLES.get(name, name) for name in names)
    print(f"| what | tokens | ranks | {TITLES['threads']} | {columns} | one / {names[0]} | imbalance | bytes / least | "
          f"simulated / measured {names[0]} |")  # fmt: skip
    print("|---" * (8 + len(names)) + "|")
    for row in rows:
        took = row["seconds"]
        times = " | ".join(f"{took[name]:.3f}" if name in took else "" for name in names)
        guess = f"{row['simulated'][names[0]] / took[names[0]]:.2f}" if row["clock"] == "wall" else ""
        title = "forward" if row["pass"] == "forward" else "forward and backward"
        ratio = row["bytes"] / row["least_bytes"] if row["least_bytes"] else 1.0
        kind = f"{row['kind']} {row['seed']}" if row["kind"] == "documents" else row["kind"]
        medians = row["medians"]["threads"] / row["medians"][names[0]]
        print(
            f"| {kind}, {title} | {row['length']:,} | {row['ranks']} | {took['threads']:.3f} | {times} | "
            f"{took['threads'] / took[names[0]]:.3f} ({medians:.3f}) | "
            f"{100 * row['imbalance']:.1f} % | {ratio:.3f} | {guess} |"
        )
    for reason in {row["torch_context_parallel"] for row in rows if row.get("torch_context_parallel")}:
        print(f"torch's own context parallel on the CPU: {reason}")


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of the documents' lengths")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--schemes", nargs="+", default=["ring"])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)
    parser.add_argument("--peers", action="store_true", help="time plain all-gathers too, and ask torch's own")
    parser.add_argument(
        "--cpu-time", action="store_true", help="CPU seconds of all threads and ranks, on a busy machine"
    )
    parser.add_argument("--json", type=pathlib.Path, help="keep the rows in this file")
    parser.add_argument("--table", type=pathlib.Path, help="print the table of such a file, and time nothing")
    given = parser.parse_args()
    if given.table:
        print_table(json.loads(given.table.read_text())["rows"])
        return
    rows = run_all(given)
    if given.json:
        keep(rows, given.json)
    print_table(rows)


if __name__ == "__main__":
    main()
