"""The tables and the plots of docs/distributed.md: the simulator's, and what benchmarks/distributed.py measured.

python docs/site/distributed_tables.py           prints the simulator's tables
python docs/site/distributed_tables.py --plot    also draws distributed.png and distributed-measured.png (matplotlib)
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import headway.distributed as distributed

# Nodes of 8 accelerators that reach 400 TFLOP/s in attention; 400 GB/s inside a node, 400 GB/s out of it.
CLUSTER = distributed.Cluster(
    ranks_per_node=8, flops=4e14, bandwidth=4e11, latency=5e-6, node_bandwidth=4e11, node_latency=1e-5, call=1e-5
)
MODEL = {"heads": 32, "kv_heads": 8, "head_dim": 128, "element_bytes": 2}
RANKS = (2, 8, 32, 128, 512, 1024)
DOCS = pathlib.Path(__file__).parents[1]
MEASURED = DOCS.parent / "benchmarks/results/distributed.json"


def efficiency(scheme: str, tokens: int, ranks: int, sharding: str = "zigzag") -> float | None:
    """Of one layer's forward pass; None where the scheme cannot be."""
    make = distributed.zigzag if sharding == "zigzag" else distributed.contiguous
    try:
        plan = distributed.explain(
            make(tokens, ranks=ranks), scheme=scheme, cluster=CLUSTER, text=False, causal=True, **MODEL
        )
    except ValueError:
        return None
    return plan.efficiency


def rows(tokens: int) -> list[tuple[str, list[float | None]]]:
    """A line of the table for each scheme."""
    schemes = ("ring", "hybrid", "all_gather")
    found = [(f"{scheme}, zigzag", [efficiency(scheme, tokens, r) for r in RANKS]) for scheme in schemes]
    found.append(("heads", [efficiency("heads", tokens, r) for r in RANKS]))
    found.append(("ring, contiguous", [efficiency("ring", tokens, r, "contiguous") for r in RANKS]))
    return found


def main() -> None:
    """Prints the tables; draws the plot if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", action="store_true")
    arguments = parser.parse_args()
    lengths = (131_072, 1_048_576, 10_000_000)
    tables = {tokens: rows(tokens) for tokens in lengths}
    for tokens, table in tables.items():
        print(f"\n| {tokens:,} tokens, causal | " + " | ".join(f"{r} ranks" for r in RANKS) + " |")
        print("|---|" + "---|" * len(RANKS))
        for name, numbers in table:
            print(f"| {name} | " + " | ".join("" if n is None else f"{100 * n:.0f} %" for n in numbers) + " |")
    if arguments.plot:
        plot(tables)
        runs = json.loads(MEASURED.read_text())["rows"] if MEASURED.exists() else []
        timed = [run for run in runs if run["clock"] == "wall" and run["seed"] == 0]
        if timed:
            plot_measured(timed)


def plot(tables: dict[int, list[tuple[str, list[float | None]]]]) -> None:
    """Efficiency over ranks, one picture for each length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, pictures = plt.subplots(1, len(tables), figsize=(12, 3.6), sharey=True)
    for axes, (tokens, table) in zip(pictures, tables.items(), strict=True):
        for name, numbers in table:
            points = [(r, 100 * n) for r, n in zip(RANKS, numbers, strict=True) if n is not None]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axes.set(xscale="log", xlabel="ranks", title=f"{tokens:,} tokens", ylim=(0, 102))
        axes.set_xticks(RANKS, [str(r) for r in RANKS], fontsize=8)
        axes.minorticks_off()
    pictures[0].set_ylabel("efficiency (%)")
    pictures[0].legend(fontsize=8)
    plt.savefig(DOCS / "distributed.png", dpi=110, bbox_inches="tight")


def plot_measured(runs: list[dict[str, Any]]) -> None:
    """Measured and simulated seconds of every scheme, one picture for each call."""
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys((run["kind"], run["pass"], run["length"]) for run in runs))
    _, pictures = plt.subplots(1, len(kinds), figsize=(3.6 * len(kinds), 3.4), squeeze=False)
    for axes, (kind, of_pass, length) in zip(pictures[0], kinds, strict=True):
        mine = [run for run in runs if (run["kind"], run["pass"], run["length"]) == (kind, of_pass, length)]
        for scheme in dict.fromkeys(name for run in mine for name in run["simulated"]):
            points = [
                (r["ranks"], r["seconds"][scheme], r["simulated"][scheme]) for r in mine if scheme in r["simulated"]
            ]
            ranks, measured, simulated = zip(*points, strict=True)
            [line] = axes.plot(ranks, measured, marker="o", markersize=4, label=scheme)
            axes.plot(ranks, simulated, linestyle=":", marker="x", markersize=4, color=line.get_color())
        title = f"{kind}, {'forward' if of_pass == 'forward' else 'both passes'}, {length:,}"
        axes.set(xlabel="ranks", title=title, ylim=(0, None))
        axes.set_xticks(sorted({run["ranks"] for run in mine}))
    pictures[0][0].set_ylabel("seconds (dotted: simulated)")
    pictures[0][0].legend(fontsize=8)
    plt.savefig(DOCS / "distributed-measured.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
