"""Rows that take turns: each is called once a round, round after round, and the median of the rounds counts; a table,
and a JSON file of what was found."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import native
import torch

import headway

Call = Callable[[int], object]  # with the number of the call: rows that read from memory have several copies of it


@dataclass
class Row:
    name: str
    work: float  # of one call: bytes or operations
    call: Call
    calls: int = 1  # in a round
    of: str = ""  # the row whose rate this one's is compared with
    least: float = 0  # what the comparison should reach
    flops: float = 0  # operations of one call, where they may bind instead of reading


@dataclass
class Settings:
    only: str
    rounds: int
    threads: int
    json: Path | None


def settings(text: str, rounds: int) -> Settings:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only groups whose name contains this")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="FILE", help="adds the groups to this file")
    found = Settings(**vars(parser.parse_args()))
    torch.set_num_threads(found.threads)
    headway.set_threads(found.threads)
    torch.manual_seed(0)
    return found


def measure(rows: list[Row], rounds: int) -> list[float]:
    """Seconds of one call of each row."""
    for row in rows:
        row.call(0)
    times: list[list[float]] = [[] for _ in rows]
    for _ in range(rounds):
        for row, found in zip(rows, times):
            begin = time.perf_counter()
            for n in range(row.calls):
                row.call(n)
            found.append((time.perf_counter() - begin) / row.calls)
    return [statistics.median(found) for found in times]


def run(groups: list[tuple[str, str, Callable[[], list[Row]]]], chosen: Settings) -> None:
    """Groups are (name, unit, rows): the unit is GB/s or GFLOP/s."""
    peaks = {kind: native.peak(kind, chosen.threads, 0.2) for kind in ("f32", "bf16")}
    print(f"{chosen.threads} threads, torch {torch.__version__}; peaks: ", end="")
    print(", ".join(f"{kind} {peak / 1e9:.0f} GFLOP/s" for kind, peak in peaks.items()))
    done: list[dict[str, Any]] = []
    for name, unit, made in groups:
        if chosen.only not in name:
            continue
        print(f"\n{name}", flush=True)
        rows = made()
        times = measure(rows, chosen.rounds)
        rates = {row.name: row.work / t for row, t in zip(rows, times)}
        found = []
        for row, t in zip(rows, times):
            line = f"  {row.name:48}{t * 1e6:10.0f} us{rates[row.name] / 1e9:8.1f} {unit}"
            result: dict[str, Any] = {"name": row.name, "seconds": t, "rate": rates[row.name]}
            if row.flops:
                result["flops"] = row.flops / t
                line += f"{row.flops / t / 1e9:8.0f} GFLOP/s"
            if row.of:
                ratio = rates[row.name] / rates[row.of]
                result |= {"of": row.of, "ratio": ratio, "least": row.least}
                line += f"  {ratio:5.2f} of {row.of}" + (f", wanted {row.least}" if row.least else "")
            print(line, flush=True)
            found.append(result)
        done.append({"name": name, "unit": unit, "threads": chosen.threads, "peaks": peaks, "rows": found})
        del rows
    if chosen.json:
        _save(chosen.json, done)


def _save(path: Path, done: list[dict[str, Any]]) -> None:
    """Groups that the file has already are replaced."""
    about = Path("/proc/cpuinfo")
    model = next((x.split(":", 1)[1].strip() for x in about.read_text().splitlines() if "model name" in x), "unknown")
    before = json.loads(path.read_text())["groups"] if path.exists() else []
    names = {group["name"] for group in done}
    groups = [group for group in before if group["name"] not in names] + done
    text = {
        "processor": model,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"headway": headway.__version__, "torch": torch.__version__},
        "groups": groups,
    }
    path.write_text(json.dumps(text, indent=1) + "\n")
